"""Backbones of the timm library, through its ``features_only`` models."""

from __future__ import annotations

from torch import nn

from matbackprop.errors import MissingExtraError, WeightsError
from matbackprop.models.backbones.modules import ListedMaps

__all__ = ["TimmFeatures"]


class TimmFeatures(ListedMaps):
    """A network of timm; its maps have the names of the modules that timm takes them from (``layer1`` …).

    Args:
        source: name of the network, such as ``"resnet50"`` or ``"convnext_tiny"``.

    Raises:
        MissingExtraError: timm is not installed.
        WeightsError: there is no such network, or timm takes no maps from it.
    """

    def __init__(self, source: str) -> None:
        network = _create(source, pretrained=False)
        super().__init__(network, list(network.feature_info.module_name()))  # type: ignore[operator, union-attr]
        self.source = source
        published = getattr(network, "default_cfg", None) or {}
        self.mean, self.std = tuple(published.get("mean", self.mean)), tuple(published.get("std", self.std))

    def load_published(self) -> None:
        """Load the weights that timm publishes."""
        self.network.load_state_dict(_create(self.source, pretrained=True).state_dict())


def _create(source: str, *, pretrained: bool) -> nn.Module:
    try:
        import timm
    except ImportError:
        raise MissingExtraError(f"timm:{source} needs the timm library: pip install timm.") from None
    try:
        network: nn.Module = timm.create_model(source, features_only=True, pretrained=pretrained)
    except Exception as error:  # an unknown name, no features, no connection: all of them of kinds of its own
        raise WeightsError(f"timm:{source} cannot be built: {str(error).splitlines()[0]}") from error
    return network
