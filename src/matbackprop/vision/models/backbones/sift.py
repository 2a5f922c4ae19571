"""Dense SIFT as a backbone without trainable parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from matbackprop.errors import needs
from matbackprop.vision.models.backbones.base import Backbone, TapInfo

__all__ = ["DenseSIFT"]

CELLS, ANGLES = 4, 8
STRIDE = 4
BINS = (4, 6, 8)
LUMA = (0.299, 0.587, 0.114)


class DenseSIFT(Backbone):
    """Dense SIFT of the gray image, one map per scale: ``bins4``, ``bins6`` and ``bins8``.

    A descriptor has 8 angles in 4×4 cells of 4, 6 or 8 pixels. Pooled together (the tap ``"bins4+bins6+bins8"``) inside
    the region they are SIFT-O2P.

    Reference:
        Carreira, Caseiro, Batista, Sminchisescu. Semantic segmentation with second-order pooling. ECCV 2012.
    """

    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

    def __init__(self) -> None:
        # The center of an even window is half a pixel early, and one more window fits.
        super().__init__(
            {
                f"bins{size}": TapInfo(
                    ANGLES * CELLS**2,
                    STRIDE,
                    (CELLS - 1) * size / 2 - (size % 2 == 0) / 2,
                    (CELLS - 1) * size + 1 - (size % 2 == 0),
                )
                for size in BINS
            }
        )

    @torch.no_grad()
    def maps(self, image: Tensor, taps: Sequence[str]) -> dict[str, Tensor]:
        """Return descriptors (b, 128, h, w) at each scale."""
        with needs("dense SIFT needs kornia", "'matbackprop[sift]'"):
            from kornia.feature import DenseSIFTDescriptor
        image = image.float()
        gray = (image * image.new_tensor(LUMA).view(3, 1, 1)).sum(1, keepdim=True)
        maps = {}
        for tap in taps:
            descriptor = DenseSIFTDescriptor(
                num_ang_bins=ANGLES,
                num_spatial_bins=CELLS,
                spatial_bin_size=int(tap.removeprefix("bins")),
                stride=STRIDE,
                padding=0,
            )
            maps[tap] = descriptor.to(gray.device)(gray)
        return maps
