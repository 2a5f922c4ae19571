"""Starting weights of a backbone or a saved model (``matbackprop train RECIPE --from MODEL``)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import nn

from matbackprop.errors import ConfigurationError
from matbackprop.vision.inference.loading import BOX, model_folder
from matbackprop.vision.models.backbones import check_published, load_backbone_weights
from matbackprop.vision.models.weights import WEIGHTS, load_weights_into, pretrained_config, read_weights
from matbackprop.vision.training.config import Recipe

_CLASSES = {"o2p": "RegionClassifier", "ncuts": "DeepNCuts", "contours": "ContourNet"}


def saved_fields(recipe: Recipe, source: str) -> dict[str, dict[str, Any]]:
    """Return the configuration fields for fine-tuning a saved model.

    ``source`` is ``"box"``, a folder of ``save_pretrained``, a run folder, or ``"owner/name"`` on the hub.
    """
    source = f"{BOX}/classifier" if recipe.name == "o2p" and source == BOX else source
    saved = pretrained_config(model_folder(source))
    if saved["class"] != _CLASSES[recipe.name]:
        other = next((name for name, kind in _CLASSES.items() if kind == saved["class"]), None)
        fix = f"Use matbackprop train {other}." if other else "Choose another model."
        raise ConfigurationError(f"{source} is a {saved['class']}, which recipe {recipe.name} does not train. {fix}")
    check_published(saved["arguments"].get("backbone"))
    default = recipe.config_class()
    fields: dict[str, dict[str, Any]] = {}
    for section in ("model", "data"):
        names = {field.name for field in dataclasses.fields(getattr(default, section))}
        arguments = saved["arguments"].items()
        fields[section] = {name: value for name, value in arguments if name in names and value is not None}
    fields["model"]["weights"] = str(Path(source).resolve()) if Path(source).is_dir() else source
    return fields


def load_start(model: nn.Module, backbone: str, weights: str) -> None:
    """Load starting weights into a model with a submodule ``backbone``.

    ``weights`` is as in :func:`~matbackprop.vision.models.backbones.published.load_backbone_weights`, or a saved model
    of the same architecture. If its classes differ, the classifier is initialized randomly.
    """
    if weights in ("imagenet", "none") or weights.endswith(".safetensors"):
        load_backbone_weights(model.backbone, backbone, weights)  # type: ignore[arg-type]
        return
    folder = model_folder(weights)
    state = read_weights(folder / WEIGHTS)
    if getattr(model, "names", None) != pretrained_config(folder)["arguments"].get("names"):
        state |= {name: value for name, value in model.state_dict().items() if name.startswith("classifier.")}
    load_weights_into(model, state, str(folder / WEIGHTS))
