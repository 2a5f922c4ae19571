"""Backbones of the torchvision library: any of its models, by the names of its submodules."""

from __future__ import annotations

from torch import nn

from matbackprop.errors import MissingExtraError, WeightsError
from matbackprop.models.backbones.modules import ModuleBackbone

__all__ = ["TorchvisionModel"]


class TorchvisionModel(ModuleBackbone):
    """A model of torchvision; its maps are outputs of its submodules (``layer3``, ``features.5``).

    Args:
        source: name of the model, such as ``"resnet50"``.

    Raises:
        MissingExtraError: torchvision is not installed.
        WeightsError: there is no such model.
    """

    def __init__(self, source: str) -> None:
        super().__init__(_create(source, None))
        self.source = source

    def load_published(self) -> None:
        """Load the weights that torchvision publishes."""
        self.network.load_state_dict(_create(self.source, "DEFAULT").state_dict())


def _create(source: str, weights: str | None) -> nn.Module:
    try:
        from torchvision.models import get_model
    except ImportError:
        raise MissingExtraError(
            f"torchvision:{source} needs the torchvision library: pip install torchvision."
        ) from None
    try:
        network: nn.Module = get_model(source, weights=weights)
    except Exception as error:  # an unknown name or no connection
        raise WeightsError(f"torchvision:{source} cannot be built: {str(error).splitlines()[0]}") from error
    return network
