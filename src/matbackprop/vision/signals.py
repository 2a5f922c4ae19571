"""Handlers for SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any


class SignalHandlers:
    """Context manager that handles SIGINT, SIGTERM and SIGHUP in the main thread.

    The first signal is stored; a later signal interrupts. Schedulers signal both a process and its group, so a second
    signal within one second is ignored. Signals that were already ignored, as under ``nohup``, stay ignored.

    Attributes:
        signum: the first signal received, or None.
    """

    def __init__(self, *names: str) -> None:
        self.signum: int | None = None
        self._names = ("SIGINT", "SIGTERM", "SIGHUP", *names)
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
        """Respond to the first signal."""

    def again(self, signum: int, frame: FrameType | None) -> None:
        """Respond to a later signal: call the previous handler, then interrupt."""
        previous = self._previous.get(signum)
        if callable(previous):
            previous(signum, frame)
        raise KeyboardInterrupt


def stop_on_signal() -> SignalHandlers:
    """Return the signal handlers of a training run. Under SLURM, they include SIGUSR1."""
    return SignalHandlers(*(["SIGUSR1"] if "SLURM_JOB_ID" in os.environ else []))


class RunInterrupted(Exception):
    """Raised if the signal ``signum`` stops a run after ``step`` steps; ``where`` is the last checkpoint or None."""

    def __init__(self, signum: int, step: int, where: Any) -> None:
        self.signum, self.step, self.where = signum, step, where
        super().__init__(signum, step, where)  # for pickling

    def __str__(self) -> str:
        name = signal.Signals(self.signum).name
        saved = "No checkpoint was written." if self.where is None else f"Saved {self.where}. Rerun with --resume."
        return f"Stopped by {name} at step {self.step}. {saved}"
