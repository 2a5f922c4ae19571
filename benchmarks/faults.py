"""Inject faults into training runs and resume them: ``python -m benchmarks faults``.

The faults are defined in ``tests/helpers/training_faults.py``. Each is determined by its number and can be repeated:
``--only NAME --first N --count 1``. The summary is ``benchmarks/results/faults.json``.
"""

from __future__ import annotations

import logging
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.program import RESULTS, finish, provenance


@dataclass
class Config:
    """Inject faults into training runs. Exits with 0 if training survived all of them."""

    count: int = 200  #: Number of faults.
    first: int = 0  #: Number of the first fault.
    only: str | None = None  #: One kind only.
    output: Path = RESULTS / "faults.json"  #: Summary file.


def main(config: Config) -> dict[str, Any]:
    """Inject the faults and write the summary."""
    from helpers.training_faults import FAULTS, inject

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # forked processes inherit the handlers
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_DFL)
    logging.getLogger("matbackprop").addHandler(logging.NullHandler())
    logging.getLogger("matbackprop").propagate = False
    names = list(FAULTS) if config.only is None else [config.only]
    kinds = {name: {"what": FAULTS[name].__doc__, "injected": 0, "survived": 0, "failures": []} for name in names}
    started = time.perf_counter()
    for number in range(config.first, config.first + config.count):
        name = names[number % len(names)]
        folder = Path(tempfile.mkdtemp())
        kinds[name]["injected"] += 1
        try:
            inject(name, folder, number)
            kinds[name]["survived"] += 1
        except Exception as error:
            kinds[name]["failures"].append({"number": number, "error": f"{type(error).__name__}: {error}"})
            traceback.print_exc()
        shutil.rmtree(folder, ignore_errors=True)
        print(f"\r{number + 1 - config.first} of {config.count}", end="", file=sys.stderr)
    summary = {
        "command": f"python -m benchmarks faults --count {config.count}",
        "injected": config.count,
        "survived": sum(kind["survived"] for kind in kinds.values()),
        "seconds": round(time.perf_counter() - started),
        **provenance(),
        "faults": kinds,
    }
    survived = f"{summary['survived']} of {config.count} survived"
    return finish(config.output, summary, survived, good=summary["survived"] == config.count)
