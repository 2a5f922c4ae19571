"""Base classes of backbones."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from matbackprop.errors import ConfigurationError
from matbackprop.vision.configuration import suggest
from matbackprop.vision.data.pictures import IMAGENET_MEAN, IMAGENET_STD


def normalize(image: Tensor) -> Tensor:
    """Normalize RGB images (*b, 3, h, w) in [0, 1] by the mean and standard deviation of ImageNet."""
    # Python numbers, because a CUDA graph cannot copy a tensor to the device.
    parts = zip(image.split(1, -3), IMAGENET_MEAN, IMAGENET_STD, strict=True)
    return torch.cat([(channel - mean) / std for channel, mean, std in parts], -3)


def fold(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a convolution without bias and the batch normalization after it."""
    assert norm.running_var is not None and norm.running_mean is not None
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    return convolution.weight * scale.view(-1, 1, 1, 1), norm.bias - norm.running_mean * scale


def start_randomly(network: nn.Module) -> None:
    """Initialize all convolutions with Kaiming initialization for ReLU."""
    for module in network.modules():
        # Random numbers on the meta device would import torch._dynamo, which takes seconds and 130 MB.
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class TapInfo(NamedTuple):
    """Channels of a feature map and position of its cells in the image."""

    channels: int  #: number of channels
    stride: int  #: distance between neighboring cells in pixels
    offset: float  #: pixel coordinate of the center of the first cell. The center of cell i is offset + i · stride
    reach: int  #: minimum image side for one cell; n cells need reach + (n − 1) · stride pixels


class Backbone(nn.Module, ABC):
    """Base class of networks with named feature maps.

    Subclasses describe their maps (``places``) and compute them (:meth:`maps`). Batch normalization keeps its published
    statistics in training, so that results do not depend on the distribution of batches over processes.

    Attributes:
        taps: names of the maps, in order of computation.
        mean, std: normalization of RGB inputs in [0, 1].
        left_out: keys of the weights removed by :meth:`cut`.
        prefix: prefix of the keys of the published weights.
    """

    taps: Sequence[str]
    prefix: str = ""
    left_out: frozenset[str] = frozenset()
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    @property
    def memory_format(self) -> torch.memory_format:
        """Fastest memory layout on a GPU: channels last, except for networks with depthwise convolutions.

        For those networks, cuDNN took 6 s on an H200 for every new image size.
        """
        depthwise = any(isinstance(module, nn.Conv2d) and module.groups > 1 for module in self.modules())
        return torch.contiguous_format if depthwise else torch.channels_last

    def __init__(self, places: Mapping[str, TapInfo]) -> None:
        """Initialize from ``places``, the maps in order of computation."""
        super().__init__()
        self._places = dict(places)
        self.taps = tuple(places)

    def info(self, tap: str) -> TapInfo:
        """Return the channels and cell positions of a map.

        Example:
            >>> from matbackprop.vision.models.backbones import build_backbone
            >>> build_backbone("alexnet").info("relu5")
            TapInfo(channels=256, stride=16, offset=15.0, reach=31)
        """
        self.check([tap])
        return self._places[tap]

    @abstractmethod
    def maps(self, image: Tensor, taps: Sequence[str]) -> Mapping[str, Tensor]:
        """Return the maps (b, c, h', w') of images (b, 3, h, w) normalized with :attr:`mean` and :attr:`std`."""

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules. Batch normalization stays in evaluation mode."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def cut(self, taps: Sequence[str]) -> None:
        """Remove the layers after the last of ``taps``."""
        self.check(taps)
        last = max(self.taps.index(tap) for tap in taps)
        before = set(self.state_dict())
        self.remove_after(self.taps[last])
        self.left_out |= before - set(self.state_dict())
        self.taps = tuple(self.taps)[: last + 1]

    def remove_after(self, tap: str) -> None:
        """Remove the layers after ``tap``, if any."""

    def freeze(self, tap: str) -> None:
        """Freeze the layers up to a map."""
        self.check([tap])
        kept = copy.deepcopy(self)
        kept.remove_after(tap)
        names = set(kept.state_dict())
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in names)

    def check(self, taps: Sequence[str]) -> None:
        """Raise ConfigurationError if a map does not exist."""
        for tap in taps:
            if tap not in self.taps:
                raise ConfigurationError(f"Unknown feature map {tap!r}. {suggest(tap, self.taps, 'Feature maps')}")

    def forward(self, image: Tensor, taps: Sequence[str]) -> dict[str, Tensor]:
        """Compute the maps ``taps``. Layers after the last one are not run.

        Args:
            image: RGB (b, 3, h, w), normalized by :func:`normalize`. It is converted if :attr:`mean` and :attr:`std`
                differ.
            taps: names of maps.

        Returns:
            Name → map (b, c, h', w').
        """
        self.check(taps)
        if (self.mean, self.std) != (IMAGENET_MEAN, IMAGENET_STD):
            numbers = zip(image.split(1, -3), IMAGENET_MEAN, IMAGENET_STD, self.mean, self.std, strict=True)
            image = torch.cat([x * (s / own_s) + (m - own_m) / own_s for x, m, s, own_m, own_s in numbers], -3)
        maps = self.maps(image, taps)
        return {tap: maps[tap] for tap in taps}


class StagedBackbone(Backbone):
    """Backbone in which each stage computes a map from the previous one."""

    @abstractmethod
    def stage(self, tap: str, x: Tensor) -> Tensor:
        """Compute a map from the previous one, or from the image."""

    def maps(self, image: Tensor, taps: Sequence[str]) -> dict[str, Tensor]:
        x, maps = image, {}
        for tap in self.taps[: 1 + max(self.taps.index(tap) for tap in taps)]:
            x = self.stage(tap, x)
            if tap in taps:
                maps[tap] = x
        return maps


class LayerStack(StagedBackbone):
    """Backbone that is a sequence of layers. Its maps are outputs of layers.

    Args:
        features: layers with square convolutions and poolings.
        taps: name → index of the layer in ``features``.
    """

    def __init__(self, features: nn.Sequential, taps: Mapping[str, int]) -> None:
        self.index = dict(sorted(taps.items(), key=lambda item: item[1]))
        super().__init__({tap: self._measure(list(features)[: last + 1]) for tap, last in self.index.items()})
        self.features = features
        start_randomly(self)

    @staticmethod
    def _measure(layers: Sequence[nn.Module]) -> TapInfo:
        channels, offset, stride = 3, 0.0, 1
        windows = []
        for layer in layers:
            if isinstance(layer, (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)):
                sizes = (layer.kernel_size, layer.stride, layer.padding)
                kernel, step, padding = (int(v[0]) if isinstance(v, tuple) else int(v) for v in sizes)
                windows.append((kernel, step, padding))
                offset += ((kernel - 1) / 2 - padding) * stride
                stride *= step
                channels = layer.out_channels if isinstance(layer, nn.Conv2d) else channels
        reach = 1
        for kernel, step, padding in reversed(windows):
            reach = max(1, (reach - 1) * step + kernel - 2 * padding)
        return TapInfo(channels, stride, offset, reach)

    def remove_after(self, tap: str) -> None:
        del self.features[self.index[tap] + 1 :]

    def stage(self, tap: str, x: Tensor) -> Tensor:
        before = [index for index in self.index.values() if index < self.index[tap]]
        for index in range(before[-1] + 1 if before else 0, self.index[tap] + 1):
            x = self.features[index](x)
        return x
