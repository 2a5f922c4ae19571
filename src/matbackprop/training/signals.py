"""Signals that save before they end a run."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any


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
                f"{name} at step {step}: the state is saved in {where}. Give the same command with --resume to resume."
            )

    def __reduce__(self) -> Any:
        return type(self), (self.signum, self.step, self.where)


class StopOnSignal:
    """Notes SIGINT, SIGTERM, SIGHUP and, under SLURM, SIGUSR1, for a loop that asks; a second signal ends at once.

    Whoever sends a signal to a process and to its group sends it twice: a second one within a second is the same.
    Signals that were ignored before, as under ``nohup``, stay ignored.

    Attributes:
        signum: the first signal that came, or None.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, Any] = {}
        self._time = 0.0

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            names = ["SIGINT", "SIGTERM", "SIGHUP"] + (["SIGUSR1"] if "SLURM_JOB_ID" in os.environ else [])
            for signum in (getattr(signal, name) for name in names if hasattr(signal, name)):
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._previous[signum] = signal.signal(signum, self.note)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)

    def note(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        now = time.monotonic()
        if self.signum is None:
            self.signum, self._time = signum, now
        elif now - self._time > 1.0:
            previous = self._previous.get(signum)
            if callable(previous):
                previous(signum, frame)
            raise KeyboardInterrupt
