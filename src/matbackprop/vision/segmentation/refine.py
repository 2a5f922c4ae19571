"""Refine low-resolution label maps to the resolution of the photograph."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from matbackprop.errors import ShapeError

_STRIP = 96  # rows of the small map that are refined together, to bound memory
_MARGIN = 4  # overlap of strips in rows


def enlarge_labels(labels: NDArray[np.int32], size: tuple[int, int]) -> NDArray[np.int32]:
    """Enlarge a label map by nearest-neighbor interpolation."""
    rows, columns = ((np.arange(n) + 0.5) * m / n for n, m in zip(size, labels.shape, strict=True))
    return labels[rows.astype(np.int64)][:, columns.astype(np.int64)]


def refine_labels(labels: ArrayLike, image: ArrayLike, contours: ArrayLike | None = None) -> NDArray[np.int32]:
    """Enlarge a label map to the size of its photograph and align its borders with image edges.

    The interior of every region keeps its label. Within one cell of a border, labels are assigned by a watershed of the
    image gradient plus the enlarged contours. A region without interior is not changed.

    Args:
        labels: (h, w) integers.
        image: uint8 (H, W, 3), at least as large as ``labels``.
        contours: (h, w) strengths in [0, 1]; None for the gradient alone.

    Returns:
        (H, W) int32 with the same labels.

    Example:
        >>> image = np.zeros((40, 40, 3), np.uint8); image[:, 21:] = 255
        >>> labels = np.zeros((10, 10), np.int32); labels[:, 5:] = 1
        >>> refine_labels(labels, image)[20, 18:24].tolist()
        [0, 0, 0, 1, 1, 1]
    """
    small, photo = np.asarray(labels, dtype=np.int32), np.asarray(image)
    if small.ndim != 2 or photo.ndim != 3 or any(n < m for n, m in zip(photo.shape, small.shape, strict=False)):
        raise ShapeError(f"labels {small.shape} must be a map no larger than the photograph {photo.shape}.")
    height, width = photo.shape[:2]
    if small.shape == (height, width):
        return small
    ridge = np.zeros(small.shape, np.float32) if contours is None else np.asarray(contours, dtype=np.float32)
    if ridge.shape != small.shape:
        raise ShapeError(f"contours {ridge.shape} must have the shape of the labels, {small.shape}.")
    from scipy.ndimage import maximum_filter, minimum_filter

    band = maximum_filter(small, 3, mode="nearest") != minimum_filter(small, 3, mode="nearest")  # along borders
    inside = np.zeros(int(small.max()) + 1, bool)
    inside[small[~band]] = True
    seeds = ~band | ~inside[small]

    out = np.empty((height, width), np.int32)
    scale = height / len(small)
    for first in range(0, len(small), _STRIP):
        last = min(first + _STRIP, len(small))
        low, high = max(0, first - _MARGIN), min(len(small), last + _MARGIN)
        top, bottom = round(low * scale), round(high * scale)
        start, stop = round(first * scale), round(last * scale)
        part = slice(low, high)
        strip = _refine_strip(small[part], seeds[part], ridge[part], photo[top:bottom])
        out[start:stop] = strip[start - top : stop - top]
    return out


def _refine_strip(
    labels: NDArray[np.int32], seeds: NDArray[np.bool_], ridge: NDArray[np.float32], image: NDArray[np.uint8]
) -> NDArray[np.int32]:
    from scipy.ndimage import binary_dilation, gaussian_gradient_magnitude
    from skimage.segmentation import watershed
    from skimage.transform import resize

    size = (image.shape[0], image.shape[1])
    big = enlarge_labels(labels, size)
    fixed = enlarge_labels(seeds.astype(np.int32), size) > 0
    if fixed.all():
        return big
    luma = image.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)
    slope = gaussian_gradient_magnitude(luma, max(1.0, 0.15 * size[0] / len(labels)))
    slope /= np.quantile(slope[~fixed], 0.95) + 1e-6
    elevation = np.minimum(slope, 1.0) + resize(ridge, size, order=1)
    mask = binary_dilation(~fixed, iterations=1)  # only the rim of an interior is needed
    grown = watershed(elevation, np.where(fixed & mask, big + 1, 0), mask=mask)
    return np.where(fixed | (grown == 0), big, grown - 1).astype(np.int32)
