"""Covering, Rand index and variation of information of two label maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from matbackprop.errors import LabelError, ShapeError

_DENSE_CELLS = 1 << 22  # larger tables of counts are built by sorting


@dataclass(frozen=True)
class RegionScores:
    """Region metrics of one image: ``t`` segmentations against ``g`` human maps."""

    covering: NDArray[np.float64]  #: Cover(S_t → G_g), ``(t, g)``
    rand_index: NDArray[np.float64]  #: Rand index, ``(t, g)``
    variation_of_information: NDArray[np.float64]  #: in bits, ``(t, g)``
    #: covering of each human map by the best regions over all segmentations, ``(g,)``
    best_covering: NDArray[np.float64]
    pixels: int  #: number of pixels of the image


def as_label_map(labels: Any, name: str = "the label map") -> NDArray[np.integer]:
    """Convert an array, a tensor or nested lists to a two-dimensional array of integer labels.

    Args:
        labels: integers or booleans ``(h, w)``; floats must be whole numbers.
        name: name of the map in error messages.

    Returns:
        The labels ``(h, w)``, integer.

    Raises:
        ShapeError: the array is not two-dimensional, or is empty.
        LabelError: values are fractional, non-finite or too large for int64.
    """
    if hasattr(labels, "detach"):
        labels = labels.detach().cpu().numpy()
    array = np.asarray(labels)
    if array.ndim != 2 or array.size == 0:
        raise ShapeError(f"{name} has shape {array.shape}. It must be (height, width) with at least one pixel.")
    if array.dtype == bool:
        return array.astype(np.uint8)
    if np.issubdtype(array.dtype, np.integer):
        return array
    if np.issubdtype(array.dtype, np.floating):
        whole = bool((np.abs(array) < 2**63).all() and (array == np.round(array)).all())  # NaN is neither
        if whole:
            return array.astype(np.int64)
    raise LabelError(f"{name} has {array.dtype} values that are not integers. Number its regions.")


def compact_labels(labels: ArrayLike, name: str = "the label map") -> tuple[NDArray[np.int64], int]:
    """Renumber the labels of a map to 0 … k−1, in ascending order of their values.

    Args:
        labels: integers ``(h, w)``.
        name: name of the map in error messages.

    Returns:
        The renumbered map ``(h, w)``, int64, and the number k of regions.

    Example:
        >>> compact_labels([[7, 7], [3, 900]])
        (array([[1, 1],
               [0, 2]]), 3)
    """
    array = as_label_map(labels, name)
    low, high = int(array.min()), int(array.max())
    if high - low <= 4 * array.size + 1024:  # a table look-up is about twenty times faster than sorting
        shifted = array.astype(np.int64) - array.min().astype(np.int64)  # both wrap around if uint64
        present = np.bincount(shifted.ravel()) > 0
        table = np.cumsum(present) - 1
        return table[shifted], int(table[-1]) + 1
    values, inverse = np.unique(array, return_inverse=True)
    return inverse.reshape(array.shape).astype(np.int64), len(values)


def region_scores(segmentations: Sequence[Any], ground_truth: Sequence[Any]) -> RegionScores:
    """Compute all region metrics of the segmentations of one image against its human maps.

    Let n be the number of pixels shared by a human region R and a region R′ of the segmentation, and N the number of
    pixels of the image. Then
    IoU(R, R′) = n/(|R| + |R′| − n), Cover(S → G) = Σ_R |R| max_R′ IoU(R, R′) / N,
    RI = 1 − (½Σ|R|² + ½Σ|R′|² − Σn²) / (N(N−1)/2) and VI = (Σ|R| log₂|R| + Σ|R′| log₂|R′| − 2Σn log₂ n) / N.

    Args:
        segmentations: label maps ``(h, w)``, at least one.
        ground_truth: human label maps ``(h, w)``, at least one.

    Returns:
        The scores of every pair.

    Raises:
        ShapeError: a list is empty or the maps differ in size.
        LabelError: the labels of a map are not integers.

    Example:
        >>> scores = region_scores([[[0, 0], [1, 1]], [[0, 0], [0, 0]]], [[[5, 5], [9, 9]]])
        >>> scores.covering.tolist(), scores.rand_index.round(4).tolist()
        ([[1.0], [0.5]], [[1.0], [0.3333]])
        >>> scores.variation_of_information.tolist()
        [[0.0], [1.0]]

    Reference: Arbelaez, Maire, Fowlkes, Malik, "Contour detection and hierarchical image segmentation", PAMI 2011, 3.1.
    """
    people = HumanMaps.of(ground_truth)
    return score_regions(people, people.all_overlaps(segmentations))


def score_regions(people: HumanMaps, overlaps: Sequence[Overlaps]) -> RegionScores:
    """Compute :func:`region_scores` from counted overlaps."""
    first, areas, pixels = people.first, people.areas, people.atoms.size
    covering, rand, information = np.empty((3, len(overlaps), len(first)))
    best = np.zeros(len(areas))
    square_sum = np.add.reduceat(areas * areas, first)
    log_sum = np.add.reduceat(_xlog2x(areas), first)
    for t, (rows, columns, shared, own) in enumerate(overlaps):
        iou = shared / (areas[rows] + own[columns] - shared)
        start = np.searchsorted(rows, np.arange(len(areas)))
        overlap = np.maximum.reduceat(iou, start)
        np.maximum(best, overlap, out=best)
        covering[t] = np.add.reduceat(areas * overlap, first) / pixels
        blocks = start[first]
        disagreement = 0.5 * (square_sum + np.sum(own * own)) - np.add.reduceat(shared * shared, blocks)
        rand[t] = 1 - disagreement / max(pixels * (pixels - 1) / 2, 1)
        joint = np.add.reduceat(_xlog2x(shared), blocks)
        # Rounding errors can make the distance of equal partitions negative.
        information[t] = np.maximum((log_sum + _xlog2x(own).sum() - 2 * joint) / pixels, 0)
    return RegionScores(covering, rand, information, np.add.reduceat(areas * best, first) / pixels, pixels)


def segmentation_covering(segmentation: Any, ground_truth: Any) -> float:
    """Compute the covering of a human map by a segmentation, Σ_R |R| max_R′ IoU(R, R′) / N; see :func:`region_scores`.

    It is in (0, 1], is 1 for equal partitions, and is not symmetric.

    Example:
        >>> segmentation_covering([[0, 0, 1, 1]], [[0, 0, 0, 1]])
        0.625
    """
    return float(region_scores([segmentation], [ground_truth]).covering[0, 0])


def rand_index(segmentation: Any, ground_truth: Any) -> float:
    """Compute the Rand index of two label maps: the fraction of pixel pairs that both maps join or both separate.

    The probabilistic Rand index (PRI) is its mean over annotators.

    Example:
        >>> round(rand_index([[0, 0, 1, 1]], [[0, 0, 0, 1]]), 6)
        0.5
    """
    return float(region_scores([segmentation], [ground_truth]).rand_index[0, 0])


def variation_of_information(segmentation: Any, ground_truth: Any) -> float:
    """Compute the variation of information H(S|G) + H(G|S) of two label maps in bits.

    Example:
        >>> variation_of_information([[0, 0, 1, 1]], [[0, 1, 0, 1]])
        2.0
    """
    return float(region_scores([segmentation], [ground_truth]).variation_of_information[0, 0])


class Overlaps(NamedTuple):
    """Nonzero numbers of pixels shared by human regions (rows, numbered over all maps) and regions of a segmentation.

    Entries are sorted by row. ``areas`` are the pixels of each region of the segmentation.
    """

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    shared: NDArray[np.int64]
    areas: NDArray[np.int64]


class HumanMaps(NamedTuple):
    """Human maps of one image and their common refinement, whose regions are called atoms.

    Overlaps of a segmentation with atoms, typically a thousand per image, are counted once and summed for each map.
    Regions are numbered consecutively over all maps: ``first`` (g,) is the first of each map, and ``regions_of``
    (g, atoms) the region of each atom.
    """

    shape: tuple[int, ...]
    first: NDArray[np.int64]
    areas: NDArray[np.int64]
    atoms: NDArray[np.int64]
    regions_of: NDArray[np.int64]

    @classmethod
    def of(cls, maps: Sequence[Any]) -> HumanMaps:
        if not maps:
            raise ShapeError("There is no human map. Pass at least one.")
        compact = [compact_labels(labels, f"human map {g + 1}") for g, labels in enumerate(maps)]
        shape, atoms = compact[0][0].shape, compact[0][0].ravel()
        for g, (labels, count) in enumerate(compact):
            check_size(f"human map {g + 1}", labels.shape, "the first one", shape)
            if g:
                atoms = compact_labels((atoms * count + labels.ravel())[None])[0][0]
        first = np.cumsum([0, *(count for _, count in compact)])
        truth = np.stack([labels.ravel() + start for (labels, _), start in zip(compact, first[:-1], strict=True)])
        pixel_of = np.zeros(int(atoms.max()) + 1, dtype=np.int64)
        pixel_of[atoms] = np.arange(atoms.size)
        return cls(shape, first[:-1], np.bincount(truth.ravel()), atoms, truth[:, pixel_of])

    def all_overlaps(self, segmentations: Sequence[Any]) -> list[Overlaps]:
        """Count the pixels that each segmentation shares with all human regions."""
        if not segmentations:
            raise ShapeError("There is no segmentation. Pass at least one label map.")
        return [self._overlaps(labels, f"segmentation {t + 1}") for t, labels in enumerate(segmentations)]

    def _overlaps(self, segmentation: Any, name: str) -> Overlaps:
        labels, count = compact_labels(segmentation, name)
        check_size(name, labels.shape, "the human maps", self.shape)
        present, pixels = _count(self.atoms * count + labels.ravel(), self.regions_of.shape[1] * count)
        atom, column = np.divmod(present, count)
        codes = (self.regions_of[:, atom] * count + column).ravel()
        present, shared = _count(codes, len(self.areas) * count, np.tile(pixels, len(self.regions_of)))
        return Overlaps(*np.divmod(present, count), shared, np.bincount(column, pixels).astype(np.int64))


def _count(
    codes: NDArray[np.int64], size: int, weights: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the codes that occur, ascending, and their numbers or summed weights (exact below 2⁵³)."""
    if size <= _DENSE_CELLS:
        table = np.bincount(codes, weights, minlength=size)
        present = np.flatnonzero(table)
        return present, table[present].astype(np.int64)
    present, inverse = np.unique(codes, return_inverse=True)
    return present, np.bincount(inverse, weights).astype(np.int64)


def harmonic_mean(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute 2ab/(a + b), or 0 if both are 0."""
    return 2 * a * b / np.maximum(a + b, np.finfo(np.float64).tiny)


def _xlog2x(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    return counts.astype(np.float64) * np.log2(counts)


def check_size(name: str, shape: tuple[int, ...], other: str, expected: tuple[int, ...]) -> None:
    """Raise :class:`ShapeError` if two maps differ in size."""
    if shape != expected:
        fix = "Transpose one of them" if shape == expected[::-1] else "Resize one of them"
        sizes = ["×".join(map(str, size)) for size in (shape, expected)]
        raise ShapeError(f"{name} has size {sizes[0]}, but {other} {sizes[1]}. {fix}.")
