"""Trained models by name: the one that comes with the package, a folder of ``save_pretrained``, a run folder, or a
repository of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from matbackprop.errors import WeightsError
from matbackprop.vision.configuration import suggest
from matbackprop.vision.devices import choose_device
from matbackprop.vision.files import shorten
from matbackprop.vision.models.deep_ncuts import DeepNCuts
from matbackprop.vision.models.deep_o2p import RegionClassifier
from matbackprop.vision.models.weights import CONFIG, fetch_pretrained, pretrained_config

M = TypeVar("M", DeepNCuts, RegionClassifier)

BOX = "box"
"""Name of the small segmenter and of the classifier that come with the package."""
_IN_THE_PACKAGE = (BOX, f"{BOX}/accurate", f"{BOX}/classifier")
"""Folders beside this file, each with its card, ``README.md``."""


def load_segmenter(source: str | Path = BOX, device: str = "auto") -> DeepNCuts:
    """Load a trained segmenter.

    Args:
        source: ``"box"`` for the small one that comes with the package, ``"box/accurate"`` for the larger one, which
            is better and slower; a folder of ``save_pretrained``, a run folder of ``matbackprop train ncuts``, or
            ``"owner/name"``.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Raises:
        WeightsError: there is no model, or one of another kind.
    """
    model = _load(source, DeepNCuts, "segment photographs", "ncuts").to(choose_device(device))
    return model.to(memory_format=model.backbone.memory_format)  # type: ignore[call-overload]


def load_classifier(source: str | Path = BOX, device: str = "auto") -> RegionClassifier:
    """Load a trained classifier of regions.

    Args:
        source: ``"box"`` for the one that comes with the package, which knows COCO's 80 classes, a folder of
            ``save_pretrained``, a run folder of ``matbackprop train o2p``, or ``"owner/name"``.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Raises:
        WeightsError: there is no model, or one of another kind.
    """
    source = f"{BOX}/classifier" if source == BOX else source
    return _load(source, RegionClassifier, "classify regions", "o2p").to(choose_device(device))


def load_model(source: str | Path) -> DeepNCuts | RegionClassifier:
    """Load a trained model of either kind, on the CPU.

    Args:
        source: as in :func:`load_segmenter` and :func:`load_classifier`; of those that come with the package ``"box"``
            and ``"box/accurate"`` are segmenters, ``"box/classifier"`` is the classifier.

    Raises:
        WeightsError: there is no model.
    """
    folder = _folder(source)
    if pretrained_config(folder).get("class") == RegionClassifier.__name__:
        return load_classifier(folder, "cpu")
    return load_segmenter(folder, "cpu")


def _folder(source: str | Path) -> Path:
    folder = Path(__file__).parent / source if source in _IN_THE_PACKAGE else Path(source)
    if (folder / "model" / CONFIG).is_file():  # a run folder
        return folder / "model"
    if (folder / "checkpoints").is_dir():
        raise WeightsError(f"the run {folder} has written no model yet; let it finish, or resume it with --resume.")
    if not folder.is_dir() and (str(source).startswith(f"{BOX}/") or "/" not in str(source)):
        raise WeightsError(f"There is no model {str(source)!r}. {suggest(str(source), _IN_THE_PACKAGE, 'Models')}")
    return folder if folder.is_dir() else fetch_pretrained(source)


def _load(source: str | Path, kind: type[M], purpose: str, recipe: str) -> M:
    folder = _folder(source)
    name = pretrained_config(folder).get("class")
    if name != kind.__name__:
        raise WeightsError(
            f"{folder} holds a {shorten(str(name))} by its {CONFIG}, which does not {purpose}; train one with "
            f"'matbackprop train {recipe}'."
        )
    return kind.from_pretrained(folder)
