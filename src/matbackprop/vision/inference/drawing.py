"""Draw label maps as borders on an image, or as regions of distinct hues."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from matbackprop.errors import ShapeError
from matbackprop.vision.metrics.regions import as_label_map, check_size

YELLOW = (255, 235, 51)
WHITE = (255, 255, 255)


def as_rgb(image: ArrayLike) -> NDArray[np.uint8]:
    """Convert an image (h, w), (h, w, 3) or (3, h, w), uint8 or in [0, 1], to uint8 (h, w, 3)."""
    array = np.asarray(image)
    if array.dtype != np.uint8:
        array = (255 * np.clip(array.astype(np.float64), 0, 1)).round().astype(np.uint8)
    if array.ndim == 2:
        array = np.repeat(array[..., None], 3, -1)
    elif array.ndim == 3 and array.shape[-1] != 3 and array.shape[0] == 3:
        array = np.moveaxis(array, 0, -1)
    if array.ndim != 3 or array.shape[-1] != 3:
        raise ShapeError(f"An image must be (h, w), (h, w, 3) or (3, h, w), got shape {array.shape}.")
    return array


def border_pixels(labels: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return the pixels (h, w) whose right or lower neighbor has another label."""
    border = np.zeros(labels.shape, dtype=bool)
    border[:, :-1] |= labels[:, :-1] != labels[:, 1:]
    border[:-1] |= labels[:-1] != labels[1:]
    return border


def draw_boundaries(
    image: ArrayLike, labels: ArrayLike, *, color: tuple[int, int, int] = YELLOW, width: int = 1
) -> NDArray[np.uint8]:
    """Draw the borders between regions onto an image.

    Args:
        image: (h, w), (h, w, 3) or (3, h, w), uint8 or in [0, 1].
        labels: (h, w) integers.
        color: RGB color.
        width: border width in pixels. If it is 1, pixels whose right or lower neighbor has another label are drawn.

    Returns:
        uint8 (h, w, 3).

    Raises:
        LabelError: ``labels`` is not a map of integers.
        ShapeError: the sizes differ.

    Example:
        >>> draw_boundaries(np.zeros((1, 4, 3)), np.array([[0, 0, 1, 1]]), color=(255, 0, 0))[0, :, 0].tolist()
        [0, 255, 0, 0]
    """
    from scipy.ndimage import maximum_filter

    out = as_rgb(image).copy()
    lab = as_label_map(labels)
    check_size("the label map", lab.shape, "the image", out.shape[:2])
    out[maximum_filter(border_pixels(lab), width)] = color
    return out


def paint_labels(labels: ArrayLike) -> NDArray[np.uint8]:
    """Draw each region of a label map (h, w) in a distinct hue, uint8 (h, w, 3). The label −1 (ignored) is black.

    Raises:
        LabelError: ``labels`` is not a map of integers.

    Example:
        >>> paint_labels(np.array([[0, -1]])).tolist()
        [[[90, 146, 199], [0, 0, 0]]]
    """
    lab = as_label_map(labels)
    ids = np.unique(lab)
    gaps = ids[-1] - ids[0] >= len(ids)
    # With golden-angle hues, consecutive labels have distant colors, and a label has the same color in every map.
    hue = (0.58 + 0.618034 * ids) % 1.0
    light = 0.78 - 0.22 * (ids % 3) / 2
    wheel = np.clip(np.abs((hue[:, None] * 6 + np.array([0.0, 4.0, 2.0])) % 6 - 3) - 1, 0, 1)
    table = 255 * light[:, None] * (0.45 + 0.55 * wheel)
    table[ids < 0] = 0.0
    return table.round().astype(np.uint8)[np.searchsorted(ids, lab) if gaps else lab - ids[0]]
