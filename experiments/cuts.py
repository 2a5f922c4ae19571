"""Normalized cuts in a hierarchy of contours, trained end to end through ``topk_eigh``.

The regions of the watershed are the nodes of a graph with the affinity Wᵢⱼ = ℓᵢⱼ exp(−sᵢⱼ/σ) for a common border of
length ℓ and mean contour strength s. With the leading generalized eigenvectors (D − W)x = λDx, two neighbors have the
spectral distance d = (Σₖ (xₖᵢ − xₖⱼ)²/λₖ)^½ (Arbelaez et al., PAMI 2011, section 3.2, on regions instead of pixels).
Regions are merged by the border strength sigmoid(a + b logit s + c log d).

a, b, c and σ are trained on 50 training images by the cross-entropy with the fraction of annotators who drew the
border. The gradient of σ passes through the eigenvectors. The row without cuts trains a and b only, and the first row
is the hierarchy of the package. Three disjoint sets of training images are used instead of seeds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import maximum_filter
from torch import Tensor
from torch.nn import functional as nnf

from experiments import runs
from experiments.runs import Experiment, ImagesConfig
from matbackprop import topk_eigh
from matbackprop.vision.data.bsds import BSDS
from matbackprop.vision.inference.loading import BOX, load_segmenter, model_folder
from matbackprop.vision.inference.segmenting import network_contours
from matbackprop.vision.metrics import ImageScores, score_image, summarize
from matbackprop.vision.metrics.boundaries import boundary_map
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.models.weights import WEIGHTS
from matbackprop.vision.progress import track
from matbackprop.vision.segmentation.hierarchy import merge_graph, smooth_contours, watershed_regions
from matbackprop.vision.segmentation.regions import RegionGraph, border_strengths, region_graph

SIGMA = 0.1  #: Initial contour strength at which the affinity falls to 1/e, as for gPb.
VECTORS = 16  #: Eigenvectors, as for gPb.
MARGIN = 5  #: Side in pixels of the window in which a drawn border matches a border of regions.
STEPS = 60  #: Passes of the optimizer over the training images.
LEVELS = np.arange(2, 100, 3) / 100  #: Heights at which hierarchies are cut.
ROWS = ("package", "contours", "cuts")
#: Column of the table → name of the measure.
COLUMNS = {
    "boundary F ODS": "boundary_ods", "OIS": "boundary_ois", "covering ODS": "covering_ods",
    "covering OIS": "covering_ois", "covering best": "covering_best", "PRI ODS": "pri_ods", "VI ODS": "vi_ods",
    "objects ODS": "objects_ods", "paper best": "paper_best", "paper average": "paper_average",
}  # fmt: skip


@dataclass
class Config(ImagesConfig):
    """Train border strengths with and without spectral distances, and score the hierarchies."""

    out: Path = Path("results/cuts")  #: Folder of results.jsonl and table.md. Finished runs are not repeated.
    model: str = BOX  #: Contour network: box, a folder or a run folder.
    folds: int = 3  #: Disjoint sets of training images; each has a quarter of them.
    images: str = "val"  #: Split that is scored.


class Borders(NamedTuple):
    """Borders between the regions of one image."""

    regions: int  #: number of regions
    edges: Tensor  #: (E, 2), pairs of regions
    lengths: Tensor  #: (E,), in pixels
    strengths: Tensor  #: (E,), mean contour strength
    agreement: Tensor  #: (E,), mean fraction of the annotators who drew the border


#: Parameters of a border's strength: offset and contour; with cuts, also spectral and log_sigma.
Weights = dict[str, Tensor]


def spectral_distances(borders: Borders, sigma: Tensor) -> Tensor:
    """Distance (E,) of neighboring regions in the leading eigenvectors of the normalized affinity.

    Example:
        >>> edges = torch.tensor([[0, 1], [1, 2], [2, 3]])
        >>> strengths = torch.tensor([0.1, 0.9, 0.1], dtype=torch.float64)
        >>> borders = Borders(4, edges, torch.ones(3, dtype=torch.float64), strengths, strengths)
        >>> int(spectral_distances(borders, torch.tensor(0.1)).argmax())  # across the strong border
        1
    """
    weight = borders.lengths * torch.exp(-borders.strengths / sigma)
    i, j = borders.edges.T
    affinity = weight.new_zeros(borders.regions, borders.regions).index_put((i, j), weight)
    affinity = affinity + affinity.mT
    scale = affinity.sum(1).rsqrt()
    values, vectors = topk_eigh(scale[:, None] * affinity * scale, min(VECTORS, borders.regions), ties="drop")
    x = scale[:, None] * vectors[:, 1:] / (1 - values[1:]).clamp(min=1e-6).sqrt()
    return (x[i] - x[j]).norm(dim=1)


def border_logits(borders: Borders, weights: Weights) -> Tensor:
    """a + b logit s + c log d of every border, with d relative to its mean square in the image."""
    logits = weights["offset"] + weights["contour"] * torch.logit(borders.strengths, eps=1e-4)
    if "spectral" not in weights or borders.regions < 3:
        return logits
    squared = spectral_distances(borders, weights["log_sigma"].exp()).square()
    return logits + weights["spectral"] * torch.log(squared / squared.mean() + 1e-6) / 2


def train_weights(images: Sequence[Borders], *, spectral: bool) -> Weights:
    """Minimize the cross-entropy of the borders, each weighted by its length, by Adam."""
    start = {"offset": -2.0, "contour": 1.0} | ({"spectral": 0.0, "log_sigma": np.log(SIGMA)} if spectral else {})
    weights = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in start.items()}
    optimizer = torch.optim.Adam(weights.values(), lr=0.05)
    for _ in track(range(STEPS), "Training"):
        optimizer.zero_grad()
        for borders in images:
            weight = borders.lengths / borders.lengths.sum() / len(images)
            logits = border_logits(borders, weights)
            nnf.binary_cross_entropy_with_logits(logits, borders.agreement, weight, reduction="sum").backward()
        optimizer.step()
    return {name: value.detach() for name, value in weights.items()}


class Image(NamedTuple):
    """Regions of an image, their graph, and the segmentations that annotators drew."""

    name: str
    regions: NDArray[np.int32]
    graph: RegionGraph
    borders: Borders
    people: list[NDArray[Any]]


def image_of(name: str, contours: NDArray[np.float32], people: list[NDArray[Any]]) -> Image:
    """Divide an image along its contours and measure the borders of its regions."""
    regions = watershed_regions(contours)
    graph = region_graph(regions)
    drawn = np.mean([maximum_filter(boundary_map(labels), MARGIN) for labels in people], 0)
    borders = Borders(
        len(graph.areas),
        torch.from_numpy(graph.edges),
        torch.from_numpy(graph.lengths).double(),
        torch.from_numpy(border_strengths(regions, graph, smooth_contours(contours))),
        torch.from_numpy(border_strengths(regions, graph, drawn)),
    )
    return Image(name, regions, graph, borders, people)


def score(image: Image, weights: Weights | None) -> tuple[ImageScores, float]:
    """Scores of one hierarchy, without weights that of the package, and the seconds that its strengths took."""
    started = time.perf_counter()
    strengths = image.borders.strengths if weights is None else border_logits(image.borders, weights).sigmoid()
    seconds = time.perf_counter() - started
    tree = merge_graph(image.graph, strengths.numpy())
    levels = tree.levels([tree.regions_at(height) for height in LEVELS])[:, image.regions]
    return score_image(image.name, list(levels), image.people, boundary=True, objects=True), seconds


class Cuts(Experiment):
    """The table of spectral distances; see the module."""

    def train(self) -> None:
        """Train and score every row and fold that is missing."""
        config, root = self.config, self.config.root
        fixed = {"data": runs.data_hash(root, tuple(sorted({"train", config.images}))), "device": "cpu",
                 "weights": runs.file_hash(model_folder(config.model) / WEIGHTS)}  # fmt: skip
        configuration = {"images": config.images, "limit": config.data.limit, "sigma": SIGMA, "vectors": VECTORS,
                         "margin": MARGIN, "steps": STEPS, "levels": len(LEVELS)}  # fmt: skip
        scored = list(self.images(BSDS(root, config.images)))
        for fold in range(config.folds):
            training: list[Borders] = []
            for row in ROWS if fold == 0 else ROWS[1:]:
                if row != "package" and not training:
                    ids = BSDS(root, "train").ids[fold::4]
                    training += [image.borders for image in self.images(BSDS(root, "train", ids=ids))]
                provenance = {**fixed, "configuration": {**configuration, "row": row, "fold": fold}}
                self.results.run(row, "fold", fold, provenance, partial(self.run, row, training, scored))

    def images(self, data: BSDS) -> Iterator[Image]:
        """Regions and borders of the images of a split."""
        model = load_segmenter(self.config.model, self.config.device)
        assert isinstance(model, ContourNet)
        for sample in track(self.config.limited(data), "Finding contours"):
            people = [labels.numpy() for labels in sample.segmentations]
            yield image_of(sample.id, network_contours(model, sample.image[None])[0], people)

    def run(self, row: str, training: Sequence[Borders], images: Sequence[Image]) -> dict[str, Any]:
        """Train a row and score it."""
        weights = None if row == "package" else train_weights(training, spectral=row == "cuts")
        with self.config.pool() as pool:
            scores, seconds = zip(*pool.map(partial(score, weights=weights), images), strict=True)
        return {
            "images": len(scores),
            "weights": {name: float(w) for name, w in (weights or {}).items()},
            "border_seconds": float(np.median(seconds)),
            "scores": summarize(scores),
            "covering": [round(float(one.covering.mean(1).max()), 5) for one in scores],
        }

    def summarize(self) -> None:
        """Write the mean over folds, with paired intervals against contours alone."""
        done = self.results.require({row: each for row in ROWS if (each := self.results.runs(row, "fold"))})
        milliseconds = {row: 1000 * each[0]["metrics"]["border_seconds"] for row, each in done.items()}
        first, cuts = next(iter(done.values()))[0], done.get("cuts", [])
        note = (
            f"{first['metrics']['images']} images of {first['provenance']['configuration']['images']}, hierarchies cut "
            f"at {len(LEVELS)} heights; mean ± deviation over {len(cuts)} sets of training images. Difference: "
            "covering of the best level of an image against the row contours, with its 95 % interval. Milliseconds: "
            "border strengths of one image, eigenvectors included. Trained weights of cuts: "
            + "; ".join(", ".join(f"{n} {w:.2f}" for n, w in run["metrics"]["weights"].items()) for run in cuts)
            + "."
        )
        title = "Normalized cuts in the hierarchy"
        table = runs.contour_table(done, COLUMNS, title=title, note=note, milliseconds=milliseconds)
        self.results.write_table(table, runs=[run for all_runs in done.values() for run in all_runs])


main = Cuts.main
