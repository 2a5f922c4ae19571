"""Evaluate segmentations of many images with the scores of the benchmark and of the paper."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from matbackprop.errors import DataError
from matbackprop.vision.metrics.boundaries import TOLERANCE, boundary_counts, f_measure
from matbackprop.vision.metrics.objects_parts import best_f, score_objects
from matbackprop.vision.metrics.regions import HumanMaps, RegionScores, harmonic_mean, score_regions
from matbackprop.vision.workers import parallel_map

T = TypeVar("T")
Maps = Sequence[Any] | Callable[[], Sequence[Any]]  #: Label maps of an image, or a function that reads them.


@dataclass(frozen=True)
class ImageScores(RegionScores):
    """Scores of one image with ``t`` segmentations and ``g`` human maps."""

    id: str  #: image name
    boundary: NDArray[np.int64] | None = None  #: boundary counts ``(t, 4)`` of :func:`boundary_counts`, or None
    objects: NDArray[np.float64] | None = None  #: precision and recall of objects and parts, ``(t, 2)``, or None

    @property
    def paper_best(self) -> float:
        """Maximum covering over segmentations and human maps ("best" in the paper)."""
        return float(self.covering.max())

    @property
    def paper_average(self) -> float:
        """Maximum over segmentations of the mean covering over human maps ("average" in the paper)."""
        return float(self.covering.mean(1).max())

    def row(self) -> dict[str, float | int | str]:
        """Return the scores of the best segmentation of the image, as a table row."""
        row: dict[str, float | int | str] = {
            "id": self.id,
            "segmentations": len(self.covering),
            "annotators": len(self.best_covering),
            "paper_best": self.paper_best,
            "paper_average": self.paper_average,
            "covering_best": float(self.best_covering.mean()),
            "pri": float(self.rand_index.mean(1).max()),
            "vi": float(self.variation_of_information.mean(1).min()),
        }
        if self.boundary is not None:
            row["boundary_f"] = float(f_measure(self.boundary)[2].max())
        if self.objects is not None:
            row["objects_f"] = best_f(self.objects)
        return row


def score_image(
    id: str,
    segmentations: Sequence[Any],
    ground_truth: Sequence[Any],
    *,
    boundary: bool = False,
    objects: bool = False,
    tolerance: float = TOLERANCE,
) -> ImageScores:
    """Compute the scores of one image.

    Args:
        id: image name, for tables.
        segmentations: label maps ``(h, w)``, in the same order for all images (for example from fine to coarse).
        ground_truth: human label maps ``(h, w)``.
        boundary: also match boundaries, which takes most of the time.
        objects: also match objects and parts.
        tolerance: maximum distance between matched boundary pixels, as a fraction of the image diagonal.

    Returns:
        The scores of every segmentation against every human map.

    Raises:
        ShapeError: the maps differ in size, or a list is empty.
        LabelError: the labels of a map are not integers.

    Example:
        >>> score_image("a", [[[0, 0, 1, 1]]], [[[0, 0, 0, 1]], [[0, 0, 1, 1]]]).paper_best
        1.0
    """
    # Neighboring levels of a hierarchy are often the same object, which is evaluated once.
    new = [t == 0 or labels is not segmentations[t - 1] for t, labels in enumerate(segmentations)]
    level, maps = np.cumsum(new) - 1, [labels for labels, first in zip(segmentations, new, strict=True) if first]
    people = HumanMaps.of(ground_truth)
    overlaps = people.all_overlaps(maps)
    regions = vars(score_regions(people, overlaps))
    for name in ("covering", "rand_index", "variation_of_information"):
        regions[name] = regions[name][level]
    counts = boundary_counts(maps, ground_truth, tolerance)[level] if boundary else None
    pairs = score_objects(people, overlaps)[level] if objects else None
    return ImageScores(**regions, id=id, boundary=counts, objects=pairs)


def score_images(
    segmentations: Mapping[str, Maps], ground_truth: Mapping[str, Maps], *, workers: int = 0, **options: Any
) -> Iterator[ImageScores]:
    """Compute the scores of many images.

    Args:
        segmentations: label maps of each image, or functions that read them. The functions must be picklable if
            ``workers`` > 1.
        ground_truth: human maps of at least these images, or functions that read them.
        workers: number of processes; 0 and 1 use the current process.
        options: ``boundary``, ``objects`` and ``tolerance`` of :func:`score_image`.

    Yields:
        Scores in the order of ``segmentations``.

    Raises:
        DataError: there is no image, or images have no human maps. Images with unreadable or incompatible maps are
            listed in one error after all other images were evaluated.
    """
    return map_images(partial(score_image, **options), segmentations, ground_truth, workers)


def map_images(
    score: Callable[[str, Any, Any], T],
    segmentations: Mapping[str, Any],
    ground_truth: Mapping[str, Maps],
    workers: int,
) -> Iterator[T]:
    """Yield ``score(name, segmentations, ground_truth)`` of many images; see :func:`score_images`."""
    if not segmentations:
        raise DataError("There is no segmentation to evaluate. Pass at least one image.")
    without = [name for name in segmentations if name not in ground_truth]
    if without:
        shown = ", ".join(sorted(without)[:5]) + (", …" if len(without) > 5 else "")
        raise DataError(f"{len(without)} of {len(segmentations)} images have no human map: {shown}. Add the maps.")
    jobs = [(name, maps, ground_truth[name]) for name, maps in segmentations.items()]
    problems = []
    for result in parallel_map(partial(_score, score), jobs, workers):
        if isinstance(result, str):
            problems.append(result)
        else:
            yield result
    if len(problems) == 1:
        raise DataError(problems[0])
    if problems:
        raise DataError(f"{len(problems)} of {len(jobs)} images cannot be scored:\n  " + "\n  ".join(problems))


def _score(score: Callable[[str, Any, Any], T], job: tuple[str, Any, Maps]) -> T | str:
    name, *sources = job
    try:
        return score(name, *(source() if callable(source) else source for source in sources))
    except ValueError as error:  # also DataError of a reader
        return str(error) if isinstance(error, DataError) else f"{name}: {error}"


def summarize(scores: Iterable[ImageScores]) -> dict[str, float]:
    """Compute the scores of a data set from the scores of its images.

    ODS (optimal data set scale) uses the same segmentation index for all images; OIS (optimal image scale) uses the
    best segmentation of each image. Covering pools all human maps, so an image with more annotators has a larger
    weight. PRI, VI, the scores of the paper, and precision and recall of objects and parts are means over images.
    Boundary precision and recall are computed from pooled counts, and their ODS is interpolated between neighboring
    segmentations, as in the benchmark.

    Args:
        scores: scores of at least one image.

    Returns:
        ``covering_ods``, ``covering_ois``, ``covering_best``, ``paper_best``, ``paper_average``, ``pri_ods``,
        ``pri_ois``, ``vi_ods``, ``vi_ois``; with boundaries ``boundary_ods``, ``boundary_ois`` and ``boundary_ap``;
        with objects and parts ``objects_ods`` and ``objects_ois``. ODS and AP are NaN if images have different
        numbers of segmentations.

    Example:
        >>> scores = [score_image(name, [[[0, 1, 1, 1]], [[0, 0, 1, 1]]], [[[0, 0, 0, 1]]]) for name in "ab"]
        >>> {name: round(value, 4) for name, value in summarize(scores).items() if name.startswith("covering")}
        {'covering_ods': 0.625, 'covering_ois': 0.625, 'covering_best': 0.625}
    """
    scores = list(scores)
    summary: dict[str, float] = {}
    for row, summarize_rows in MEASURES.values():
        rows = [row(score) for score in scores]
        if all(one is not None for one in rows):
            summary |= summarize_rows(rows)
    return summary


def _covering_row(score: ImageScores) -> NDArray[np.float64]:
    alone = [len(score.best_covering), score.best_covering.sum(), score.paper_best, score.paper_average]
    return np.concatenate([alone, score.covering.sum(1)])


def _covering_scores(rows: Sequence[NDArray[np.float64]]) -> dict[str, float]:
    annotators, best, paper_best, paper_average = np.array([row[:4] for row in rows]).T
    ods, ois = over_scales([row[4:] for row in rows])
    return {
        "covering_ods": ods * len(rows) / float(annotators.sum()),
        "covering_ois": ois * len(rows) / float(annotators.sum()),
        "covering_best": float(best.sum() / annotators.sum()),
        "paper_best": float(paper_best.mean()),
        "paper_average": float(paper_average.mean()),
    }


def boundary_scores(counts: Sequence[NDArray[np.int64]]) -> dict[str, float]:
    """Compute ODS, OIS and average precision of boundaries from the counts ``(t, 4)`` of each image."""
    best = [count[f_measure(count)[2].argmax()] for count in counts]
    return {
        "boundary_ods": boundary_curve(counts)["ods"]["f"] if _same_number(counts) else float("nan"),
        "boundary_ois": float(f_measure(np.sum(best, 0))[2]),
        "boundary_ap": boundary_average_precision(counts),
    }


def _named(stem: str, scores: tuple[float, float]) -> dict[str, float]:
    return {f"{stem}_ods": scores[0], f"{stem}_ois": scores[1]}


#: Metric → its row for an image, and the scores of a data set from the rows of its images.
MEASURES: dict[str, tuple[Callable[[ImageScores], Any], Callable[[Any], dict[str, float]]]] = {
    "covering": (_covering_row, _covering_scores),
    "pri": (lambda score: score.rand_index.mean(1), lambda rows: _named("pri", over_scales(rows))),
    "vi": (lambda score: score.variation_of_information.mean(1), lambda rows: _named("vi", over_scales(rows, np.min))),
    "boundary": (lambda score: score.boundary, boundary_scores),
    "objects": (lambda score: score.objects, lambda rows: _named("objects", over_scales(rows, best_f))),
}


def over_scales(
    values: Sequence[NDArray[np.float64]], best: Callable[[NDArray[np.float64]], Any] = np.max
) -> tuple[float, float]:
    """Compute ODS and OIS of a score that is averaged over images. ODS is NaN if the numbers of scores differ.

    Example:
        >>> over_scales([np.array([0.2, 0.6]), np.array([0.8, 0.3])])
        (0.5, 0.7)
    """
    ods = float(best(np.mean(values, 0))) if _same_number(values) else float("nan")
    return ods, float(np.mean([best(scores) for scores in values]))


def _same_number(values: Sequence[NDArray[Any]] | NDArray[Any]) -> bool:
    return len({len(one) for one in values}) == 1


def boundary_average_precision(counts: Sequence[NDArray[np.int64]] | NDArray[np.int64]) -> float:
    """Compute the average boundary precision of the benchmark, the area under the precision-recall curve.

    Precision is interpolated linearly at recalls 0, 0.01, …, 1 and is 0 outside the recalls of the segmentations. The
    result is NaN if images have different numbers of segmentations.
    """
    if not _same_number(counts):
        return float("nan")
    recall, precision, _ = f_measure(np.sum(counts, 0))
    recalls, first = np.unique(recall, return_index=True)
    if len(recalls) < 2:
        return 0.0
    grid = np.arange(101) / 100
    return 0.01 * float(np.interp(grid, recalls, precision[first], left=0, right=0).sum())


def boundary_curve(counts: Sequence[NDArray[np.int64]] | NDArray[np.int64]) -> dict[str, Any]:
    """Compute boundary precision and recall of all levels from pooled counts, and the best point on the curve.

    Args:
        counts: counts ``(t, 4)`` of :func:`boundary_counts` for each image, with the same t for all images.

    Returns:
        ``recall``, ``precision`` and ``f``, lists of t numbers, and ``ods``, the point of the largest F: ``level``
        (from 1; fractional between two levels), ``recall``, ``precision`` and ``f``.

    Example:
        >>> round(boundary_curve([np.array([[8, 10, 8, 20], [4, 10, 4, 5]])])["ods"]["f"], 3)
        0.6
    """
    recall, precision, f = f_measure(np.sum(counts, 0))
    step = np.linspace(0, 1, 100)[:, None]
    points = np.stack([np.arange(1.0, len(f) + 1), recall, precision])
    between = (points[:, None, :-1] * (1 - step) + points[:, None, 1:] * step).reshape(3, -1)
    level, r, p = np.concatenate([between, points], axis=1)
    largest = harmonic_mean(r, p)
    i = int(largest.argmax())
    ods = {"level": float(level[i]), "recall": float(r[i]), "precision": float(p[i]), "f": float(largest[i])}
    return {"recall": recall.tolist(), "precision": precision.tolist(), "f": f.tolist(), "ods": ods}


def evaluate_segmentations(
    segmentations: Mapping[str, Maps], ground_truth: Mapping[str, Maps], **options: Any
) -> dict[str, float]:
    """Evaluate segmentations of many images by :func:`score_images`, with its options, and :func:`summarize`.

    Example:
        >>> half = [[0, 0, 1, 1]]
        >>> evaluate_segmentations({"pond": [half]}, {"pond": [half, [[0, 1, 2, 3]]]})["paper_average"]
        0.75
    """
    return summarize(score_images(segmentations, ground_truth, **options))
