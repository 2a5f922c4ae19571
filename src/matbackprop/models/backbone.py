"""The convolutional parts of AlexNet and VGG-16, in torchvision's layout and with its keys (``features.N.weight``).

A backbone gives any of its named feature maps; both systems build on it. Inputs are RGB in [0, 1], normalised with
:data:`IMAGENET_MEAN` and :data:`IMAGENET_STD`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from matbackprop.errors import ConfigurationError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def normalize(image: Tensor) -> Tensor:
    """Normalise RGB images (*b, 3, h, w) in [0, 1] as the ImageNet networks expect."""
    # With plain numbers: a tensor of them would have to be copied to the device, which a CUDA graph cannot.
    parts = zip(image.split(1, -3), IMAGENET_MEAN, IMAGENET_STD, strict=True)
    return torch.cat([(channel - mean) / std for channel, mean, std in parts], -3)


class Backbone(nn.Module):
    """A stack ``features`` with named taps.

    Args:
        features: the layers, applied in order.
        taps: name → index in ``features`` of the layer whose output the name means.
        channels: name → number of channels there.
        strides: name → stride of the map with respect to the image.
    """

    def __init__(
        self, features: nn.Sequential, taps: dict[str, int], channels: dict[str, int], strides: dict[str, int]
    ) -> None:
        super().__init__()
        self.features = features
        self.taps = taps
        self.channels = channels
        self.strides = strides
        self.whole = len(features)
        """Number of layers before :meth:`up_to` left some out."""

    def up_to(self, taps: Sequence[str]) -> Backbone:
        """Return the same layers without those after the last of ``taps``, whose weights would never get a gradient."""
        self._check(taps)
        layers = max(self.taps[t] for t in taps) + 1
        kept = {name: index for name, index in self.taps.items() if index < layers}
        part = Backbone(nn.Sequential(*list(self.features)[:layers]), kept, self.channels, self.strides)
        part.whole = self.whole
        return part

    def _check(self, taps: Sequence[str]) -> None:
        unknown = [t for t in taps if t not in self.taps]
        if unknown:
            raise ConfigurationError(f"unknown feature map {unknown[0]!r}; this backbone has {', '.join(self.taps)}.")

    def forward(self, image: Tensor, taps: Sequence[str]) -> list[Tensor]:
        """Return the feature maps named in ``taps``, in that order; layers after the last one are not run."""
        self._check(taps)
        wanted = {self.taps[t]: t for t in taps}
        found: dict[str, Tensor] = {}
        x = image
        for index in range(max(wanted) + 1):
            x = self.features[index](x)
            if index in wanted:
                found[wanted[index]] = x
        return [found[t] for t in taps]


def alexnet() -> Backbone:
    """AlexNet's convolutions (torchvision's variant: no local response normalisation, no groups)."""
    features = nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
    )
    return Backbone(
        features,
        taps={"relu1": 1, "relu2": 4, "relu3": 7, "relu4": 9, "relu5": 11, "pool5": 12},
        channels={"relu1": 64, "relu2": 192, "relu3": 384, "relu4": 256, "relu5": 256, "pool5": 256},
        strides={"relu1": 4, "relu2": 8, "relu3": 16, "relu4": 16, "relu5": 16, "pool5": 32},
    )


def vgg16() -> Backbone:
    """VGG-16's convolutions (configuration D)."""
    layers: list[nn.Module] = []
    taps: dict[str, int] = {}
    channels: dict[str, int] = {}
    strides: dict[str, int] = {}
    width = 3
    for block, (depth, filters) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)], start=1):
        for i in range(1, depth + 1):
            layers += [nn.Conv2d(width, filters, 3, padding=1), nn.ReLU()]
            name = f"relu{block}_{i}"
            taps[name], channels[name], strides[name] = len(layers) - 1, filters, 2 ** (block - 1)
            width = filters
        layers.append(nn.MaxPool2d(2, 2))
        taps[f"pool{block}"], channels[f"pool{block}"], strides[f"pool{block}"] = len(layers) - 1, filters, 2**block
    return Backbone(nn.Sequential(*layers), taps, channels, strides)


BACKBONES = {"alexnet": alexnet, "vgg16": vgg16}


def build_backbone(name: str) -> Backbone:
    """Build a backbone by name, with random weights (Kaiming, for ReLU)."""
    if name not in BACKBONES:
        raise ConfigurationError(f"unknown backbone {name!r}; choose one of {', '.join(BACKBONES)}.")
    backbone = BACKBONES[name]()
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
    return backbone


def windows(backbone: Backbone, tap: str) -> list[tuple[int, int, int]]:
    """Kernel, stride and padding of the convolutions and poolings before a map, in order; they are square."""
    found = []
    for layer in list(backbone.features)[: backbone.taps[tap] + 1]:
        if isinstance(layer, (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)):
            sizes = (layer.kernel_size, layer.stride, layer.padding)
            kernel, stride, padding = (int(v[0]) if isinstance(v, tuple) else int(v) for v in sizes)
            found.append((kernel, stride, padding))
    return found


def grid_geometry(backbone: Backbone, tap: str) -> tuple[float, int]:
    """Where the cells of a feature map lie in the image.

    Args:
        backbone: the network.
        tap: name of the map.

    Returns:
        The pixel coordinate of the centre of the first cell's receptive field, and the distance of neighbouring cells.

    Example:
        >>> grid_geometry(build_backbone("alexnet"), "relu5")
        (15.0, 16)
    """
    start, jump = 0.0, 1
    for kernel, stride, padding in windows(backbone, tap):
        start += ((kernel - 1) / 2 - padding) * jump
        jump *= stride
    return start, jump
