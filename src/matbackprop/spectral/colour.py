"""Colour spaces of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def rgb_to_lab(image: Tensor) -> Tensor:
    """Convert sRGB (*b, 3, h, w) in [0, 1] to CIE Lab (D65), L in [0, 100].

    Example:
        >>> rgb_to_lab(torch.ones(3, 1, 1)).flatten().round(decimals=1).abs()
        tensor([100.,   0.,   0.])
    """
    linear = torch.where(image > 0.04045, ((image.clamp(min=0) + 0.055) / 1.055) ** 2.4, image / 12.92)
    matrix = image.new_tensor(
        [
            [0.412453 / 0.95047, 0.357580 / 0.95047, 0.180423 / 0.95047],
            [0.212671, 0.715160, 0.072169],
            [0.019334 / 1.08883, 0.119193 / 1.08883, 0.950227 / 1.08883],
        ]
    )
    xyz = torch.einsum("ij,...jhw->...ihw", matrix, linear)
    f = torch.where(xyz > 0.008856, xyz.clamp(min=1e-8) ** (1 / 3), 7.787 * xyz + 16 / 116)
    x, y, z = f.unbind(-3)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -3)
