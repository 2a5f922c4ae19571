"""Signals that are handled while something runs, and given back afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any


class SignalHandlers:
    """Handles SIGINT and SIGTERM while it is entered, in the main thread.

    Whoever sends a signal to a process and to its group sends it twice: a second one within a second is the same.
    Signals that were ignored before, as under ``nohup``, stay ignored.

    Attributes:
        signum: the first signal that came, or None.
    """

    def __init__(self, *names: str) -> None:
        self.signum: int | None = None
        self._names = ("SIGINT", "SIGTERM", *names)
        self._previous: dict[int, Any] = {}
        self._time = 0.0

    def __enter__(self) -> SignalHandlers:
        if threading.current_thread() is threading.main_thread():
            for signum in (getattr(signal, name) for name in self._names if hasattr(signal, name)):
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._previous[signum] = signal.signal(signum, self.handle)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        now = time.monotonic()
        if self.signum is None:
            self.signum, self._time = signum, now
            self.first()
        elif now - self._time > 1.0:
            self.again(signum, frame)

    def first(self) -> None:
        """Act on the first signal: it is noted for whoever asks."""

    def again(self, signum: int, frame: FrameType | None) -> None:
        """Act on a further signal: end at once, as without these handlers."""
        previous = self._previous.get(signum)
        if callable(previous):
            previous(signum, frame)
        raise KeyboardInterrupt


class RunInterrupted(Exception):
    """A signal ended a training after its state was saved, where checkpoints are wanted.

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


def stop_on_signal() -> SignalHandlers:
    """Note SIGINT, SIGTERM, SIGHUP and, under SLURM, SIGUSR1, for a loop that asks; a second signal ends at once."""
    return SignalHandlers("SIGHUP", *(["SIGUSR1"] if "SLURM_JOB_ID" in os.environ else []))
