"""Backbones: networks that give named feature maps. Heads, objectives and training know nothing else about them.

A backbone answers two questions (:class:`~matbackprop.models.backbones.base.Backbone`): ``forward(image, taps)`` gives
the maps that are named, and ``info(tap)`` says how many channels a map has and where its cells lie in the image.

A new backbone is one file with a subclass and one line in :data:`BACKBONES`. This module imports nothing heavy, so that
the command line can list them.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from matbackprop.errors import ConfigurationError
from matbackprop.files import shorten

if TYPE_CHECKING:
    from matbackprop.models.backbones.base import Backbone

__all__ = ["ADAPTERS", "BACKBONES", "BackboneEntry", "build_backbone", "check_published"]

_TORCH = "https://download.pytorch.org/models"


class BackboneEntry(NamedTuple):
    """Where a backbone's code and weights are.

    Attributes:
        code: ``"module:Class"`` in this package.
        file: name of its weights below ``weights`` in ``$MATBACKPROP_DATA``; empty for one without weights.
        url: official address of its weights; empty where there is none of a kind that can be read.
        sha256: first digits of the checksum of what is there.
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
    "pidinet": BackboneEntry("pidinet:PiDiNet", "pidinet_multicue_fp16.safetensors"),
    "sift": BackboneEntry("sift:DenseSIFT"),
    "tiny-vit": BackboneEntry("tiny_vit:TinyViT", "mobile_sam_tinyvit_encoder_fp16.safetensors"),
    "vgg16": BackboneEntry("base:VGG16", "vgg16_features_fp16.safetensors", f"{_TORCH}/vgg16-397923af.pth", "397923af"),
    "xception": BackboneEntry("xception:Xception", "xception_imagenet_fp16.safetensors"),
}


ADAPTERS = {
    "hf": "hugging_face:HuggingFace",
    "timm": "timm_features:TimmFeatures",
    "torchvision": "torchvision_models:TorchvisionModel",
}
"""Libraries of backbones: ``"hf:facebook/dinov2-small"``, ``"timm:resnet50"``, ``"torchvision:resnet50"``."""


def check_published(name: object) -> None:
    """Refuse a backbone that is code of its own: a file that names one must not decide what is run.

    Raises:
        ConfigurationError: ``name`` is not one of :data:`BACKBONES` or of :data:`ADAPTERS`.
    """
    if name not in BACKBONES and str(name).partition(":")[0] not in ADAPTERS:
        raise ConfigurationError(
            f"the backbone {shorten(repr(name))} is none that files may name; build the model yourself, with network=, "
            "and load its weights with matbackprop.models.weights.load_weights_into."
        )


def build_backbone(name: str, taps: Sequence[str] | None = None) -> Backbone:
    """Build a backbone by name, with random weights.

    Args:
        name: one of :data:`BACKBONES`; ``"hf:"``, ``"timm:"`` or ``"torchvision:"`` with the name of a model there; or
            ``"package.module:Class"``, a class or function of yours that gives a
            :class:`~matbackprop.models.backbones.base.Backbone` or any ``nn.Module``, whose submodules' outputs are
            then its maps.
        taps: the maps that will be asked for: layers behind the last one are left out. None keeps all.

    Raises:
        ConfigurationError: there is no such backbone, or it has no such map; the message names those that are there.
    """
    kind, _, rest = name.partition(":")
    if name in BACKBONES:
        backbone: Backbone = _load(f"{__name__}.{BACKBONES[name].code}")()
    elif kind in ADAPTERS and rest:
        backbone = _load(f"{__name__}.{ADAPTERS[kind]}")(rest)
    elif rest:
        backbone = _own(name)
    else:
        schemes = ", ".join(f"{scheme}:…" for scheme in ADAPTERS)
        raise ConfigurationError(
            f"unknown backbone {name!r}; choose one of {', '.join(BACKBONES)}, or {schemes} or module:Class."
        )
    if taps is not None:
        backbone.cut(taps)
    return backbone


def _load(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _own(place: str) -> Backbone:
    from matbackprop.models.backbones.base import Backbone
    from matbackprop.models.backbones.modules import ModuleBackbone

    try:
        module = _load(place)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"the backbone {place!r} cannot be built: {error}.") from error
    return module if isinstance(module, Backbone) else ModuleBackbone(module)
