"""Do normalized cuts improve a hierarchy of contours? Spectral distances as a part of border strengths.

The regions of the watershed are the nodes of a graph with the affinity Wᵢⱼ = ℓᵢⱼ exp(−sᵢⱼ/σ) for a common border of
length ℓ and mean contour strength s. With the leading generalized eigenvectors (D − W)x = λDx, two neighbors have the
spectral distance d = (Σₖ (xₖᵢ − xₖⱼ)²/λₖ)^½ (Arbelaez et al., PAMI 2011, section 3.2, on regions instead of pixels).
Borders are merged by (1 − α)s + αd, where d is divided by its 95th percentile in the image. α = 0 is the hierarchy of
the package. Every α is reported; none is chosen.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from experiments import runs
from experiments.runs import ExperimentConfig, Results
from experiments.table2 import Images
from matbackprop import topk_eigh
from matbackprop.vision.data.bsds import BSDS, find_root
from matbackprop.vision.data.cache import dataset_folder
from matbackprop.vision.devices import processors
from matbackprop.vision.inference.loading import BOX, load_segmenter, model_folder
from matbackprop.vision.inference.segmenting import network_contours
from matbackprop.vision.metrics import ImageScores, paired_bootstrap, score_image, summarize
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.progress import track
from matbackprop.vision.report.tables import Table
from matbackprop.vision.segmentation.hierarchy import merge_graph, watershed_regions
from matbackprop.vision.segmentation.regions import RegionGraph, border_strengths, region_graph
from matbackprop.vision.workers import Workers

SIGMA = 0.1
"""Contour strength at which the affinity falls to 1/e, as for gPb."""
VECTORS = 16
"""Eigenvectors, as for gPb."""
LEVELS = np.arange(1, 100) / 100
"""Heights at which hierarchies are cut."""
COLUMNS = {
    "boundary F ODS": "boundary_ods", "OIS": "boundary_ois", "AP": "boundary_ap", "covering ODS": "covering_ods",
    "covering OIS": "covering_ois", "covering best": "covering_best", "PRI ODS": "pri_ods", "VI ODS": "vi_ods",
    "objects ODS": "objects_ods", "paper best": "paper_best", "paper average": "paper_average",
}  # fmt: skip
"""Column of the table → name of the measure."""


@dataclass
class Config(ExperimentConfig):
    """Merge borders by contour strength and spectral distance, and score the hierarchies."""

    out: Path = Path("results/cuts")
    """Folder of results.jsonl and table.md. Finished runs are not repeated."""
    model: str = BOX
    """Contour network: box, a folder or a run folder."""
    alphas: tuple[float, ...] = (0.0, 0.1, 0.2, 0.4)
    """Weights of the spectral distance."""
    images: str = "val"
    """Split that is scored."""
    workers: int = 0
    """Processes for scoring; 0 for one per core."""
    data: Images = field(default_factory=Images)
    """Source of the images."""


def spectral_distances(graph: RegionGraph, strengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance (E,) of neighboring regions in the leading eigenvectors of the normalized affinity.

    Example:
        >>> graph = region_graph([[0, 1, 2, 3]])
        >>> distances = spectral_distances(graph, np.array([0.1, 0.9, 0.1]))
        >>> int(distances.argmax())  # across the strong border
        1
    """
    count = len(graph.areas)
    if count < 3:
        return np.zeros(len(strengths))
    weight = torch.from_numpy(graph.lengths * np.exp(-strengths / SIGMA))
    i, j = torch.from_numpy(graph.edges.T)
    affinity = torch.zeros(count, count, dtype=torch.float64).index_put((i, j), weight)
    affinity = affinity + affinity.mT
    scale = affinity.sum(1).rsqrt()
    values, vectors = topk_eigh(scale[:, None] * affinity * scale, min(VECTORS, count - 1), ties="drop")
    cut = (1 - values[1:]).clamp(min=1e-6)
    x = scale[:, None] * vectors[:, 1:]
    distance = ((x[i] - x[j]) / cut.sqrt()).norm(dim=1)
    return distance.numpy()


class Scored(NamedTuple):
    """One image: its scores for every α, the seconds that its eigenvectors took, and its regions."""

    scores: list[ImageScores]
    seconds: float
    regions: int


def score(task: tuple[str, NDArray[np.float32], list[NDArray[Any]]], alphas: Sequence[float]) -> Scored:
    """Score the hierarchies of one image for every α."""
    name, contours, people = task
    regions = watershed_regions(contours)
    graph = region_graph(regions)
    strengths = border_strengths(regions, graph, contours)
    started = time.perf_counter()
    distances = spectral_distances(graph, strengths)
    seconds = time.perf_counter() - started
    if len(distances) and (largest := np.quantile(distances, 0.95)) > 0:
        distances = np.minimum(distances / largest, 1)
    scores = []
    for alpha in alphas:
        tree = merge_graph(graph, (1 - alpha) * strengths + alpha * distances)
        levels = tree.levels([tree.regions_at(height) for height in LEVELS])
        scores.append(score_image(name, list(levels[:, regions]), people, boundary=True, objects=True))
    return Scored(scores, seconds, len(graph.areas))


class Cuts:
    """The table of spectral distances; see the module."""

    def __init__(self, config: Config) -> None:
        self.config, self.results = config, Results(config.out)

    def train(self) -> None:
        """Score the images, unless they are scored already."""
        config = self.config
        weights = hashlib.sha256((model_folder(config.model) / "model.safetensors").read_bytes()).hexdigest()[:16]
        root = dataset_folder("BSDS500", config.data.root, config.data.generate, config.data.cache)
        configuration = {"alphas": config.alphas, "images": config.images, "limit": config.data.limit,
                         "sigma": SIGMA, "vectors": VECTORS, "levels": len(LEVELS)}  # fmt: skip
        provenance = {"configuration": configuration, "data": runs.data_hash(root, (config.images,)),
                      "weights": weights, "device": "cpu"}  # fmt: skip
        self.results.run("spectral", "scores", 0, provenance, lambda: self.score(BSDS(find_root(root), config.images)))

    def score(self, data: BSDS) -> dict[str, Any]:
        """Score every image for every α."""
        config = self.config
        with Workers(config.workers or processors()) as pool:
            scored = list(pool.map(partial(score, alphas=config.alphas), self.tasks(data)))
        return {
            "images": len(scored),
            "eigenvector_seconds": float(np.median([one.seconds for one in scored])),
            "regions": float(np.median([one.regions for one in scored])),
            "scores": {alpha: summarize([one.scores[k] for one in scored]) for k, alpha in enumerate(config.alphas)},
            "covering": {alpha: [round(float(one.scores[k].covering.mean(1).max()), 5) for one in scored]
                         for k, alpha in enumerate(config.alphas)},
        }  # fmt: skip

    def tasks(self, data: BSDS) -> Iterator[tuple[str, NDArray[np.float32], list[NDArray[Any]]]]:
        """Contours of every image, and the segmentations that people drew."""
        model = load_segmenter(self.config.model, self.config.device)
        assert isinstance(model, ContourNet)
        count = min(len(data), self.config.data.limit or len(data))
        for index in track(range(count), "Scoring images", count):
            sample = data[index]
            people = [labels.numpy() for labels in sample.segmentations]
            yield data.ids[index], network_contours(model, sample.image[None])[0], people

    def summarize(self) -> None:
        """Write the scores of every α, with paired intervals against contours alone."""
        run = self.results.runs("spectral", "scores")[0]
        metrics = run["metrics"]
        alphas = list(metrics["scores"])
        body = []
        for alpha in alphas:
            scores = metrics["scores"][alpha]
            gain = paired_bootstrap(metrics["covering"][alpha], metrics["covering"][alphas[0]])
            difference = "" if alpha == alphas[0] else runs.interval_text(gain._asdict(), 3)
            body.append([alpha, *(scores[name] for name in COLUMNS.values()), difference])
        note = (
            f"{metrics['images']} images of {run['provenance']['configuration']['images']}, hierarchies cut at 99 "
            f"heights. Difference: covering of the best level of an image against α = {alphas[0]}, with its 95 % "
            f"interval. Eigenvectors take {metrics['eigenvector_seconds']:.3f} s for {metrics['regions']:.0f} regions "
            "(medians)."
        )
        formats = dict.fromkeys(COLUMNS, ".3f")
        table = Table(["α", *COLUMNS, "difference"], body, title="Spectral distances", note=note, formats=formats)
        self.results.write_table(table, runs=[run])


def main(config: Config) -> dict[str, Any]:
    """Score and write the table."""
    table = Cuts(config)
    return runs.main(config, table.train, table.summarize)
