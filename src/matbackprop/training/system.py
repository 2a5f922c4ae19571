"""What a recipe gives the engine, a system that learns and the data that it learns from, and what processes ask each
other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from matbackprop.training.loading import EpochLoader


class Means:
    """Weighted means of named numbers. Sums stay on the device that computes them until they are read.

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


class System(nn.Module, ABC):
    """A network with its loss, its metrics and its optimiser. The methods are named in the order they are called.

    Attributes:
        step: optimiser steps done, kept by the engine.
        processes: number of processes that train together.
        means: what :meth:`record` has averaged since the last line of metrics.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.processes = 1
        self.means = Means()

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def record(self, name: str, value: Tensor | float, weight: float = 1.0) -> None:
        """Average ``value`` into the next line of metrics, over all steps and processes since the last.

        Nothing waits for the device. In :meth:`validation_step` the mean is over the whole validation.

        Args:
            name: such as ``"train/accuracy"`` or ``"val/loss"``.
            value: a scalar.
            weight: usually the number of items that it is the mean of.
        """
        self.means.add(name, value, weight)

    def start(self, data: Any) -> None:
        """Prepare for training once parameters are on their device, and those of a checkpoint are loaded."""

    @abstractmethod
    def optimizers(self, steps: int) -> tuple[Optimizer, LRScheduler | None]:
        """Return the optimiser of a training of ``steps`` steps, and a schedule that moves with every step or None."""

    @abstractmethod
    def training_step(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""

    def forward(self, batch: Any) -> Tensor:
        """The training step: what processes that share gradients call."""
        return self.training_step(batch)

    def validation_step(self, batch: Any) -> None:
        """Record metrics named ``val/…`` of a batch, where there are data to validate on."""

    def validation_end(self, data: Any) -> Mapping[str, float]:
        """Return metrics that need the whole validation; every process must return the same."""
        return {}

    def validated(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Hear the metrics of the validation after an epoch of a training, on every process."""

    def diagnose(self, batch: Any) -> Any:
        """Return what the structured layer saw in a batch that is not finite, as JSON can hold it."""
        return None


class Data(ABC):
    """Where batches come from."""

    may_choose = True
    """Whether validation may choose among checkpoints; where it only reports, the last weights are the result."""

    @abstractmethod
    def train_loader(self) -> EpochLoader:
        """Return the training batches."""

    def validation_loader(self) -> EpochLoader | None:
        """Return the validation batches, or None where there are none."""
        return None

    def on_device(self, batch: Any, training: bool) -> Any:
        """Return what the system takes, from a batch that was moved to the device."""
        return batch


# --------------------------------------------------------------------------------- what processes ask each other


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
