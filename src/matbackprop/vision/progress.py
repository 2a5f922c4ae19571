"""Progress bars and logging to the terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

from matbackprop.vision.distributed import is_first_process

T = TypeVar("T")

log = logging.getLogger("matbackprop")

EVERY = 30.0  #: Seconds between progress lines if standard error is not a terminal.

_silent: ContextVar[bool] = ContextVar("silent", default=False)


@contextmanager
def silence() -> Iterator[None]:
    """Disable progress output in this context."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


class _Screen(logging.Handler):
    """Print to the current ``sys.stderr``, so that lines appear above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


@contextmanager
def log_on_screen() -> Iterator[None]:
    """Print the log of the library to standard error, unless it already has handlers."""
    screen, level = _Screen(), log.level
    alone = not log.hasHandlers() and not _silent.get()
    log.setLevel(min(level or logging.INFO, logging.INFO))
    if alone:
        log.addHandler(screen)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(screen)


@cache
def _console() -> Any:
    from rich.console import Console

    return Console(stderr=True, highlight=False)  # shared, so that bars can be nested


class Progress:
    """Progress bar on a terminal; otherwise a line every 30 seconds.

    Steps in ``done`` were completed earlier and do not count for the speed. ``quiet`` disables all output.
    """

    def __init__(self, what: str, total: int, done: int = 0, quiet: bool = False) -> None:
        self.what, self.total, self.done = what, total, done
        self.quiet = quiet or _silent.get() or not is_first_process()
        self._before, self._started = done, time.monotonic()
        self._printed = self._started
        self._bar = None if self.quiet or not sys.stderr.isatty() else self._open()

    def _open(self) -> Any:
        from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), "{task.fields[note]}")
        # Output to a file stays on standard output; on a terminal it appears above the bar.
        redirect = sys.stdout.isatty()
        bar = Bar("{task.description}", *columns, console=_console(), transient=True, redirect_stdout=redirect)
        bar.start()
        bar.add_task(self.what, total=self.total, completed=self.done, note="")
        return bar

    def advance(self, note: str = "") -> None:
        """Count a completed step and append ``note`` to the progress line."""
        self.done += 1
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done, note=note)
            return
        now = time.monotonic()
        if self.quiet or self.done >= self.total or now - self._printed < EVERY:
            return
        self._printed = now
        left = (now - self._started) / max(self.done - self._before, 1) * (self.total - self.done)
        line = f"{self.what}: {self.done} of {self.total}, about {_duration(left)} left{note and ', '}{note}"
        print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


def track(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yield the items and show progress. An item counts as completed when the next one is requested.

    ``total`` is needed if the items have no length.
    """
    progress = Progress(what, len(items) if total is None else total)  # type: ignore[arg-type]
    try:
        for item in items:
            yield item
            progress.advance()
    finally:
        progress.close()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{-(-seconds // 60):.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
