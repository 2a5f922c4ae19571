"""A hierarchy of regions as an ultrametric contour map, in the layout that the Berkeley benchmark's tools read."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from matbackprop.errors import ShapeError
from matbackprop.spectral.hierarchy import Hierarchy
from matbackprop.spectral.superpixels import region_graph

__all__ = ["contour_map", "number_strengths"]

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
