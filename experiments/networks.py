"""Backbones that only the experiments use: ``sift`` and ``xception``.

Importing this module registers them. ``python -m experiments.networks train o2p --model.backbone xception …`` runs
the command line with both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from matbackprop.errors import needs
from matbackprop.vision.models.backbones import BACKBONES, BackboneEntry
from matbackprop.vision.models.backbones.base import Backbone, StagedBackbone, TapInfo, start_randomly

CELLS, ANGLES = 4, 8
STRIDE = 4
BINS = (4, 6, 8)
LUMA = (0.299, 0.587, 0.114)


class DenseSIFT(Backbone):
    """Dense SIFT of the gray image, one map per scale: ``bins4``, ``bins6`` and ``bins8``.

    A descriptor has 8 angles in 4×4 cells of 4, 6 or 8 pixels. SIFT-O2P pools all scales inside the region (the tap
    ``"bins4+bins6+bins8"``).

    Reference:
        Carreira, Caseiro, Batista, Sminchisescu. Semantic segmentation with second-order pooling. ECCV 2012.
    """

    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)

    def __init__(self) -> None:
        # The center of an even window is shifted by half a pixel, and one more window fits.
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


def sift_o2p(canvas: int) -> dict[str, Any]:
    """Return the fields of SIFT-O2P: descriptors of all scales are pooled together, as one set of unit weight."""
    sift = DenseSIFT()
    sides = [(canvas - sift.info(tap).reach) // sift.info(tap).stride + 1 for tap in sift.taps]
    return {
        "model.head": "o2p",
        "model.backbone": "sift",
        "model.weights": "none",
        "model.taps": ["+".join(sift.taps)],
        "model.feature_scale": sum(max(side, 1) ** 2 for side in sides) ** -0.5,
    }


# Input and output channels, repetitions and stride of each block.
BLOCKS = [(64, 128, 2, 2), (128, 256, 2, 2), (256, 728, 2, 2), *[(728, 728, 3, 1)] * 8, (728, 1024, 2, 2)]
REACH = 7  # required by the two convolutions without padding


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class _Separable(nn.Module):
    """A depthwise and a pointwise convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False)
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(self.conv1(x))


class _Block(nn.Module):
    """Separable convolutions with a residual connection, which has a convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, repetitions: int, stride: int, *, first: bool, last: bool) -> None:
        super().__init__()
        self.skip: nn.Conv2d | None = None
        if stride != 1:
            self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.skipbn = _norm(outputs)
        widths = [inputs, *[inputs if last else outputs] * (repetitions - 1), outputs]
        layers: list[nn.Module] = []
        for one, two in pairwise(widths):
            layers += [nn.ReLU(), _Separable(one, two), _norm(two)]
        layers = layers[1:] if first else layers
        self.rep = nn.Sequential(*layers, *([nn.MaxPool2d(3, stride, 1)] if stride != 1 else []))

    def forward(self, x: Tensor) -> Tensor:
        return self.rep(x) + (x if self.skip is None else self.skipbn(self.skip(x)))


class Xception(StagedBackbone):
    """Xception: ``stem``, the outputs of its blocks ``block1`` to ``block12``, ``conv3`` and ``conv4``.

    Reference:
        Chollet. Xception: deep learning with depthwise separable convolutions. CVPR 2017.
    """

    mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

    def __init__(self) -> None:
        stride = 2
        places = {"stem": TapInfo(64, stride, 3.0, REACH)}
        for number, (_, outputs, _, step) in enumerate(BLOCKS, start=1):
            stride *= step
            places[f"block{number}"] = TapInfo(outputs, stride, 3.0, REACH)
        places |= {"conv3": TapInfo(1536, stride, 3.0, REACH), "conv4": TapInfo(2048, stride, 3.0, REACH)}
        super().__init__(places)
        self.conv1, self.bn1 = nn.Conv2d(3, 32, 3, 2, bias=False), _norm(32)
        self.conv2, self.bn2 = nn.Conv2d(32, 64, 3, bias=False), _norm(64)
        for number, (inputs, outputs, repetitions, step) in enumerate(BLOCKS, start=1):
            block = _Block(inputs, outputs, repetitions, step, first=number == 1, last=number == len(BLOCKS))
            self.add_module(f"block{number}", block)
        self.conv3, self.bn3 = _Separable(1024, 1536), _norm(1536)
        self.conv4, self.bn4 = _Separable(1536, 2048), _norm(2048)
        start_randomly(self)

    def remove_after(self, tap: str) -> None:
        """Remove the layers after a map."""
        for name in self.taps[self.taps.index(tap) + 1 :]:
            for part in {"conv3": ("conv3", "bn3"), "conv4": ("conv4", "bn4")}.get(name, (name,)):
                delattr(self, part)

    def stage(self, tap: str, x: Tensor) -> Tensor:
        """Compute a map from the previous one."""
        if tap == "stem":
            x = self.bn1(self.conv1(x)).relu()
            return self.bn2(self.conv2(x)).relu()
        if tap in ("conv3", "conv4"):
            return getattr(self, f"bn{tap[-1]}")(getattr(self, tap)(x)).relu()
        return getattr(self, tap)(x)


ADDED = {
    "sift": BackboneEntry("experiments.networks:DenseSIFT"),
    "xception": BackboneEntry("experiments.networks:Xception", "xception_imagenet_fp16.safetensors"),
}
BACKBONES.update(ADDED)

if __name__ == "__main__":
    from matbackprop.cli import main

    main()
