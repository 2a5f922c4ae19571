"""Region measures of a segmentation against human maps, from their confusion counts.

One image is scored at once: all its segmentations against all its annotators. The counts n of pixels that a human
region and a region of the segmentation share are taken in one pass for all annotators; covering, Rand index and
variation of information are sums over the non-zero counts only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from matbackprop.errors import LabelError, ShapeError

# Above this many cells a table of counts is made by sorting instead of densely: 32 MiB of int64.
_DENSE_CELLS = 1 << 22


@dataclass(frozen=True)
class RegionScores:
    """Region measures of one image: ``t`` segmentations against ``g`` human maps.

    Attributes:
        covering: Cover(S_t → G_g), ``(t, g)``.
        rand_index: Rand index, ``(t, g)``.
        variation_of_information: in bits, ``(t, g)``.
        best_covering: per human map, each of its regions covered by the best region over all segmentations, ``(g,)``.
        pixels: number of pixels of the image.
    """

    covering: NDArray[np.float64]
    rand_index: NDArray[np.float64]
    variation_of_information: NDArray[np.float64]
    best_covering: NDArray[np.float64]
    pixels: int


def as_label_map(labels: Any, name: str = "the label map") -> NDArray[np.integer]:
    """A two-dimensional NumPy array of integer labels, from an array, a tensor on any device or nested lists.

    Args:
        labels: integers or booleans ``(h, w)``; floats are accepted where every value is a whole number.
        name: how to call the map in an error message.

    Returns:
        The labels ``(h, w)``, integer.

    Raises:
        ShapeError: not two-dimensional, or without a pixel.
        LabelError: fractional, non-finite or enormous values.
    """
    if hasattr(labels, "detach"):
        labels = labels.detach().cpu().numpy()
    array = np.asarray(labels)
    if array.ndim != 2 or array.size == 0:
        raise ShapeError(f"{name} has shape {array.shape}; a label map is (height, width) with at least one pixel")
    if array.dtype == bool:
        return array.astype(np.uint8)
    if np.issubdtype(array.dtype, np.integer):
        return array
    if np.issubdtype(array.dtype, np.floating):
        whole = bool((np.abs(array) < 2**63).all() and (array == np.round(array)).all())  # NaN is neither
        if whole:
            return array.astype(np.int64)
    raise LabelError(
        f"{name} holds {array.dtype} values that are not whole numbers; labels are integers, one for each region"
    )


def compact_labels(labels: ArrayLike, name: str = "the label map") -> tuple[NDArray[np.int64], int]:
    """Number the labels of a map 0 … k−1 in ascending order of their values.

    Args:
        labels: integers ``(h, w)``.
        name: how to call the map in an error message.

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
        shifted = array.astype(np.int64) - array.min().astype(np.int64)  # right for uint64 too, since both wrap around
        present = np.bincount(shifted.ravel()) > 0
        table = np.cumsum(present) - 1
        return table[shifted], int(table[-1]) + 1
    values, inverse = np.unique(array, return_inverse=True)
    return inverse.reshape(array.shape).astype(np.int64), len(values)


def region_scores(segmentations: Sequence[Any], ground_truth: Sequence[Any]) -> RegionScores:
    """All region measures of the segmentations of one image against all its human maps.

    With n the pixels shared by a human region R and a region R′ of the segmentation, N the pixels of the image:
    IoU(R, R′) = n/(|R| + |R′| − n), Cover(S → G) = Σ_R |R| max_R′ IoU(R, R′) / N,
    RI = 1 − (½Σ|R|² + ½Σ|R′|² − Σn²) / (N(N−1)/2) and VI = (Σ|R| log₂|R| + Σ|R′| log₂|R′| − 2Σn log₂ n) / N.

    Args:
        segmentations: label maps ``(h, w)``, at least one.
        ground_truth: human label maps ``(h, w)``, at least one.

    Returns:
        The scores of every pair.

    Raises:
        ShapeError: a list is empty or the maps differ in size.
        LabelError: a map holds something other than integers.

    Example:
        >>> scores = region_scores([[[0, 0], [1, 1]], [[0, 0], [0, 0]]], [[[5, 5], [9, 9]]])
        >>> scores.covering.tolist(), scores.rand_index.round(4).tolist()
        ([[1.0], [0.5]], [[1.0], [0.3333]])
        >>> scores.variation_of_information.tolist()
        [[0.0], [1.0]]

    Reference: Arbelaez, Maire, Fowlkes, Malik, "Contour detection and hierarchical image segmentation", PAMI 2011, 3.1.
    """
    truth, first, areas, sizes = _stack_ground_truth(ground_truth)
    shape, pixels = sizes
    if not segmentations:
        raise ShapeError("no segmentation was given; at least one label map is needed")
    annotators = len(first)
    shared_shape = (len(segmentations), annotators)
    covering, rand, information = (np.empty(shared_shape) for _ in range(3))
    best = np.zeros(len(areas))
    atoms, regions_of = _atoms(truth)
    square_sum = np.add.reduceat(areas * areas, first)
    log_sum = np.add.reduceat(_xlog2x(areas), first)
    for t, segmentation in enumerate(segmentations):
        labels, count = compact_labels(segmentation, f"segmentation {t + 1}")
        if labels.shape != shape:
            raise ShapeError(size_message(f"segmentation {t + 1}", labels.shape, "the human maps", shape))
        rows, columns, shared = _shared_counts(atoms, regions_of, len(areas), labels.ravel(), count)
        own = np.bincount(labels.ravel(), minlength=count)
        iou = shared / (areas[rows] + own[columns] - shared)
        start = np.searchsorted(rows, np.arange(len(areas)))
        overlap = np.maximum.reduceat(iou, start)
        np.maximum(best, overlap, out=best)
        covering[t] = np.add.reduceat(areas * overlap, first) / pixels
        blocks = start[first]
        disagreement = 0.5 * (square_sum + np.sum(own * own)) - np.add.reduceat(shared * shared, blocks)
        rand[t] = 1 - disagreement / max(pixels * (pixels - 1) / 2, 1)
        joint = np.add.reduceat(_xlog2x(shared), blocks)
        # Both terms are exact for equal partitions up to rounding: a distance is never negative.
        information[t] = np.maximum((log_sum + _xlog2x(own).sum() - 2 * joint) / pixels, 0)
    return RegionScores(covering, rand, information, np.add.reduceat(areas * best, first) / pixels, pixels)


def segmentation_covering(segmentation: Any, ground_truth: Any) -> float:
    """Covering of one human map by one segmentation, Σ_R |R| max_R′ IoU(R, R′) / N.

    Args:
        segmentation: labels ``(h, w)``.
        ground_truth: labels ``(h, w)`` of the human map, whose regions are covered.

    Returns:
        A number in (0, 1], 1 for equal partitions. Not symmetric.

    Example:
        >>> segmentation_covering([[0, 0, 1, 1]], [[0, 0, 0, 1]])
        0.625
    """
    return float(region_scores([segmentation], [ground_truth]).covering[0, 0])


def rand_index(segmentation: Any, ground_truth: Any) -> float:
    """Rand index of two label maps: the share of pairs of pixels that both join or both separate.

    Args:
        segmentation: labels ``(h, w)``.
        ground_truth: labels ``(h, w)``.

    Returns:
        A number in [0, 1]; the probabilistic Rand index (PRI) is its mean over annotators.

    Example:
        >>> round(rand_index([[0, 0, 1, 1]], [[0, 0, 0, 1]]), 6)
        0.5
    """
    return float(region_scores([segmentation], [ground_truth]).rand_index[0, 0])


def variation_of_information(segmentation: Any, ground_truth: Any) -> float:
    """Variation of information of two label maps in bits, H(S|G) + H(G|S).

    Args:
        segmentation: labels ``(h, w)``.
        ground_truth: labels ``(h, w)``.

    Returns:
        A number ≥ 0, 0 for equal partitions; a metric on partitions.

    Example:
        >>> variation_of_information([[0, 0, 1, 1]], [[0, 1, 0, 1]])
        2.0
    """
    return float(region_scores([segmentation], [ground_truth]).variation_of_information[0, 0])


def _stack_ground_truth(
    ground_truth: Sequence[Any],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], tuple[tuple[int, ...], int]]:
    """Human maps ``(g, n)`` numbered through, the first region of each, all areas, and the size."""
    if not ground_truth:
        raise ShapeError("no human map was given; at least one is needed")
    first, total = [], 0
    shape = np.shape(ground_truth[0])
    truth = np.empty((len(ground_truth), math.prod(shape)), np.int64)
    for g, labels in enumerate(ground_truth):
        compact, count = compact_labels(labels, f"human map {g + 1}")
        if compact.shape != shape:
            raise ShapeError(size_message(f"human map {g + 1}", compact.shape, "the first one", shape))
        np.add(compact.ravel(), total, out=truth[g])
        first.append(total)
        total += count
    return truth, np.asarray(first), np.bincount(truth.ravel(), minlength=total), (shape, truth.shape[1])


def _atoms(truth: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The common refinement of all human maps: the atom of each pixel, and each map's region of each atom ``(g,
    atoms)``.

    There are some thousand atoms where there are a hundred thousand pixels, so that a segmentation is counted against
    atoms once, and all human maps add up atoms instead of pixels.
    """
    atoms = truth[0]
    for labels in truth[1:]:
        low = int(labels.min())
        atoms = compact_labels((atoms * (int(labels.max()) - low + 1) + (labels - low))[None])[0][0]
    pixel_of = np.zeros(int(atoms.max()) + 1, dtype=np.int64)
    pixel_of[atoms] = np.arange(atoms.size)
    return atoms, truth[:, pixel_of]


def _shared_counts(
    atoms: NDArray[np.int64], regions_of: NDArray[np.int64], regions: int, labels: NDArray[np.int64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Rows, columns and values of the non-zero shared pixel counts of all human regions, sorted by row."""
    present, pixels = _count(atoms * count + labels, regions_of.shape[1] * count)
    atom, column = np.divmod(present, count)
    codes = (regions_of[:, atom] * count + column).ravel()
    present, shared = _count(codes, regions * count, np.tile(pixels, len(regions_of)))
    rows, columns = np.divmod(present, count)
    return rows, columns, shared


def _count(
    codes: NDArray[np.int64], size: int, weights: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Codes that occur, ascending, and how often (or their summed weights, exact below 2⁵³)."""
    if size <= _DENSE_CELLS:
        table = np.bincount(codes, weights, minlength=size)
        present = np.flatnonzero(table)
        return present, table[present].astype(np.int64)
    present, inverse = np.unique(codes, return_inverse=True)
    return present, np.bincount(inverse, weights).astype(np.int64)


def _xlog2x(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    return counts.astype(np.float64) * np.log2(counts)


def size_message(name: str, shape: tuple[int, ...], other: str, expected: tuple[int, ...]) -> str:
    """What to say about two maps of different sizes."""
    hint = " (transposed: swap height and width)" if shape == expected[::-1] and shape != expected else ""
    return f"{name} has size {shape[0]}×{shape[1]}, but {other} {expected[0]}×{expected[1]}{hint}; sizes must agree"
