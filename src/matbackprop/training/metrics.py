"""Metrics without waiting for the device: sums stay where they are computed and are read every ``log_every`` steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matbackprop.training.run_folder import RunFolder

__all__ = ["Means", "MetricsWriter"]

log = logging.getLogger("matbackprop")


class Means:
    """Weighted means of named numbers, accumulated on their device.

    Example:
        >>> means = Means()
        >>> means.add("loss", torch.tensor(1.0), weight=1)
        >>> means.add("loss", torch.tensor(4.0), weight=2)
        >>> means.flush()
        {'loss': 3.0}
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[Any]] = {}

    def add(self, name: str, value: Tensor | float, weight: float = 1.0) -> None:
        """Add a scalar; ``weight`` is usually the number of items that it is the mean of."""
        value = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        entry = self._sums.get(name)
        if entry is None:
            self._sums[name] = [value.to(torch.float64) * weight, weight]
            return
        if entry[0].device != value.device:  # a checkpoint's
            entry[0] = entry[0].to(value.device)
        entry[0].add_(value, alpha=weight)  # one kernel, no waiting
        entry[1] += weight

    def state_dict(self) -> dict[str, list[Any]]:
        """Return the sums so far, on the CPU."""
        return {name: [total.cpu().clone(), weight] for name, (total, weight) in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, list[Any]]) -> None:
        """Continue from what :meth:`state_dict` gave."""
        self._sums = {name: [total, weight] for name, (total, weight) in state.items()}

    def flush(self, reduce_on: torch.device | None = None) -> dict[str, float]:
        """Return the means and start again: one transfer from the device.

        Args:
            reduce_on: the device on which to sum over all processes first, each of which must have added the same
                names; None for the means of this process.
        """
        sums, self._sums = self._sums, {}
        if not sums:
            return {}
        names = sorted(sums)
        device = reduce_on or next((t.device for t, _ in sums.values() if t.is_cuda), torch.device("cpu"))
        totals = torch.stack([sums[n][0].to(device).reshape(()) for n in names])
        weights = torch.tensor([float(sums[n][1]) for n in names], dtype=torch.float64, device=device)
        table = torch.stack([totals, weights])
        if reduce_on is not None:
            torch.distributed.all_reduce(table)
        return {n: t / w if w else float("nan") for n, t, w in zip(names, *table.tolist(), strict=True)}


class MetricsWriter:
    """Writes lines to ``metrics.jsonl`` and the same numbers to TensorBoard.

    Args:
        run: the run folder.
        step: optimiser steps done; the lines that an interrupted run wrote after it are dropped.
        validated: whether the validation after that step, if there was one, is done.
        tensorboard: write TensorBoard's files too.
    """

    def __init__(self, run: RunFolder, step: int, validated: bool, tensorboard: bool) -> None:
        self.run = run
        self._writer: Any = None
        run.keep_metrics_until(step, validated)
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                log.warning("TensorBoard is not installed: curves are in metrics.jsonl only (pip install tensorboard).")
                return
            self._writer = SummaryWriter(str(run.tensorboard), purge_step=step + 1 if step else None)

    def write(self, step: int, epoch: int, numbers: Mapping[str, float]) -> None:
        """Write one line."""
        self.run.append_metrics({"step": step, "epoch": epoch, **numbers})
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close TensorBoard's file."""
        if self._writer is not None:
            self._writer.close()
