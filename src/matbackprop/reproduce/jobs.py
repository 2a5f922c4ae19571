"""Runs of a table, several at a time, within a time limit."""

from __future__ import annotations

import logging
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import cache
from typing import NamedTuple, Protocol

from matbackprop.processes import Workers
from matbackprop.reproduce.store import Job

__all__ = ["Clock", "Runs", "run_jobs", "shared_workers"]

log = logging.getLogger("matbackprop")


class Clock:
    """Says whether what is to be started would end in time, from how long the like of it took before.

    Args:
        limit: seconds from now on; None for no limit.
    """

    def __init__(self, limit: float | None = None) -> None:
        self._end = float("inf") if limit is None else time.monotonic() + limit
        self._known: dict[str, float] = {}

    def note(self, key: str, seconds: float) -> None:
        """Remember how long ``key`` took."""
        self._known[key] = max(seconds, self._known.get(key, 0.0))

    def allows(self, key: str) -> bool:
        """Whether ``key`` may be started; what was never seen is taken to last as long as the slowest."""
        estimate = self._known.get(key, max(self._known.values(), default=0.0))
        return time.monotonic() + 1.2 * estimate < self._end


@cache
def shared_workers(count: int) -> Workers:
    """Processes that all runs in this process share; they end with it."""
    return Workers(count)


class Runs(Protocol):
    """Runs that depend on each other and keep their own results; picklable where several are done at a time."""

    def ready(self) -> list[Job]:
        """Runs that have not ended and can be started now, those to start first in front."""

    def run(self, job: Job) -> str:
        """Carry out a run, keep its result and return a line about it."""


class _Outcome(NamedTuple):
    line: str
    seconds: float
    failure: str | None = None


def run_jobs(runs: Runs, *, jobs: int = 1, clock: Clock | None = None) -> None:
    """Do all runs that can be done in time, ``jobs`` at a time, each once.

    With several at a time, a run that fails does not stop the others; the call fails at the end.

    Raises:
        RuntimeError: a run failed, or has ended without a result that :meth:`Runs.ready` recognises.
    """
    clock = clock or Clock()
    started, failures = set[Job](), list[str]()
    running: dict[Future[_Outcome], Job] = {}
    with Workers(jobs) as pool:
        try:
            while True:
                for job in runs.ready():
                    if len(running) >= max(jobs, 1):
                        break
                    if job not in started and clock.allows(f"{job.key} {job.part}"):
                        started.add(job)
                        running[pool.submit(_run, runs, job, jobs > 1)] = job
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job, outcome = running.pop(future), future.result()
                    if outcome.failure is None:
                        clock.note(f"{job.key} {job.part}", outcome.seconds)
                        log.info("%-34s %6.1f s  %s", job, outcome.seconds, outcome.line)
                    else:
                        failures.append(f"{job}:\n{outcome.failure}")
                        log.error("%s", failures[-1])
        except BaseException:
            pool.kill()  # finished runs are on the disk, half-written files are not
            raise
    if failures:
        raise RuntimeError(f"{len(failures)} of {len(started)} runs failed, the first: {failures[0]}")
    if lost := started.intersection(runs.ready()):
        raise RuntimeError(f"{min(map(str, lost))} has ended, but its result is not the one that was asked for.")


def _run(runs: Runs, job: Job, catch: bool) -> _Outcome:
    if catch:  # in a process of its own: what a run says is in its folder, the parent reports
        log.addHandler(logging.NullHandler())
        log.propagate = False
    before = time.perf_counter()
    try:
        return _Outcome(runs.run(job), time.perf_counter() - before)
    except Exception:
        if not catch:
            raise
        return _Outcome("", time.perf_counter() - before, traceback.format_exc())
