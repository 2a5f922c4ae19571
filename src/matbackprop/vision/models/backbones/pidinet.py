"""PiDiNet, a small network that finds edges by differences of pixels, with the keys of its repository."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from matbackprop.vision.models.backbones.base import Backbone, TapInfo, start_randomly

__all__ = ["PiDiNet"]

WIDTHS = (60, 120, 240, 240)
FUSED = 24
KINDS = ("central", "angular", "radial", "plain")
_CLOCKWISE = [3, 0, 1, 6, 4, 2, 7, 8, 5]
_OUTER, _INNER = [0, 2, 4, 10, 14, 20, 22, 24], [6, 7, 8, 11, 13, 16, 17, 18]


def _as_convolution(weight: Tensor, kind: str) -> Tensor:
    """The kernel whose convolution is a convolution of differences of pixels.

    ``"central"`` takes differences from the middle pixel, ``"angular"`` from the next one clockwise, ``"radial"``
    between the ring two pixels out and the one inside it, for which the kernel grows to 5×5.
    """
    if kind == "plain":
        return weight
    flat = weight.flatten(2)
    if kind == "central":
        middle = torch.zeros_like(flat)
        middle[..., 4] = flat.sum(-1)
        return (flat - middle).view_as(weight)
    if kind == "angular":
        return (flat - flat[..., _CLOCKWISE]).view_as(weight)
    wide = flat.new_zeros(*flat.shape[:2], 25)
    wide[..., _OUTER] = flat[..., 1:]
    wide[..., _INNER] = -flat[..., 1:]
    return wide.view(*weight.shape[:2], 5, 5)


class _Differences(nn.Conv2d):
    """A 3×3 convolution of pixels or of their differences."""

    def __init__(self, inputs: int, outputs: int, kind: str, groups: int = 1) -> None:
        super().__init__(inputs, outputs, 3, padding=1, groups=groups, bias=False)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        kernel = _as_convolution(self.weight, self.kind)
        return nnf.conv2d(x, kernel, padding=kernel.shape[-1] // 2, groups=self.groups)


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, kind: str, halve: bool) -> None:
        super().__init__()
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if halve else None
        self.conv1 = _Differences(inputs, inputs, kind, groups=inputs)
        self.conv2 = nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.shortcut is None else nnf.max_pool2d(x, 2)
        y = self.conv2(self.conv1(x).relu())
        return y + (x if self.shortcut is None else self.shortcut(x))


class _Dilations(nn.Module):
    """Convolutions of four widths side by side."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, FUSED, 1)
        for i, dilation in enumerate((5, 7, 9, 11), start=1):
            conv = nn.Conv2d(FUSED, FUSED, 3, dilation=dilation, padding=dilation, bias=False)
            self.add_module(f"conv2_{i}", conv)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x.relu())
        return torch.stack([getattr(self, f"conv2_{i}")(x) for i in range(1, 5)]).sum(0)


class _SpatialAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(FUSED, 4, 1)
        self.conv2 = nn.Conv2d(4, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.conv2(self.conv1(x.relu())))


class _Reduce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(FUSED, 1, 1)


class PiDiNet(Backbone):
    """PiDiNet: the outputs of its stages ``block1`` to ``block4``, and ``edges``, the probability of an edge per pixel.

    Reference:
        Su et al. Pixel difference networks for efficient edge detection. ICCV 2021.
    """

    def __init__(self) -> None:
        places = {f"block{i + 1}": TapInfo(w, 2**i, (2**i - 1) / 2, 2**i) for i, w in enumerate(WIDTHS)}
        super().__init__({**places, "edges": TapInfo(1, 1, 0.0, 1)})
        self.init_block = _Differences(3, WIDTHS[0], KINDS[0])
        width, layer = WIDTHS[0], 1
        for stage, outputs in enumerate(WIDTHS, start=1):
            for i in range(1, 4 if stage == 1 else 5):
                block = _Block(width, outputs, KINDS[layer % 4], halve=stage > 1 and i == 1)
                self.add_module(f"block{stage}_{i}", block)
                width, layer = outputs, layer + 1
        self.dilations = nn.ModuleList(_Dilations(w) for w in WIDTHS)
        self.attentions = nn.ModuleList(_SpatialAttention() for _ in WIDTHS)
        self.conv_reduces = nn.ModuleList(_Reduce() for _ in WIDTHS)
        self.classifier = nn.Conv2d(len(WIDTHS), 1, 1)
        start_randomly(self)

    def remove_behind(self, tap: str) -> None:
        """Remove the layers behind a map."""
        if tap == "edges":
            return
        del self.dilations, self.attentions, self.conv_reduces, self.classifier
        for stage in range(int(tap.removeprefix("block")) + 1, 5):
            for i in range(1, 5):
                delattr(self, f"block{stage}_{i}")

    def maps(self, image: Tensor, taps: Sequence[str]) -> dict[str, Tensor]:
        """The outputs of the stages and, if it is asked for, the edges."""
        last = max(self.taps.index(tap) for tap in taps)
        maps: dict[str, Tensor] = {}
        x = self.init_block(image)
        for stage in range(1, min(last + 1, 4) + 1):
            for i in range(1, 4 if stage == 1 else 5):
                x = getattr(self, f"block{stage}_{i}")(x)
            maps[f"block{stage}"] = x
        if "edges" in taps:
            sides = []
            for x, dilation, attention, reduce in zip(
                maps.values(), self.dilations, self.attentions, self.conv_reduces, strict=True
            ):
                side = reduce.conv(attention(dilation(x)))  # type: ignore[operator, union-attr]
                sides.append(nnf.interpolate(side, image.shape[-2:], mode="bilinear", align_corners=False))
            maps["edges"] = torch.sigmoid(self.classifier(torch.cat(sides, 1)))
        return maps
