"""Backbones of the ``transformers`` library: ResNet, ConvNeXt, Swin, DINOv2, ViT, all that ``AutoBackbone`` knows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from matbackprop.errors import MissingExtraError, WeightsError
from matbackprop.models.backbones.modules import ListedMaps

__all__ = ["HuggingFace"]


class HuggingFace(ListedMaps):
    """A backbone of Hugging Face's ``transformers``; its maps have the library's names (``stem``, ``stage1`` …).

    Args:
        source: a model on the hub, such as ``"facebook/dinov2-small"`` or ``"microsoft/resnet-50"``, or a folder with
            its ``config.json``.

    Raises:
        MissingExtraError: transformers is not installed.
        WeightsError: there is no such model, or it is none that gives feature maps.
    """

    def __init__(self, source: str) -> None:
        try:
            from transformers import AutoBackbone, AutoConfig
        except ImportError:
            raise MissingExtraError(f"hf:{source} needs the transformers library: pip install transformers.") from None
        try:
            config = AutoConfig.from_pretrained(source)
            stages = AutoBackbone.from_config(config).stage_names
            config.out_features = list(stages)
            network = AutoBackbone.from_config(config)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise WeightsError(f"hf:{source} cannot be built: {str(error).splitlines()[0]}") from error
        super().__init__(network, list(network.out_features), int(getattr(config, "patch_size", 1) or 1))
        self.source = source
        self.mean, self.std = _normalisation(source, self.mean, self.std)

    @staticmethod
    def listed(network: nn.Module, image: Tensor) -> Sequence[Tensor]:
        """The stages' maps."""
        return network(image).feature_maps

    def load_published(self) -> None:
        """Load the weights that are published with the model."""
        try:
            published = type(self.network).from_pretrained(self.source, out_features=self.names)  # type: ignore[attr-defined]
        except (OSError, ValueError) as error:
            raise WeightsError(
                f"the weights of hf:{self.source} cannot be had: {str(error).splitlines()[0]}"
            ) from error
        self.network.load_state_dict(published.state_dict())


def _normalisation(
    source: str, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of the pixels, from the model's ``preprocessor_config.json`` where there is one."""
    from transformers.utils import cached_file

    try:
        path = cached_file(source, "preprocessor_config.json")
        content = json.loads(Path(str(path)).read_text())
        return tuple(map(float, content["image_mean"])), tuple(map(float, content["image_std"]))
    except (OSError, ValueError, KeyError, TypeError):
        return mean, std
