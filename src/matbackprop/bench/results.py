"""Results of a benchmark: one JSON file per machine, which it describes, and one record per measurement."""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from matbackprop.errors import DataError
from matbackprop.files import read_json
from matbackprop.training.run_folder import is_number, package_versions

Status = Literal["ok", "missing", "failed"]
PACKAGES = ("matbackprop", "torch", "numpy", "scipy", "scikit-learn", "scikit-image", "spd_learn", "geoopt",
            "ncut_pytorch", "cupy-cuda13x", "cupy-cuda12x", "jax")  # fmt: skip


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, device, threads and versions, as JSON can hold them."""
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "kind": device.type,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
    }
    facts["versions"] = {**package_versions(PACKAGES), "torch": torch.__version__}
    return facts


def machine_name(machine: dict[str, Any]) -> str:
    """A file name for the machine: its device, and the threads where that is a CPU.

    Example:
        >>> machine_name({"device": "NVIDIA H200", "kind": "cuda", "threads": 16})
        'nvidia-h200'
        >>> machine_name({"device": "Intel(R) Xeon(R) Processor", "kind": "cpu", "threads": 2})
        'intel-xeon-2-threads'
    """
    text = re.sub(r"\((r|tm)\)|processor|cpu|@.*", " ", machine["device"].lower())
    slug = "-".join(re.findall(r"[a-z0-9]+", text)) or "unknown"
    return slug if machine["kind"] == "cuda" else f"{slug}-{machine['threads']}-threads"


@dataclass(frozen=True)
class Record:
    """One measurement.

    Attributes:
        suite: the suite.
        case: what was computed, the same for all who are compared.
        method: who computed it; ``matbackprop`` or its variants, or a peer.
        status: ``ok``, ``missing`` for a peer that is not installed, ``failed`` with the reason in ``note``.
        parameters: numbers of the case, for plots.
        median_ms, low_ms, high_ms, repeats, peak_mb: see :class:`matbackprop.bench.measure.Timing`.
        error: relative error, in suites that measure accuracy; NaN is kept as the text ``nan``.
        note: why it failed, or what to know.
    """

    suite: str
    case: str
    method: str
    status: Status = "ok"
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
    """All records of one machine, and how they were measured."""

    machine: dict[str, Any]
    """See :func:`describe_machine`."""
    command: str
    revision: str
    """The code's revision, where known."""
    date: str
    records: list[Record] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the machine's file."""
        return machine_name(self.machine)


def load_results(path: Path) -> Results:
    """Read one machine's file."""
    try:
        raw = read_json(path)
        known = {f.name for f in fields(Record)}
        records = [Record(**{k: v for k, v in r.items() if k in known}) for r in raw.pop("records")]
        results = Results(**raw, records=records)
        if not all(map(_is_sound, records)) or not results.name or not isinstance(results.command, str):
            raise ValueError("values of other kinds")
        return results
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is not a file of benchmark results ({error}); measure again.") from error


def _is_sound(record: Record) -> bool:
    """Whether the values of a record, which came from a file, are of the kinds that it says."""
    numbers = (record.median_ms, record.low_ms, record.high_ms, record.repeats, record.peak_mb)
    texts = (record.suite, record.case, record.method, record.note, *record.parameters)
    values = (*numbers, *record.parameters.values(), record.error)
    return (
        all(isinstance(text, str) for text in texts)
        and record.status in get_args(Status)
        and all(number is None or is_number(number) for number in numbers)
        and all(isinstance(value, (int, float, str, type(None))) for value in values)
    )


def save_results(results: Results, folder: Path) -> Path:
    """Write a machine's file; suites that were not measured this time are kept from the file that is there."""
    path = folder / f"{results.name}.json"
    records = list(results.records)
    if path.exists():
        measured = {r.suite for r in records}
        records = [r for r in load_results(path).records if r.suite not in measured] + records
    folder.mkdir(parents=True, exist_ok=True)
    merged = {**asdict(results), "records": [asdict(r) for r in records]}
    path.write_text(json.dumps(merged, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
