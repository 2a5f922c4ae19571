"""Results of a benchmark: one JSON file per machine, one record per measurement."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from matbackprop.bench.machine import machine_name
from matbackprop.errors import DataError

__all__ = ["Record", "Results", "load_results", "save_results"]

Status = Literal["ok", "missing", "failed"]


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
    """All records of one machine.

    Attributes:
        machine: see :func:`matbackprop.bench.machine.describe_machine`.
        command: how they were measured.
        revision: the code's revision, where known.
        date: day of the measurement.
        records: the measurements.
    """

    machine: dict[str, Any]
    command: str
    revision: str
    date: str
    records: list[Record] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the machine's file."""
        return machine_name(self.machine)


def load_results(path: Path) -> Results:
    """Read one machine's file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        known = {f.name for f in fields(Record)}
        records = [Record(**{k: v for k, v in r.items() if k in known}) for r in raw.pop("records")]
        return Results(**raw, records=records)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is not a file of benchmark results ({error}); measure again.") from error


def save_results(results: Results, folder: Path) -> Path:
    """Write a machine's file; suites that were not measured this time are kept from the file that is there.

    Returns:
        The file.
    """
    path = folder / f"{results.name}.json"
    records = list(results.records)
    if path.exists():
        measured = {r.suite for r in records}
        records = [r for r in load_results(path).records if r.suite not in measured] + records
    folder.mkdir(parents=True, exist_ok=True)
    merged = {**asdict(results), "records": [asdict(r) for r in records]}
    path.write_text(json.dumps(merged, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
