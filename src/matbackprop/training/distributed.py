"""The few things that processes ask each other, which one process answers alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["any_process", "gather_objects", "gather_rows"]


def _alone() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


def any_process(flag: bool, device: torch.device) -> bool:
    """Return whether the flag is set on any process; all call it together."""
    if _alone():
        return flag
    flags = torch.tensor(int(flag), device=device)
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
    return bool(flags)


def gather_objects(value: Any) -> list[Any]:
    """Return the values of all processes, in their order."""
    if _alone():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def gather_rows(value: Tensor) -> Tensor:
    """Concatenate tensors (n,) of different lengths from all processes, in their order."""
    if _alone():
        return value
    counts = gather_objects(len(value))
    padded = torch.cat([value, value.new_zeros(max(counts) - len(value))])
    parts = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(parts, padded)
    return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])
