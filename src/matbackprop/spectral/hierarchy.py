"""Merging regions into a nested hierarchy by spectral distance, boundary and size."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.spectral.superpixels import RegionGraph


@dataclass(frozen=True)
class MergeCost:
    """Exponents of the price d^region · b^boundary · (ab/(a+b))^area of uniting two regions.

    d is the distance of their means in the spectral space, b the mean boundary strength between them, a and b in the
    last factor their shares of the image.
    """

    region: float = 0.8
    boundary: float = 0.4
    area: float = 0.27


@dataclass(frozen=True)
class Hierarchy:
    """A binary tree of merges over S regions.

    Attributes:
        count: S.
        merges: (S − 1, 2) representatives (original regions) of the two sides, in the order of merging.
        heights: (S − 1,) non-decreasing price of each merge: the ultrametric distance of the two sides.
    """

    count: int
    merges: NDArray[np.int64]
    heights: NDArray[np.float64]

    def levels(self, ks: Sequence[int]) -> NDArray[np.int64]:
        """Labels (n, S) of the original regions for each number of segments in ``ks``; at most S segments exist.

        Example:
            >>> tree = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.1, 0.7]))
            >>> tree.levels([1, 2, 9]).tolist()
            [[0, 0, 0], [0, 0, 1], [0, 1, 2]]
        """
        if len(ks) == 0 or min(ks) < 1:
            raise ConfigurationError(f"ks must name at least one positive number of segments, got {list(ks)}.")
        steps = [max(self.count - int(k), 0) for k in ks]
        return self._after(steps)

    def cuts(self, heights: Sequence[float]) -> NDArray[np.int64]:
        """Labels (n, S) after all merges that cost at most each of ``heights``."""
        return self._after([int(np.searchsorted(self.heights, t, side="right")) for t in heights])

    def _after(self, steps: Sequence[int]) -> NDArray[np.int64]:
        out = np.empty((len(steps), self.count), dtype=np.int64)
        parent = np.arange(self.count)
        done = 0
        for index in np.argsort(steps, kind="stable"):
            for keep, gone in self.merges[done : steps[index]]:
                parent[gone] = keep
            done = max(done, steps[index])
            root = parent
            while not np.array_equal(root, root[root]):
                root = root[root]
            out[index] = np.unique(root, return_inverse=True)[1]
        return out

    def ultrametric(self, graph: RegionGraph) -> NDArray[np.float64]:
        """For each edge (i, j) of ``graph`` the height at which i and j become one region: an ultrametric contour."""
        out = np.full(len(graph.edges), np.inf)
        open_edges = np.arange(len(graph.edges))
        label = np.arange(self.count)
        for (keep, gone), height in zip(self.merges, self.heights, strict=True):
            label[label == gone] = keep
            met = label[graph.edges[open_edges, 0]] == label[graph.edges[open_edges, 1]]
            out[open_edges[met]] = height
            open_edges = open_edges[~met]
        return out


def merge_regions(
    features: ArrayLike, graph: RegionGraph, boundary: ArrayLike | None = None, *, cost: MergeCost | None = None
) -> Hierarchy:
    """Greedily unite the cheapest pair of neighbouring regions until one is left.

    The price is d^α · b^β · (ab/(a+b))^γ (:class:`MergeCost`). A union has the area-weighted mean of the features and
    the length-weighted mean of the boundaries towards each neighbour. Prices are made monotone, so that the levels are
    nested and the heights an ultrametric.

    Args:
        features: (S, e) one row a region, for example means of :func:`soft_embedding`'s points.
        graph: neighbours, areas and border lengths, from :func:`region_graph`.
        boundary: (E,) strengths in [0, 1] of the edges; None for ones.
        cost: exponents.

    Returns:
        :class:`Hierarchy`. Ties are broken by the smaller numbers of the regions.

    Raises:
        ShapeError: rows do not fit the graph.

    Example:
        >>> from matbackprop.spectral import region_graph
        >>> graph = region_graph([[0, 0, 1, 1, 2, 2]])
        >>> merge_regions([[0.0], [0.1], [1.0]], graph).levels([2]).tolist()
        [[0, 0, 1]]
    """
    cost = MergeCost() if cost is None else cost
    x = np.array(features, dtype=np.float64)
    count = len(graph.areas)
    if x.ndim != 2 or len(x) != count:
        raise ShapeError(f"features must be ({count}, e) for a graph of {count} regions, got {x.shape}.")
    strength = np.ones(len(graph.edges)) if boundary is None else np.asarray(boundary, dtype=np.float64)
    if strength.shape != (len(graph.edges),):
        raise ShapeError(f"boundary must be ({len(graph.edges)},), one number an edge, got {strength.shape}.")
    area = (graph.areas / graph.areas.sum()).astype(np.float64)
    # neighbours[i][j] = (length, length · boundary)
    neighbours: list[dict[int, tuple[float, float]]] = [{} for _ in range(count)]
    for (i, j), length, value in zip(graph.edges.tolist(), graph.lengths.tolist(), strength.tolist(), strict=True):
        neighbours[i][j] = neighbours[j][i] = (length, length * value)

    def price(i: NDArray[np.int64], j: NDArray[np.int64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        difference = x[i] - x[j]
        distance = np.maximum(np.einsum("ij,ij->i", difference, difference), 1e-18) ** (0.5 * cost.region)
        size = (area[i] * area[j] / (area[i] + area[j])) ** cost.area
        return distance * np.maximum(b, 1e-9) ** cost.boundary * size

    first, second = graph.edges[:, 0], graph.edges[:, 1]
    heap = [
        (p, i, j, 0, 0)
        for p, i, j in zip(price(first, second, strength).tolist(), first.tolist(), second.tolist(), strict=True)
    ]
    heapq.heapify(heap)
    version = [0] * count
    alive = [True] * count
    merges, heights, top = [], [], 0.0
    while heap:
        p, i, j, vi, vj = heapq.heappop(heap)
        if not (alive[i] and alive[j]) or version[i] != vi or version[j] != vj:
            continue
        top = max(top, p)
        merges.append((i, j))
        heights.append(top)
        x[i] = (area[i] * x[i] + area[j] * x[j]) / (area[i] + area[j])
        area[i] += area[j]
        alive[j] = False
        version[i] += 1
        mine = neighbours[i]
        del mine[j]
        for k, (length, total) in neighbours[j].items():
            if k == i:
                continue
            old = mine.get(k, (0.0, 0.0))
            mine[k] = neighbours[k][i] = (old[0] + length, old[1] + total)
            del neighbours[k][j]
        neighbours[j] = {}
        if mine:
            others = np.fromiter(mine, dtype=np.int64, count=len(mine))
            lengths = np.array(list(mine.values()))
            prices = price(np.full_like(others, i), others, lengths[:, 1] / lengths[:, 0])
            for k, value in zip(others.tolist(), prices.tolist(), strict=True):
                low, high = (i, k) if i < k else (k, i)
                heapq.heappush(heap, (value, low, high, version[low], version[high]))
    survivors = [i for i in range(count) if alive[i]]
    for other in survivors[1:]:  # parts that do not touch are united last, at an infinite price
        merges.append((survivors[0], other))
        heights.append(np.inf)
    return Hierarchy(count, np.array(merges, dtype=np.int64).reshape(-1, 2), np.array(heights, dtype=np.float64))
