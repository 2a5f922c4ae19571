"""Devices and processors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from matbackprop.errors import ConfigurationError

if TYPE_CHECKING:
    import torch


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_device(name: str = "auto") -> torch.device:
    """Return a device by name. ``"auto"`` selects CUDA if available; ``"gpu"`` is an alias of ``"cuda"``.

    Raises:
        ConfigurationError: CUDA is not available.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = "cuda" if name == "gpu" else name
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("CUDA is not available. Use cpu or auto.")
    return torch.device(name)
