"""The one engine that both systems train in: a loop to read from top to bottom.

A recipe gives it a :class:`System` that learns and the :class:`Data` that it learns from. :func:`fit` opens the run
folder and hands over to ``_Training``, whose method ``run`` is the loop. Lightning Fabric chooses the device, starts
processes and shares gradients between them; everything else is a plain call in the loop: the guard against NaN and Inf,
metrics that do not make the device wait, checkpoints, signals, and the profile of a step.
"""

from __future__ import annotations

import logging
import os
import random
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from matbackprop.errors import CheckpointError, ConfigurationError, NonFiniteError, NumericalError, SolverError
from matbackprop.vision.processes import (
    Progress,
    RunInterrupted,
    any_process,
    choose_device,
    gather_objects,
    is_first_process,
    log_on_screen,
    stop_on_signal,
    track,
)
from matbackprop.vision.training.config import EngineConfig, Recipe
from matbackprop.vision.training.guard import Guard, StepProfile
from matbackprop.vision.training.loading import EpochLoader, generator_for, map_tensors
from matbackprop.vision.training.run_folder import (
    RunFolder,
    latest_checkpoint,
    load_checkpoint,
    random_state,
    save_checkpoint,
    set_random_state,
)

log = logging.getLogger("matbackprop")
_file_log = logging.getLogger("matbackprop.vision.training.file")
_file_log.propagate = False
_file_log.addHandler(logging.NullHandler())

T = TypeVar("T")


# ---------------------------------------------------------------------------------------------- what a recipe gives it


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


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


# ------------------------------------------------------------------------------------------------------------- entries


def run_recipe(recipe: Recipe[T], config: T, *, preset: str = "custom") -> RunFolder:
    """Train a recipe: seed, build, fit, export, figures, report.

    The preset that the configuration came from is part of the default name of the run folder.
    """
    engine: EngineConfig = config.engine  # type: ignore[attr-defined]
    with _open_run(config, f"{recipe.name}-{preset}") as run:
        seed_all(engine.seed)
        try:
            system, data = recipe.build(config)
        except Exception:
            if is_first_process() and not engine.resume:
                run.discard()  # so that the corrected command finds no run in its place
            raise
        _fit(run, engine, system, data)
        if is_first_process():
            if engine.checkpoints:
                load_weights(run, system)
            recipe.export(run, system, data)
            if engine.report:
                from matbackprop.vision.report.html import write_report

                recipe.figures(run, system, data)
                write_report(run)
    return run


def fit(config: Any, system: System, data: Data, *, name: str) -> RunFolder:
    """Train ``system`` on ``data`` in a run folder, from the start or from its last checkpoint.

    Args:
        config: an :class:`EngineConfig`, or a configuration with a field ``engine``; saved as it is.
        system: what is trained.
        data: what it is trained on.
        name: the folder is ``runs/<name>-seed<seed>`` unless ``engine.run`` says otherwise.

    Raises:
        RunInterrupted: a signal came; the state is saved.
        NonFiniteError: a loss or a gradient was not finite, or a layer could not compute a batch; the last good
            checkpoint is kept.
        ConfigurationError: the folder holds another run, or another process is training in it.
        CheckpointError: all checkpoints are damaged.
    """
    with _open_run(config, name) as run:
        _fit(run, getattr(config, "engine", config), system, data)
    return run


def evaluate(config: Any, system: System, data: Data) -> dict[str, float]:
    """Validate a system in this process alone, with the device and precision of ``config``, and return its metrics."""
    engine: EngineConfig = getattr(config, "engine", config)
    device, devices = choose_device(engine.accelerator), _devices(engine)
    if device.type == "cuda" and isinstance(devices, list):
        device = torch.device("cuda", devices[0])
    system.to(device)
    loader = data.validation_loader()
    with _torch_settings(engine, device):
        seed_all(engine.seed)
        return {} if loader is None else _validate(system, data, loader, engine) or {}


def load_weights(run: RunFolder, system: System, which: str = "best") -> Path:
    """Load the best (or ``"last"``) weights of a run, the last where there are no best, and return their file."""
    path = run.checkpoints / f"{which}.ckpt"
    if which == "best" and not path.exists():
        path = latest_checkpoint(run.checkpoints) or path
    _load_into(system, load_checkpoint(path), path)
    return path


def _load_into(system: System, state: dict[str, Any], path: Path | None) -> None:
    try:
        system.load_state_dict(state["state_dict"])
    except (RuntimeError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).replace("\n\t", " ")[:500]
        raise ConfigurationError(f"{path} does not fit the model of the run's config.json: {reason}") from error


def _fit(run: RunFolder, engine: EngineConfig, system: System, data: Data) -> None:
    checkpoint = latest_checkpoint(run.checkpoints) if engine.resume else None
    if checkpoint is not None:
        log.info("Resuming from %s.", checkpoint)
    elif engine.resume:
        log.info("There is no checkpoint in %s yet: starting at the beginning.", run.checkpoints)
    devices = _devices(engine)
    try:
        fabric = Fabric(
            accelerator=engine.accelerator,
            devices=devices,
            num_nodes=engine.nodes,
            strategy=DDPStrategy(gradient_as_bucket_view=True) if engine.strategy == "ddp" else "auto",
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"--devices {engine.devices} with --accelerator {engine.accelerator} is not available here: {error}"
        ) from error
    fabric.launch()
    with _torch_settings(engine, fabric.device):
        try:
            _Training(run, engine, system, data, fabric, checkpoint).run()
        except (RunInterrupted, NonFiniteError) as error:
            _file_log.error("%s", error)
            raise
    if torch.distributed.is_initialized():
        # What follows, exports and the report, is the first process's alone: nothing may wait for the others.
        fabric.barrier()
        torch.distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------ the loop


class _Training:
    """One training, from its first step or from a checkpoint to its end.

    The position is (epoch, batch): the number of batches of the epoch that are done. All of them done and the epoch not
    over means that its validation is still to come.
    """

    def __init__(
        self, run: RunFolder, engine: EngineConfig, system: System, data: Data, fabric: Fabric, checkpoint: Path | None
    ) -> None:
        self.run_folder, self.engine, self.system, self.data, self.fabric = run, engine, system, data, fabric
        self.first, self.device = fabric.is_global_zero, fabric.device
        self.epoch = self.batch = self.step = 0
        self.best_score: float | None = None
        self.best_step = 0
        self.validation: dict[str, float] = {}
        self._best: dict[str, Any] | None = None  # kept in memory until the next checkpoint is written
        self._warned = False
        self._note = ""

        seed_all(engine.seed)
        system.processes = fabric.world_size
        self.train_loader = data.train_loader().share(fabric.global_rank, fabric.world_size)
        loader = data.validation_loader()
        self.validation_loader = loader and loader.share(fabric.global_rank, fabric.world_size)
        self.batches = len(self.train_loader)
        self.steps = -(-self.batches // engine.accumulate) * engine.max_epochs

        state = None if checkpoint is None else load_checkpoint(checkpoint)
        if engine.precision == "64":
            system.double()
        system.to(self.device)
        if state is not None:
            _load_into(system, state, checkpoint)
            if "optimizer" not in state:
                raise ConfigurationError(
                    f"{checkpoint} was written by an earlier version, which cannot be resumed; its weights can be used."
                )
        system.train()
        with _autocast(engine, self.device):
            system.start(data)
        self.optimizer, self.schedule = system.optimizers(max(self.steps, 1))
        if isinstance(self.schedule, ReduceLROnPlateau):
            raise ConfigurationError("ReduceLROnPlateau needs a metric; use a schedule that moves with every step.")
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=engine.precision == "16-mixed")
        self.wrapped = fabric.setup_module(system)
        if fabric.world_size > 1:  # let processes draw apart
            torch.manual_seed(generator_for(torch.initial_seed(), fabric.global_rank).initial_seed())
        if state is not None:
            try:
                self._restore(state)
            except ConfigurationError:
                raise
            except Exception as error:  # a file of the right kind whose values are of any other
                reason = f"{type(error).__name__}: {str(error)[:200]}"
                raise CheckpointError(f"{checkpoint} does not hold the state of this training ({reason}).") from error
        self._saved_step = self.step if state is not None else -1
        self._saved_epoch, self._saved_time = self.epoch, time.monotonic()

        self.guard = Guard(run, engine, system, self.optimizer, fabric.global_rank, self.scaler.is_enabled())
        self.tensorboard: Any = None
        if self.first:
            run.keep_metrics_until(self.step, validated=self.batch == 0)
            self.tensorboard = _tensorboard(run, self.step) if engine.tensorboard else None
        measured = engine.profile_steps if engine.profile and self.first else 0
        self.profile = StepProfile(system, run.profile_path, self.steps, measured)
        self.progress = Progress("Training", self.steps, self.step, quiet=not (self.first and engine.progress))

    def run(self) -> None:
        """Train to the end."""
        engine, started = self.engine, time.perf_counter()
        with stop_on_signal() as self.signals:
            try:
                while self.epoch < engine.max_epochs:
                    self._train_epoch()
                    self._validate_epoch()
                    self.epoch, self.batch = self.epoch + 1, 0
                    last = self.epoch == engine.max_epochs
                    due = self.epoch - self._saved_epoch >= engine.checkpoint_every_epochs
                    if last or (due and self._may_save()):
                        self._save()
                    if not last:
                        self._stop_if_asked(agree=True)
            finally:
                self.progress.close()
                if self.tensorboard is not None:
                    self.tensorboard.close()
            self.profile.finish()
            if self.first:
                self.run_folder.write_summary(self._summary(time.perf_counter() - started))
                log.info("Done after %d steps: %s", self.step, self.run_folder.path)
            if self.signals.signum is not None:  # too late to end the run earlier, but not to be forgotten
                raise self._interrupted()

    def _train_epoch(self) -> None:
        """Train on the batches of the epoch that are not done yet."""
        engine, system, mark = self.engine, self.system, self.profile.mark
        self._timer = self.step, time.perf_counter()
        system.train()
        system.step = self.step
        self.profile.begin()
        for index, batch in enumerate(self.train_loader.read(self.epoch, self.batch), self.batch):
            batch = _on_device(batch, self.data, engine, self.device, training=True)
            self.guard.batch(self.epoch, index, batch)
            last = index + 1 == self.batches
            whole = last or (index + 1) % engine.accumulate == 0
            mark("data")

            with self.fabric.no_backward_sync(self.wrapped, enabled=not whole):
                try:
                    with _autocast(engine, self.device):
                        loss = self.wrapped(batch)
                    mark("network forward")
                    self.guard.loss(loss)
                    if index % engine.accumulate == 0:
                        self.optimizer.zero_grad()
                    self.fabric.backward(self.scaler.scale(loss / engine.accumulate))
                except (NumericalError, SolverError, torch.linalg.LinAlgError) as error:
                    # A layer that looks at its input refuses a bad batch before there is a loss.
                    raise self.guard.refused(error) from error
            mark("network backward")

            rate = max(float(group["lr"]) for group in self.optimizer.param_groups)
            if whole:
                self.scaler.unscale_(self.optimizer)
                self.guard.gradient()
                mark("gradient checks")
                self.scaler.step(self.optimizer)
                self.scaler.update()
                if self.schedule is not None:
                    self.schedule.step()
                self.step += 1
                mark("optimiser")
            system.record("train/loss", loss.detach())
            self.batch = index + 1
            self.guard.after_batch(whole)
            if last or (whole and self.step % engine.log_every == 0):
                self._write_metrics(rate)
            system.step = self.step
            if whole:
                self.progress.advance(note=f"epoch {self.epoch + 1} of {engine.max_epochs}{self._note}")
                self.profile.end()
                self._stop_if_asked()
                every = engine.checkpoint_every_steps
                due = every and self.step % every == 0 and self.step != self._saved_step
                if due and not last and self._may_save():
                    self._save()
                self.profile.begin()

    def _validate_epoch(self) -> None:
        """Validate after every so many epochs, and keep the weights in memory if they are the best so far."""
        if self.validation_loader is None or (self.epoch + 1) % self.engine.validate_every:
            return
        alone = self.fabric.world_size == 1
        stop = (lambda: self.signals.signum is not None) if alone else None
        numbers = _validate(self.system, self.data, self.validation_loader, self.engine, stop)
        if numbers is None:  # the numbers of a part of the data are none; a resumed run begins with this validation
            self._stop_if_asked()
            return
        self.validation = numbers
        self._write_line(numbers)
        if self.data.may_choose:
            self._note_best()

    def _note_best(self) -> None:
        monitor, sign = self.engine.monitor, 1.0 if self.engine.monitor_mode == "min" else -1.0
        score = self.validation.get(monitor)
        if score is None and not self._warned:
            self._warned = True
            log.warning(
                "There is no metric %s to choose the best checkpoint by; there are %s. Set --monitor.",
                monitor,
                ", ".join(sorted(self.validation)),
            )
        if score is None or score != score or (self.best_score is not None and sign * score >= sign * self.best_score):
            return
        self.best_score, self.best_step = score, self.step
        if self.engine.checkpoints:
            weights = {name: tensor.detach().clone() for name, tensor in self.system.state_dict().items()}
            self._best = {"state_dict": weights, "epoch": self.epoch, "global_step": self.step, "monitor": monitor}
            self._best["score"] = score

    # ------------------------------------------------------------------------------------------- metrics and signals

    def _write_metrics(self, rate: float) -> None:
        """Read the means and write a line; all processes call it together."""
        numbers = self.system.means.flush(self.device if self.fabric.world_size > 1 else None)
        self._note = f", loss {numbers['train/loss']:.4g}"
        then, at = self._timer
        self._timer = self.step, time.perf_counter()
        if self.step > then:
            numbers["train/steps_per_second"] = (self.step - then) / max(self._timer[1] - at, 1e-9)
        numbers["train/learning_rate"] = rate
        self._write_line(numbers)

    def _write_line(self, numbers: Mapping[str, float]) -> None:
        if self.first:
            self.run_folder.append_metrics({"step": self.step, "epoch": self.epoch, **numbers})
        if self.tensorboard is not None:
            for name, value in numbers.items():
                self.tensorboard.add_scalar(name, value, self.step)

    def _stop_if_asked(self, agree: bool = False) -> None:
        """Save and end where a signal came; several processes ask each other every ``guard_every`` steps."""
        asked = self.signals.signum is not None
        if self.fabric.world_size > 1:
            if not agree and self.step % self.engine.guard_every:
                return
            asked = any_process(asked, self.device)
        if asked:
            self.signals.signum = self.signals.signum or 15
            self._save()
            raise self._interrupted()

    def _interrupted(self) -> RunInterrupted:
        assert self.signals.signum is not None
        path = self.run_folder.checkpoints / "last.ckpt"
        return RunInterrupted(self.signals.signum, self.step, path if path.exists() else None)

    def _summary(self, seconds: float) -> dict[str, Any]:
        """Return the final numbers; a run that was complete already keeps those it had."""
        before = self.run_folder.read_summary()
        summary: dict[str, Any] = {
            **before,
            **self.validation,
            "epochs": self.epoch,
            "steps": self.step,
            "seconds": before.get("seconds", 0.0) + seconds,
            "processes": self.fabric.world_size,
        }
        if self.best_score is not None:
            summary |= {"best": self.best_score, "best_metric": self.engine.monitor, "best_step": self.best_step}
        if self.profile.result is not None:
            summary["step_milliseconds"] = self.profile.result["total_milliseconds"]
        return summary

    # --------------------------------------------------------------------------------------------------- checkpoints

    def _may_save(self) -> bool:
        waited = time.monotonic() - self._saved_time >= self.engine.checkpoint_min_seconds
        # Clocks differ between processes.
        return any_process(waited, self.device) if self.engine.checkpoint_min_seconds else waited

    def _save(self) -> None:
        """Save the best weights where they changed, then the state; all processes call it together.

        A run that is killed in between finds best weights that it is going to reach again.
        """
        self.guard.check_weights()
        if not self.engine.checkpoints:
            return
        own = {"random": random_state(), "means": self.system.means.state_dict()}
        state = {
            "state_dict": self.system.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": self.epoch,
            "batch": self.batch,
            "global_step": self.step,
            "steps": self.steps,
            "best_score": self.best_score,
            "best_step": self.best_step,
            "processes": gather_objects(own),
        }
        if self.first:
            folder = self.run_folder.checkpoints
            if self._best is not None:
                save_checkpoint(self._best, folder / "best.ckpt")
            save_checkpoint(state, folder / "last.ckpt", keep=folder / "previous.ckpt")
        self.fabric.barrier()  # a process that ends now would take the others with it
        self._best = None
        self._saved_step, self._saved_epoch, self._saved_time = self.step, self.epoch, time.monotonic()

    def _restore(self, state: dict[str, Any]) -> None:
        """Bring the training to exactly where it was; the weights are loaded already."""
        for live, saved in zip(self.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
            # Which kernels compute a step depends on the device of this run, not on that of the checkpoint.
            saved |= {name: live[name] for name in ("fused", "foreach") if name in live}
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule is not None:
            # A training of another length has another schedule, which continues from the same step.
            saved = state["schedule"]
            if state["steps"] != self.steps:
                position = {name: saved[name] for name in ("last_epoch", "_step_count", "_last_lr")}
                saved = self.schedule.state_dict() | position
            self.schedule.load_state_dict(saved)
        self.scaler.load_state_dict(state["scaler"])
        self.epoch, self.batch, self.step = state["epoch"], state["batch"], state["global_step"]
        self.best_score, self.best_step = state["best_score"], state["best_step"]
        if not all(type(count) is int and count >= 0 for count in (self.epoch, self.batch, self.step, self.best_step)):
            raise TypeError("a count of steps is not a whole number")
        then, now = len(state["processes"]), self.fabric.world_size
        if then == now:
            own = state["processes"][self.fabric.global_rank]
            self.system.means.load_state_dict(own["means"])
            set_random_state(own["random"])
        elif self.batch:
            raise ConfigurationError(
                f"the checkpoint is from within an epoch of {then} processes, whose batches {now} processes cannot "
                "continue. Finish the epoch with as many processes as before."
            )
        else:
            log.warning(
                "The run resumes with %d processes instead of %d: random numbers start afresh, the order of the data "
                "stays.",
                now,
                then,
            )


def _validate(
    system: System, data: Data, loader: EpochLoader, engine: EngineConfig, stop: Callable[[], bool] | None = None
) -> dict[str, float] | None:
    """Return the metrics of a validation, or None where ``stop`` ended it; training does not see what it drew."""
    before, device = random_state(), system.device
    training = system.training
    system.eval()
    batches = loader.read(0)
    try:
        with torch.no_grad():
            for batch in track(batches, "Validating", len(loader)) if engine.progress else batches:
                batch = _on_device(batch, data, engine, device, training=False)
                with _autocast(engine, device):
                    system.validation_step(batch)
                if stop is not None and stop():
                    system.means.flush()
                    return None
            numbers = system.means.flush(device if system.processes > 1 else None)
            return numbers | {name: float(value) for name, value in system.validation_end(data).items()}
    finally:
        system.train(training)
        set_random_state(before)


def _tensorboard(run: RunFolder, step: int) -> Any:
    """TensorBoard's writer, which drops what an interrupted run wrote after a step; None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.warning("TensorBoard is not installed: curves are in metrics.jsonl only (pip install tensorboard).")
        return None
    return SummaryWriter(str(run.tensorboard), purge_step=step + 1 if step else None)


# --------------------------------------------------------------------------------------------- devices and precision


def _devices(engine: EngineConfig) -> Any:
    """Return Fabric's ``devices``: auto, a number, or a list. On the CPU auto is one process."""
    text = engine.devices
    if text == "auto":
        return "auto" if torch.cuda.is_available() and engine.accelerator != "cpu" else 1
    return [int(part) for part in text.split(",") if part] if "," in text else int(text)


def _autocast(engine: EngineConfig, device: torch.device) -> AbstractContextManager[Any]:
    dtypes = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    if engine.precision not in dtypes:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtypes[engine.precision], cache_enabled=False)


def _on_device(batch: Any, data: Data, engine: EngineConfig, device: torch.device, training: bool) -> Any:
    """Move a batch without waiting, and let the data prepare it there."""
    batch = data.on_device(map_tensors(batch, lambda t: t.to(device, non_blocking=True)), training)
    if engine.precision == "64":
        batch = map_tensors(batch, lambda t: t.double() if t.is_floating_point() else t)
    return batch


@contextmanager
def _torch_settings(engine: EngineConfig, device: torch.device) -> Iterator[None]:
    """Set what torch keeps for the whole process, and give it back."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision(engine.matmul_precision)
    torch.backends.cudnn.benchmark = device.type == "cuda" and not engine.deterministic
    if engine.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.benchmark = before[1]
        torch.use_deterministic_algorithms(deterministic)


# ---------------------------------------------------------------------------------------------------------- run folder


@contextmanager
def _open_run(config: Any, name: str) -> Iterator[RunFolder]:
    """Enter the run folder, which no other process may enter meanwhile, and let what is said also go to its log."""
    engine: EngineConfig = getattr(config, "engine", config)
    choose_device(engine.accelerator)  # an error before there is a folder
    run = RunFolder(engine.run or Path("runs") / f"{name}-seed{engine.seed}")
    with warnings.catch_warnings():
        for message in (".*isinstance\\(treespec, LeafSpec\\).*", ".*srun.*", ".*Grad strides do not match.*"):
            warnings.filterwarnings("ignore", message=message)
        if not is_first_process():
            yield run
            return
        with run.locked(), log_on_screen():
            run.create(config, resume=engine.resume, overwrite=engine.overwrite, seed=engine.seed)
            file = logging.FileHandler(run.log_path)
            file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            for logger in (log, _file_log):
                logger.addHandler(file)
            try:
                yield run
            finally:
                for logger in (log, _file_log):
                    logger.removeHandler(file)
                file.close()
