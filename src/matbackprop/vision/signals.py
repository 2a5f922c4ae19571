"""Handlers for SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any


class SignalHandlers:
    """Context manager that handles SIGINT, SIGTERM and SIGHUP in the main thread.

    The first signal is stored and calls ``first``; a later one calls ``again``, by default the previous handler, and
    raises KeyboardInterrupt. Schedulers signal both a process and its group, so a second signal within one second is
    ignored. Signals that were already ignored, as under ``nohup``, stay ignored.

    Attributes:
        signum: the first signal received, or None.
    """

    def __init__(
        self, *, first: Callable[[], object] = lambda: None, again: Callable[[int], object] | None = None
    ) -> None:
        self.signum: int | None = None
        self._first, self._again = first, again
        self._previous: dict[int, Any] = {}
        self._time = 0.0

    def __enter__(self) -> SignalHandlers:
        if threading.current_thread() is threading.main_thread():
            for signum in (getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)):
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum is None:
            self.signum, self._time = signum, now
            self._first()
        elif now - self._time > 1.0:
            if self._again is not None:
                self._again(signum)
            elif callable(previous := self._previous.get(signum)):
                previous(signum, frame)
            raise KeyboardInterrupt


def interrupt_on_signal() -> SignalHandlers:
    """Return the signal handlers of a command: raise KeyboardInterrupt, so that it can clean up; exit on the second."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    return SignalHandlers(first=interrupt, again=lambda signum: os._exit(128 + signum))


class RunInterrupted(Exception):
    """Raised if the signal ``signum`` stops a run after ``step`` steps; ``where`` is the last checkpoint or None."""

    def __init__(self, signum: int, step: int, where: Any) -> None:
        self.signum, self.step, self.where = signum, step, where
        super().__init__(signum, step, where)  # for pickling

    def __str__(self) -> str:
        name = signal.Signals(self.signum).name
        saved = "No checkpoint was written." if self.where is None else f"Saved {self.where}. Rerun with --resume."
        return f"Stopped by {name} at step {self.step}. {saved}"
