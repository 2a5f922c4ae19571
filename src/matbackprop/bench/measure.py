"""Time, memory and error of one call, measured the same way for everybody."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_SAMPLE_SECONDS = 0.002
_MOST = 50  # repeats
_LONG = 3  # times the seconds to spend, from which on one repeat is enough


@dataclass(frozen=True)
class Timing:
    """Times of a call in milliseconds, and the memory it took on top of what was there before.

    Attributes:
        median_ms: median of the repeats.
        low_ms: first quartile.
        high_ms: third quartile.
        repeats: number of timed calls, after the warm-up.
        peak_mb: peak of allocated device memory, or of the resident set on the CPU, above the level before the call.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    repeats: int
    peak_mb: float


class _ResidentPeak:
    """Samples the resident set of this process in a thread; zero where the system does not tell."""

    def __init__(self) -> None:
        self._file = Path("/proc/self/statm")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.start = self._now()
        self.peak = self.start

    def _now(self) -> int:
        return int(self._file.read_text().split()[1]) * 4096 if self._file.exists() else 0

    def _watch(self) -> None:
        while not self._done.wait(_SAMPLE_SECONDS):
            self.peak = max(self.peak, self._now())

    def __enter__(self) -> _ResidentPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.peak = max(self.peak, self._now())
        self._done.set()
        self._thread.join()


def _time_cuda(call: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def _time_cpu(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def measure(call: Callable[[], Any], device: torch.device, *, seconds: float = 1.0) -> Timing:
    """Time a call: a warm-up, then repeats until ``seconds`` are spent, three at least or one of a long call.

    A call is long when it takes more than three times ``seconds``.

    On CUDA the time is that between two events on the stream with the device idle before, so that launches count as a
    user would feel them; on the CPU it is the wall clock.
    """
    clock = _time_cuda if device.type == "cuda" else _time_cpu
    gc.collect()
    first = clock(call)
    if first < 1e3 * seconds:
        clock(call)
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        times = [clock(call)]
        peak = float(torch.cuda.max_memory_allocated() - before)
    else:
        with _ResidentPeak() as resident:
            times = [clock(call)]
        peak = float(resident.peak - resident.start)
    long = first > _LONG * 1e3 * seconds and times[0] > _LONG * 1e3 * seconds
    stop = time.perf_counter() + seconds
    while not long and len(times) < _MOST and (time.perf_counter() < stop or len(times) < 3):
        times.append(clock(call))
    low, _, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
    return Timing(statistics.median(times), low, high, len(times), peak / 2**20)
