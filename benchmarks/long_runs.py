"""Measure memory over long runs, in threads and in processes: ``python -m benchmarks long_runs``.

Parts: a small training with checkpoints and validation, segmentation with the network in the package, eight threads,
and forked and spawned processes. The summary is ``benchmarks/results/long_runs.json``.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from benchmarks.program import options_of, provenance, write_summary

MEGABYTES = 4  # allowed rise of the line fitted to the memory of the second half, with 95 % confidence
BLOCKS = 1000  # the same for Python's memory blocks; a process has some 700,000


def main() -> int:
    """Run all parts and write the summary. Exit code 0 if memory did not grow and results agree."""
    from helpers.concurrency import call_in_processes, call_in_threads
    from helpers.long_runs import segment_long, train_long

    parser = options_of("long_runs", __doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="steps of training")
    parser.add_argument("--photographs", type=int, default=2_000, help="photographs to segment")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        long = {
            "training": train_long(options.steps, Path(folder)),
            "segmenting photographs of many sizes": segment_long(options.photographs, Path(folder)),
            "segmenting photographs of one size": segment_long(options.photographs, Path(folder), (80, 80)),
        }
    tempfile.tempdir = None
    many = {
        "threads": call_in_threads(8, 200),
        "fork": call_in_processes("fork", 8),
        "spawn": call_in_processes("spawn", 2),
    }
    amounts = {
        f"{name}: {what}": (amount, most)
        for name, result in long.items()
        for what, amount, most in (
            ("megabytes", result["megabytes_in_second_half"]["at_most"], MEGABYTES),
            ("blocks of Python", result["python_blocks_in_second_half"]["at_most"], BLOCKS),
            *((what, amount, 0) for what, amount in result["grew"].items()),
        )
    }
    grown = {what: amount for what, (amount, most) in amounts.items() if amount > most}
    wrong = sum(result["wrong"] for result in many.values())
    summary = {
        "command": f"python -m benchmarks long_runs --steps {options.steps} --photographs {options.photographs}",
        "promise": f"in the second half, with a certainty of 95 %, memory rises by less than {MEGABYTES} MB, Python's "
        f"blocks by less than {BLOCKS}; all else not at all; no wrong result",
        "kept": not grown and not wrong,
        "grown": grown,
        "seconds": round(time.perf_counter() - started),
        **provenance(),
        **long,
        **many,
    }
    write_summary(options.output, summary)
    print(f"{'nothing grew, nothing was wrong' if summary['kept'] else f'{grown}, {wrong} wrong'}: {options.output}")
    return 0 if summary["kept"] else 1
