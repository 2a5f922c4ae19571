"""Adjacency graphs of regions, and means over regions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from matbackprop.errors import ShapeError


class RegionGraph(NamedTuple):
    """Adjacency graph of the regions of a partition."""

    areas: NDArray[np.int64]  #: (S,) number of pixels of each region
    edges: NDArray[np.int64]  #: (E, 2) pairs i < j of regions that share a border, sorted
    lengths: NDArray[np.int64]  #: (E,) number of neighboring pixel pairs across the border
    pairs: NDArray[np.int64]  #: (P,) edge of each such pixel pair, horizontal pairs first, both in raster order


def region_graph(regions: ArrayLike) -> RegionGraph:
    """Build the 4-neighbor adjacency graph of a partition (h, w) numbered from 0.

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
        across = np.flatnonzero(one != other)  # few pixels are next to a border
        sides.append((one[across], other[across]))
    a, b = (np.concatenate(side).astype(np.int64) for side in zip(*sides, strict=True))
    key = np.minimum(a, b) * count + np.maximum(a, b)
    unique, pairs, lengths = np.unique(key, return_inverse=True, return_counts=True)
    edges = np.stack([unique // count, unique % count], 1)
    areas = np.bincount(r.ravel().astype(np.int64, copy=False), minlength=count)
    return RegionGraph(areas, edges, lengths.astype(np.int64), pairs.astype(np.int64))


def border_strengths(regions: ArrayLike, graph: RegionGraph, contours: ArrayLike) -> NDArray[np.float64]:
    """Compute the mean contour strength (E,) along the border of each edge of ``graph``.

    The strength of a pixel pair across a border is the smaller strength of the two pixels. A strong contour therefore
    raises the ends of weak borders less.
    """
    r, v = np.asarray(regions), np.asarray(contours, dtype=np.float64)
    if v.shape != r.shape:
        raise ShapeError(f"contours must have the shape of the regions, {r.shape}, got {v.shape}.")
    horizontal, vertical = r[:, :-1] != r[:, 1:], r[:-1] != r[1:]
    across = [np.minimum(v[:, :-1], v[:, 1:])[horizontal], np.minimum(v[:-1], v[1:])[vertical]]
    return np.bincount(graph.pairs, np.concatenate(across), len(graph.edges)) / graph.lengths


def region_means(regions: ArrayLike, values: ArrayLike) -> NDArray[np.float64]:
    """Compute the mean (S, e) of a map (h, w, e) in every region; zero for empty regions."""
    r = np.asarray(regions)
    v, size = np.asarray(values).reshape(*r.shape, -1), int(r.max()) + 1
    sums = np.zeros((size, v.shape[-1] + 1))
    rows = max(1, (1 << 22) // r.shape[1])  # strips bound memory
    for strip, part in ((r[i : i + rows].ravel(), v[i : i + rows]) for i in range(0, len(r), rows)):
        for c, column in enumerate(part.reshape(strip.size, -1).T):
            sums[:, c] += np.bincount(strip, column, size)
        sums[:, -1] += np.bincount(strip, minlength=size)
    return sums[:, :-1] / np.maximum(sums[:, -1:], 1)
