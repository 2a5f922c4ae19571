"""ContourNet: predict the probability of a region border at every pixel, with any backbone.

Feature maps of the backbone are fused from coarse to fine. A shallow stem adds detail at full resolution. Every level
also predicts the contours (deep supervision).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from matbackprop.errors import ShapeError
from matbackprop.vision.models.backbones import build_backbone
from matbackprop.vision.models.backbones.base import normalize
from matbackprop.vision.models.config import ContourModelConfig
from matbackprop.vision.models.weights import PretrainedMixin

_LEAST = 16  # minimum image side in pixels; smaller images are padded


class _Grid(NamedTuple):
    """Cell i of a map is centered on ``offset + i · stride`` pixels of the image."""

    stride: float
    offset: float


_PIXELS = _Grid(1.0, 0.0)


def _resample(x: Tensor, source: _Grid, target: _Grid, size: tuple[int, int]) -> Tensor:
    """Interpolate a map (b, c, h, w) linearly at the cells of another grid of ``size``."""
    lines = []
    for cells, new in zip(x.shape[-2:], size, strict=True):
        place = torch.arange(new, device=x.device, dtype=torch.float32) * target.stride + (
            target.offset - source.offset
        )
        lines.append(place * (2 / (source.stride * max(cells - 1, 1))) - 1)
    rows, columns = torch.meshgrid(*lines, indexing="ij")
    grid = torch.stack([columns, rows], -1).to(x.dtype)
    grid = grid.expand(x.shape[0], *grid.shape)
    return nnf.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=True)


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    groups = max((n for n in range(1, outputs // 6 + 1) if outputs % n == 0), default=1)  # of six channels or more
    norm = nn.GroupNorm(groups, outputs)
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), norm, nn.ReLU(inplace=True))


class ContourNet(PretrainedMixin, nn.Module):
    """Contour detection network.

    Args:
        config: configuration of the network.
        changes: fields that override ``config``.

    Example:
        >>> net = ContourNet(backbone="alexnet", taps=("relu1", "relu2", "relu5"), width=12, stem=6).eval()
        >>> net.contours(torch.zeros(1, 3, 64, 80)).shape
        torch.Size([1, 64, 80])
    """

    def __init__(self, config: ContourModelConfig | None = None, **changes: Any) -> None:
        super().__init__()
        config = dataclasses.replace(config or ContourModelConfig(), **changes)
        self.config = config
        self.hparams_dict = {name: value for name, value in vars(config).items() if name != "weights"}
        self.backbone = build_backbone(config.backbone, config.taps)
        places = [self.backbone.info(tap) for tap in config.taps]
        # Convert pixels of the enlarged image to pixels of the image.
        self.grids = [_Grid(place.stride / config.zoom, (place.offset + 0.5) / config.zoom - 0.5) for place in places]
        self.least = max(_LEAST, *(math.ceil(place.reach / config.zoom) for place in places))
        width = config.width
        self.lateral = nn.ModuleList(nn.Conv2d(place.channels, width, 1) for place in places)
        self.smooth = nn.ModuleList(_convolution(width, width) for _ in places)
        self.side = nn.ModuleList(nn.Conv2d(width, 1, 1) for _ in places)
        self.stem = nn.Sequential(_convolution(3, config.stem), _convolution(config.stem, config.stem))
        self.fuse = nn.Sequential(
            _convolution(width + config.stem, width), _convolution(width, width), nn.Conv2d(width, 1, 1)
        )

    def forward(self, image: Tensor, *, sides: bool = True) -> list[Tensor]:
        """Compute the logits of the contours.

        Args:
            image: RGB (b, 3, h, w), float in [0, 1], of any size.
            sides: also compute the logits of the levels, for training.

        Returns:
            Logits (b, h, w) of the network, followed by the logits of its levels from coarse to fine.
        """
        if image.ndim != 4 or image.shape[1] != 3 or 0 in image.shape:
            raise ShapeError(f"images must be (b, 3, h, w) with at least one pixel, got {tuple(image.shape)}.")
        height, width = int(image.shape[-2]), int(image.shape[-1])
        if min(height, width) < self.least:
            pad = (0, max(0, self.least - width), 0, max(0, self.least - height))
            return [one[:, :height, :width] for one in self(nnf.pad(image, pad, mode="replicate"), sides=sides)]
        image = normalize(image)
        enlarged = image
        if self.config.zoom != 1:
            size = (round(height * self.config.zoom), round(width * self.config.zoom))
            enlarged = nnf.interpolate(image, size=size, mode="bicubic", align_corners=False)
        maps = self.backbone(enlarged, self.config.taps)

        levels = []
        x, coarse = None, _PIXELS
        for level in reversed(range(len(self.config.taps))):
            lateral, grid = self.lateral[level](maps[self.config.taps[level]]), self.grids[level]
            if x is not None:
                lateral = lateral + _resample(x, coarse, grid, lateral.shape[-2:])
            x, coarse = self.smooth[level](lateral), grid
            if sides:
                levels.append(_resample(self.side[level](x), grid, _PIXELS, (height, width)).squeeze(1))
        assert x is not None
        del maps, lateral  # free memory before the layers at full resolution
        detail = self.stem(image)
        x = _resample(x, coarse, _PIXELS, (height, width)).to(detail.dtype, memory_format=torch.channels_last)
        fused = torch.cat([x, detail], 1)
        del detail, x
        for layer in (part for part in self.fuse.modules() if not isinstance(part, nn.Sequential)):
            fused = layer(fused)
        return [fused.squeeze(1), *levels]

    def contours(self, image: Tensor) -> Tensor:
        """Compute contour probabilities (b, h, w) of images (b, 3, h, w) with values in [0, 1]."""
        return self(image, sides=False)[0].float().sigmoid()
