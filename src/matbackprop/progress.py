"""How far a long piece of work is, and how long it will still take."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from matbackprop.processes import is_first_process

__all__ = ["Progress", "is_silent", "log_on_screen", "silence", "track"]

T = TypeVar("T")

log = logging.getLogger("matbackprop")

EVERY = 30.0
"""Seconds between two lines where nobody watches a terminal."""

_silent: ContextVar[bool] = ContextVar("silent", default=False)


@contextmanager
def silence() -> Iterator[None]:
    """Say nothing about progress while this lasts."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


def is_silent() -> bool:
    """Whether :func:`silence` lasts."""
    return _silent.get()


@contextmanager
def log_on_screen() -> Iterator[None]:
    """Show the library's log on standard error where nobody else listens to it, for as long as this lasts."""
    screen = logging.StreamHandler()
    screen.setFormatter(logging.Formatter("%(message)s"))
    level, alone = log.level, not log.hasHandlers() and not is_silent()
    log.setLevel(min(level or logging.INFO, logging.INFO))
    if alone:
        log.addHandler(screen)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(screen)
        screen.close()


class Progress:
    """Says what is done: on a terminal a line that is rewritten, elsewhere a line every half minute.

    Short work says nothing. Lines go to the library's log where it is listened to, otherwise to standard error.

    Args:
        what: the work, such as ``"Preparing images"``.
        total: number of parts.
        done: parts that were done before, which say nothing about the speed.
        quiet: say nothing at all.
    """

    def __init__(self, what: str, total: int, done: int = 0, quiet: bool = False) -> None:
        self.what, self.total, self.done = what, total, done
        self.quiet = quiet or is_silent() or not is_first_process()  # what one process of a run says, all would say
        self._before, self._started = done, time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._said = self._started
        self._width = 0

    def advance(self, note: str = "") -> None:
        """Count a part that is done; ``note`` is added to the next line."""
        self.done += 1
        now = time.monotonic()
        if self.quiet or self.done >= self.total or now - self._said < (0.5 if self._terminal else EVERY):
            return
        self._said = now
        line = self.line(now) + (f", {note}" if note else "")
        if self._terminal:
            sys.stderr.write("\r" + line.ljust(self._width))
            sys.stderr.flush()
            self._width = len(line)
        elif log.isEnabledFor(logging.INFO) and log.hasHandlers():
            log.info("%s", line)
        else:
            print(line, file=sys.stderr, flush=True)

    def line(self, now: float) -> str:
        """Return what there is to say at a time of the monotonic clock."""
        parts = max(self.done - self._before, 1)
        left = (now - self._started) / parts * (self.total - self.done)
        return f"{self.what}: {self.done} of {self.total}, about {_duration(left)} left"

    def close(self) -> None:
        """Remove the line from a terminal."""
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
            self._width = 0


def track(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """Yield the items and say how far they are; an item counts as done when the next one is asked for."""
    progress = Progress(what, total)
    try:
        for item in items:
            yield item
            progress.advance()
    finally:
        progress.close()


def _duration(seconds: float) -> str:
    """Return a rounded duration.

    Example:
        >>> _duration(42), _duration(150), _duration(9000)
        ('42 s', '3 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{-(-seconds // 60):.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
