"""Judge every operator on ill-conditioned and invalid matrices: ``python -m benchmarks adversarial_matrices``.

The problems are defined in ``tests/helpers/adversarial.py``. Each is determined by its number; ``--only 1234``
repeats one. An interrupted run can be resumed. The summary is ``benchmarks/results/adversarial_matrices.json``. With
``--device cuda`` the mode eager checks values and the mode unchecked is the default of the operators. A process that
ends or takes more than 90 seconds is a crash of its problem and is replaced.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.program import RESULTS, finish, provenance

BAD = ("needless error", "unclear error", "silently wrong", "crash")
VERDICTS = ("exact", "undetermined", "clear error", *BAD)
Record = dict[str, Any]
PATIENCE = 90.0
"""Seconds after which a problem counts as a crash."""


def judged(task: tuple[int, int], device: str = "cpu") -> Record:
    """Judge one problem; an exception of the judge itself is a separate verdict."""
    from helpers import adversarial

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        record = adversarial.record(*task, device=device)
    except Exception as error:
        record = crashed(task, f"{type(error).__name__}: {error}")
    return record | {"verdict": max(record["verdicts"].values(), key=VERDICTS.index)}


def crashed(task: tuple[int, int], reason: str) -> Record:
    from helpers import adversarial

    problem, kind = adversarial.make(*task)
    record = {"number": task[1], "operator": problem.row.name, "kind": kind, "mode": problem.mode, "caught": {}}
    record |= {"dtype": str(problem.dtype).removeprefix("torch."), "verdicts": {"value": "crash"}}
    return record | {"details": {"value": reason}, "verdict": "crash"}


def work(connection: Connection, seed: int, device: str) -> None:
    """Judge the numbers that a connection sends, until None. An error of the device ends the process."""
    for number in iter(connection.recv, None):
        record = judged((seed, number), device)
        if device == "cuda":
            torch.cuda.synchronize()
        connection.send(record)


class Worker:
    """A process that judges one problem at a time."""

    def __init__(self, seed: int, device: str):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, seed, device), daemon=True)
        self.process.start()
        theirs.close()
        self.number, self.since = -1, 0.0

    def give(self, number: int) -> None:
        self.number, self.since = number, time.monotonic()
        self.connection.send(number)


def judge_all(numbers: list[int], seed: int, device: str, processes: int, seconds: float) -> Iterator[Record]:
    """The records of problems as they are judged, until the time is over."""
    until, todo, busy = time.monotonic() + seconds, iter(numbers), dict[Any, Worker]()

    def employ(worker: Worker | None) -> None:
        number = next(todo, None)
        if number is not None:
            worker = worker or Worker(seed, device)
            worker.give(number)
            busy[worker.connection] = worker
        elif worker is not None:
            worker.connection.send(None)

    for _ in range(processes):
        employ(None)
    while busy and time.monotonic() < until:
        ready = wait(list(busy), timeout=1)
        late = [c for c, w in busy.items() if c not in ready and time.monotonic() - w.since > PATIENCE]
        for connection in [*ready, *late]:
            worker = busy.pop(connection)
            try:
                if connection in late:
                    worker.process.kill()
                record = worker.connection.recv()
            except (EOFError, OSError):
                worker.process.join()
                reason = f"no result after {PATIENCE:.0f} s" if connection in late else "the process ended"
                record = crashed((seed, worker.number), f"{reason}, exit code {worker.process.exitcode}")
                yield record
                employ(None)
            else:
                yield record
                employ(worker)
    for worker in busy.values():
        worker.process.kill()


def processor_of(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    from benchmarks.speed.measure import processor  # which imports all suites

    return processor()


def summary(records: list[Record], seed: int, device: str) -> Record:
    """Counts by operator, kind, mode and dtype, the mutated answers that were noticed, and every failed problem."""

    def counts(rows: list[Record]) -> dict[str, int]:
        found = Counter(r["verdict"] for r in rows)
        return {v: found[v] for v in VERDICTS if found[v]}

    def by(key: str) -> dict[str, dict[str, int]]:
        return {name: counts([r for r in records if r[key] == name]) for name in sorted({r[key] for r in records})}

    def caught(rows: list[Record]) -> str:
        found = Counter(value for r in rows for value in r["caught"].values())
        return f"{found[True]} of {found.total()}"

    dtypes = sorted({r["dtype"] for r in records})
    command = f"python -m benchmarks adversarial_matrices --cases {len(records)} --seed {seed}"
    return {
        "command": command + ("" if device == "cpu" else f" --device {device}"),
        "cases": len(records),
        "verdicts": counts(records),
        **provenance(),
        "processor": processor_of(device),
        "mutated answers noticed": {dtype: caught([r for r in records if r["dtype"] == dtype]) for dtype in dtypes},
        **{f"{key}s": by(key) for key in ("operator", "kind", "mode", "dtype")},
        "failed": [r for r in records if r["verdict"] in BAD],
    }


def table(result: Record) -> str:
    """The counts by kind of matrix and by mode, and the command and revision, in Markdown."""
    lines = [f"| | {' | '.join(VERDICTS)} |", "| --- |" + " ---: |" * len(VERDICTS)]
    rows = [*result["kinds"].items(), *result["modes"].items(), ("**all**", result["verdicts"])]
    lines += [f"| {name} | {' | '.join(str(counts.get(v, 0)) for v in VERDICTS)} |" for name, counts in rows]
    noticed = ", ".join(f"{dtype} {count}" for dtype, count in result["mutated answers noticed"].items())
    origin = f"`{result['command']}` at {result['revision'][:7]}, torch {result['torch']}, {result['processor']}."
    return "\n".join([*lines, "", f"Mutated answers noticed: {noticed}.", "", origin, ""])


@dataclass
class Config:
    """Judge every operator on problematic matrices. Exits with 0 if every result was correct or a clear error."""

    cases: int = 20_000  #: Number of problems.
    seed: int = 0  #: Seed of the problems.
    device: Literal["cpu", "cuda"] = "cpu"  #: Where to compute.
    processes: int = os.cpu_count() or 1  #: Parallel processes.
    seconds: float = float("inf")  #: Stop after this time.
    only: tuple[int, ...] = ()  #: Judge these problems and print their records.
    output: Path = RESULTS / "adversarial_matrices.json"  #: Summary file.


def main(config: Config) -> dict[str, Any]:
    """Judge the problems and write the summary."""
    if config.only:
        for number in config.only:
            print(json.dumps(judged((config.seed, number), config.device), indent=2, ensure_ascii=False))
        return {}
    progress = config.output.with_suffix(f".{config.seed}.jsonl")
    done = {r["number"]: r for r in map(json.loads, progress.read_text().splitlines())} if progress.exists() else {}
    numbers = [n for n in range(config.cases) if n not in done]
    with progress.open("a") as log:
        for record in judge_all(numbers, config.seed, config.device, config.processes, config.seconds):
            done[record["number"]] = record
            log.write(json.dumps(record, ensure_ascii=False) + "\n")
            log.flush()
            print(f"\r{len(done)} of {config.cases}", end="", file=sys.stderr)
    result = summary([done[n] for n in sorted(done)], config.seed, config.device)
    if len(done) >= config.cases:
        progress.unlink()
    print(f"\n{table(result)}")
    for r in result["failed"]:
        print(*(r[k] for k in ("number", "operator", "kind", "mode", "dtype", "verdicts", "details")))
    return finish(config.output, result, f"{result['verdicts']}", good=not result["failed"])
