"""Read corrupted files of every kind: ``python -m benchmarks corrupted_files``.

The corruptions are defined in ``tests/helpers/corrupted_files.py``. Each is determined by its number and can be
repeated: ``--only READER --first N --files 1``. The summary is ``benchmarks/results/corrupted_files.json``.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.program import RESULTS, finish, provenance


def _attack(job: tuple[str, int]) -> tuple[str, int, Any]:
    from helpers.corrupted_files import attack

    return *job, attack(*job)


@dataclass
class Config:
    """Corrupt and read files. Exits with 0 if every file was read or rejected."""

    files: int = 5000  #: Number of files.
    first: int = 0  #: Number of the first file.
    processes: int = 2  #: Parallel processes.
    only: str | None = None  #: One reader only.
    output: Path = RESULTS / "corrupted_files.json"  #: Summary file.


def main(config: Config) -> dict[str, Any]:
    """Corrupt and read the files, and write the summary."""
    from helpers.corrupted_files import GOOD, MEMORY, READERS, SECONDS, prepare

    torch.set_num_threads(1)
    names = list(READERS) if config.only is None else [config.only]
    turns = [name for turn in range(8) for name in names if turn < READERS[name].turns]
    verdicts: dict[str, Counter[str]] = {name: Counter() for name in names}
    largest, slowest = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
    findings = []
    started = time.perf_counter()
    numbers = range(config.first, config.first + config.files)
    jobs = [(turns[number % len(turns)], number) for number in numbers]
    prepare()
    # Not multiprocessing.Pool, whose processes cannot start processes.
    pool = ProcessPoolExecutor(config.processes, multiprocessing.get_context("fork"))
    for done, future in enumerate(as_completed([pool.submit(_attack, job) for job in jobs]), 1):
        name, number, result = future.result()
        verdicts[name][result.verdict] += 1
        largest[name] = max(largest[name], result.bytes)
        slowest[name] = max(slowest[name], result.seconds)
        if result.verdict not in GOOD:
            findings.append({"reader": name, "number": number} | vars(result))
            print(f"\n{name} {number}: {result.verdict} ({result.file}, {result.how})\n{result.said}", flush=True)
        print(f"\r{done} of {config.files}", end="", file=sys.stderr)
    pool.shutdown()
    total = sum(verdicts.values(), Counter())
    summary = {
        "command": f"python -m benchmarks corrupted_files --first {config.first} --files {config.files}",
        "files": config.files,
        "promise": f"read, or refused in one line that names the file, within {SECONDS:g} s and {MEMORY >> 20} MB",
        "verdicts": dict(total),
        "seconds": round(time.perf_counter() - started),
        **provenance(),
        "readers": {
            name: {
                "corrupted": list(READERS[name].corrupted),
                "verdicts": dict(verdicts[name]),
                "largest_megabytes": largest[name] >> 20,
                "slowest_seconds": round(slowest[name], 2),
            }
            for name in names
        },
        "findings": findings,
    }
    return finish(config.output, summary, f"{dict(total)}", good=not findings)
