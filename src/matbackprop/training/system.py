"""What a recipe gives the engine: a system that learns and the data that it learns from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from matbackprop.training.metrics import Means

if TYPE_CHECKING:
    from matbackprop.training.loading import EpochLoader

__all__ = ["Data", "System"]


class System(nn.Module):
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

    def optimizers(self, steps: int) -> tuple[Optimizer, LRScheduler | None]:
        """Return the optimiser, and a schedule that moves with every step or None.

        Args:
            steps: optimiser steps of the whole training.
        """
        raise NotImplementedError

    def training_step(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        raise NotImplementedError

    def forward(self, batch: Any) -> Tensor:
        """The training step: what processes that share gradients call."""
        return self.training_step(batch)

    def validation_step(self, batch: Any) -> None:
        """Record metrics named ``val/…`` of a batch."""
        raise NotImplementedError

    def validation_end(self, data: Any) -> Mapping[str, float]:
        """Return metrics that need the whole validation; every process must return the same."""
        return {}

    def validated(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Hear the metrics of the validation after an epoch of a training, on every process."""

    def diagnose(self, batch: Any) -> Any:
        """Return what the structured layer saw in a batch that is not finite, as JSON can hold it."""
        return None


class Data:
    """Where batches come from."""

    may_choose = True
    """Whether validation may choose among checkpoints; where it only reports, the last weights are the result."""

    def train_loader(self) -> EpochLoader:
        """Return the training batches."""
        raise NotImplementedError

    def validation_loader(self) -> EpochLoader | None:
        """Return the validation batches, or None where there are none."""
        return None

    def on_device(self, batch: Any, training: bool) -> Any:
        """Return what the system takes, from a batch that was moved to the device."""
        return batch
