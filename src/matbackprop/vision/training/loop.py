"""Training loop.

A checkpoint within an epoch stores the number of completed batches, all random states and partial means, so that a
resumed run is bitwise equal to an uninterrupted one.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor

from matbackprop.errors import CheckpointError, ConfigurationError, NonFiniteError, NumericalError, SolverError
from matbackprop.vision.distributed import gather
from matbackprop.vision.files import is_number
from matbackprop.vision.progress import Progress, track
from matbackprop.vision.signals import RunInterrupted, SignalHandlers
from matbackprop.vision.training.checkpoint import (
    load_checkpoint,
    load_state,
    random_state,
    save_checkpoint,
    seed_all,
    set_random_state,
)
from matbackprop.vision.training.config import EngineConfig
from matbackprop.vision.training.loading import EpochLoader, generator_for
from matbackprop.vision.training.run_folder import RunFolder
from matbackprop.vision.training.system import Data, System

log = logging.getLogger("matbackprop")


class Training:
    """State of a training run. ``batch`` is the number of completed batches of the epoch."""

    def __init__(self, run: RunFolder, engine: EngineConfig, system: System, data: Data, fabric: Fabric) -> None:
        self.run_folder, self.engine, self.system, self.data, self.fabric = run, engine, system, data, fabric
        self.first, self.device = fabric.is_global_zero, fabric.device
        self.epoch = self.batch = self.step = self.best_step = 0
        self.best_score: float | None = None
        self.validation: dict[str, float] = {}
        self._best: dict[str, Any] | None = None  # written with the next checkpoint
        self._last = run.checkpoints / "last.ckpt"
        self._saved_at = time.monotonic()
        self._note = ""
        self._unchecked: list[tuple[str, Tensor]] = []  # position of a batch, whether its loss and gradient are finite
        alone = self.device.type == "cpu" and fabric.world_size == 1
        self.check_every = 1 if alone else engine.guard_every  # reading flags from a GPU synchronizes

        seed_all(engine.seed)
        self.train_loader = data.train_loader().share(fabric.global_rank, fabric.world_size)
        loader = data.validation_loader()
        self.validation_loader = loader and loader.share(fabric.global_rank, fabric.world_size)
        self.batches = len(self.train_loader)
        self.steps = -(-self.batches // engine.accumulate) * engine.max_epochs
        self._set_up()
        self.tensorboard: Any = None
        if self.first:
            run.keep_metrics_until(self.step)
            if engine.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                purge = self.step + 1 if self.step else None
                self.tensorboard = SummaryWriter(str(run.tensorboard), purge_step=purge)
        self.progress = Progress("Training", self.steps, self.step, quiet=not (self.first and engine.progress))

    def _set_up(self) -> None:
        """Prepare system, optimizer and schedule, and restore the last checkpoint when resuming."""
        engine, system, fabric = self.engine, self.system, self.fabric
        state = load_checkpoint(self._last) if engine.resume and self._last.exists() else None
        if engine.resume:
            log.info("No checkpoint yet, starting." if state is None else f"Resuming from {self._last}.")
        system.to(self.device)
        if state is not None:
            load_state(system, state, self._last)
        system.train()
        with autocast(engine, self.device):
            system.start(self.data)
        self.optimizer, self.schedule = system.optimizers(max(self.steps, 1))
        self.wrapped = fabric.setup_module(system)
        if fabric.world_size > 1:  # different random numbers in each process
            torch.manual_seed(generator_for(torch.initial_seed(), fabric.global_rank).initial_seed())
        if state is not None:
            self._restore(state)

    def run(self) -> None:
        """Train to the end."""
        engine, started = self.engine, time.perf_counter()
        with SignalHandlers() as self.signals:
            try:
                while self.epoch < engine.max_epochs:
                    self._train_epoch()
                    self._validate_epoch()
                    self.epoch, self.batch = self.epoch + 1, 0
                    if self.epoch == engine.max_epochs:
                        self._save()
                    else:
                        self._save_if_due()
                        self._stop_if_signaled(agree=True)
            finally:
                self.progress.close()
                if self.tensorboard is not None:
                    self.tensorboard.close()
            if self.first:
                self._write_summary(time.perf_counter() - started)
                log.info("Done after %d steps: %s", self.step, self.run_folder.path)
            if self.signals.signum is not None:  # received after the last step
                self._interrupt(self.signals.signum)

    def _train_epoch(self) -> None:
        engine, system = self.engine, self.system
        self._timer = self.step, time.perf_counter()
        system.train()
        system.step = self.step
        for index, batch in enumerate(self.train_loader.read(self.epoch, self.batch), self.batch):
            batch = self.data.on_device(batch, self.device, training=True)
            place = f"step {self.step}, epoch {self.epoch}, batch {index}"
            last = index + 1 == self.batches
            complete = last or (index + 1) % engine.accumulate == 0  # the batches of an optimizer step

            with self.fabric.no_backward_sync(self.wrapped, enabled=not complete):
                try:
                    with autocast(engine, self.device):
                        loss = self.wrapped(batch)
                    self._unchecked.append((place, torch.isfinite(loss.detach())))
                    if index % engine.accumulate == 0:
                        self.optimizer.zero_grad()
                    self.fabric.backward(loss / engine.accumulate)
                except (NumericalError, SolverError, torch.linalg.LinAlgError) as error:
                    problem = f"A batch cannot be computed at {place} ({str(error).rstrip('.')})"
                    raise self._error(problem) from error

            rate = max(float(group["lr"]) for group in self.optimizer.param_groups)
            if complete:
                self._check_gradient()
                self.optimizer.step()
                if self.schedule is not None:
                    self.schedule.step()
                self.step += 1
            system.record("train/loss", loss.detach())
            self.batch = index + 1
            if last or (complete and self.step % engine.log_every == 0):
                self._write_metrics(rate)
            system.step = self.step
            if complete:
                self.progress.advance(note=f"epoch {self.epoch + 1} of {engine.max_epochs}{self._note}")
                if not last:
                    self._stop_if_signaled()
                    if engine.checkpoint_every_steps and self.step % engine.checkpoint_every_steps == 0:
                        self._save_if_due()

    def _validate_epoch(self) -> None:
        """Validate if due, and store the weights if they are the best so far."""
        if self.validation_loader is None or (self.epoch + 1) % self.engine.validate_every:
            return
        numbers = validate(self.system, self.data, self.validation_loader, self.engine)
        self._write_line(numbers)
        if self.data.may_choose:
            self._keep_if_best(numbers)
        self.validation = numbers

    def _keep_if_best(self, numbers: dict[str, float]) -> None:
        monitor = self.engine.monitor
        score = numbers.get(monitor)
        if score is None:
            if not self.validation:  # the first time
                logged = ", ".join(sorted(numbers))
                log.warning("Metric %r was not logged. Logged metrics: %s. Set --monitor.", monitor, logged)
            return
        if math.isnan(score) or (self.best_score is not None and score >= self.best_score):
            return
        self.best_score, self.best_step = score, self.step
        if self.engine.checkpoints:
            weights = {name: tensor.detach().clone() for name, tensor in self.system.state_dict().items()}
            self._best = {"state_dict": weights, "epoch": self.epoch, "global_step": self.step}
            self._best |= {"monitor": monitor, "score": score}

    def _write_metrics(self, rate: float) -> None:
        """Write a line of metrics. All processes must call this method."""
        numbers = self.system.means.flush(self.device)
        self._note = f", loss {numbers['train/loss']:.4g}"
        (then, started), self._timer = self._timer, (self.step, time.perf_counter())
        if self.step > then:
            numbers["train/steps_per_second"] = (self.step - then) / max(self._timer[1] - started, 1e-9)
        numbers["train/learning_rate"] = rate
        self._write_line(numbers)

    def _write_line(self, numbers: Mapping[str, float]) -> None:
        if self.first:
            self.run_folder.append_metrics({"step": self.step, "epoch": self.epoch, **numbers})
        if self.tensorboard is not None:
            for name, value in numbers.items():
                self.tensorboard.add_scalar(name, value, self.step)

    def _stop_if_signaled(self, agree: bool = False) -> None:
        """Save and stop if a signal was received. Processes synchronize every ``guard_every`` steps."""
        if self.fabric.world_size > 1:
            if not agree and self.step % self.engine.guard_every:
                return
            self.signals.signum = next((signum for signum in gather(self.signals.signum) if signum), None)
        if self.signals.signum is not None:
            self._save()
            self._interrupt(self.signals.signum)

    def _interrupt(self, signum: int) -> None:
        raise RunInterrupted(signum, self.step, self._last if self._last.exists() else None)

    def _write_summary(self, seconds: float) -> None:
        before = self.run_folder.read_summary()
        summary = before | self.validation | {"epochs": self.epoch, "steps": self.step}
        if is_number(before.get("seconds")):
            seconds += before["seconds"]  # of the run before it was resumed
        summary |= {"seconds": seconds, "processes": self.fabric.world_size}
        if self.best_score is not None:
            summary |= {"best": self.best_score, "best_metric": self.engine.monitor, "best_step": self.best_step}
        self.run_folder.write_summary(summary)

    @torch.no_grad()
    def _check_gradient(self) -> None:
        """Record, check and clip the gradient. Flags are read every ``check_every`` batches."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if parameters:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            self.system.record("train/gradient_norm", norm)
            if self.engine.gradient_clip is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, self.engine.gradient_clip, norm)
            place, finite = self._unchecked[-1]
            self._unchecked[-1] = place, finite & torch.isfinite(norm)
        if len(self._unchecked) >= self.check_every:
            self._check_finite()

    def _check_finite(self) -> None:
        """Raise NonFiniteError if a loss or gradient since the last check is not finite. All processes must call it."""
        finite = torch.stack([flag for _, flag in self._unchecked]).tolist() if self._unchecked else []
        bad = [i for i in gather(finite.index(False) if False in finite else None) if i is not None]
        if bad:
            gather(None)  # a process that exits now would terminate the others
            raise self._error(f"The loss or its gradient is not finite at {self._unchecked[min(bad)][0]}")
        self._unchecked.clear()

    def _error(self, problem: str) -> NonFiniteError:
        last = f"The last good checkpoint is {self._last}." if self._last.exists() else "No checkpoint yet."
        return NonFiniteError(f"{problem}. {last} Use a smaller learning rate, --gradient-clip, or a larger eps.")

    def _save_if_due(self) -> None:
        due = time.monotonic() - self._saved_at >= self.engine.checkpoint_min_seconds
        if any(gather(due)):  # clocks differ between processes
            self._save()

    def _save(self) -> None:
        """Save the best weights if they changed, then the state. All processes must call this method."""
        self._check_finite()
        weights = [p.detach() for p in self.system.parameters() if p.is_floating_point() and p.numel()]
        if not all(gather(not weights or bool(torch.isfinite(torch.nn.utils.get_total_norm(weights))))):
            raise self._error(f"A weight is not finite at step {self.step}")
        if not self.engine.checkpoints:
            return
        process = {"random": random_state(), "means": dict(self.system.means.sums)}
        state = {
            "state_dict": self.system.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "epoch": self.epoch,
            "batch": self.batch,
            "global_step": self.step,
            "steps": self.steps,
            "best_score": self.best_score,
            "best_step": self.best_step,
            "processes": gather(process),
        }
        if self.first:
            if self._best is not None:
                save_checkpoint(self._best, self.run_folder.checkpoints / "best.ckpt")
            save_checkpoint(state, self._last)
        self.fabric.barrier()  # a process that exits now would terminate the others
        self._best, self._saved_at = None, time.monotonic()

    def _restore(self, state: dict[str, Any]) -> None:
        """Restore everything but the weights."""
        try:
            self._restore_optimizer(state)
            self.epoch, self.batch, self.step = state["epoch"], state["batch"], state["global_step"]
            self.best_score, self.best_step = state["best_score"], state["best_step"]
            counts = (self.epoch, self.batch, self.step, self.best_step)
            scored = isinstance(self.best_score, (float, int, type(None)))
            if not scored or not all(type(count) is int and count >= 0 for count in counts):
                raise TypeError("a count or a score has another type")
            then, now = len(state["processes"]), self.fabric.world_size
            if then == now:
                process = state["processes"][self.fabric.global_rank]
                self.system.means.sums = {name: torch.as_tensor(pair) for name, pair in process["means"].items()}
                set_random_state(process["random"])
        except Exception as error:  # values of other types than expected
            reason = f"{type(error).__name__}: {str(error)[:200]}"
            raise CheckpointError(
                f"{self._last} does not contain the state of this training run ({reason}). Use --overwrite."
            ) from error
        if then != now and self.batch:
            raise ConfigurationError(f"{self._last} was written within an epoch by {then} processes. Use {then} again.")
        if then != now:
            log.warning("Resuming with %d processes instead of %d: random numbers restart.", now, then)

    def _restore_optimizer(self, state: dict[str, Any]) -> None:
        for live, saved in zip(self.optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
            saved |= {name: live[name] for name in ("fused", "foreach") if name in live}  # depend on the device
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule is not None:
            saved = state["schedule"]
            if state["steps"] != self.steps:  # continue the new schedule from the same step
                log.warning("The run now has %d steps instead of %d; its schedule changes.", self.steps, state["steps"])
                position = {name: saved[name] for name in ("last_epoch", "_step_count", "_last_lr")}
                saved = self.schedule.state_dict() | position
            self.schedule.load_state_dict(saved)


def validate(system: System, data: Data, loader: EpochLoader, engine: EngineConfig) -> dict[str, float]:
    """Compute validation metrics and restore the random states."""
    before, device, training = random_state(), system.device, system.training
    system.eval()
    batches = loader.read(0)
    try:
        with torch.no_grad():
            for batch in track(batches, "Validating", len(loader)) if engine.progress else batches:
                batch = data.on_device(batch, device, training=False)
                with autocast(engine, device):
                    system.validation_step(batch)
            return system.means.flush(device) | {
                name: float(value) for name, value in system.validation_end(data).items()
            }
    finally:
        system.train(training)
        set_random_state(before)


def autocast(engine: EngineConfig, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(
        device.type, dtype=torch.bfloat16, enabled=engine.precision == "bf16-mixed", cache_enabled=False
    )
