"""Measure memory over long runs, in threads and in processes: ``python -m benchmarks long_runs``.

Parts: a small training with checkpoints and validation, segmentation with the network in the package, eight threads,
and forked and spawned processes. The summary is ``benchmarks/results/long_runs.json``.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.program import RESULTS, finish, provenance

MEGABYTES = 4  # allowed rise of the line fitted to the memory of the second half, with 95 % confidence
BLOCKS = 1000  # the same for Python's memory blocks; a process has some 700,000


@dataclass
class Config:
    """Measure memory over long runs. Exits with 0 if memory did not grow and results agree."""

    steps: int = 10_000  #: Steps of training.
    photographs: int = 2_000  #: Photographs to segment.
    output: Path = RESULTS / "long_runs.json"  #: Summary file.


def main(config: Config) -> dict[str, Any]:
    """Run all parts and write the summary."""
    from helpers.concurrency import call_in_processes, call_in_threads
    from helpers.long_runs import segment_long, train_long

    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        long = {
            "training": train_long(config.steps, Path(folder)),
            "segmenting photographs of many sizes": segment_long(config.photographs, Path(folder)),
            "segmenting photographs of one size": segment_long(config.photographs, Path(folder), (80, 80)),
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
        "command": f"python -m benchmarks long_runs --steps {config.steps} --photographs {config.photographs}",
        "promise": f"in the second half, with a certainty of 95 %, memory rises by less than {MEGABYTES} MB, Python's "
        f"blocks by less than {BLOCKS}; all else not at all; no wrong result",
        "kept": not grown and not wrong,
        "grown": grown,
        "seconds": round(time.perf_counter() - started),
        **provenance(),
        **long,
        **many,
    }
    text = f"{grown}, {wrong} wrong" if grown or wrong else "nothing grew, nothing was wrong"
    return finish(config.output, summary, text, good=not grown and not wrong)
