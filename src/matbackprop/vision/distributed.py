"""Helpers for distributed training."""

from __future__ import annotations

import os
from typing import Any


def is_first_process() -> bool:
    """Return whether this is the first process of a run. Works before the process group is initialized."""
    variables = os.environ
    if "RANK" in variables:
        return int(variables["RANK"]) == 0
    if "SLURM_PROCID" in variables and variables.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return int(variables["SLURM_PROCID"]) == 0
    node = int(variables.get("NODE_RANK", variables.get("GROUP_RANK", 0)))
    return node == int(variables.get("LOCAL_RANK", 0)) == 0


def gather(value: Any) -> list[Any]:
    """Gather the values of all processes, ordered by rank. All processes must call this function."""
    from torch import distributed

    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
