"""Results that know what made them.

A result is kept with its *provenance*, everything that its numbers depend on: the configuration, the data, the starting
weights, the kind of device and the measure. The hash of the provenance, its *fingerprint*, is part of the name of the
result's folder, so a result that was made otherwise is never taken for the one that is asked for, nor overwritten.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from matbackprop.data.cache import cache_key
from matbackprop.errors import DataError
from matbackprop.files import atomic_write, read_json
from matbackprop.training.config import differences, to_json

__all__ = ["Job", "Store", "data_digest", "fingerprint", "settings", "weights_digest"]

_ENGINE = ("seed", "max_epochs", "precision", "matmul_precision", "deterministic", "gradient_clip", "accumulate")
"""Fields of the engine that change numbers; the others say where and how a run is carried out."""
_PLACES = {"root", "cache", "workers", "threads", "resident"}
"""Fields of the data that say where and how, not what: what is there is hashed on its own."""
_PICTURES = {".jpg", ".jpeg", ".png", ".bmp"}
_READABLE = _PICTURES | {".mat", ".seg", ".json", ".npy", ".npz"}


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        key: of what it is a run: a row, a group of rows, a baseline.
        part: its purpose, such as ``"trial"`` or ``"seed"``.
        number: which of those.
    """

    key: str
    part: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.key} {self.part} {self.number}"


def fingerprint(provenance: Mapping[str, Any]) -> str:
    """The hash of everything that makes a result, 16 hexadecimal digits.

    Example:
        >>> fingerprint({"data": "a", "device": "cpu"}) == fingerprint({"device": "cpu", "data": "a"})
        True
    """
    return cache_key(provenance)


def settings(config: Any) -> dict[str, Any]:
    """What the numbers of a run depend on, of a recipe's configuration: not where and how it is carried out.

    A field that was added later (its metadata say so) counts where it is set: unset it means what was meant before.

    Args:
        config: a configuration with the fields ``engine`` and ``data``, or its JSON form.
    """
    fields: dict[str, Any] = to_json(config)
    for section, values in fields.items():
        for one in dataclasses.fields(getattr(config, section)) if dataclasses.is_dataclass(config) else ():
            if one.metadata.get("added") and getattr(getattr(config, section), one.name) == one.default:
                del values[one.name]
    fields["engine"] = {name: fields["engine"][name] for name in _ENGINE}
    fields["data"] = {name: value for name, value in fields["data"].items() if name not in _PLACES}
    return fields


@cache
def data_digest(root: Path, splits: tuple[str, ...]) -> str:
    """The hash of a data set: names and sizes of its pictures, contents of its annotations.

    Args:
        root: its folder, in the layout of COCO or BSDS.
        splits: the parts to look at, such as ``("train", "val")``.

    Raises:
        DataError: there is no such file.
    """
    names = {split + year for split in splits for year in ("", "2014", "2017")}
    total, files = hashlib.sha256(), 0
    for path in sorted(root.rglob("*")):
        place = path.relative_to(root)
        words = {*place.parts[:-1], path.stem.removeprefix("instances_")}
        if path.suffix.lower() not in _READABLE or not names & words or not path.is_file():
            continue
        files += 1
        total.update(f"{place.as_posix()}\0{path.stat().st_size}\0".encode())
        if path.suffix.lower() not in _PICTURES or "groundTruth" in place.parts:
            total.update(hashlib.sha256(path.read_bytes()).digest())
    if not files:
        raise DataError(f"{root} holds no picture or annotation of {', '.join(splits)}; check --data.root.")
    return total.hexdigest()[:16]


def weights_digest(backbone: str, weights: str) -> str:
    """The hash of a backbone's starting weights.

    Args:
        backbone: its name.
        weights: ``"imagenet"``, ``"none"`` or a file, as configurations name them.
    """
    from matbackprop.models.weights import find_weights

    if weights == "none":
        return "none"
    path = find_weights(backbone) if weights == "imagenet" else Path(weights)
    if not path.is_file():
        raise DataError(f"there are no weights at {path}; name a safetensors file, imagenet or none.")
    return _file_digest(path, path.stat().st_mtime_ns)


@cache
def _file_digest(path: Path, changed: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class Store:
    """Results on the disk, in ``<folder>/<key>/<part><number>-<fingerprint>/result.json``.

    Example:
        >>> import tempfile
        >>> store, job = Store(Path(tempfile.mkdtemp())), Job("alexnet", "seed", 0)
        >>> store.write(job, {"device": "cpu"}, {"error": 40.0})
        >>> store.read(job, {"device": "cpu"})["error"], store.read(job, {"device": "cuda"})
        (40.0, None)
        >>> store.made_otherwise(job, {"device": "cuda"})
        [{'device': ('cpu', 'cuda')}]
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, dict[str, Any]] = {}

    def path(self, job: Job, provenance: Mapping[str, Any]) -> Path:
        """The folder of a result."""
        return self.folder / job.key / f"{job.part}{job.number}-{fingerprint(provenance)}"

    def read(self, job: Job, provenance: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result of a job that was made by ``provenance``; None where there is none.

        Raises:
            DataError: the file is damaged, or tells of another provenance than its folder's name.
        """
        path = self.path(job, provenance) / "result.json"
        if path in self._read:  # what is finished does not change
            return self._read[path]
        if not path.is_file():
            return None
        try:
            result: dict[str, Any] = read_json(path)
        except DataError as error:
            raise DataError(f"{error} To do the run again, remove its folder.") from error
        if fingerprint(result.get("provenance", {})) == fingerprint(provenance):
            return self._read.setdefault(path, result)
        raise DataError(f"{path} was made by something else than its folder says; remove the folder.")

    def write(self, job: Job, provenance: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Keep a result."""
        path = self.path(job, provenance)
        path.mkdir(parents=True, exist_ok=True)
        content = {**result, "provenance": to_json(provenance)}
        atomic_write(path / "result.json", json.dumps(content, indent=1) + "\n")

    def made_otherwise(self, job: Job, provenance: Mapping[str, Any]) -> list[dict[str, tuple[Any, Any]]]:
        """What differs in the job's results that were made by something else: dotted name → (there, asked for)."""
        asked = to_json(provenance)
        paths = sorted((self.folder / job.key).glob(f"{job.part}{job.number}-*/result.json"))
        there = (read_json(path).get("provenance", {}) for path in paths)
        return [changes for one in there if (changes := differences(one, asked))]
