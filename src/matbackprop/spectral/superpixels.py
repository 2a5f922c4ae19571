"""Superpixels and the graph of neighbouring regions, in NumPy on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from matbackprop.errors import ConfigurationError, MissingExtraError, ShapeError


class RegionGraph(NamedTuple):
    """Which regions of a partition touch.

    Attributes:
        areas: (S,) pixels of each region.
        edges: (E, 2) pairs i < j of regions that share a border, sorted.
        lengths: (E,) number of neighbouring pixel pairs across the border.
        pairs: (P,) for each such pixel pair its edge, horizontal pairs first, both in raster order.
    """

    areas: NDArray[np.int64]
    edges: NDArray[np.int64]
    lengths: NDArray[np.int64]
    pairs: NDArray[np.int64]


COMPACTNESS = 8.0  # weight of the distance in space against that in colour
SMOOTHING = 0.7  # deviation, in pixels, of the Gaussian before SLIC


def is_tiny(height: int, width: int, count: int) -> bool:
    """Whether an image is too small for SLIC, so that squares are its superpixels."""
    return height * width <= 4 * count or min(height, width) < 4


def too_few(regions: NDArray[np.integer], count: int) -> bool:
    """Whether SLIC left less than a third of the superpixels wanted: on noise its pieces fall apart and are united."""
    return bool(3 * np.count_nonzero(np.bincount(regions.ravel())) < count)


def number_regions(regions: NDArray[np.integer]) -> NDArray[np.int32]:
    """Number regions from 0 without gaps, in the order of their numbers."""
    used = np.bincount(regions.ravel()) > 0
    return (np.cumsum(used, dtype=np.int32) - 1)[regions]


def slic_superpixels(image: ArrayLike, count: int = 600) -> NDArray[np.int32]:
    """Divide an RGB image into about ``count`` connected superpixels (SLIC).

    Args:
        image: (h, w, 3) uint8, or floating point in [0, 1].
        count: wanted number of superpixels; images with fewer pixels get fewer.

    Returns:
        int32 map (h, w), numbered from 0 without gaps.

    Raises:
        MissingExtraError: scikit-image is not installed.

    References:
        R. Achanta et al., SLIC superpixels compared to state-of-the-art superpixel methods, PAMI 2012.
    """
    array = np.asarray(image)
    if array.ndim != 3 or array.shape[-1] != 3 or 0 in array.shape:
        raise ShapeError(f"image must be (h, w, 3) with at least one pixel, got {array.shape}.")
    if count < 1:
        raise ConfigurationError(f"count must be positive, got {count}.")
    height, width = array.shape[:2]
    if is_tiny(height, width, count):
        side = max(1, round(float(np.sqrt(height * width / count))))
        rows, columns = np.arange(height) // side, np.arange(width) // side
        return (rows[:, None] * (columns[-1] + 1) + columns).astype(np.int32)
    try:
        from skimage.segmentation import slic
    except ImportError as error:
        raise MissingExtraError("superpixels need scikit-image: pip install 'matbackprop[train]'") from error
    for stronger in (1, 4, 16):  # weigh space more until enough are left
        weight = COMPACTNESS * stronger
        out = slic(array, n_segments=count, compactness=weight, sigma=SMOOTHING, start_label=0, channel_axis=-1)
        if not too_few(out, count):
            break
    return number_regions(out)


def region_graph(regions: ArrayLike) -> RegionGraph:
    """Build the graph of 4-neighbouring regions of a partition (h, w) numbered from 0.

    Example:
        >>> region_graph([[0, 0, 1], [2, 2, 1]]).edges.tolist()
        [[0, 1], [0, 2], [1, 2]]
    """
    r = np.asarray(regions)
    if r.ndim != 2 or r.size == 0 or not np.issubdtype(r.dtype, np.integer):
        raise ShapeError(f"regions must be a non-empty integer map (h, w), got {r.dtype} {r.shape}.")
    count = int(r.max()) + 1
    sides = []
    for one, other in ((r[:, :-1].ravel(), r[:, 1:].ravel()), (r[:-1].ravel(), r[1:].ravel())):
        # Few pixels lie at a border: all that follows looks only at those.
        across = np.flatnonzero(one != other)
        sides.append((one[across], other[across]))
    a, b = (np.concatenate(side).astype(np.int64) for side in zip(*sides, strict=True))
    key = np.minimum(a, b) * count + np.maximum(a, b)
    unique, pairs, lengths = np.unique(key, return_inverse=True, return_counts=True)
    edges = np.stack([unique // count, unique % count], 1)
    areas = np.bincount(r.ravel().astype(np.int64, copy=False), minlength=count)
    return RegionGraph(areas, edges, lengths.astype(np.int64), pairs.astype(np.int64))


def border_mean(regions: ArrayLike, graph: RegionGraph, values: ArrayLike) -> NDArray[np.float64]:
    """Mean of a map (h, w) along the border of each edge of ``graph``, over the pixels on both sides."""
    r, v = np.asarray(regions), np.asarray(values, dtype=np.float64)
    if v.shape != r.shape:
        raise ShapeError(f"values must have the regions' shape {r.shape}, got {v.shape}.")
    horizontal, vertical = r[:, :-1] != r[:, 1:], r[:-1] != r[1:]
    across = np.concatenate([(v[:, :-1] + v[:, 1:])[horizontal], (v[:-1] + v[1:])[vertical]])
    sums = np.bincount(graph.pairs, weights=across, minlength=len(graph.edges))
    return 0.5 * sums / graph.lengths


def region_means(regions: ArrayLike, values: ArrayLike) -> NDArray[np.float64]:
    """Mean of a map (h, w, e) in every region: (S, e); regions without a pixel get zeros."""
    r, v = np.asarray(regions).ravel(), np.asarray(values, dtype=np.float64)
    v = v.reshape(r.size, -1)
    size = int(r.max()) + 1
    area = np.maximum(np.bincount(r, minlength=size), 1)
    return np.stack([np.bincount(r, weights=v[:, c], minlength=size) for c in range(v.shape[1])], 1) / area[:, None]
