"""Changing a segmentation by hand along its tree of merges: divide a region, or unite it with its next relative."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from matbackprop.spectral import Hierarchy

__all__ = ["split_region", "unite_region"]


def split_region(hierarchy: Hierarchy, labels: NDArray[np.integer], region: int) -> NDArray[np.int32]:
    """Divide a region into the two parts that were merged last.

    Args:
        hierarchy: the tree over S superpixels.
        labels: (S,) the region of each superpixel.
        region: which one to divide; a single superpixel stays as it is.

    Returns:
        New labels (S,), numbered from 0.

    Example:
        >>> tree = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.1, 0.7]))
        >>> split_region(tree, np.array([0, 0, 0]), 0).tolist()
        [0, 0, 1]
    """
    members = labels == region
    inside = hierarchy.merges[members[hierarchy.merges].all(1)]
    parts = _components(hierarchy.count, inside)
    if len(np.unique(parts[members])) == 1 and len(inside):
        parts = _components(hierarchy.count, inside[:-1])
    out = np.where(members, int(labels.max()) + 1 + parts, labels)
    return np.unique(out, return_inverse=True)[1].astype(np.int32)


def unite_region(hierarchy: Hierarchy, labels: NDArray[np.integer], region: int) -> NDArray[np.int32]:
    """Unite a region with what the tree merges it with first.

    Args:
        hierarchy: the tree over S superpixels.
        labels: (S,) the region of each superpixel.
        region: which one to unite; the last region of all stays as it is.

    Returns:
        New labels (S,), numbered from 0.

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
            out = np.where(np.isin(labels, labels[merged]), region, labels)
            return np.unique(out, return_inverse=True)[1].astype(np.int32)
    return labels.astype(np.int32)


def _components(count: int, pairs: NDArray[np.integer]) -> NDArray[np.int64]:
    """The part of each of ``count`` elements when pairs are joined in turn."""
    part = np.arange(count)
    for keep, gone in pairs:
        part[part == part[gone]] = part[keep]
    return part
