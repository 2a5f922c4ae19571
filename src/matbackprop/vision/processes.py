"""What long work needs: a device, worker processes that never outlive their parent, signals, what the processes of a
training ask each other, and how far it is."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import islice
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from matbackprop.errors import ConfigurationError, WorkerError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_device(name: str = "auto") -> torch.device:
    """Return a device by name; ``"auto"`` takes CUDA where there is one, ``"gpu"`` is another word for ``"cuda"``.

    Raises:
        ConfigurationError: CUDA was asked for and there is none.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = "cuda" if name == "gpu" else name
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("there is no CUDA device that torch can use; take cpu or auto.")
    return torch.device(name)


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold SIGINT, SIGTERM and SIGHUP back in this thread; processes started meanwhile are born deaf to them.

    A worker needs seconds until its own code runs. Without this, Ctrl-C, a scheduler's SIGTERM or the SIGHUP of a
    closed terminal, which reach all processes of a command, would end it before it could call :func:`follow_parent`.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow_parent() -> None:
    """Let this process, started under :func:`signals_held`, end when its parent ends or terminates it.

    Signals of anybody else are the parent's to act on: it stops giving out work and ends its workers. Its own SIGTERM
    may be lost in one of theirs that came just before, as signals are not counted; SIGKILL is not.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None and hasattr(signal, "sigtimedwait"):
        threading.Thread(target=_follow, args=(parent.pid,), daemon=True).start()


def release_memory() -> None:
    """Let the C library give free memory back to the system, where it is glibc.

    It keeps what lies between blocks that are still used, and arrays of ever other sizes leave more and more of that.
    """
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def bound_reserves() -> None:
    """Let the C library keep little free memory in a process with many threads, where it is glibc.

    It gives threads heaps of their own, up to eight per core, and comes to keep large blocks in them instead of giving
    each back; what many requests leave free in many heaps adds up.
    """
    with suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(-8, 2)  # M_ARENA_MAX: heaps
        library.mallopt(-3, 1 << 18)  # M_MMAP_THRESHOLD: blocks of so many bytes are given back by themselves


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


# -------------------------------------------------------------------------------------------------------------- signals


class SignalHandlers:
    """Handles SIGINT, SIGTERM and SIGHUP while it is entered, in the main thread.

    Whoever sends a signal to a process and to its group sends it twice: a second one within a second is the same.
    Signals that were ignored before, as under ``nohup``, stay ignored.

    Attributes:
        signum: the first signal that came, or None.
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
    return SignalHandlers(*(["SIGUSR1"] if "SLURM_JOB_ID" in os.environ else []))


# --------------------------------------------------------------------- what the processes of a training ask each other


def _alone() -> bool:
    from torch import distributed

    return not distributed.is_initialized() or distributed.get_world_size() == 1


def any_process(flag: bool, device: torch.device) -> bool:
    """Return whether the flag is set on any process; all call it together."""
    if _alone():
        return flag
    import torch

    flags = torch.tensor(int(flag), device=device)
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
    return bool(flags)


def gather_objects(value: Any) -> list[Any]:
    """Return the values of all processes, in their order."""
    if _alone():
        return [value]
    from torch import distributed

    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def gather_rows(value: Tensor) -> Tensor:
    """Concatenate tensors (n,) of different lengths from all processes, in their order."""
    if _alone():
        return value
    import torch

    counts = gather_objects(len(value))
    padded = torch.cat([value, value.new_zeros(max(counts) - len(value))])
    parts = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(parts, padded)
    return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])


log = logging.getLogger("matbackprop")

# ------------------------------------------------------------------------------------------------------------- progress

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
