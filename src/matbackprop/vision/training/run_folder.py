"""The run folder: everything that a run leaves behind, in files that other programs can read.

======================  ================================================================================
``config.json``         the resolved configuration
``versions.json``       versions, git revision, platform, command and seed, one entry per start
``log.txt``             what was said
``metrics.jsonl``       one JSON object per line: step, epoch, time and named numbers
``tensorboard/``        the same as TensorBoard curves
``checkpoints/``        ``last.ckpt``, ``previous.ckpt``, ``best.ckpt``
``figures/``            pictures
``predictions/``        what the model said about the validation data
``profile.json``        the division of a step's time, where ``--profile`` was given
``nonfinite/``          the batch and the layer's report, where a run met NaN or Inf
``summary.json``        the final numbers
``report.html``         all of it on one page
======================  ================================================================================
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import pickle
import platform
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from matbackprop.errors import CheckpointError, ConfigurationError
from matbackprop.vision.files import (
    atomic_file,
    atomic_write,
    locked,
    parse_json,
    plain_numbers,
    read_bytes,
    read_json,
    remove_written,
    shorten,
    show,
)
from matbackprop.vision.training.config import EngineConfig, differences, to_json

log = logging.getLogger("matbackprop")

_FIXED = {"seed", "precision", "matmul_precision", "deterministic", "gradient_clip", "accumulate", "validate_every",
          "monitor", "monitor_mode"}  # fmt: skip
"""Fields of the engine that may not change when a run is resumed; the others say how it is carried out."""

_PACKAGES = ("matbackprop", "torch", "lightning-fabric", "torchmetrics", "numpy", "scipy", "safetensors", "triton",
             "cupy-cuda12x")  # fmt: skip
_LONGEST = 1 << 20  # bytes of a line of metrics
_MARK = ".matbackprop-run"
_LOCK = ".lock"
_FILES = ("config.json", "versions.json", "log.txt", "metrics.jsonl", "profile.json", "summary.json", "report.html")
_WRITTEN = (
    *_FILES,
    _LOCK,
    "result.json",
    "model/README.md",
    "model/config.json",
    "model/model.safetensors",
    "checkpoints/*.ckpt",
    "tensorboard/events.out.tfevents.*",
    "nonfinite/step-*/report.json",
    "nonfinite/step-*/batch.safetensors",
)
"""Files that every run may write; figures and predictions are named in the mark as they are written."""


def versions() -> dict[str, Any]:
    """Return versions, git revision, platform and command of this process."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "packages": package_versions(_PACKAGES),
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "platform": platform.platform(),
        "command": sys.argv,
        **git_revision(),
    }


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    known = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            known[name] = metadata.version(name)
    return known


def git_revision() -> dict[str, Any]:
    """Return the revision of the checkout that this package lives in, if it lives in one."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    revision = git("rev-parse", "HEAD")
    if revision is None:
        return {"git": None}
    return {"git": revision, "git_dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}


class RunFolder:
    """A folder with the files of one run. Opening one needs only its path; :meth:`create` starts one.

    Example:
        >>> import tempfile
        >>> run = RunFolder(Path(tempfile.mkdtemp()) / "run").create({"seed": 0})
        >>> run.append_metrics({"step": 1, "epoch": 0, "train/loss": 0.5})
        >>> run.read_metrics()[0]["train/loss"]
        0.5
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.json"
        self.versions_path = self.path / "versions.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.summary_path = self.path / "summary.json"
        self.log_path = self.path / "log.txt"
        self.report_path = self.path / "report.html"
        self.profile_path = self.path / "profile.json"
        self.checkpoints = self.path / "checkpoints"
        self.figures = self.path / "figures"
        self.predictions = self.path / "predictions"
        self.tensorboard = self.path / "tensorboard"
        self.nonfinite = self.path / "nonfinite"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    # ------------------------------------------------------------------------------------------------------- creating

    def discard(self) -> None:
        """Remove the folder of a run that never began, unless it holds anything that no run wrote."""
        with suppress(ConfigurationError):
            remove_written(self.path, _MARK, self._written())

    def create(
        self, config: Any, *, resume: bool = False, overwrite: bool = False, seed: int | None = None
    ) -> RunFolder:
        """Create the folder, or enter it again when ``resume`` is set.

        Args:
            config: a configuration dataclass or its JSON form; saved as ``config.json``.
            resume: continue the run that is there; its configuration must be the same but for how the run is
                carried out.
            overwrite: remove what a run wrote to a folder that is there; where it holds anything else, nothing is
                removed and ConfigurationError raised.
            seed: noted in ``versions.json``.
        """
        data = to_json(config)
        marked = (self.path / _MARK).is_file()
        if any((self.path / name).exists() for name in (_MARK, *_FILES)):
            if overwrite:
                remove_written(self.path, _MARK, self._written(), keep=[_LOCK])
            elif resume:
                self._check_same(data)
            else:
                raise ConfigurationError(
                    f"{self.path} already holds a run. Continue it with --resume, replace it with "
                    "--overwrite, or name another folder with --run."
                )
        for folder in (self.path, self.checkpoints, self.figures, self.predictions):
            folder.mkdir(parents=True, exist_ok=True)
        for name in (*(f".{name}.*.tmp" for name in _FILES), "checkpoints/.*.ckpt.*.tmp"):
            for path in self.path.glob(name):  # which a process that was killed left half-written
                path.unlink(missing_ok=True)
        if overwrite or not marked:
            (self.path / _MARK).write_text("A folder of matbackprop: --overwrite removes what a run wrote.\n")
        atomic_write(self.config_path, json.dumps(data, indent=2) + "\n")
        starts = self.read_versions()
        entry = versions() | ({} if seed is None else {"seed": seed})
        atomic_write(self.versions_path, json.dumps([*starts, entry], indent=2) + "\n")
        return self

    def locked(self) -> AbstractContextManager[None]:
        """Let no other process write to the folder, which is made if need be; raise where one is writing to it."""
        self.path.mkdir(parents=True, exist_ok=True)
        return locked(
            self.path / _LOCK,
            f"another process is training in {self.path}. Wait until it has ended, or name another folder with --run.",
        )

    def _written(self) -> list[str]:
        """Return patterns of all files that the run in this folder wrote."""
        mark = self.path / _MARK
        noted = read_bytes(mark, 1 << 24).decode(errors="replace").splitlines()[1:] if mark.is_file() else []
        temporary = [(Path(name).parent / f".{Path(name).name}.*.tmp").as_posix() for name in _WRITTEN]
        return [*_WRITTEN, *temporary, *(line.replace("[", "[[]") for line in noted)]

    def _check_same(self, data: Any) -> None:
        prefix = "engine." if "engine" in data else ""
        free = {prefix + one.name for one in dataclasses.fields(EngineConfig) if one.name not in _FIXED}
        differing = differences(self.read_config(), data)
        if prefix + "max_epochs" in differing:
            before, now = differing[prefix + "max_epochs"]
            log.warning("The run now has %s epochs instead of %s; schedules that end with it change.", now, before)
        changed = {k: v for k, v in differing.items() if k not in free}
        if changed:
            lines = "; ".join(
                f"{key}: {shorten(repr(old))} then, {shorten(repr(new))} now"
                for key, (old, new) in sorted(changed.items())
            )
            raise ConfigurationError(
                f"the run in {self.path} was started with another configuration ({lines}). Give the same options, "
                "or another folder with --run."
            )

    # --------------------------------------------------------------------------------------------------------- places

    def figure_path(self, name: str) -> Path:
        """Return where the figure ``name`` (with or without .png) belongs, its folder made."""
        return self._place(self.figures / (name if Path(name).suffix else name + ".png"))

    def predictions_path(self, name: str) -> Path:
        """Return where the predictions ``name`` belong, their folder made."""
        return self._place(self.predictions / name)

    def _place(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        mark, line = self.path / _MARK, path.relative_to(self.path).as_posix()
        if mark.is_file() and line not in read_bytes(mark, 1 << 24).decode(errors="replace").splitlines():
            with mark.open("a") as file:
                file.write(line + "\n")
        return path

    # -------------------------------------------------------------------------------------------------------- reading

    def read_config(self) -> dict[str, Any]:
        """Return the resolved configuration in its JSON form."""
        if not self.config_path.exists():
            raise ConfigurationError(f"{self.path} is not a run folder: it has no {self.config_path.name}.")
        return read_json(self.config_path, error=ConfigurationError)

    def read_versions(self) -> list[dict[str, Any]]:
        """Return one entry for each start of the run."""
        if not self.versions_path.exists():
            return []
        starts = read_json(self.versions_path, list, error=ConfigurationError)
        for start in starts:
            if not isinstance(start, dict) or not isinstance(start.get("git"), (str, type(None))):
                raise ConfigurationError(f"{self.versions_path} is damaged: an entry is {show(start)}.")
        return starts

    def read_summary(self) -> dict[str, Any]:
        """Return the final numbers, empty where the run has not ended."""
        if not self.summary_path.exists():
            return {}
        summary = read_json(self.summary_path, error=ConfigurationError)
        for name, value in summary.items():
            measure = "/" in name and value is not None
            if (measure or name in ("seconds", "best", "best_step")) and not is_number(value):
                raise ConfigurationError(f"{self.summary_path} is damaged: {show(name)} is {show(value)}.")
        return summary

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return all lines of metrics; a last line that a crash left half-written is passed over."""
        if not self.metrics_path.exists():
            return []
        if not self.metrics_path.is_file():
            raise ConfigurationError(f"{self.metrics_path} is not a regular file.")
        metrics = []
        with self.metrics_path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), 1):
                if not line.endswith(b"\n") and len(line) < _LONGEST:
                    break
                place = f"{self.metrics_path}, line {number}"
                row = parse_json(line, place, error=ConfigurationError)
                bad = [name for name, value in row.items() if value is not None and not is_number(value)]
                if bad or not isinstance(row.get("step"), int) or row["step"] < 0:
                    name = bad[0] if bad else "step"
                    raise ConfigurationError(f"{place} is damaged: {show(name)} is {show(row.get(name))}.")
                metrics.append(row)
        return metrics

    # -------------------------------------------------------------------------------------------------------- writing

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append one line of metrics; the time is added. Values that are not finite are written as null."""
        line = {"step": 0, "epoch": 0, "time": round(time.time(), 3), **metrics}
        with self.metrics_path.open("a") as file:
            file.write(json.dumps({k: plain_numbers(v) for k, v in line.items()}) + "\n")

    def keep_metrics_until(self, step: int, validated: bool = True) -> None:
        """Drop the lines after ``step``, which a run that resumes there writes again.

        The numbers of a validation after that very step stay where it is done (``validated``).
        """
        kept = [
            line
            for line in self.read_metrics()
            if line.get("step", 0) < step
            or (line.get("step", 0) == step and (validated or not any(name.startswith("val/") for name in line)))
        ]
        atomic_write(self.metrics_path, "".join(json.dumps(line) + "\n" for line in kept))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the final numbers."""
        atomic_write(self.summary_path, json.dumps({k: plain_numbers(v) for k, v in summary.items()}, indent=2) + "\n")


def is_number(value: Any) -> bool:
    """Whether a value from JSON is a finite number, small enough to be drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


# --------------------------------------------------------------------------------------------------------- checkpoints
#
# Never half-written, they say when they are damaged, and reading them executes nothing: ordinary ``torch.save`` files
# whose archive comment carries their own SHA-256. Plain ``torch.load(path, weights_only=True)`` reads them too.

_PREFIX = b"matbackprop-sha256:"
_COMMENT = len(_PREFIX) + 64
_CHUNK = 1 << 24


class _HashingFile:
    """A file that hashes what is written to it, holding back the last bytes: the archive's empty comment."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.hash = hashlib.sha256()
        self.held = b""

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        if len(data) >= 2:
            self._emit(self.held)
            self._emit(data[:-2])
            self.held = bytes(data[-2:])
        else:
            joined = self.held + bytes(data)
            self._emit(joined[:-2])
            self.held = joined[-2:]
        return len(data)

    def _emit(self, data: Any) -> None:
        self.hash.update(data)
        self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def finish(self) -> None:
        if self.held != b"\0\0":
            raise CheckpointError("torch.save wrote an archive that does not end as expected; nothing was replaced.")
        self.file.write(_COMMENT.to_bytes(2, "little") + _PREFIX + self.hash.hexdigest().encode())


def save_checkpoint(content: Mapping[str, Any], path: str | Path, *, keep: str | Path | None = None) -> None:
    """Write a checkpoint: temporary file, flush to disk, rename.

    Args:
        content: nested dicts, lists and tuples of tensors, numbers, strings and None.
        path: the target.
        keep: where the file that is now at ``path`` is kept as the one before.

    Raises:
        CheckpointError: ``content`` holds an object that a safe reader would refuse.
    """
    path = Path(path)
    plain = _plain(content, "checkpoint")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        hashing = _HashingFile(file)
        try:
            torch.save(plain, hashing)  # type: ignore[arg-type]
        except RuntimeError as error:  # torch's complaint about the archive hides that the disk is full
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        hashing.finish()
        if keep is not None and path.exists():
            _link(path, Path(keep))


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Verify a checkpoint's checksum and read it with ``torch.load(weights_only=True)``.

    Raises:
        CheckpointError: the file is missing, cut short or changed, or was not written by :func:`save_checkpoint`.
    """
    path = Path(path)
    verify_checkpoint(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # whose text advises to read it unsafely
        raise CheckpointError(f"{path} is not read: it holds more than tensors and plain values, or none.") from error
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {str(error)[:200]}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not the state of a training.")
    return state


def verify_checkpoint(path: Path) -> None:
    """Raise :class:`CheckpointError` unless the file is complete and unchanged."""
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"the checkpoint {path} is not a regular file.")
        size = path.stat().st_size
        with path.open("rb") as file:
            if size < _COMMENT + 22:
                raise CheckpointError(f"{path} is damaged: it has only {size} bytes.")
            file.seek(-_COMMENT - 2, os.SEEK_END)
            tail = file.read()  # first, since hashing a large file takes long
            if tail[2 : 2 + len(_PREFIX)] != _PREFIX:
                raise CheckpointError(
                    f"{path} is damaged (cut short?) or was not written by this library: it has no checksum."
                )
            file.seek(0)
            digest = hashlib.sha256()
            left = size - _COMMENT - 2
            while left:
                chunk = file.read(min(_CHUNK, left))
                if not chunk:
                    raise CheckpointError(f"{path} is damaged: it became shorter while it was read.")
                digest.update(chunk)
                left -= len(chunk)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror}.") from error
    if tail != _COMMENT.to_bytes(2, "little") + _PREFIX + digest.hexdigest().encode():
        raise CheckpointError(f"{path} is damaged: its content does not fit its checksum.")


def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest undamaged checkpoint of a folder, or None where there is none at all.

    A damaged ``last.ckpt`` is announced and ``previous.ckpt`` used instead.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    folder = Path(folder)
    damaged = []
    for name in ("last.ckpt", "previous.ckpt"):
        path = folder / name
        if not path.exists():
            continue
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            damaged.append(path)
            log.warning(f"{error} Looking for the checkpoint before it.")
            continue
        if damaged:
            log.warning(f"Resuming from {path}; the steps after it are done again.")
        return path
    if damaged:
        raise CheckpointError(
            f"all checkpoints in {folder} are damaged ({', '.join(p.name for p in damaged)}). "
            "Start again with --overwrite."
        )
    return None


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, replacing what had it, so that the name is never without a file."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # file systems without hard links
        shutil.copyfile(source, temporary)
    temporary.replace(target)
    temporary.unlink(missing_ok=True)  # where target was the same file already, replacing did nothing


def _plain(value: Any, where: str) -> Any:
    """Return ``value`` with only what ``torch.load(weights_only=True)`` accepts."""
    import numpy as np

    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {k if type(k) in (str, int) else str(k): _plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
        return tuple(items) if type(value) is tuple else items
    if isinstance(value, (bool, int, float, str)):  # subclasses, for example enumerations of strings
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    if isinstance(value, (torch.Size, torch.dtype, torch.device)):
        return value
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__name__}, which a checkpoint cannot hold because reading "
        "it would execute code. Keep numbers, strings, tensors, lists and dicts in states."
    )


# ------------------------------------------------------------------------------------------------------- random states


def random_state() -> dict[str, Any]:
    """Return the states of all random generators of this process, in plain values and tensors."""
    import numpy as np

    version, words, gauss = random.getstate()
    name, key, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(key).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set what :func:`random_state` gave."""
    import numpy as np

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, key, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, key.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
