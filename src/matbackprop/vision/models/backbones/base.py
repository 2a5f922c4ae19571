"""The base class of backbones, AlexNet and VGG-16, all backbones by name, and their starting weights.

Weights are safetensors files. Torchvision's official ``.pth`` files are read once, with ``weights_only=True`` after
their checksum is verified, and stored as safetensors.
"""

from __future__ import annotations

import copy
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from matbackprop.errors import ConfigurationError, DataError, WeightsError
from matbackprop.vision.configuration import suggest
from matbackprop.vision.data.pictures import IMAGENET_MEAN, IMAGENET_STD
from matbackprop.vision.files import atomic_write, shorten
from matbackprop.vision.models.weights import load_weights_into, read_weights


def normalize(image: Tensor) -> Tensor:
    """Normalize RGB images (*b, 3, h, w) in [0, 1] by the mean and deviation of ImageNet."""
    # Plain numbers: a CUDA graph cannot copy a tensor of them to the device.
    parts = zip(image.split(1, -3), IMAGENET_MEAN, IMAGENET_STD, strict=True)
    return torch.cat([(channel - mean) / std for channel, mean, std in parts], -3)


def start_randomly(network: nn.Module) -> None:
    """Initialize all convolutions (Kaiming, for ReLU)."""
    for module in network.modules():
        # Drawing numbers on the meta device would import torch._dynamo: seconds, and 130 MB.
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class TapInfo(NamedTuple):
    """Channels of a feature map and position of its cells in the image.

    Attributes:
        channels: number of channels.
        stride: distance of neighboring cells in pixels.
        offset: pixel coordinate of the center of the first cell; the center of cell i is offset + i · stride.
        reach: pixels along a side that one cell needs; n cells need reach + (n − 1) · stride.
    """

    channels: int
    stride: int
    offset: float
    reach: int


class Backbone(nn.Module, ABC):
    """A network with named feature maps.

    Subclasses describe their maps (``places``) and compute them (:meth:`maps`). Batch normalization keeps its published
    means and deviations in training, so that results do not depend on the distribution of batches over processes.

    Attributes:
        taps: names of the maps, in order of computation.
        mean, std: normalization of its pixels, for RGB in [0, 1].
        left_out: keys of the weights that :meth:`cut` removed.
        prefix: prefix of the keys of its published weights.
    """

    taps: Sequence[str]
    prefix: str = ""
    left_out: frozenset[str] = frozenset()
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    @property
    def memory_format(self) -> torch.memory_format:
        """The fastest layout on a GPU: channels last, except for networks with depthwise convolutions.

        For those, cuDNN took 6 s on an H200 for every new image size.
        """
        depthwise = any(isinstance(module, nn.Conv2d) and module.groups > 1 for module in self.modules())
        return torch.contiguous_format if depthwise else torch.channels_last

    def __init__(self, places: Mapping[str, TapInfo]) -> None:
        """``places`` has the maps in order of computation."""
        super().__init__()
        self._places = dict(places)
        self.taps = tuple(places)

    def info(self, tap: str) -> TapInfo:
        """Return channels and position of a map.

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
        """Set the mode of all modules except batch normalization."""
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

    def maps_after(self, tap: str, x: Tensor, taps: Sequence[str]) -> dict[str, Tensor]:
        """Return the maps ``taps`` computed from ``x``, the map ``tap``.

        Raises:
            ConfigurationError: the maps of this network are not computed one from another.
        """
        raise ConfigurationError(
            f"{type(self).__name__} computes all maps together, not from {tap!r}. Use another backbone."
        )

    def freeze(self, tap: str) -> None:
        """Freeze the layers up to a map."""
        self.check([tap])
        kept = copy.deepcopy(self)
        kept.remove_after(tap)
        names = set(kept.state_dict())
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in names)

    def check(self, taps: Sequence[str]) -> None:
        """Raise ConfigurationError for a map that this backbone does not have."""
        for tap in taps:
            if tap not in self.taps:
                raise ConfigurationError(f"Unknown feature map {tap!r}. {suggest(tap, self.taps, 'Feature maps')}")

    def forward(self, image: Tensor, taps: Sequence[str]) -> dict[str, Tensor]:
        """Compute the maps ``taps``; layers after the last one are not run.

        Args:
            image: RGB (b, 3, h, w), normalized by :func:`normalize`; converted here for backbones with another
                normalization.
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
    """A network in which each stage computes a map from the one before it."""

    @abstractmethod
    def stage(self, tap: str, x: Tensor) -> Tensor:
        """Compute a map from the previous one, or from the image."""

    def maps(self, image: Tensor, taps: Sequence[str]) -> dict[str, Tensor]:
        """Return the maps up to the last of ``taps``."""
        return self._stages(0, image, taps)

    def maps_after(self, tap: str, x: Tensor, taps: Sequence[str]) -> dict[str, Tensor]:
        """Return the maps after ``tap`` up to the last of ``taps``."""
        return self._stages(self.taps.index(tap) + 1, x, taps)

    def _stages(self, first: int, x: Tensor, taps: Sequence[str]) -> dict[str, Tensor]:
        last = max(self.taps.index(tap) for tap in taps)
        maps: dict[str, Tensor] = {}
        for tap in self.taps[first : last + 1]:
            x = maps[tap] = self.stage(tap, x)
        return maps


class LayerStack(Backbone):
    """A stack of layers whose maps are outputs of layers.

    Args:
        features: the layers, applied in order. Their convolutions and poolings are square.
        taps: name → index in ``features`` of the layer with this output.
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
        """Remove the layers after a map."""
        del self.features[self.index[tap] + 1 :]

    def maps(self, image: Tensor, taps: Sequence[str]) -> dict[str, Tensor]:
        """Return the outputs of the layers of ``taps``."""
        return self._layers(0, image, taps)

    def maps_after(self, tap: str, x: Tensor, taps: Sequence[str]) -> dict[str, Tensor]:
        """Return the outputs of the layers of ``taps``, computed from that of ``tap``."""
        return self._layers(self.index[tap] + 1, x, taps)

    def _layers(self, first: int, x: Tensor, taps: Sequence[str]) -> dict[str, Tensor]:
        names = {self.index[tap]: tap for tap in taps}
        maps: dict[str, Tensor] = {}
        for index in range(first, max(names) + 1):
            x = self.features[index](x)
            if index in names:
                maps[names[index]] = x
        return maps


class AlexNet(LayerStack):
    """AlexNet (torchvision's variant: no local response normalization, no groups)."""

    def __init__(self) -> None:
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
        super().__init__(features, {"relu1": 1, "relu2": 4, "relu3": 7, "relu4": 9, "relu5": 11, "pool5": 12})


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


# ----------------------------------------------------------------------------------------------- all backbones by name

_TORCH = "https://download.pytorch.org/models"


class BackboneEntry(NamedTuple):
    """Location of a backbone's code and weights.

    Attributes:
        code: ``"module:Class"`` in this package.
        file: name of its weights in ``$MATBACKPROP_DATA/weights``; empty if it has none.
        url: official address of its weights, or empty.
        sha256: first digits of their checksum.
    """

    code: str
    file: str = ""
    url: str = ""
    sha256: str = ""


BACKBONES = {
    "alexnet": BackboneEntry(
        "base:AlexNet", "alexnet_features_fp16.safetensors", f"{_TORCH}/alexnet-owt-7be5be79.pth", "7be5be79"
    ),
    "efficientnet-lite2": BackboneEntry("efficientnet_lite2:EfficientNetLite2", "efficientnet_lite2_fp16.safetensors"),
    "sift": BackboneEntry("sift:DenseSIFT"),
    "tiny-vit": BackboneEntry("tiny_vit:TinyViT", "mobile_sam_tinyvit_encoder_fp16.safetensors"),
    "vgg16": BackboneEntry("base:VGG16", "vgg16_features_fp16.safetensors", f"{_TORCH}/vgg16-397923af.pth", "397923af"),
    "xception": BackboneEntry("xception:Xception", "xception_imagenet_fp16.safetensors"),
}


ADAPTERS = {
    "hf": "modules:HuggingFace",
    "timm": "modules:TimmFeatures",
    "torchvision": "modules:TorchvisionModel",
}
"""Libraries of backbones: ``"hf:facebook/dinov2-small"``, ``"timm:resnet50"``, ``"torchvision:resnet50"``."""


def check_published(name: object) -> None:
    """Reject a backbone that is user code, because a file must not choose code to run.

    Raises:
        ConfigurationError: ``name`` is not one of :data:`BACKBONES` or of :data:`ADAPTERS`.
    """
    if name not in BACKBONES and str(name).partition(":")[0] not in ADAPTERS:
        raise ConfigurationError(
            f"Backbone {shorten(repr(name))} is not allowed in files. Build the model in Python and load its "
            "weights with matbackprop.vision.models.weights.load_weights_into."
        )


def build_backbone(name: str, taps: Sequence[str] | None = None) -> Backbone:
    """Build a backbone by name, with random weights.

    Args:
        name: one of :data:`BACKBONES`; ``"hf:"``, ``"timm:"`` or ``"torchvision:"`` with the name of a model there; or
            ``"package.module:Class"``, a class or function that returns a :class:`Backbone` or any ``nn.Module``, whose
            maps are the outputs of its submodules.
        taps: maps to keep: layers after the last one are removed. None keeps all.

    Raises:
        ConfigurationError: the backbone or one of the maps is unknown.
    """
    kind, _, rest = name.partition(":")
    if name in BACKBONES:
        backbone: Backbone = _load(f"{__package__}.{BACKBONES[name].code}")()
    elif kind in ADAPTERS and rest:
        backbone = _load(f"{__package__}.{ADAPTERS[kind]}")(rest)
    elif rest:
        backbone = _own(name)
    else:
        known = [*BACKBONES, *(f"{scheme}:NAME" for scheme in ADAPTERS), "module:Class"]
        raise ConfigurationError(f"Unknown backbone {name!r}. {suggest(name, known, 'Backbones')}")
    if taps is not None:
        backbone.cut(taps)
    return backbone


def _load(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _own(place: str) -> Backbone:
    from matbackprop.vision.models.backbones.modules import ModuleBackbone

    try:
        module = _load(place)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"The backbone {place!r} cannot be built: {error}.") from error
    return module if isinstance(module, Backbone) else ModuleBackbone(module)


# ---------------------------------------------------------------------------------------------------- starting weights


def load_backbone_weights(backbone: nn.Module, name: str, weights: str | Path = "imagenet") -> Path | None:
    """Load starting weights into a backbone.

    Args:
        backbone: from :func:`build_backbone`.
        name: its name.
        weights: ``"none"`` changes nothing; ``"imagenet"`` reads the file of :func:`find_weights`, or the weights that
            its library publishes; otherwise a safetensors file with the keys of the backbone. Keys of a classifier are
            ignored.

    Returns:
        The file, or None.

    Raises:
        WeightsError: no file, a damaged one, or one of another architecture.
    """
    if str(weights) == "none" or not any(True for _ in backbone.parameters()):
        return None
    publish = getattr(backbone, "load_published", None)
    if str(weights) == "imagenet" and publish is not None:
        publish()
        return None
    path = find_weights(name) if str(weights) == "imagenet" else Path(weights)
    own = backbone.state_dict()
    state = {k.removeprefix(getattr(backbone, "prefix", "")): v for k, v in read_weights(path).items()}
    state = {k: v for k, v in state.items() if k in own or not k.startswith("classifier.")}
    # Some files have the counters of batch normalization, which are not used.
    state |= {k: v for k, v in own.items() if k.endswith("num_batches_tracked") and k not in state}
    load_weights_into(backbone, state, str(path))
    return path


def find_weights(name: str) -> Path:
    """Return the file of a backbone's published weights: in ``$MATBACKPROP_DATA/weights``, in the cache, or downloaded.

    Raises:
        WeightsError: the file is missing and cannot be downloaded.
    """
    from matbackprop.vision.data.cache import default_cache_folder

    if name not in BACKBONES or not BACKBONES[name].file:
        known = [n for n, entry in BACKBONES.items() if entry.file]
        raise WeightsError(f"Backbone {name!r} has no published weights. {suggest(name, known, 'Backbones')}")
    entry = BACKBONES[name]
    cached = default_cache_folder() / "weights" / f"{name}.safetensors"
    root = os.environ.get("MATBACKPROP_DATA")
    for path in [*([Path(root) / "weights" / entry.file] if root else []), cached]:
        if path.is_file():
            return path
    if not entry.url:
        raise WeightsError(
            f"The weights of {name} were not found. Put {entry.file} into $MATBACKPROP_DATA/weights, name a "
            "safetensors file, or use random weights (none)."
        )
    return download_weights(name, cached)


def download_weights(name: str, target: Path, entry: BackboneEntry | None = None) -> Path:
    """Download torchvision's weights, verify them, and store them as safetensors.

    Args:
        name: ``"alexnet"`` or ``"vgg16"``.
        target: the safetensors file to write.
        entry: another address, for a mirror.

    Raises:
        WeightsError: the download failed, or the file is damaged.
    """
    from safetensors.torch import save

    from matbackprop.vision.data.download import download

    entry = entry or BACKBONES[name]
    downloaded = target.with_name(entry.url.rsplit("/", 1)[-1])
    try:
        download(entry.url, downloaded, sha256=entry.sha256)
    except DataError as error:
        raise WeightsError(f"The weights of {name} are missing. {error}") from error
    try:
        state = torch.load(downloaded, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for damaged files
        raise WeightsError(f"{downloaded} cannot be read as weights: {error}") from error
    atomic_write(target, save({k: v.contiguous() for k, v in state.items()}))
    downloaded.unlink()
    return target
