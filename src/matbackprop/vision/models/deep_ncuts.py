"""DeepNCuts: a network whose features are trained to span human segmentations.

The models of the paper add two Conv-ReLU pairs to a feature map of AlexNet or VGG-16. Other backbones can be used.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.vision.models.backbones import build_backbone
from matbackprop.vision.models.backbones.base import Backbone, TapInfo, normalize
from matbackprop.vision.models.config import NCutsModelConfig
from matbackprop.vision.models.weights import PretrainedMixin
from matbackprop.vision.segmentation import CLUSTER_KS, NCutSpace, Segmentation, SoftSpace, segment_features


class _Geometry:
    """Number of cells of a feature map that cover an image, and the padding they need."""

    def __init__(self, info: TapInfo) -> None:
        self.stride, self.reach = info.stride, info.reach
        # Pixels from the center of the first block to that of the first cell.
        self.shift = info.offset - (info.stride - 1) / 2

    def cells(self, pixels: int) -> int:
        """Number of cells along a side of ``pixels`` pixels."""
        return max(1, round(pixels / self.stride))

    def start(self, before: int) -> tuple[int, float]:
        """Return the cell over the first block after padding by ``before`` pixels, and the fraction to the next cell.

        Distances below one pixel are rounded to 0.
        """
        place = (before - self.shift) / self.stride
        if abs(place - round(place)) * self.stride < 1:
            return max(0, round(place)), 0.0
        return math.floor(place), place - math.floor(place)

    def after(self, pixels: int, before: int) -> int:
        """Return the padding at the end so that the input of every cell is complete."""
        first, part = self.start(before)
        last = first + self.cells(pixels) - (1 if part == 0 else 0)
        return max(0, self.reach + last * self.stride - pixels - before)

    def over_blocks(self, maps: Tensor, size: tuple[int, int], before: int) -> Tensor:
        """Interpolate maps linearly to the cells (b, c, h, w) over the blocks of an image of ``size``."""
        first, part = self.start(before)
        for dimension, pixels in zip((-2, -1), size, strict=True):
            cells = maps.narrow(dimension, first, self.cells(pixels))
            if part:
                cells = torch.lerp(cells, maps.narrow(dimension, first + 1, self.cells(pixels)), part)
            maps = cells
        return maps


def _paper_head(width: int, hidden: int, channels: int, dropout: float) -> nn.Sequential:
    """Conv-ReLU, dropout, convolution: many filters for capacity, few outputs to bound the rank of W."""
    first, second = nn.Conv2d(width, hidden, 3, padding=1), nn.Conv2d(hidden, channels, 1)
    for layer in (first, second):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        assert layer.bias is not None
        nn.init.zeros_(layer.bias)
    return nn.Sequential(OrderedDict(first=first, relu=nn.ReLU(), drop=nn.Dropout(dropout), second=second))


class DeepNCuts(PretrainedMixin, nn.Module):
    """Deep normalized cuts: compute features F of an image, for clustering with the affinity W = FFᵀ or FΛFᵀ.

    Args:
        config: configuration of the network.
        network: user-defined :class:`~matbackprop.vision.models.backbones.base.Backbone` that replaces the configured
            backbone. Such a model cannot be saved by name.
        changes: fields that override ``config``.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = DeepNCuts(variant="alexnet-relu5").eval()
        >>> model(torch.rand(1, 3, 64, 96)).shape
        torch.Size([1, 4, 6, 20])

    References:
        C. Ionescu, O. Vantzos, C. Sminchisescu, Training deep networks with structured layers by matrix
        backpropagation, 2016, sections 5 and 6.2.
    """

    def __init__(
        self, config: NCutsModelConfig | None = None, *, network: Backbone | None = None, **changes: Any
    ) -> None:
        super().__init__()
        self.config = dataclasses.replace(config or NCutsModelConfig(), **changes)
        full = self.config.resolved()
        self.backbone = build_backbone(full["backbone"]) if network is None else network
        self.tap: str = (full["taps"] or self.backbone.taps[-1:])[0]
        self.hparams_dict: dict[str, Any] = {**full, "taps": [self.tap]}
        self.backbone.cut([self.tap])
        info = self.backbone.info(self.tap)
        self.geometry = _Geometry(info)
        self.space, self.ridge = self.config.space, self.config.ridge
        self.head: nn.Module | None = None
        self.channels: int = info.channels
        if full["head"] == "paper":
            self.channels = full["channels"]
            widths = (info.channels, full["hidden"], self.channels)
            self.head = _paper_head(*widths, self.config.dropout)
        self.factor = nn.Parameter(torch.eye(self.channels)) if self.config.affinity == "lambda" else None

    @property
    def stride(self) -> int:
        """Side of a cell in pixels of the image."""
        stride = self.geometry.stride / self.config.zoom
        if not stride.is_integer():
            raise ConfigurationError(
                f"Map {self.tap} has cells of {stride:g} pixels, which is not an integer. Change model.taps or "
                "model.zoom."
            )
        return int(stride)

    @property
    def lam(self) -> Tensor | None:
        """Λ = LLᵀ (d, d), or None for W = FFᵀ."""
        return None if self.factor is None else self.factor @ self.factor.mT

    def forward(self, image: Tensor) -> Tensor:
        """Compute F on its grid.

        Args:
            image: RGB (b, 3, h, w), uint8 or floating point in [0, 1]; at least one pixel.

        Returns:
            Non-negative features (b, h', w', d). Cell (i, j) is centered on its stride × stride block of pixels.
        """
        if image.ndim != 4 or image.shape[1] != 3 or 0 in image.shape:
            raise ShapeError(f"images must be (b, 3, h, w) with at least one pixel, got {tuple(image.shape)}.")
        image = normalize(image.float() / 255 if image.dtype == torch.uint8 else image)
        if self.config.zoom != 1:
            image = nnf.interpolate(image, scale_factor=self.config.zoom, mode="bilinear", align_corners=False)
        height, width = int(image.shape[-2]), int(image.shape[-1])
        # Padding at the start centers cells on their blocks; padding at the end gives every block a cell.
        before = max(0, math.ceil(self.geometry.shift))
        below, right = self.geometry.after(height, before), self.geometry.after(width, before)
        if before or below or right:
            image = nnf.pad(image, (before, right, before, below), mode="replicate")
        if image.is_cuda:
            image = image.contiguous(memory_format=self.backbone.memory_format)
        maps = self.backbone(image, [self.tap])[self.tap]
        cells = self.geometry.over_blocks(maps, (height, width), before)
        return torch.relu(cells if self.head is None else self.head(cells)).movedim(1, -1)

    @torch.no_grad()
    def cluster(
        self,
        image: Tensor,
        ks: Sequence[int] = CLUSTER_KS,
        *,
        seed: int = 0,
        space: str | None = None,
    ) -> Segmentation:
        """Segment images (b, 3, h, w) by clustering and splitting into connected components, as in the paper.

        Args:
            image: a batch of images of one size.
            ks: numbers of clusters.
            seed: seed of K-means.
            space: space to cluster in, ``"ncut"`` or ``"soft"``; None for the configured space.

        Returns:
            :class:`~matbackprop.vision.segmentation.Segmentation` with labels (b, n, H, W).
        """
        size = (image.shape[-2], image.shape[-1])
        clustered = NCutSpace(self.lam) if (space or self.space) == "ncut" else SoftSpace(self.ridge)
        return segment_features(self(image).float(), ks, size=size, space=clustered, seed=seed)
