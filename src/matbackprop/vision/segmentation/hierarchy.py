"""Merging regions into a nested hierarchy by spectral distance, boundary and size."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from matbackprop.checks import check_ks
from matbackprop.errors import ShapeError
from matbackprop.vision.segmentation.superpixels import RegionGraph, region_graph

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
        steps = [max(self.count - k, 0) for k in check_ks(ks)]
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
        features: (S, e) one row per region, for example means of :func:`soft_embedding`'s points.
        graph: neighbours, areas and border lengths, from :func:`region_graph`.
        boundary: (E,) strengths in [0, 1] of the edges; None for ones.
        colours: (S, 3) mean Lab colours; None leaves the factor of colour out.
        cost: exponents.

    Returns:
        :class:`Hierarchy`. Ties are broken by the smaller numbers of the regions.

    Raises:
        ShapeError: rows do not fit the graph.

    Example:
        >>> from matbackprop.vision.segmentation import region_graph
        >>> graph = region_graph([[0, 0, 1, 1, 2, 2]])
        >>> merge_regions([[0.0], [0.1], [1.0]], graph).levels([2]).tolist()
        [[0, 0, 1]]
    """
    merger = _Merger(*_checked(features, graph, boundary, colours), MergeCost() if cost is None else cost, graph)
    merges, heights, height = [], [], 0.0
    while (cheapest := merger.cheapest()) is not None:
        price, i, j = cheapest
        height = max(height, price)
        merges.append((i, j))
        heights.append(height)
        merger.unite(i, j)
    gone = {j for _, j in merges}
    survivors = [i for i in range(len(graph.areas)) if i not in gone]
    for other in survivors[1:]:  # parts that do not touch are united last, at an infinite price
        merges.append((survivors[0], other))
        heights.append(np.inf)
    ordered = np.array(merges, dtype=np.int64).reshape(-1, 2)
    return Hierarchy(len(graph.areas), ordered, np.array(heights, dtype=np.float64))


def _checked(
    features: ArrayLike, graph: RegionGraph, boundary: ArrayLike | None, colours: ArrayLike | None
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64] | None]:
    """Features, boundary strengths and colours as arrays that fit the graph."""
    x, count, edges = np.array(features, dtype=np.float64), len(graph.areas), len(graph.edges)
    if x.ndim != 2 or len(x) != count:
        raise ShapeError(f"features must be ({count}, e) for a graph of {count} regions, got {x.shape}.")
    lab = None if colours is None else np.asarray(colours, dtype=np.float64)
    if lab is not None and lab.shape != (count, 3):
        raise ShapeError(f"colours must be ({count}, 3), one Lab colour per region, got {lab.shape}.")
    strength = np.ones(edges) if boundary is None else np.asarray(boundary, dtype=np.float64)
    if strength.shape != (edges,):
        raise ShapeError(f"boundary must be ({edges},), one number per edge, got {strength.shape}.")
    return x, strength, lab


_Border = tuple[float, float, float]
"""What two neighbours share: the price of uniting them, the length of their border, and length · boundary."""


class _Merger:
    """Regions on their way to one: means, areas, outlines, neighbours, and a heap of prices.

    A region has few neighbours, for which plain numbers are faster than arrays of them; only features stay arrays. The
    heap may hold less than the price of a pair, never more: the rest is made up for when the pair comes to the top.
    """

    def __init__(
        self,
        x: NDArray[np.float64],
        strength: NDArray[np.float64],
        colours: NDArray[np.float64] | None,
        cost: MergeCost,
        graph: RegionGraph,
    ) -> None:
        self.cost, self.size = cost, x.shape[1]
        self.x = x if colours is None else np.concatenate([x, colours], 1)
        self.rows = list(self.x)  # views: a new mean in one of them is in x
        self.area: list[float] = (graph.areas / graph.areas.sum()).tolist()
        ends = graph.edges.T.ravel()
        self.outline: list[float] = np.bincount(ends, np.tile(graph.lengths, 2), len(self.area)).tolist()
        self.neighbours: list[dict[int, _Border]] = [{} for _ in self.area]
        self.heap: list[tuple[float, int, int]] = []
        distances = self.distances(self.x[graph.edges[:, 0]] - self.x[graph.edges[:, 1]])
        totals = (graph.lengths * strength).tolist()
        for (i, j), *border in zip(graph.edges.tolist(), distances, graph.lengths.tolist(), totals, strict=True):
            self.heap.append((self.set_price(i, j, *border), i, j))
        heapq.heapify(self.heap)

    def distances(self, difference: NDArray[np.float64]) -> list[float]:
        """d^region · c^colour of rows of differences."""
        squares = np.einsum("ij,ij->i", difference[:, : self.size], difference[:, : self.size])
        powers = np.maximum(squares, 1e-18) ** (0.5 * self.cost.region)
        if difference.shape[1] > self.size and self.cost.colour:
            tints = difference[:, self.size :]
            powers *= (np.einsum("ij,ij->i", tints, tints) + _INVISIBLE) ** (0.5 * self.cost.colour)
        return powers.tolist()

    def set_price(self, i: int, j: int, distance: float, length: float, total: float) -> float:
        """Price a pair of neighbours from their distance and what they share."""
        a, b = self.area[i], self.area[j]
        price = distance * max(total / length, 1e-9) ** self.cost.boundary * (a * b / (a + b)) ** self.cost.area
        if self.cost.contact:
            share = length / min(self.outline[i], self.outline[j])
            price *= (share + _NO_CONTACT) ** -self.cost.contact
        self.neighbours[i][j] = self.neighbours[j][i] = (price, length, total)
        return price

    def cheapest(self) -> tuple[float, int, int] | None:
        """Take the cheapest pair out of the heap; None when no regions touch any more."""
        while self.heap:
            before, i, j = self.heap[0]
            border = self.neighbours[i].get(j)
            now = -np.inf if border is None else border[0]
            if now > before:  # it has become dearer since
                heapq.heapreplace(self.heap, (now, i, j))
                continue
            heapq.heappop(self.heap)
            if now == before:  # otherwise it is gone, or has become cheaper and stands elsewhere in the heap
                return now, i, j
        return None

    def unite(self, i: int, j: int) -> None:
        """Let region i take in its neighbour j."""
        self._join_borders(i, j)
        if self.neighbours[i]:
            self._join_means(i, j)
            self._price_again(i)

    def _join_borders(self, i: int, j: int) -> None:
        mine, theirs = self.neighbours[i], self.neighbours[j]
        self.outline[i] += self.outline[j] - 2 * mine[j][1]
        self.neighbours[j] = {}
        del mine[j], theirs[i]
        for k, (_, length, total) in theirs.items():
            old = mine.get(k, _NO_BORDER)
            mine[k] = (old[0], old[1] + length, old[2] + total)
            del self.neighbours[k][j]

    def _join_means(self, i: int, j: int) -> None:
        mean, area = self.rows[i], self.area[i] + self.area[j]
        mean *= self.area[i]
        mean += self.area[j] * self.rows[j]
        mean /= area
        self.area[i] = area

    def _price_again(self, i: int) -> None:
        """Price all neighbours of a region anew, and put into the heap what has become cheaper."""
        mine = self.neighbours[i]
        difference = self.x.take(list(mine), 0)
        difference -= self.rows[i]
        for (k, (before, length, total)), distance in zip(list(mine.items()), self.distances(difference), strict=True):
            price = self.set_price(i, k, distance, length, total)
            if price < before:
                heapq.heappush(self.heap, (price, i, k) if i < k else (price, k, i))


_NO_BORDER = (np.inf, 0.0, 0.0)
_INVISIBLE = 2.5  # ‖ΔLab‖² that hardly anybody sees
_NO_CONTACT = 0.05  # share of an outline that counts like none


FINEST = 1000
"""Number of regions whose contours have strength 0."""


def number_strengths(count: int) -> NDArray[np.float64]:
    """Strengths of merges by the number of regions alone, the same for every image.

    Cut at a threshold t, a map with these strengths has about 1000^(1−t) regions: 2 at .9, 31 at .5, 500 at .1.

    Args:
        count: number S of regions to begin with.

    Returns:
        (S − 1,) one strength in [0, 1) per merge: 1 − log(k − ½)/log 1000 where it leaves k − 1 regions of k.

    Example:
        >>> number_strengths(3).round(3).tolist()
        [0.867, 0.941]
    """
    before = np.arange(count, 1, -1)
    return np.clip(1 - np.log(before - 0.5) / np.log(FINEST), 0, 1)


def contour_map(regions: ArrayLike, hierarchy: Hierarchy, strengths: ArrayLike | None = None) -> NDArray[np.float64]:
    """Draw every contour with the strength at which the two regions at its sides become one.

    The map is of twice the size (``ucm2``): pixel (i, j) lies at (2i + 1, 2j + 1), the contour between two neighbouring
    pixels between them, and a corner has the strength of the strongest contour that meets there. Joining pixels over
    contours not above a threshold gives a level of the hierarchy.

    Args:
        regions: (h, w) the map of the hierarchy's regions, numbered from 0.
        hierarchy: the merges.
        strengths: (S − 1,) non-decreasing strength of each merge, in [0, 1] for the benchmark's thresholds; None for
            :func:`number_strengths`.

    Returns:
        (2h + 1, 2w + 1).

    Raises:
        ShapeError: regions or strengths do not fit the hierarchy, or the strengths decrease.

    Example:
        >>> tree = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.1, 0.7]))
        >>> contour_map([[0, 1, 2]], tree, tree.heights)[1].tolist()
        [0.0, 0.0, 0.1, 0.0, 0.7, 0.0, 0.0]

    Reference: Arbelaez, Maire, Fowlkes, Malik, "Contour detection and hierarchical image segmentation", PAMI 2011, 4.2.
    """
    r = np.asarray(regions)
    graph = region_graph(r)
    s = number_strengths(hierarchy.count) if strengths is None else np.asarray(strengths, dtype=np.float64)
    if len(graph.areas) != hierarchy.count or s.shape != (hierarchy.count - 1,):
        raise ShapeError(
            f"the map has {len(graph.areas)} regions and there are {s.shape} strengths; a hierarchy over "
            f"{hierarchy.count} regions needs as many, and one strength per merge."
        )
    if (np.diff(s) < 0).any():
        raise ShapeError("strengths decrease from one merge to the next; a contour map needs the levels nested.")
    horizontal, vertical = r[:, :-1] != r[:, 1:], r[:-1] != r[1:]
    values = s[_joined_at(hierarchy, graph.edges)][graph.pairs]  # along each piece of border between two pixels
    out = np.zeros((2 * r.shape[0] + 1, 2 * r.shape[1] + 1))
    out[1::2, 2:-1:2][horizontal] = values[: horizontal.sum()]
    out[2:-1:2, 1::2][vertical] = values[horizontal.sum() :]
    around = np.pad(out, 1)
    corners = [around[1 + dy : -1 + dy or None, 1 + dx : -1 + dx or None][::2, ::2] for dy, dx in _NEIGHBOURS]
    out[::2, ::2] = np.max(corners, 0)
    return out


_NEIGHBOURS = ((-1, 0), (1, 0), (0, -1), (0, 1))


def _joined_at(hierarchy: Hierarchy, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which merge makes the two regions of each edge one."""
    out = np.zeros(len(edges), dtype=np.int64)
    waiting = np.arange(len(edges))
    label = np.arange(hierarchy.count)
    for number, (keep, gone) in enumerate(hierarchy.merges):
        label[label == gone] = keep
        met = label[edges[waiting, 0]] == label[edges[waiting, 1]]
        out[waiting[met]] = number
        waiting = waiting[~met]
    return out
