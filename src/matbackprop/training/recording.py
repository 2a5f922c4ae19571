"""Metrics without waiting for the device: sums stay where they are computed and are read every ``log_every`` steps."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities.data import extract_batch_size
from torch import Tensor

if TYPE_CHECKING:
    from matbackprop.training.run_folder import RunFolder

__all__ = ["Means", "MetricsCallback", "MetricsLogger", "RecordingModule", "ReduceLogs"]

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
        entry = self._sums.get(name)
        if isinstance(value, Tensor):
            if entry is None:
                self._sums[name] = [value.detach().to(torch.float64) * weight, weight]
            else:
                if entry[0].device != value.device:  # a checkpoint's
                    entry[0] = entry[0].to(value.device)
                entry[0].add_(value.detach(), alpha=weight)  # one kernel, no waiting
                entry[1] += weight
        elif entry is None:
            self._sums[name] = [torch.tensor(value * weight, dtype=torch.float64), weight]
        else:
            entry[0] += value * weight
            entry[1] += weight

    def state_dict(self) -> dict[str, list[Any]]:
        """Return the sums so far, on the CPU."""
        return {name: [total.cpu().clone(), weight] for name, (total, weight) in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, list[Any]]) -> None:
        """Continue from what :meth:`state_dict` gave."""
        self._sums = {name: [total, weight] for name, (total, weight) in state.items()}

    def flush(self, reduce: bool = False) -> dict[str, float]:
        """Return the means and start again: one transfer from the device.

        Args:
            reduce: sum over all processes first; every process must have added the same names.
        """
        sums, self._sums = self._sums, {}
        if not sums:
            return {}
        names = sorted(sums)
        device = next((s.device for s, _ in sums.values() if isinstance(s, Tensor)), torch.device("cpu"))
        table = torch.stack(
            [
                torch.stack(
                    [torch.as_tensor(sums[n][0], dtype=torch.float64, device=device).reshape(()) for n in names]
                ),
                torch.tensor([float(sums[n][1]) for n in names], dtype=torch.float64, device=device),
            ]
        )
        if reduce:
            torch.distributed.all_reduce(table)
        totals, weights = table.tolist()
        return {n: t / w if w else float("nan") for n, t, w in zip(names, totals, weights, strict=True)}


class RecordingModule(pl.LightningModule):
    """A Lightning module with :meth:`record`, a way to log that costs no synchronisation and next to no time a step."""

    structured_methods: tuple[str, ...] = ()
    """Methods that compute the structured layer by calling functions; ``--profile`` times them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.means = Means()

    def record(self, name: str, value: Tensor | float, weight: float = 1.0) -> None:
        """Average ``value`` into the next line of metrics, weighted, over all steps and processes since the last."""
        self.means.add(name, value, weight)


class MetricsLogger(Logger):
    """Writes what Lightning and the engine log to ``metrics.jsonl`` and to TensorBoard."""

    def __init__(self, run: RunFolder, tensorboard: bool = True) -> None:
        super().__init__()
        self.run = run
        self.trainer: pl.Trainer | None = None
        self.muted = False
        self._want_tensorboard = tensorboard
        self._writer: Any = None

    @property
    def name(self) -> str:
        return self.run.path.name

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.run.path)

    def log_hyperparams(self, params: Mapping[str, Any] | argparse.Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the whole configuration is in config.json."""

    def start(self, trainer: pl.Trainer, step: int) -> None:
        """Begin after ``step``; later lines of an interrupted run are dropped."""
        self.trainer = trainer
        if not trainer.is_global_zero:
            return
        self.run.keep_metrics_until(step)
        if self._want_tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                log.warning("TensorBoard is not installed: curves are in metrics.jsonl only (pip install tensorboard).")
                return
            self._writer = SummaryWriter(str(self.run.tensorboard), purge_step=step + 1 if step else None)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write one line on the first process. The step is the number of optimiser steps done."""
        trainer = self.trainer
        if trainer is None or not trainer.is_global_zero or self.muted:
            return
        numbers = {k: float(v) for k, v in metrics.items() if k != "epoch"}
        if not numbers:
            return
        now = trainer.global_step
        self.run.append_metrics({"step": now, "epoch": trainer.current_epoch, **numbers})
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, now)

    def finalize(self, status: str) -> None:
        """Close the TensorBoard file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MetricsCallback(pl.Callback):
    """Flushes means every ``log_every`` steps and at the end of an epoch, and adds speed and learning rate."""

    def __init__(self, logger: MetricsLogger, means: Means, log_every: int) -> None:
        self.logger = logger
        self.means = means
        self.log_every = log_every
        self._step = 0
        self._time = 0.0
        self._flushed = -1
        self._rate = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.logger.start(trainer, trainer.global_step)
        self._begin(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer)  # validation is no training time

    def _begin(self, trainer: pl.Trainer) -> None:
        self._step, self._time = trainer.global_step, time.perf_counter()

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        # Before the schedule moves on: the rate that this step takes.
        self._rate = max((float(g["lr"]) for o in trainer.optimizers for g in o.param_groups), default=0.0)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self.means.add("train/loss", loss * trainer.accumulate_grad_batches)
        step = trainer.global_step
        last = batch_idx + 1 >= trainer.num_training_batches
        whole = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if step != self._flushed and ((whole and step % self.log_every == 0) or last):
            self.flush(trainer, pl_module)

    def flush(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the means and write them; all processes call it together."""
        self._flushed = trainer.global_step
        reduce = trainer.world_size > 1
        numbers = self.means.flush(reduce)
        if isinstance(pl_module, RecordingModule):
            numbers |= pl_module.means.flush(reduce)
        steps, seconds = trainer.global_step - self._step, time.perf_counter() - self._time
        if steps and seconds > 0:
            numbers["train/steps_per_second"] = steps / seconds
        numbers["train/learning_rate"] = self._rate
        self.logger.log_metrics(numbers)
        self._begin(trainer)


class ReduceLogs(pl.Callback):
    """Takes the place of a module's ``log`` where several processes validate, and reduces right.

    Lightning averages the number of items over processes as an integer, so that its mean is wrong where processes saw
    different numbers of items, and it reduces at all only where the module asked for it. Means of ``validation_step``
    are therefore summed here, with their weights, and handed to Lightning when they are complete.
    """

    def __init__(self) -> None:
        self.means = Means()
        self.options: dict[str, dict[str, Any]] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            pl_module.log = partial(self._log, trainer, pl_module)  # type: ignore[method-assign]

    def _log(
        self, trainer: pl.Trainer, module: pl.LightningModule, name: str, value: Any, *args: Any, **options: Any
    ) -> None:
        plain = isinstance(value, (Tensor, int, float)) and options.get("reduce_fx", "mean") == "mean"
        if plain and module._current_fx_name == "validation_step" and not options.get("on_step"):
            weight = options.pop("batch_size", None)
            if weight is None:
                results: Any = trainer._results
                weight = extract_batch_size(results.batch)
            self.means.add(name, value, weight)
            self.options[name] = options
            return
        if not trainer.training:
            options["sync_dist"] = True
        type(module).log(module, name, value, *args, **options)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size == 1:
            return
        everywhere: list[Any] = [None] * trainer.world_size
        torch.distributed.all_gather_object(everywhere, self.options)
        for options in everywhere:  # a process with nothing to validate takes part with weight zero
            for name in options:
                self.options.setdefault(name, options[name])
                self.means.add(name, torch.zeros((), device=pl_module.device), 0.0)
        for name, value in self.means.flush(reduce=True).items():
            options = self.options[name] | {"sync_dist": True, "batch_size": 1}
            number = torch.tensor(value, dtype=torch.float64, device=pl_module.device)
            type(pl_module).log(pl_module, name, number, **options)
        self.options = {}
