"""Backbones: networks that give named feature maps. Heads, objectives and training know nothing else about them.

A backbone answers two questions (:class:`~matbackprop.vision.models.backbones.base.Backbone`): ``forward(image, taps)``
gives the maps that are named, and ``info(tap)`` says how many channels a map has and where its cells lie in the image.

A new backbone is one file with a subclass and one line in :data:`~matbackprop.vision.models.backbones.base.BACKBONES`.
"""

from matbackprop.vision.models.backbones.base import (
    ADAPTERS,
    BACKBONES,
    Backbone,
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
