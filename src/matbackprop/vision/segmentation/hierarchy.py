"""Hierarchical segmentation: watershed, merging by contour strength, and ultrametric contour maps."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from matbackprop.errors import ConfigurationError, ShapeError, needs
from matbackprop.vision.segmentation.regions import RegionGraph, border_strengths, region_graph

SMOOTHING = 1.2
"""Standard deviation in pixels of the Gaussian applied to contours. Chosen on 50 training images of BSDS500."""
STEPS = 128
"""Number of quantization levels of contour strengths in the watershed; fewer levels give fewer regions."""
SMALL = 3e-4
"""Relative area of a region at which the height of its borders is half their strength.

Without it, half of the regions at the best threshold are very small. Chosen on 25 training images of BSDS500."""
LEVELS = (2, 3, 4, 6, 8, 11, 16, 25)
"""Numbers of regions of eight levels of a hierarchy; chosen on training images of BSDS300."""


def check_ks(ks: Sequence[int]) -> list[int]:
    """Return numbers of regions or clusters as a list, or raise ConfigurationError."""
    try:
        out = [operator.index(k) for k in ks]
    except TypeError:
        out = []
    if not out or min(out) < 1:
        raise ConfigurationError(f"ks must contain at least one positive integer, got {list(ks)}.")
    return out


@dataclass(frozen=True)
class Hierarchy:
    """Binary tree of merges over S regions.

    Attributes:
        count: number S of original regions, the leaves.
        merges: (S − 1, 2) one leaf of each of the two merged parts, in the order of merging.
        heights: (S − 1,) non-decreasing height of each merge, the ultrametric distance of the two parts.
    """

    count: int
    merges: NDArray[np.int64]
    heights: NDArray[np.float64]

    def regions_at(self, height: float) -> int:
        """Return the number of regions after all merges up to ``height``.

        Example:
            >>> Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.1, 0.7])).regions_at(0.5)
            2
        """
        return self.count - int(np.searchsorted(self.heights, height, side="right"))

    def levels(self, ks: Sequence[int]) -> NDArray[np.int32]:
        """Return the labels (n, S) of the leaves for each number of regions in ``ks``, limited to S.

        Example:
            >>> tree = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.1, 0.7]))
            >>> tree.levels([1, 2, 9]).tolist()
            [[0, 0, 0], [0, 0, 1], [0, 1, 2]]
        """
        return np.stack([_joined(self.count, self.merges[: max(self.count - k, 0)]) for k in check_ks(ks)])


def watershed_regions(contours: ArrayLike) -> NDArray[np.int32]:
    """Partition an image by a watershed of its contour strengths.

    Args:
        contours: (h, w) strengths in [0, 1].

    Returns:
        Label map (h, w) with consecutive labels from 0.

    Raises:
        ShapeError: ``contours`` is not a non-empty map, or has values outside [0, 1].

    Example:
        >>> contours = np.zeros((9, 12))
        >>> contours[:, 6] = 1
        >>> watershed_regions(contours)[0, [0, 4, 8, 11]].tolist()
        [0, 0, 1, 1]
    """
    smooth = smooth_contours(contours)
    with needs("segmentation needs scikit-image", "'matbackprop[train]'"):
        from scipy.ndimage import label
        from skimage.morphology import local_minima
        from skimage.segmentation import watershed
    seeds, count = label(local_minima(np.round(smooth * STEPS), allow_borders=True))
    if count < 2:
        return np.zeros(smooth.shape, np.int32)
    return watershed(smooth, seeds).astype(np.int32) - 1


def merge_contours(regions: ArrayLike, contours: ArrayLike) -> Hierarchy:
    """Merge neighboring regions in order of border strength, until one region is left.

    The height of a merge is the mean smoothed contour strength along the common border times a/(a + SMALL), where a is
    the relative area of the smaller region. Small regions are therefore merged early. Heights are replaced by their
    cumulative maximum, so that levels are nested.

    Args:
        regions: (h, w) partition with consecutive labels from 0.
        contours: (h, w) strengths in [0, 1].

    Returns:
        :class:`Hierarchy`. Ties are broken by the numbers of the regions.

    Example:
        >>> contours = np.repeat([0.0, 0.2, 0.0, 0.9, 0.0], 8)[None]
        >>> tree = merge_contours(np.repeat([0, 1, 2], [12, 16, 12])[None], contours)
        >>> tree.heights.round(2).tolist(), tree.levels([2]).tolist()
        ([0.2, 0.9], [[0, 0, 1]])
    """
    graph = region_graph(regions)
    return merge_graph(graph, border_strengths(regions, graph, smooth_contours(contours)))


def merge_graph(graph: RegionGraph, strengths: NDArray[np.float64]) -> Hierarchy:
    """Merge the regions of a graph by the strengths (E,) of its borders; see :func:`merge_contours`."""
    count = len(graph.areas)
    areas: list[float] = (graph.areas / graph.areas.sum()).tolist()
    borders: list[dict[int, tuple[float, int]]] = [{} for _ in range(count)]  # neighbor → sum of strengths, length
    lengths = graph.lengths.tolist()
    for (i, j), mean, length in zip(graph.edges.tolist(), strengths.tolist(), lengths, strict=True):
        borders[i][j] = borders[j][i] = (mean * length, length)

    def entry(i: int, j: int) -> tuple[float, int, int]:
        (total, length), smaller = borders[i][j], min(areas[i], areas[j])
        return total / length * smaller / (smaller + SMALL), min(i, j), max(i, j)

    heap = [entry(i, j) for i, j in graph.edges.tolist()]
    heapq.heapify(heap)
    merges: list[tuple[int, int]] = []
    heights: list[float] = []
    while heap:
        height, i, j = first = heapq.heappop(heap)
        if j not in borders[i] or entry(i, j) != first:
            continue  # outdated: a region was merged, or the border or areas changed
        merges.append((i, j))
        heights.append(max(height, heights[-1] if heights else 0.0))
        areas[i] += areas[j]
        del borders[i][j], borders[j][i]
        for k, (total, length) in borders[j].items():
            del borders[k][j]
            before = borders[i].get(k, (0.0, 0))
            borders[i][k] = borders[k][i] = (total + before[0], length + before[1])
        borders[j] = {}
        for k in borders[i]:
            heapq.heappush(heap, entry(i, k))
    return Hierarchy(count, np.array(merges, np.int64).reshape(-1, 2), np.array(heights))


def split_region(hierarchy: Hierarchy, labels: NDArray[np.integer], region: int) -> NDArray[np.int32]:
    """Split a region into the two parts that were merged last. A leaf is not changed.

    ``labels`` (S,) are the regions of the leaves.

    Example:
        >>> tree = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.1, 0.7]))
        >>> split_region(tree, np.array([0, 0, 0]), 0).tolist()
        [0, 0, 1]
    """
    members = labels == region
    inside = hierarchy.merges[members[hierarchy.merges].all(1)]
    parts = _joined(hierarchy.count, inside)
    if len(np.unique(parts[members])) == 1 and len(inside):
        parts = _joined(hierarchy.count, inside[:-1])
    return _renumbered(np.where(members, int(labels.max()) + 1 + parts, labels))


def unite_region(hierarchy: Hierarchy, labels: NDArray[np.integer], region: int) -> NDArray[np.int32]:
    """Merge a region with its nearest regions in the hierarchy. ``labels`` (S,) are the regions of the leaves.

    Example:
        >>> tree = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.1, 0.7]))
        >>> unite_region(tree, np.array([0, 1, 2]), 1).tolist()
        [0, 0, 1]
    """
    members = labels == region
    node = np.arange(hierarchy.count)
    for keep, gone in hierarchy.merges:
        node[node == node[gone]] = node[keep]
        merged = node == node[keep]
        if (merged & members).any() and (merged & ~members).any():
            return _renumbered(np.where(np.isin(labels, labels[merged]), region, labels))
    return labels.astype(np.int32)


def _joined(count: int, pairs: NDArray[np.integer]) -> NDArray[np.int32]:
    """Return the component of each of ``count`` elements after joining pairs, numbered by their first elements."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(pairs), bool), pairs.T), (count, count))
    return connected_components(graph, directed=False)[1]


def _renumbered(labels: NDArray[np.integer]) -> NDArray[np.int32]:
    return np.unique(labels, return_inverse=True)[1].astype(np.int32)


def contour_map(regions: ArrayLike, hierarchy: Hierarchy) -> NDArray[np.float64]:
    """Compute the ultrametric contour map: the strength of a border is the height at which its two regions merge.

    The map has twice the size (``ucm2``): pixel (i, j) is at (2i + 1, 2j + 1), the border between two neighboring
    pixels is between them, and a corner has the strength of the strongest border that ends there. Removing borders up
    to a threshold gives the segmentation of the hierarchy at that height.

    Args:
        regions: (h, w) label map of the leaves, numbered from 0.
        hierarchy: the merges.

    Returns:
        (2h + 1, 2w + 1).

    Raises:
        ShapeError: the number of regions differs from the number of leaves.

    Example:
        >>> tree = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.1, 0.7]))
        >>> contour_map([[0, 1, 2]], tree)[1].tolist()
        [0.0, 0.0, 0.1, 0.0, 0.7, 0.0, 0.0]

    Reference: Arbelaez, Maire, Fowlkes, Malik, "Contour detection and hierarchical image segmentation", PAMI 2011, 4.2.
    """
    r = np.asarray(regions)
    graph = region_graph(r)
    if len(graph.areas) != hierarchy.count:
        raise ShapeError(f"regions must be the {hierarchy.count} leaves of the hierarchy, got {len(graph.areas)}.")
    horizontal, vertical = r[:, :-1] != r[:, 1:], r[:-1] != r[1:]
    out = np.zeros((2 * r.shape[0] + 1, 2 * r.shape[1] + 1))
    if hierarchy.count > 1:
        values = hierarchy.heights[_joined_at(hierarchy, graph.edges)][graph.pairs]
        out[1::2, 2:-1:2][horizontal] = values[: horizontal.sum()]
        out[2:-1:2, 1::2][vertical] = values[horizontal.sum() :]
    around = np.pad(out, 1)
    sides = ((-1, 0), (1, 0), (0, -1), (0, 1))
    corners = [around[1 + dy : -1 + dy or None, 1 + dx : -1 + dx or None][::2, ::2] for dy, dx in sides]
    out[::2, ::2] = np.max(corners, 0)
    return out


def _joined_at(hierarchy: Hierarchy, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the merge that joins the two regions of each edge."""
    out = np.zeros(len(edges), dtype=np.int64)
    waiting = np.arange(len(edges))
    label = np.arange(hierarchy.count)
    for number, (keep, gone) in enumerate(hierarchy.merges):
        label[label == gone] = keep
        met = label[edges[waiting, 0]] == label[edges[waiting, 1]]
        out[waiting[met]] = number
        waiting = waiting[~met]
    return out


def smooth_contours(contours: ArrayLike) -> NDArray[np.float32]:
    """Smooth contour strengths (h, w) in [0, 1] by :data:`SMOOTHING`."""
    with needs("segmentation needs SciPy", "'matbackprop[train]'"):
        from scipy.ndimage import gaussian_filter
    array = np.asarray(contours, dtype=np.float32)
    if array.ndim != 2 or array.size == 0:
        raise ShapeError(f"contours must be a non-empty map (h, w), got {array.shape}.")
    if not (array.min() >= 0 and array.max() <= 1):  # also if NaN
        raise ShapeError("contours must be in [0, 1]. Divide them by their largest possible value.")
    return gaussian_filter(array, SMOOTHING)
