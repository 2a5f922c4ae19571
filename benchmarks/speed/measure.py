"""Time, memory and error of one call, measured the same way for all methods."""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import re
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.speed.peers import MissingPeer
from benchmarks.speed.suites.entry import Entry
from matbackprop.vision.files import atomic_write
from matbackprop.vision.versions import package_versions

_MOST = 50  # repeats
_LONG = 3  # a call longer than this multiple of ``seconds`` is repeated once


@dataclass(frozen=True)
class Timing:
    """Quartiles of a call's times, and its peak memory above the level before: device memory or resident set."""

    median_ms: float
    low_ms: float
    high_ms: float
    repeats: int
    peak_mb: float


def _resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS, or VmHWM for the peak; 0 on other systems."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field)), 0)


def _milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        call()
        return (time.perf_counter() - begun) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def measure(call: Callable[[], Any], device: torch.device, *, seconds: float = 1.0) -> Timing:
    """Time a call: a warm-up, then repeats for ``seconds``, at least three.

    A call that takes more than three times ``seconds`` is repeated once.

    CUDA times are measured between two events on an idle device and include kernel launches. CPU times are wall-clock
    times.
    """
    gc.collect()
    first = _milliseconds(call, device)
    if first < 1e3 * seconds:
        _milliseconds(call, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        times = [_milliseconds(call, device)]
        peak = float(torch.cuda.max_memory_allocated() - before)
    else:
        if (reset := Path("/proc/self/clear_refs")).exists():
            reset.write_text("5")  # resets VmHWM
        level = _resident("VmRSS")
        times = [_milliseconds(call, device)]
        peak = float(max(_resident("VmHWM") - level, 0))
    long = first > _LONG * 1e3 * seconds and times[0] > _LONG * 1e3 * seconds
    stop = time.perf_counter() + seconds
    while not long and len(times) < _MOST and (time.perf_counter() < stop or len(times) < 3):
        times.append(_milliseconds(call, device))
    low, _, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else (times[0],) * 3
    return Timing(statistics.median(times), low, high, len(times), peak / 2**20)


PACKAGES = ("matbackprop", "torch", "numpy", "scipy", "scikit-learn", "scikit-image", "spd_learn", "geoopt",
            "ncut_pytorch", "jax")  # fmt: skip


def processor() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, device, threads and versions, for JSON."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "kind": device.type,
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "versions": {**package_versions(PACKAGES), "torch": torch.__version__},
    }


def machine_name(machine: dict[str, Any]) -> str:
    """A file name for the machine: its device, and the threads if that is a CPU."""
    text = re.sub(r"\((r|tm)\)|processor|cpu|@.*", " ", machine["device"].lower())
    slug = "-".join(re.findall(r"[a-z0-9]+", text)) or "unknown"
    return slug if machine["kind"] == "cuda" else f"{slug}-{machine['threads']}-threads"


@dataclass(frozen=True)
class Record:
    """One measurement: a method on a case that is the same for all methods.

    ``status`` is ``missing`` for a peer that is not installed, and ``failed`` with the reason in ``note``.
    ``parameters`` are numbers of the case, for plots. An error of NaN is kept as the text ``nan``.
    """

    suite: str
    case: str
    method: str
    status: Literal["ok", "missing", "failed"] = "ok"
    parameters: dict[str, float | str] = field(default_factory=dict)
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    repeats: int | None = None
    peak_mb: float | None = None
    error: float | str | None = None
    note: str = ""


@dataclass
class Results:
    """All records of one machine and the conditions of the measurement."""

    machine: dict[str, Any]  #: See :func:`describe_machine`.
    command: str
    revision: str  #: Revision of the code, if known.
    date: str
    records: list[Record] = field(default_factory=list)

    @property
    def name(self) -> str:
        """File name of the machine."""
        return machine_name(self.machine)


def load_results(path: Path) -> Results:
    """Read one machine's file."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    return Results(**raw | {"records": [Record(**record) for record in raw["records"]]})


def save_results(results: Results, folder: Path) -> Path:
    """Write a machine's file; records of other suites in the existing file are kept."""
    path = folder / f"{results.name}.json"
    measured = {record.suite for record in results.records}
    others = [r for r in load_results(path).records if r.suite not in measured] if path.exists() else []
    folder.mkdir(parents=True, exist_ok=True)
    merged = asdict(replace(results, records=[*others, *results.records]))
    atomic_write(path, json.dumps(merged, indent=1, ensure_ascii=False) + "\n")
    return path


def run_entry(suite: str, entry: Entry, device: torch.device, seconds: float) -> Record:
    """Measure one entry; a missing or failing peer is also recorded."""
    record = Record(suite, entry.case, entry.method, parameters=dict(entry.parameters), note=entry.note)
    try:
        call = entry.build(device)
        if entry.kind == "error":
            error = float(call())
            return replace(record, error=error if math.isfinite(error) else str(error))
        timing = measure(call, device, seconds=seconds)
    except (MissingPeer, ImportError) as missing:
        return replace(record, status="missing", note=str(missing)[:300])
    except Exception as problem:
        reason = traceback.format_exception_only(problem)[-1].strip()
        return replace(record, status="failed", note=reason[:300])
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return replace(record, **vars(timing))
