"""Methods of table 2 that need no training: an image uint8 ``(3, h, w)`` → a list of label maps.

``BASELINES`` lists them and ``run_baseline`` scores one on a data set. Runs are stored with table 2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments import runs, table2
from matbackprop.vision.data.bsds import BSDS
from matbackprop.vision.metrics import ImageScores, region_scores, score_image, summarize
from matbackprop.vision.segmentation import connected_components
from matbackprop.vision.workers import Workers

KS = (2, 3, 4, 6, 8, 12, 16, 20)  #: The numbers of clusters of the eight segmentations.
#: The scales of Felzenszwalb and Huttenlocher's eight segmentations.
SCALES = (50, 100, 200, 400, 800, 1600, 3200, 6400)


def shrink(image: Tensor, factor: float) -> Tensor:
    """Scale an image down with antialiasing: float32 in [0, 1], ``(3, ⌈factor·h⌉, ⌈factor·w⌉)``."""
    size = [max(1, int(np.ceil(side * factor))) for side in image.shape[1:]]
    return F.interpolate(image[None].float() / 255, size=size, mode="bilinear", antialias=True)[0].clamp(0, 1)


def to_label_maps(labels: list[Tensor], size: Sequence[int]) -> list[Tensor]:
    """Enlarge label maps to the image by nearest neighbor and split them into connected components."""
    large = [F.interpolate(one[None, None].double(), size=size, mode="nearest-exact")[0, 0].long() for one in labels]
    return [connected_components(one) for one in large]


def one_region(image: Tensor) -> list[Tensor]:
    """The whole image as one region."""
    return [torch.zeros(image.shape[1:], dtype=torch.int64)]


def fixed_grids(image: Tensor) -> list[Tensor]:
    """The image cut into k×k equal rectangles, k = 1 … 8."""
    height, width = image.shape[1:]
    maps = []
    for side in range(1, 9):
        rows, columns = torch.arange(height) * side // height, torch.arange(width) * side // width
        maps.append(rows[:, None] * side + columns)
    return maps


def felzenszwalb(image: Tensor) -> list[Tensor]:
    """Graph-based segmentation at eight scales.

    Reference: Felzenszwalb, Huttenlocher, "Efficient graph-based image segmentation", IJCV 2004.
    """
    from skimage.segmentation import felzenszwalb as segment

    array = image.permute(1, 2, 0).numpy()
    maps = [segment(array, scale=scale, sigma=0.8, min_size=scale) for scale in SCALES]
    return [torch.from_numpy(labels).long() for labels in maps]


def sklearn_spectral(image: Tensor) -> list[Tensor]:
    """scikit-learn's spectral clustering of the graph of neighboring pixels, on an image of a quarter of the size.

    Neighbors are joined with exp(−10Δ/std Δ) + 10⁻⁶, Δ the difference of their gray values, as in scikit-learn's
    example. One spectral embedding is used for all K; K-means clusters its first K coordinates.

    Reference: Shi, Malik, "Normalized cuts and image segmentation", PAMI 2000; Pedregosa et al., JMLR 2011.
    """
    from sklearn.cluster import KMeans
    from sklearn.feature_extraction.image import img_to_graph
    from sklearn.manifold import spectral_embedding

    gray = shrink(image, 0.25).mean(0).double().numpy()
    graph = img_to_graph(gray)
    difference = np.where(graph.row == graph.col, 0.0, np.abs(graph.data))
    graph.data = np.exp(-10.0 * difference / difference.std()) + 1e-6
    embedding = spectral_embedding(
        graph.tocsr(), n_components=max(KS), eigen_solver="arpack", random_state=0, drop_first=False
    )
    labels = []
    for k in KS:
        clusters = KMeans(k, n_init=2, random_state=0).fit_predict(embedding[:, :k])
        labels.append(torch.from_numpy(clusters.reshape(gray.shape)).long())
    return to_label_maps(labels, image.shape[1:])


def ncut_pytorch(image: Tensor) -> list[Tensor]:
    """Nyström normalized cuts of ncut-pytorch on the Lab colors and positions of the pixels of a quarter-size image.

    Reference: Yang, Gee, Shi, "Brain decodes deep nets", CVPR 2024.
    """
    from ncut_pytorch import Ncut, kway_ncut
    from skimage.color import rgb2lab

    small = shrink(image, 0.25).permute(1, 2, 0).numpy()
    height, width = small.shape[:2]
    rows, columns = np.mgrid[:height, :width] / max(height, width)
    features = np.concatenate([rgb2lab(small) / 100, rows[..., None], columns[..., None]], axis=2).reshape(-1, 5)
    torch.manual_seed(0)  # ncut-pytorch uses the global generators
    np.random.seed(0)  # noqa: NPY002
    vectors = Ncut(n_eig=max(KS), device="cpu").fit_transform(torch.from_numpy(features).float())
    aligned = [kway_ncut(vectors[:, :k], device="cpu") for k in KS]
    return to_label_maps([one.argmax(-1).view(height, width).long() for one in aligned], image.shape[1:])


#: Every baseline: an image uint8 ``(3, h, w)`` → its label maps, int64 ``(h, w)``.
BASELINES: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "one_region": one_region,
    "fixed_grids": fixed_grids,
    "sklearn_spectral": sklearn_spectral,
    "ncut_pytorch": ncut_pytorch,
    "felzenszwalb": felzenszwalb,
}
HUMANS = "humans"  #: The row of human agreement, which needs no image.


def humans_leave_one_out(id: str, ground_truth: Sequence[Any]) -> dict[str, float | int | str]:
    """Score each human map of an image against those of the other annotators, and average.

    With c the covering of map j by map i: best = mean_i max_{j≠i} c, average = mean_i mean_{j≠i} c; PRI and VI are
    means over all pairs of different annotators. The names are those of ``ImageScores.row()``.
    """
    people = len(ground_truth)
    scores = region_scores(ground_truth, ground_truth)
    others = ~np.eye(people, dtype=bool)
    covering = scores.covering[others].reshape(people, people - 1)
    return {
        "id": id,
        "segmentations": people - 1,
        "annotators": people,
        "paper_best": float(covering.max(1).mean()),
        "paper_average": float(covering.mean()),
        "pri": float(scores.rand_index[others].mean()),
        "vi": float(scores.variation_of_information[others].mean()),
    }


def run_baseline(method: str, data: BSDS, workers: Workers, *, boundary: bool = False) -> dict[str, Any]:
    """Segment the images of a data set with a baseline (or ``HUMANS``), score them, and time the segmentation."""
    if method == HUMANS:
        rows = list(workers.map(partial(_people, data), range(len(data))))
        names = [name for name, value in rows[0].items() if isinstance(value, float)]
        return {"scores": {n: float(np.mean([row[n] for row in rows])) for n in names}, "per_image": _by_id(rows)}
    timed = list(workers.map(partial(_segment, data, method, boundary), range(len(data))))
    scores = [score for score, _ in timed]
    return {
        "scores": summarize(scores),
        "per_image": _by_id([score.row() for score in scores]),
        "seconds_per_image": float(np.mean([seconds for _, seconds in timed])),
    }


def _by_id(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    return {row["id"]: [round(row[f"paper_{name}"], 6) for name in ("best", "average")] for row in rows}


def _people(data: BSDS, index: int) -> dict[str, Any]:
    name = data.ids[index]
    return humans_leave_one_out(name, data.segmentations(name))


def _segment(data: BSDS, method: str, boundary: bool, index: int) -> tuple[ImageScores, float]:
    sample = data[index]
    start = time.process_time()
    maps = BASELINES[method](sample.image)
    seconds = time.process_time() - start
    return score_image(sample.id, maps, sample.segmentations, boundary=boundary), seconds


@dataclass
class Config(table2.Config):
    """Score the methods of table 2 that need no training."""


class Baselines(table2.Table2):
    """The second table; its rows without training are scored."""

    def __init__(self, config: Config) -> None:
        super().__init__(replace(config, rows=()))
        self.methods = config.chosen(dict.fromkeys([*BASELINES, HUMANS]))

    def train(self) -> None:
        """Score every method."""
        config, root = self.config, self.config.data.folder()
        data = config.limited(BSDS(root, config.split))
        for method in self.methods:
            configuration = {"method": method, "limit": config.data.limit, "boundary": config.boundary}
            provenance = {"configuration": configuration, "data": runs.data_hash(root, (config.split,)),
                          "weights": "none", "device": "cpu"}  # fmt: skip
            with config.pool() as pool:
                work = partial(run_baseline, method, data, pool, boundary=config.boundary)
                self.results.run(method, "baseline", 0, provenance, work)


main = Baselines.main
