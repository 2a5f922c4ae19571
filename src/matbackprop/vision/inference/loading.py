"""Load trained models by name: from the package, a folder, a run folder, or the Hugging Face hub."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from matbackprop.errors import WeightsError
from matbackprop.vision.configuration import suggest
from matbackprop.vision.devices import choose_device
from matbackprop.vision.files import shorten
from matbackprop.vision.models.weights import CONFIG, fetch_pretrained, pretrained_config

if TYPE_CHECKING:
    from matbackprop.vision.models.contours import ContourNet
    from matbackprop.vision.models.deep_ncuts import DeepNCuts
    from matbackprop.vision.models.deep_o2p import RegionClassifier

    Segmenter = ContourNet | DeepNCuts

#: Class of a model → its module, which is imported when a model of the class is loaded.
_MODULES = {"ContourNet": "contours", "DeepNCuts": "deep_ncuts", "RegionClassifier": "deep_o2p"}

BOX = "box"  #: Name of the models in the package.
#: Folders of the models in the package, each with a model card ``README.md``.
_IN_THE_PACKAGE = (BOX, f"{BOX}/small", f"{BOX}/classifier")


def load_segmenter(source: str | Path = BOX, device: str = "auto") -> Segmenter:
    """Load a trained segmenter.

    Args:
        source: ``"box"`` for the contour network in the package, ``"box/small"`` for a faster one; a folder of
            ``save_pretrained``; a run folder of ``matbackprop train contours`` or ``train ncuts``; or
            ``"owner/name"`` on the Hugging Face hub.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Raises:
        WeightsError: the model does not exist or is not a segmenter.
    """
    model: Any = load_model(source)
    kind = type(model).__name__
    if kind == "RegionClassifier":
        raise WeightsError(f"{source} is a classifier. Use box, or a model of 'matbackprop train contours'.")
    layout = torch.channels_last if kind == "ContourNet" else model.backbone.memory_format
    return model.to(choose_device(device), memory_format=layout)


def load_classifier(source: str | Path = BOX, device: str = "auto") -> RegionClassifier:
    """Load a trained region classifier.

    Args:
        source: ``"box"`` for the classifier in the package, for the 80 classes of COCO; or as in
            :func:`load_segmenter`, a run folder being of ``matbackprop train o2p``.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Raises:
        WeightsError: the model does not exist or is not a classifier.
    """
    model: Any = load_model(f"{BOX}/classifier" if source == BOX else source)
    if type(model).__name__ != "RegionClassifier":
        raise WeightsError(f"{source} is a segmenter. Use box, or a model of 'matbackprop train o2p'.")
    return model.to(choose_device(device))


def load_model(source: str | Path) -> Segmenter | RegionClassifier:
    """Load a trained model of any kind, on the CPU.

    Args:
        source: as in :func:`load_segmenter` and :func:`load_classifier`. ``"box"`` and ``"box/small"`` are the
            segmenters in the package and ``"box/classifier"`` is the classifier.

    Raises:
        WeightsError: the model does not exist.
    """
    folder = model_folder(source)
    kind = pretrained_config(folder)["class"]
    if kind not in _MODULES:
        raise WeightsError(f"{folder / CONFIG} has the unknown class {shorten(kind)!r}. Choose another model.")
    module = import_module(f"matbackprop.vision.models.{_MODULES[kind]}")
    return getattr(module, kind).from_pretrained(folder)  # type: ignore[no-any-return]


def model_folder(source: str | Path) -> Path:
    """Return the folder of a saved model by name; see :func:`load_model`."""
    folder = Path(__file__).parent / source if source in _IN_THE_PACKAGE else Path(source)
    if (folder / "model" / CONFIG).is_file():  # a run folder
        return folder / "model"
    if (folder / "checkpoints").is_dir():
        raise WeightsError(f"The run {folder} contains no model yet. Wait until it ends, or rerun it with --resume.")
    if not folder.is_dir() and (str(source).startswith(f"{BOX}/") or "/" not in str(source)):
        raise WeightsError(f"There is no model {str(source)!r}. {suggest(str(source), _IN_THE_PACKAGE, 'Models')}")
    return folder if folder.is_dir() else fetch_pretrained(source)
