"""Segmentations that do not look at the image: the floor under every score."""

import torch
from torch import Tensor

from matbackprop.errors import ShapeError

__all__ = ["check_image", "fixed_grids", "one_region"]


def check_image(image: Tensor) -> tuple[int, int]:
    """Height and width of an image uint8 ``(3, h, w)``.

    Raises:
        ShapeError: anything else came.
    """
    if image.ndim != 3 or image.shape[0] != 3 or image.dtype != torch.uint8 or image.numel() == 0:
        raise ShapeError(f"the image is {image.dtype} {tuple(image.shape)}; uint8 (3, height, width) is needed")
    return int(image.shape[1]), int(image.shape[2])


def one_region(image: Tensor) -> list[Tensor]:
    """The whole image as one region.

    Args:
        image: uint8 ``(3, h, w)``.

    Returns:
        One map of zeros, int64 ``(h, w)``.
    """
    return [torch.zeros(check_image(image), dtype=torch.int64)]


def fixed_grids(image: Tensor, *, sides: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)) -> list[Tensor]:
    """The image cut into k×k equal rectangles.

    Args:
        image: uint8 ``(3, h, w)``.
        sides: the numbers k.

    Returns:
        One map for each k, int64 ``(h, w)``.

    Example:
        >>> fixed_grids(torch.zeros(3, 2, 4, dtype=torch.uint8), sides=(2,))[0]
        tensor([[0, 0, 1, 1],
                [2, 2, 3, 3]])
    """
    height, width = check_image(image)
    maps = []
    for side in sides:
        rows, columns = torch.arange(height) * side // height, torch.arange(width) * side // width
        maps.append(rows[:, None] * side + columns)
    return maps
