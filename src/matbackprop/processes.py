"""Worker processes that leave signals to their parent and never outlive it."""

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
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, ParamSpec, TypeVar

from matbackprop.errors import WorkerError

__all__ = ["Workers", "follow_parent", "is_first_process", "parallel_map", "signals_held"]

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")


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


def is_first_process() -> bool:
    """Return whether this is the first process of a run, also before the processes know each other."""
    variables = os.environ
    if "RANK" in variables:
        return int(variables["RANK"]) == 0
    if "SLURM_PROCID" in variables and variables.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return int(variables["SLURM_PROCID"]) == 0
    return int(variables.get("NODE_RANK", variables.get("GROUP_RANK", 0))) == int(variables.get("LOCAL_RANK", 0)) == 0


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


class _Recording(SpawnContext):
    """Starts fresh processes and remembers them, so that one that dies can be asked how.

    Not forked: a fork of a process in which torch has started threads may hang.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started: list[BaseProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:  # type: ignore[override]
        process = SpawnProcess(*args, **kwargs)
        self.started.append(process)
        return process


class Workers:
    """Fresh processes of one torch thread each, for calls that can be made anywhere; the one pool of the library.

    A signal to the whole group does not break them. Leaving the context by an exception drops the calls that have not
    begun and waits for the rest. A process that dies ends the work at once: results that it owed raise, and leaving
    the context raises :class:`~matbackprop.errors.WorkerError`, which says how it died.

    Args:
        count: number of processes; with 0 and 1 every call is made here, in this process.

    Example:
        >>> with Workers(0) as workers:
        ...     list(workers.map(abs, [-2, 1]))
        [2, 1]
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._context = _Recording()
        self._pool: ProcessPoolExecutor | None = None
        if count > 1:
            self._pool = ProcessPoolExecutor(count, mp_context=self._context, initializer=_begin)
            # A worker process that ends waits for its children before its pools tell them that there is nothing left to
            # do, and closes their queues (at priority 10) before that.
            Finalize(self, self._pool.shutdown, exitpriority=100)

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Begin a call of a picklable function; without processes it is made here and now."""
        if self._pool is not None:
            with signals_held():  # processes are started here
                return self._pool.submit(function, *args, **kwargs)
        done: Future[T] = Future()
        done.set_result(function(*args, **kwargs))
        return done

    def map(self, function: Callable[[Item], T], items: Iterable[Item], chunk: int = 1) -> Iterator[T]:
        """Apply a picklable function to every item.

        Args:
            function: picklable.
            items: picklable.
            chunk: how many items travel together.

        Yields:
            Results in the order of the items. Only a few chunks per process are begun ahead of what has been taken,
            so that neither items nor results pile up; closing the iterator drops what has not begun.
        """
        if self._pool is None:
            yield from map(function, items)
            return
        source = iter(items)
        pending: deque[Future[list[T]]] = deque()
        try:
            while part := list(islice(source, chunk)):
                pending.append(self.submit(_apply, function, part))
                if len(pending) >= 4 * self.count:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()

    def kill(self) -> None:
        """End every process at once, whatever it is doing."""
        for process in self._context.started:
            process.kill()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._pool is None:
            return
        try:
            self._pool.shutdown(cancel_futures=kind is not None)
        except BaseException:  # interrupted while waiting
            self.kill()
            raise
        if isinstance(error, BrokenProcessPool):
            raise WorkerError(self._reason()) from error

    def _reason(self) -> str:
        for process in self._context.started:
            process.join()
        # The pool ends the others by SIGTERM as soon as one is dead.
        codes = [p.exitcode for p in self._context.started if p.exitcode]
        code = next((c for c in codes if c not in (-signal.SIGTERM, 128 + signal.SIGTERM)), None)
        if code is None:
            return "a worker process was ended from outside; start the command again."
        if code > 0:
            return f"a worker process ended with exit code {code} before its work was done."
        name = signal.Signals(-code).name
        hint = {
            signal.SIGKILL: "the system does so when memory runs out: try fewer workers",
            signal.SIGBUS: "a full disk or a file that shrank under it does so",
        }.get(signal.Signals(-code), "a damaged input can do so: `matbackprop data check` names bad files")
        return f"a worker process was killed by {name} ({hint})."


def _apply(function: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
    return [function(item) for item in items]


def parallel_map(function: Callable[[Item], T], items: Sequence[Item], workers: int = 0, chunk: int = 1) -> Iterator[T]:
    """Apply a function to every item in order, here or in processes started for it; see :meth:`Workers.map`.

    Args:
        function: picklable where ``workers`` > 1.
        items: picklable likewise.
        workers: number of processes; 0 and 1 stay in this one.
        chunk: how many items travel together.

    Example:
        >>> list(parallel_map(abs, [-2, 1]))
        [2, 1]
    """
    with Workers(min(workers, len(items))) as pool:
        yield from pool.map(function, items, chunk)
