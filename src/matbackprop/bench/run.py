"""Runs suites and collects their records."""

from __future__ import annotations

import datetime
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from matbackprop.bench.measure import measure
from matbackprop.bench.peers import MissingPeer
from matbackprop.bench.results import Record, Results, describe_machine
from matbackprop.bench.suites import SUITES
from matbackprop.bench.suites.entry import Entry, Scale
from matbackprop.errors import ConfigurationError
from matbackprop.inference.loading import choose_device
from matbackprop.training.run_folder import git_revision


def run_entry(suite: str, entry: Entry, device: torch.device, seconds: float) -> Record:
    """Measure one entry; a peer that is missing or fails gives a record too."""
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


def run_suites(
    names: Sequence[str],
    device: torch.device | str,
    *,
    scale: Scale = "full",
    seconds: float = 1.0,
    revision: str = "",
    report: Callable[[Record], None] = lambda record: None,
) -> Results:
    """Measure suites on a device.

    Args:
        names: suites, see :data:`SUITES`.
        device: ``cpu`` or ``cuda``.
        scale: ``full``, or ``quick`` for sizes that finish in seconds.
        seconds: time for the repeats of each measurement.
        revision: of the code; asked of git where it is not given.
        report: called with each record as it comes.
    """
    unknown = [n for n in names if n not in SUITES]
    if unknown:
        raise ConfigurationError(f"there is no suite {unknown[0]!r}; choose among {', '.join(SUITES)}.")
    device = choose_device(str(device))
    results = Results(
        machine=describe_machine(device),
        command=" ".join(["matbackprop", "bench", *sys.argv[2:]] if len(sys.argv) > 1 else ["matbackprop", "bench"]),
        revision=revision or (git_revision()["git"] or "")[:7],
        date=datetime.date.today().isoformat(),
    )
    for name in names:
        for entry in SUITES[name](device, scale):
            record = run_entry(name, entry, device, seconds)
            results.records.append(record)
            report(record)
    return results
