"""A pool of worker processes."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
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
        self.count = count if count > 1 else 0
        # Forking is unsafe once torch has started threads.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin) if self.count else None

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Schedule a call of a picklable function. Without processes, the call runs immediately."""
        if self._pool is not None:
            with _interrupts_blocked():  # submit may start processes
                return self._pool.submit(function, *args, **kwargs)
        done: Future[T] = Future()
        done.set_result(function(*args, **kwargs))
        return done

    def start(self, modules: Sequence[str] = ()) -> Workers:
        """Start all processes, which import ``modules``, without waiting for them."""
        for _ in range(self.count):
            self.submit(import_modules, modules)
        return self

    def map(self, function: Callable[[Item], T], items: Iterable[Item]) -> Iterator[T]:
        """Apply a picklable function to every item in order, reading few items ahead."""
        return read_ahead(lambda item: self.submit(function, item), items, 8 * self.count or 1)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._pool is None:
            return
        processes = [*(getattr(self._pool, "_processes", None) or {}).values()]
        broken = isinstance(error, BrokenProcessPool)
        if kind is not None and not broken:
            for process in processes:  # also ends running calls
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
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"  # if torch is imported later, which takes more than a second
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def _exit_with_parent() -> None:
    """Exit with the parent process. Otherwise, a worker would wait for its queue forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def import_modules(modules: Iterable[str]) -> None:
    """Import modules by name."""
    for module in modules:
        importlib.import_module(module)


def parallel_map(function: Callable[[Item], T], items: Sequence[Item], workers: int = 0) -> Iterator[T]:
    """Apply a function to every item in order, in ``workers`` processes; see :meth:`Workers.map`.

    Example:
        >>> list(parallel_map(abs, [-2, 1]))
        [2, 1]
    """
    with Workers(min(workers, len(items))) as pool:
        yield from pool.map(function, items)
