"""Backbones from any ``nn.Module``, and adapters for transformers, timm and torchvision.

Channels, strides and cell positions of the maps are measured by running the network.
"""

from __future__ import annotations

import copy
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from matbackprop.errors import ConfigurationError, WeightsError, needs
from matbackprop.vision.data.pictures import IMAGENET_MEAN, IMAGENET_STD
from matbackprop.vision.models.backbones.base import Backbone, TapInfo

_SIDES = (192, 256)  # divisible by every stride up to 64


class MeasuredBackbone(Backbone):
    """Base class of backbones that wrap a network with input (b, 3, h, w).

    Channels and strides are measured on images of two sizes. The first call of :meth:`info` measures the center of the
    first cell from the gradient of a cell. If this is not possible (global receptive fields, device ``meta``), the
    cells are assumed to tile the image. Images are padded with zeros at the end to a ``multiple`` of a size.
    """

    def __init__(self, network: nn.Module, multiple: int = 1) -> None:
        super().__init__(self._measure_strides(network, multiple))
        self.network, self.multiple = network, multiple
        self._measured: set[str] = set()

    @staticmethod
    @abstractmethod
    def compute(network: Any, image: Tensor, taps: Sequence[str] | None) -> Mapping[str, Tensor]:
        """Return the maps ``taps`` of an image, or all maps in order of computation if it is None."""

    def maps(self, image: Tensor, taps: Sequence[str]) -> Mapping[str, Tensor]:
        height, width = image.shape[-2:]
        image = nnf.pad(image, (0, -width % self.multiple, 0, -height % self.multiple))
        return self.compute(self.network, image, [tap for tap in self.taps if tap in taps])

    def _trainable(self, tap: str) -> list[tuple[nn.Parameter, bool]]:
        """Return the trainable parameters, and whether ``tap`` depends on them."""
        parameters = [p for p in self.network.parameters() if p.requires_grad]
        image = torch.zeros(1, 3, _SIDES[0], _SIDES[0], device=_device_of(self.network), requires_grad=True)
        with torch.enable_grad():
            computed = self.maps(image, [tap])[tap].sum()
            _, *gradients = torch.autograd.grad(computed, [image, *parameters], allow_unused=True)
        return [(p, gradient is not None) for p, gradient in zip(parameters, gradients, strict=True)]

    def remove_after(self, tap: str) -> None:
        """Freeze the parameters on which ``tap`` does not depend."""
        for parameter, used in self._trainable(tap):
            parameter.requires_grad_(used)

    def freeze(self, tap: str) -> None:
        self.check([tap])
        for parameter, used in self._trainable(tap):
            parameter.requires_grad_(not used)

    def info(self, tap: str) -> TapInfo:
        info = super().info(tap)
        if tap not in self._measured:
            info = self._places[tap] = info._replace(offset=self._measure_offset(tap, info.stride))
            self._measured.add(tap)
        return info

    def _measure_strides(self, network: nn.Module, multiple: int) -> dict[str, TapInfo]:
        device = _device_of(network)
        training = network.training
        sides = [-(-side // multiple) * multiple for side in _SIDES]
        try:
            network.eval()
            with torch.no_grad():
                small, large = (
                    self.compute(network, torch.zeros(1, 3, side, side, device=device), None) for side in sides
                )
        finally:
            network.train(training)
        places = {}
        for name, one in small.items():
            two = large.get(name)
            cells = 0 if two is None or two.shape[1] != one.shape[1] else two.shape[-1] - one.shape[-1]
            if cells > 0 and (sides[1] - sides[0]) % cells == 0:
                stride = (sides[1] - sides[0]) // cells
                places[name] = TapInfo(one.shape[1], stride, (stride - 1) / 2, stride)
        if not places:
            raise ConfigurationError(f"{type(network).__name__} has no map (b, c, h, w) that scales with the image.")
        return places

    def _measure_offset(self, tap: str, stride: int) -> float:
        """Return the center of the first cell, rounded to half a pixel, from the gradient of a central cell."""
        tiling = (stride - 1) / 2
        device = _device_of(self.network)
        if device.type == "meta":
            return tiling
        side = -(-_SIDES[1] // self.multiple) * self.multiple
        image = torch.full((1, 3, side, side), 0.5, dtype=torch.float64, device=device, requires_grad=True)
        with torch.enable_grad():
            cells = self.compute(_averaging(self.network), image, [tap])[tap]
            middle = cells.shape[-1] // 2
            (gradient,) = torch.autograd.grad(cells[0, :, middle, middle].sum(), image)
        weight = gradient[0].abs().sum((0, 1))
        center = float((weight * torch.arange(side, device=device)).sum() / weight.sum())
        measured = round(2 * (center - stride * middle)) / 2 if center == center else float("nan")
        return measured if abs(measured) <= 2 * stride else tiling  # False for NaN


def _device_of(network: nn.Module) -> torch.device:
    return next((p.device for p in network.parameters()), torch.device("cpu"))


def _averaging(network: nn.Module) -> nn.Module:
    """Return a copy whose layers compute averages, so that the gradient of a cell is its receptive field."""
    network = copy.deepcopy(network).double().eval()
    for parameter in network.parameters():
        nn.init.ones_(parameter)
    for parent in [network, *network.modules()]:
        for name, layer in parent.named_children():
            if isinstance(layer, (nn.LayerNorm, nn.GroupNorm, nn.Dropout)) or "Norm" in type(layer).__name__:
                setattr(parent, name, nn.Identity())
            elif isinstance(layer, nn.MaxPool2d):
                setattr(parent, name, nn.AvgPool2d(layer.kernel_size, layer.stride, layer.padding, layer.ceil_mode))
            elif isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.constant_(layer.weight, 1 / layer.weight[0].numel())
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
    for layer in network.modules():
        if "Attention" in type(layer).__name__:  # the receptive field of the residual is local
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)
    return network


@contextmanager
def _report(problem: str, fix: str = "") -> Iterator[None]:
    """Convert all errors of a library to WeightsError."""
    try:
        yield
    except Exception as error:
        raise WeightsError(f"{problem}: {str(error).splitlines()[0]}{fix}") from error


_OFFLINE = " Without a network, download the model on another machine and use hf:FOLDER."


class _Done(Exception):
    """Raised after the last requested map is computed."""


class ModuleBackbone(MeasuredBackbone):
    """Backbone whose maps are the outputs (b, c, h, w) of submodules, by name (``layer3``, ``features.12``).

    Args:
        network: network with input (b, 3, h, w) of any size.
        mean, std: normalization of RGB inputs in [0, 1].

    Example:
        >>> network = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2))
        >>> backbone = ModuleBackbone(network)
        >>> backbone.taps, backbone.info("2")
        (('0', '1', '2'), TapInfo(channels=8, stride=4, offset=1.0, reach=4))
    """

    def __init__(
        self, network: nn.Module, *, mean: tuple[float, ...] = IMAGENET_MEAN, std: tuple[float, ...] = IMAGENET_STD
    ) -> None:
        super().__init__(network)
        self.mean, self.std = mean, std

    @staticmethod
    def compute(network: nn.Module, image: Tensor, taps: Sequence[str] | None) -> Mapping[str, Tensor]:
        """Run the network up to the last of ``taps``. If a submodule is called repeatedly, use its last output."""
        outputs: dict[str, Tensor] = {}

        def keep(name: str, output: Any) -> None:
            if isinstance(output, Tensor) and output.ndim == 4 and output.is_floating_point():
                outputs.pop(name, None)
                outputs[name] = output
            if taps is not None and name == taps[-1]:
                raise _Done

        with ExitStack() as hooks, suppress(_Done):
            for name, module in network.named_modules():
                if name and (taps is None or name in taps):
                    hook = module.register_forward_hook(lambda _, __, output, name=name: keep(name, output))
                    hooks.callback(hook.remove)
            network(image)
        return outputs


class HuggingFace(MeasuredBackbone):
    """Backbone of Hugging Face ``transformers``. Its maps have the names of the library (``stem``, ``stage1`` …).

    ``source`` is a model on the hub, such as ``"facebook/dinov2-small"``, or a folder with a ``config.json``.
    """

    def __init__(self, source: str) -> None:
        with needs(f"hf:{source} needs the transformers library", "transformers"):
            from transformers import AutoBackbone, AutoConfig
            from transformers.utils import cached_file
        with _report(f"hf:{source} cannot be built", _OFFLINE):
            config = AutoConfig.from_pretrained(source)
            config.out_features = list(AutoBackbone.from_config(config).stage_names)
            network = AutoBackbone.from_config(config)
        super().__init__(network, int(getattr(config, "patch_size", 1) or 1))
        self.source = source
        with suppress(OSError, ValueError, KeyError, TypeError):  # a few models do not have this file
            content = json.loads(Path(str(cached_file(source, "preprocessor_config.json"))).read_text())
            self.mean, self.std = (tuple(map(float, content[f"image_{name}"])) for name in ("mean", "std"))

    @staticmethod
    def compute(network: Any, image: Tensor, taps: Sequence[str] | None) -> Mapping[str, Tensor]:
        """Return the maps of all stages."""
        return dict(zip(network.out_features, network(image).feature_maps, strict=True))

    def load_published(self) -> None:
        """Load the published weights."""
        network: Any = self.network
        with _report(f"The weights of hf:{self.source} cannot be loaded", _OFFLINE):
            published = type(network).from_pretrained(self.source, out_features=list(network.out_features))
        self.network.load_state_dict(published.state_dict())


class TimmFeatures(MeasuredBackbone):
    """Backbone of timm, such as ``"resnet50"`` or ``"vit_tiny_patch16_224"``.

    Its maps have the names of timm modules (``layer1``, ``blocks.11``, …).
    """

    def __init__(self, source: str) -> None:
        network: Any = _create_timm(source, pretrained=False)
        patch = next((m.patch_size for m in network.modules() if hasattr(m, "patch_size")), 1)
        try:
            super().__init__(network, max(patch) if isinstance(patch, tuple) else int(patch))
        except (AssertionError, RuntimeError) as error:  # positions or windows for one image size
            raise WeightsError(
                f"timm:{source} does not take images of any size ({str(error).splitlines()[0]}). Use another one."
            ) from error
        self.source = source
        published = getattr(network, "default_cfg", None) or {}
        self.mean, self.std = tuple(published.get("mean", self.mean)), tuple(published.get("std", self.std))

    @staticmethod
    def compute(network: Any, image: Tensor, taps: Sequence[str] | None) -> Mapping[str, Tensor]:
        """Return all maps, converted to channels first if needed (Swin)."""
        places = zip(network.feature_info.module_name(), network.feature_info.channels(), network(image), strict=True)
        return {name: m if m.shape[1] == channels else m.movedim(-1, 1) for name, channels, m in places}

    def load_published(self) -> None:
        """Load the weights published by timm."""
        self.network.load_state_dict(_create_timm(self.source, pretrained=True).state_dict())


def _create_timm(source: str, *, pretrained: bool) -> nn.Module:
    with needs(f"timm:{source} needs the timm library", "timm"):
        import timm
    with _report(f"timm:{source} cannot be built"):
        try:  # for transformers with position embeddings of fixed size
            return timm.create_model(source, features_only=True, pretrained=pretrained, dynamic_img_size=True)
        except TypeError:  # networks without the option
            return timm.create_model(source, features_only=True, pretrained=pretrained)


class TorchvisionModel(ModuleBackbone):
    """Backbone of torchvision. Its maps are outputs of submodules (``layer3``, ``features.5``)."""

    def __init__(self, source: str) -> None:
        super().__init__(_create_torchvision(source, None))
        self.source = source

    def load_published(self) -> None:
        """Load the weights published by torchvision."""
        self.network.load_state_dict(_create_torchvision(self.source, "DEFAULT").state_dict())


def _create_torchvision(source: str, weights: str | None) -> nn.Module:
    with needs(f"torchvision:{source} needs the torchvision library", "torchvision"):
        from torchvision.models import get_model
    with _report(f"torchvision:{source} cannot be built"):
        return get_model(source, weights=weights)
