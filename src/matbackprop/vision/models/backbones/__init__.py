"""Backbones: networks with named feature maps ("taps").

To add a backbone, subclass :class:`~matbackprop.vision.models.backbones.base.Backbone` and add an entry to
:data:`~matbackprop.vision.models.backbones.published.BACKBONES`.
"""

from matbackprop.vision.models.backbones.base import Backbone
from matbackprop.vision.models.backbones.published import (
    ADAPTERS,
    BACKBONES,
    BackboneEntry,
    build_backbone,
    check_published,
    load_backbone_weights,
)

__all__ = ["ADAPTERS", "BACKBONES", "Backbone", "BackboneEntry", "build_backbone", "check_published",
           "load_backbone_weights"]  # fmt: skip
