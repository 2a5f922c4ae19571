"""Synthetic label maps."""

import numpy as np


def voronoi(shape: tuple[int, int], count: int, rng: np.random.Generator) -> np.ndarray:
    """Return the nearest of ``count`` random points for each pixel."""
    points = rng.random((count, 2)) * shape
    y, x = np.mgrid[: shape[0], : shape[1]]
    return ((y[..., None] - points[:, 0]) ** 2 + (x[..., None] - points[:, 1]) ** 2).argmin(-1)


def same_partition(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two label maps are equal up to the numbers of their labels."""
    pairs = np.unique(np.stack([np.ravel(one), np.ravel(other)]), axis=1).shape[1]
    return pairs == len(np.unique(one)) == len(np.unique(other))
