"""SIGINT and SIGTERM save before they end a run."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import pytorch_lightning as pl

from matbackprop.training.checkpoint import Checkpointer, whole_step
from matbackprop.training.recording import MetricsLogger

__all__ = ["RunInterrupted", "StopOnSignal"]


class RunInterrupted(Exception):
    """A signal ended the run after its state was saved, where checkpoints are wanted.

    Attributes:
        signum: the signal.
        step: optimiser steps done.
        where: the last checkpoint, or None.
    """

    def __init__(self, signum: int, step: int, where: Any) -> None:
        self.signum, self.step, self.where = signum, step, where
        name = signal.Signals(signum).name
        if where is None:
            super().__init__(f"{name} at step {step}: the run ends without a checkpoint.")
        else:
            super().__init__(
                f"{name} at step {step}: the state is saved in {where}. Give the same command with --resume to go on."
            )

    def __reduce__(self) -> Any:
        return type(self), (self.signum, self.step, self.where)


class StopOnSignal(pl.Callback):
    """Ends the run after the step, or the validation batch, in which a signal came. A second signal ends it at once.

    Who sends a signal to a process and to its group sends it twice: a second one within a second is the same.

    Args:
        checkpointer: saves the state.
        logger: is muted while a validation is cut short, since its numbers cover a part of the data only.
        agree_every: steps between two questions to the other processes whether one of them got a signal.
    """

    def __init__(self, checkpointer: Checkpointer, logger: MetricsLogger, agree_every: int) -> None:
        self.checkpointer = checkpointer
        self.logger = logger
        self.agree_every = agree_every
        self.signum: int | None = None
        self._main = threading.current_thread() is threading.main_thread()
        self._signals = [signal.SIGINT, signal.SIGTERM] + ([signal.SIGUSR1] if "SLURM_JOB_ID" in os.environ else [])
        # Asked for here, since Lightning sets a handler of its own while it trains.
        self._previous = {s: signal.getsignal(s) for s in self._signals}
        self._steps = 0
        self._time = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._main:
            for signum in self._signals:
                signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum is None:
            self.signum, self._time = signum, now
        elif now - self._time > 1.0:
            previous = self._previous[signal.Signals(signum)]
            if callable(previous):
                previous(signum, frame)
            raise KeyboardInterrupt

    def restore(self) -> None:
        """Give the signals back to who had them before the run."""
        if self._main:
            for signum, handler in self._previous.items():
                signal.signal(signum, handler if handler is not None else signal.SIG_DFL)

    def _agreed(self, trainer: pl.Trainer) -> bool:
        if trainer.world_size == 1:
            return self.signum is not None
        self._steps += 1
        if self._steps % self.agree_every:
            return False
        if trainer.strategy.reduce_boolean_decision(self.signum is not None, all=False):
            self.signum = self.signum or signal.SIGTERM
            return True
        return False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The last step of an epoch is followed by its validation, which is cut short, and by the end of the epoch.
        if self._agreed(trainer) and batch_idx + 1 < trainer.num_training_batches and whole_step(trainer):
            self._end(trainer, inside=True)

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self.signum is not None and trainer.world_size == 1 and trainer.state.fn == "fit":
            self.logger.muted = self.checkpointer.partial_validation = True
            raise StopIteration  # Lightning's evaluation loop ends at it as at the end of its data

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        done = trainer.current_epoch + 1 >= (trainer.max_epochs or 0)
        if self.signum is not None and trainer.world_size == 1 and (not done or self.checkpointer.partial_validation):
            self.checkpointer.note_best(trainer)
            self._end(trainer)

    def _end(self, trainer: pl.Trainer, inside: bool = False) -> None:
        assert self.signum is not None
        if not inside or self.checkpointer.can_resume_inside:
            self.checkpointer.save(trainer)
        raise self.interrupted(trainer)

    def interrupted(self, trainer: pl.Trainer) -> RunInterrupted:
        """Return what a run that got a signal ends with."""
        assert self.signum is not None
        path = self.checkpointer.last_path
        return RunInterrupted(self.signum, trainer.global_step, path if path.exists() else None)
