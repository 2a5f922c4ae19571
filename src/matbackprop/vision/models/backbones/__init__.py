"""Backbones: networks with named feature maps.

A backbone (:class:`~matbackprop.vision.models.backbones.base.Backbone`) has two methods: ``forward(image, taps)``
computes maps, and ``info(tap)`` returns the channels of a map and the position of its cells in the image. A new
backbone is one file with a subclass and one entry in
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

__all__ = [
    "ADAPTERS",
    "BACKBONES",
    "Backbone",
    "BackboneEntry",
    "build_backbone",
    "check_published",
    "load_backbone_weights",
]
