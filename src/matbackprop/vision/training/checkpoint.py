"""Checkpoints: ``torch.save`` archives of tensors and plain values with CRC-32 checksums.

They are written atomically and read without executing code.
"""

from __future__ import annotations

import pickle
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from matbackprop.errors import CheckpointError, ConfigurationError
from matbackprop.vision.files import atomic_file, check_file

_FIX = "Restore a copy, or start again with --overwrite."


def save_checkpoint(content: Mapping[str, Any], path: str | Path) -> None:
    """Write nested dicts, lists and tuples of tensors and plain values atomically, or raise CheckpointError."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        try:
            torch.save(content, file)
            file.flush()
        except RuntimeError as error:  # hides the OSError of a full disk
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        if code := torch.serialization.get_unsafe_globals_in_checkpoint(file.name):
            raise CheckpointError(
                f"The state contains {', '.join(code)}. Reading it would execute code. Use numbers, strings, tensors, "
                "lists and dicts in states."
            )


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Verify the checksums and read with ``weights_only=True``. Raise CheckpointError for any other file."""
    path = Path(path)
    check_file(path, CheckpointError)
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        state = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its text recommends weights_only=False
        raise CheckpointError(f"{path} contains more than tensors and plain values. Use another file.") from error
    except Exception as error:  # zipfile and torch raise many exception types
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {str(error)[:200]}). {_FIX}") from error
    if damaged:
        raise CheckpointError(f"{path} is damaged: wrong checksum of {damaged}. {_FIX}")
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} contains a {type(state).__name__}, not the state of a training run. {_FIX}")
    return state


def load_state(system: nn.Module, state: Mapping[str, Any], path: Path) -> None:
    """Load the weights of a checkpoint into a system, or raise ConfigurationError if they do not match."""
    try:
        system.load_state_dict(state["state_dict"])
    except (RuntimeError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).replace("\n\t", " ")[:500]
        raise ConfigurationError(f"{path} does not match the configuration. Use the run's options. {reason}") from error


def seed_all(seed: int) -> None:
    """Seed the global random generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return the states of the random generators of Python, NumPy and torch."""
    version, words, gauss = random.getstate()
    name, key, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": [version, torch.tensor(words), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(key, dtype=np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore states returned by :func:`random_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, key, *rest = state["numpy"]
    np.random.set_state((name, key.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
