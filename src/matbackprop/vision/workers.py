"""A pool of worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from typing import ParamSpec, TypeVar

from matbackprop.errors import WorkerError

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")


class Workers:
    """Pool of spawned processes with one torch thread each. They ignore Ctrl-C and exit with their parent.

    If ``count`` is 0 or 1, calls run in this process. An exception inside the context kills the processes. If a process
    dies, :class:`~matbackprop.errors.WorkerError` is raised.
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._pool: ProcessPoolExecutor | None = None
        if count > 1:
            # Forking is unsafe once torch has started threads.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin)

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Schedule a call of a picklable function. Without processes, the call runs immediately."""
        if self._pool is not None:
            with _interrupts_blocked():  # submit may start processes
                return self._pool.submit(function, *args, **kwargs)
        done: Future[T] = Future()
        done.set_result(function(*args, **kwargs))
        return done

    def map(self, function: Callable[[Item], T], items: Iterable[Item], chunk: int = 1) -> Iterator[T]:
        """Apply a picklable function to every item in order, ``chunk`` items per call, reading few items ahead."""
        if self._pool is None:
            yield from map(function, items)
            return
        source = iter(items)
        parts = iter(lambda: list(islice(source, chunk)), [])
        for results in read_ahead(lambda part: self.submit(_apply, function, part), parts, 4 * self.count):
            yield from results

    def _processes(self) -> list[multiprocessing.process.BaseProcess]:
        return [*(getattr(self._pool, "_processes", None) or {}).values()]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._pool is None:
            return
        processes = self._processes()
        broken = isinstance(error, BrokenProcessPool)
        try:
            if kind is None or broken:
                self._pool.shutdown()
        finally:
            for process in processes:  # running calls after an exception or an interrupt
                process.kill()
            self._pool.shutdown()
        if broken:
            raise WorkerError(_reason([process.exitcode for process in processes])) from error


def read_ahead(submit: Callable[[Item], Future[T]], items: Iterable[Item], most: int) -> Iterator[T]:
    """Yield the results of submitted items in order, with at most ``most`` of them pending."""
    pending: deque[Future[T]] = deque()
    for item in items:
        pending.append(submit(item))
        if len(pending) >= most:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _reason(codes: Sequence[int | None]) -> str:
    # The pool ends the remaining processes by SIGTERM.
    code = next((c for c in codes if c and c != -signal.SIGTERM), -signal.SIGTERM)
    how = f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
    return (
        f"A worker process {how}. If memory ran out, use fewer workers; find damaged inputs with `matbackprop data "
        "check`; rerun with one worker to see an error."
    )


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT and SIGHUP in this thread. Processes started meanwhile inherit the blocked mask."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    import torch

    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _exit_with_parent() -> None:
    """Exit with the parent process. Otherwise, a worker would wait for its queue forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _apply(function: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
    return [function(item) for item in items]


def parallel_map(function: Callable[[Item], T], items: Sequence[Item], workers: int = 0, chunk: int = 1) -> Iterator[T]:
    """Apply a function to every item in order, in ``workers`` processes; see :meth:`Workers.map`.

    Example:
        >>> list(parallel_map(abs, [-2, 1]))
        [2, 1]
    """
    with Workers(min(workers, len(items))) as pool:
        yield from pool.map(function, items, chunk)
