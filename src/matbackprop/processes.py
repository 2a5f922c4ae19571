"""Worker processes that leave signals to their parent and never outlive it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

__all__ = ["WorkerPool", "follow_parent", "signals_held"]

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back in this thread; processes started meanwhile are born deaf to both.

    A worker needs seconds until its own code runs. Without this, Ctrl-C or a scheduler's SIGTERM, which reach all
    processes of a command, would end it before it could call :func:`follow_parent`.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow_parent() -> None:
    """Let this process, started under :func:`signals_held`, end when its parent ends or terminates it.

    SIGINT and SIGTERM of anybody else are the parent's to act on: it stops giving out work and ends its workers. Its
    own SIGTERM may be lost in one of theirs that came just before, as signals are not counted; SIGKILL is not.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and hasattr(signal, "sigtimedwait"):
        threading.Thread(target=_follow, args=(parent.pid,), daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        received = signal.sigtimedwait([signal.SIGTERM], 1.0)
        if received is not None and received.si_pid == parent:
            break
    os._exit(128 + signal.SIGTERM)


def _begin() -> None:
    import torch

    follow_parent()
    torch.set_num_threads(1)


class WorkerPool(ProcessPoolExecutor):
    """Fresh processes of one torch thread each; a signal to the whole group does not break them.

    Leaving its context by an exception drops the work that has not begun and waits for the rest.

    Args:
        count: number of processes.
    """

    def __init__(self, count: int) -> None:
        # Not forked: a fork of a process in which torch has started threads may hang.
        super().__init__(count, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Schedule a call; processes are started here."""
        with signals_held():
            return super().submit(fn, *args, **kwargs)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.shutdown(cancel_futures=kind is not None)
