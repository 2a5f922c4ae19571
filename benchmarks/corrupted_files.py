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
from typing import Any

import torch

from benchmarks.program import options_of, provenance, write_summary


def _attack(job: tuple[str, int]) -> tuple[str, int, Any]:
    from helpers.corrupted_files import attack

    return *job, attack(*job)


def main() -> int:
    """Corrupt and read the files, and write the summary. Exit code 0 if every file was read or rejected."""
    from helpers.corrupted_files import GOOD, MEMORY, READERS, SECONDS, prepare

    parser = options_of("corrupted_files", __doc__)
    parser.add_argument("--files", type=int, default=5000, help="number of files")
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--processes", type=int, default=2, help="parallel processes")
    parser.add_argument("--only", choices=READERS, help="one reader only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [options.only] if options.only else list(READERS)
    turns = [name for turn in range(8) for name in names if turn < READERS[name].turns]
    verdicts: dict[str, Counter[str]] = {name: Counter() for name in names}
    largest, slowest = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
    findings = []
    started = time.perf_counter()
    numbers = range(options.first, options.first + options.files)
    jobs = [(turns[number % len(turns)], number) for number in numbers]
    prepare()
    # Not multiprocessing.Pool, whose processes cannot start processes.
    pool = ProcessPoolExecutor(options.processes, multiprocessing.get_context("fork"))
    for done, future in enumerate(as_completed([pool.submit(_attack, job) for job in jobs]), 1):
        name, number, result = future.result()
        verdicts[name][result.verdict] += 1
        largest[name] = max(largest[name], result.bytes)
        slowest[name] = max(slowest[name], result.seconds)
        if result.verdict not in GOOD:
            findings.append({"reader": name, "number": number} | vars(result))
            print(f"\n{name} {number}: {result.verdict} ({result.file}, {result.how})\n{result.said}", flush=True)
        print(f"\r{done} of {options.files}", end="", file=sys.stderr)
    pool.shutdown()
    total = sum(verdicts.values(), Counter())
    summary = {
        "command": f"python -m benchmarks corrupted_files --first {options.first} --files {options.files}",
        "files": options.files,
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
    write_summary(options.output, summary)
    print(f"\n{dict(total)}: {options.output}")
    return 0 if not findings else 1
