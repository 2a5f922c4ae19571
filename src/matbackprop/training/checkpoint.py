"""Checkpoints that are never half-written, that say when they are damaged, and that execute nothing.

A checkpoint is an ordinary ``torch.save`` file whose archive comment carries its own SHA-256: plain
``torch.load(path, weights_only=True)`` reads it, :func:`load_checkpoint` verifies it first.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from matbackprop.errors import CheckpointError
from matbackprop.files import atomic_file

log = logging.getLogger("matbackprop")

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
        torch.save(plain, hashing)  # type: ignore[arg-type]
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
            raise CheckpointError(f"the checkpoint {path} is no regular file.")
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


def _plain(value: Any, where: str) -> Any:
    """Return ``value`` with only what ``torch.load(weights_only=True)`` accepts."""
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
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, key, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, key.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
