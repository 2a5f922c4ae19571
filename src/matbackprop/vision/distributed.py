"""Helpers for distributed training."""

from __future__ import annotations

import os
from typing import Any


def is_first_process() -> bool:
    """Return whether this is the first process of a run. Works before the process group is initialized."""
    interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    names = ("RANK", "LOCAL_RANK", *(() if interactive else ("SLURM_PROCID",)))
    return int(next((os.environ[name] for name in names if name in os.environ), 0)) == 0


def gather(value: Any) -> list[Any]:
    """Gather the values of all processes, ordered by rank. All processes must call this function."""
    from torch import distributed

    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
