"""VGG-16's convolutions in torchvision's layout, with its keys (``features.N.weight``)."""

from __future__ import annotations

from torch import nn

from matbackprop.models.backbones.base import LayerStack


class VGG16(LayerStack):
    """VGG-16 (configuration D)."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        taps: dict[str, int] = {}
        width = 3
        for block, (depth, filters) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)], start=1):
            for i in range(1, depth + 1):
                layers += [nn.Conv2d(width, filters, 3, padding=1), nn.ReLU()]
                taps[f"relu{block}_{i}"] = len(layers) - 1
                width = filters
            layers.append(nn.MaxPool2d(2, 2))
            taps[f"pool{block}"] = len(layers) - 1
        super().__init__(nn.Sequential(*layers), taps)
