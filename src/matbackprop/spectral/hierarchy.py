"""Merging regions into a nested hierarchy by spectral distance, boundary and size."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.spectral.superpixels import RegionGraph

MERGE_KS = (2, 3, 4, 6, 8, 11, 16, 25)
"""Numbers of regions of the eight levels that are read off a hierarchy; chosen on training images of BSDS300."""


@dataclass(frozen=True)
class MergeCost:
    """Exponents of the price d^region · s^boundary · (ab/(a+b))^area · c^colour · t^−contact of uniting two regions.

    d is the distance of their means in the spectral space, s the mean boundary strength between them, a and b are their
    shares of the image, c, where colours are given, is the distance of their mean colours, √(‖ΔLab‖² + 2.5), and t
    is .05 more than the share of the shorter outline (without what lies at the edge of the image) that both have.
    """

    region: float = 0.8
    boundary: float = 0.4
    area: float = 0.27
    colour: float = 0.0
    contact: float = 0.0


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
            keep, gone = self.merges[done : steps[index]].T
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


_UNSEEN = 2.5  # ‖ΔLab‖² that hardly anybody sees
_TOUCH = 0.05  # share of an outline that counts like none


def merge_regions(
    features: ArrayLike,
    graph: RegionGraph,
    boundary: ArrayLike | None = None,
    *,
    colours: ArrayLike | None = None,
    cost: MergeCost | None = None,
) -> Hierarchy:
    """Greedily unite the cheapest pair of neighbouring regions until one is left.

    The price is that of :class:`MergeCost`. A union has the area-weighted means of features and colours and the
    length-weighted mean of the boundaries towards each neighbour. Prices are made monotone, so that the levels are
    nested and the heights an ultrametric.

    Args:
        features: (S, e) one row a region, for example means of :func:`soft_embedding`'s points.
        graph: neighbours, areas and border lengths, from :func:`region_graph`.
        boundary: (E,) strengths in [0, 1] of the edges; None for ones.
        colours: (S, 3) mean Lab colours; None leaves the factor of colour out.
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
    size = x.shape[1]
    if colours is not None:
        lab = np.asarray(colours, dtype=np.float64)
        if lab.shape != (count, 3):
            raise ShapeError(f"colours must be ({count}, 3), one Lab colour a region, got {lab.shape}.")
        x = np.concatenate([x, lab], 1)
    strength = np.ones(len(graph.edges)) if boundary is None else np.asarray(boundary, dtype=np.float64)
    if strength.shape != (len(graph.edges),):
        raise ShapeError(f"boundary must be ({len(graph.edges)},), one number an edge, got {strength.shape}.")
    # A region has few neighbours, for which plain numbers are faster than arrays of them; only features stay arrays.
    area: list[float] = (graph.areas / graph.areas.sum()).tolist()
    rows = list(x)  # views: a new mean in one of them is in x
    alpha, beta, gamma, delta = 0.5 * cost.region, cost.boundary, cost.area, 0.5 * cost.colour

    def apart(difference: NDArray[np.float64]) -> list[float]:
        """d^α · c^δ of rows of differences."""
        squares = np.einsum("ij,ij->i", difference[:, :size], difference[:, :size])
        powers = np.maximum(squares, 1e-18) ** alpha
        if colours is not None and delta:
            tints = difference[:, size:]
            powers *= (np.einsum("ij,ij->i", tints, tints) + _UNSEEN) ** delta
        return powers.tolist()

    ends = np.concatenate([graph.edges[:, 0], graph.edges[:, 1]])
    outline: list[float] = np.bincount(ends, np.concatenate([graph.lengths] * 2), count).tolist()

    def price(distance: float, length: float, total: float, i: int, j: int) -> float:
        a, b = area[i], area[j]
        out = distance * max(total / length, 1e-9) ** beta * (a * b / (a + b)) ** gamma
        if cost.contact:
            out *= (length / min(outline[i], outline[j]) + _TOUCH) ** -cost.contact
        return out

    distances = apart(x[graph.edges[:, 0]] - x[graph.edges[:, 1]])
    heap: list[tuple[float, int, int]] = []
    # neighbours[i][j] = (price, length, length · boundary)
    neighbours: list[dict[int, tuple[float, float, float]]] = [{} for _ in range(count)]
    for (i, j), distance, length, value in zip(
        graph.edges.tolist(), distances, graph.lengths.tolist(), strength.tolist(), strict=True
    ):
        now = price(distance, length, length * value, i, j)
        neighbours[i][j] = neighbours[j][i] = (now, length, length * value)
        heap.append((now, i, j))
    heapq.heapify(heap)
    absent = (np.inf, 0.0, 0.0)
    merges, heights, top = [], [], 0.0
    while heap:
        seen, i, j = heap[0]
        mine = neighbours[i]
        now = mine[j][0] if j in mine else -np.inf
        if now > seen:  # it has become dearer since
            heapq.heapreplace(heap, (now, i, j))
            continue
        heapq.heappop(heap)
        if now < seen:  # it has become cheaper, and stands elsewhere in the heap, or is gone
            continue
        top = max(top, now)
        merges.append((i, j))
        heights.append(top)
        outline[i] += outline[j] - 2 * mine[j][1]
        theirs, neighbours[j] = neighbours[j], {}
        del mine[j], theirs[i]
        for k, (_, length, total) in theirs.items():
            old = mine.get(k, absent)
            mine[k] = (old[0], old[1] + length, old[2] + total)
            del neighbours[k][j]
        if not mine:
            continue
        mean, a = rows[i], area[i] + area[j]
        mean *= area[i]
        mean += area[j] * rows[j]
        mean /= a
        area[i] = a
        difference = x.take(list(mine), 0)
        difference -= mean
        for (k, (before, length, total)), distance in zip(mine.items(), apart(difference), strict=True):
            now = price(distance, length, total, i, k)
            mine[k] = neighbours[k][i] = (now, length, total)
            # The heap may hold less than the price of an edge, never more: the rest is made up for at the top.
            if now < before:
                heapq.heappush(heap, (now, i, k) if i < k else (now, k, i))
    gone = {j for _, j in merges}
    survivors = [i for i in range(count) if i not in gone]
    for other in survivors[1:]:  # parts that do not touch are united last, at an infinite price
        merges.append((survivors[0], other))
        heights.append(np.inf)
    return Hierarchy(count, np.array(merges, dtype=np.int64).reshape(-1, 2), np.array(heights, dtype=np.float64))
