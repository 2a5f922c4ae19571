"""Inject faults into training runs and resume them: ``python -m benchmarks faults``.

The faults are defined in ``tests/helpers/training_faults.py``. Each is determined by its number and can be repeated:
``--only NAME --first N --count 1``. The summary is ``benchmarks/results/faults.json``.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from benchmarks.program import options_of, provenance, write_summary


def main() -> int:
    """Inject the faults and write the summary. Exit code 0 if training survived all of them."""
    from helpers.signals import restore_signals
    from helpers.training_faults import FAULTS, inject

    parser = options_of("faults", __doc__)
    parser.add_argument("--count", type=int, default=200, help="number of faults")
    parser.add_argument("--first", type=int, default=0, help="number of the first fault")
    parser.add_argument("--only", choices=FAULTS, help="one kind only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    restore_signals()
    logging.getLogger("matbackprop").addHandler(logging.NullHandler())
    logging.getLogger("matbackprop").propagate = False
    names = [options.only] if options.only else list(FAULTS)
    kinds = {name: {"what": FAULTS[name].__doc__, "injected": 0, "survived": 0, "failures": []} for name in names}
    started = time.perf_counter()
    for number in range(options.first, options.first + options.count):
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
        print(f"\r{number + 1 - options.first} of {options.count}", end="", file=sys.stderr)
    summary = {
        "command": f"python -m benchmarks faults --count {options.count}",
        "injected": options.count,
        "survived": sum(kind["survived"] for kind in kinds.values()),
        "seconds": round(time.perf_counter() - started),
        **provenance(),
        "faults": kinds,
    }
    write_summary(options.output, summary)
    print(f"\n{summary['survived']} of {options.count} survived: {options.output}")
    return 0 if summary["survived"] == options.count else 1
