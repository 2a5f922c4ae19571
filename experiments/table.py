"""What all tables share: results that know what made them; runs, several at a time and within a time limit; stages,
timing, and the files of a table.

A result is kept with its *provenance*, everything that its numbers depend on: the configuration, the data, the starting
weights, the kind of device and the measure. The hash of the provenance, its *fingerprint*, is part of the name of the
result's folder, so a result that was made otherwise is never taken for the one that is asked for, nor overwritten.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import logging
import os
import statistics
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from experiments.config import TableConfig
from matbackprop.errors import ConfigurationError, DataError
from matbackprop.vision.data.cache import cache_key
from matbackprop.vision.files import atomic_write, read_json
from matbackprop.vision.progress import log_on_screen
from matbackprop.vision.report.tables import Table
from matbackprop.vision.training.config import differences, to_json
from matbackprop.vision.training.run_folder import RunFolder, versions
from matbackprop.vision.workers import Workers

_ENGINE = ("seed", "max_epochs", "precision", "matmul_precision", "deterministic", "gradient_clip", "accumulate")
"""Fields of the engine that change numbers; the others say where and how a run is carried out."""
_PLACES = {"root", "cache", "workers", "threads", "resident"}
"""Fields of the data that say where and how, not what: what is there is hashed on its own."""
_PICTURES = {".jpg", ".jpeg", ".png", ".bmp"}
_READABLE = _PICTURES | {".mat", ".seg", ".json", ".npy", ".npz"}


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        key: of what it is a run: a row, a group of rows, a baseline.
        part: its purpose, such as ``"trial"`` or ``"seed"``.
        number: which of those.
    """

    key: str
    part: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.key} {self.part} {self.number}"


def fingerprint(provenance: Mapping[str, Any]) -> str:
    """The hash of everything that makes a result, 16 hexadecimal digits.

    Example:
        >>> fingerprint({"data": "a", "device": "cpu"}) == fingerprint({"device": "cpu", "data": "a"})
        True
    """
    return cache_key(provenance)


def settings(config: Any) -> dict[str, Any]:
    """What the numbers of a run depend on, of a recipe's configuration: not where and how it is carried out.

    A field that was added later (its metadata say so) counts where it is set: unset it means what was meant before.

    Args:
        config: a configuration with the fields ``engine`` and ``data``, or its JSON form.
    """
    fields: dict[str, Any] = to_json(config)
    for section, values in fields.items():
        for one in dataclasses.fields(getattr(config, section)) if dataclasses.is_dataclass(config) else ():
            if one.metadata.get("added") and getattr(getattr(config, section), one.name) == one.default:
                del values[one.name]
    fields["engine"] = {name: fields["engine"][name] for name in _ENGINE}
    fields["data"] = {name: value for name, value in fields["data"].items() if name not in _PLACES}
    return fields


@cache
def data_digest(root: Path, splits: tuple[str, ...]) -> str:
    """The hash of a data set: names and sizes of its pictures, contents of its annotations.

    Args:
        root: its folder, in the layout of COCO or BSDS.
        splits: the parts to look at, such as ``("train", "val")``.

    Raises:
        DataError: there is no such file.
    """
    names = {split + year for split in splits for year in ("", "2014", "2017")}
    total, files = hashlib.sha256(), 0
    for path in sorted(root.rglob("*")):
        place = path.relative_to(root)
        words = {*place.parts[:-1], path.stem.removeprefix("instances_")}
        if path.suffix.lower() not in _READABLE or not names & words or not path.is_file():
            continue
        files += 1
        total.update(f"{place.as_posix()}\0{path.stat().st_size}\0".encode())
        if path.suffix.lower() not in _PICTURES or "groundTruth" in place.parts:
            total.update(hashlib.sha256(path.read_bytes()).digest())
    if not files:
        raise DataError(f"{root} holds no picture or annotation of {', '.join(splits)}; check --data.root.")
    return total.hexdigest()[:16]


def weights_digest(backbone: str, weights: str) -> str:
    """The hash of a backbone's starting weights.

    Args:
        backbone: its name.
        weights: ``"imagenet"``, ``"none"`` or a file, as configurations name them.
    """
    from matbackprop.vision.models.backbones.base import find_weights

    if weights == "none":
        return "none"
    path = find_weights(backbone) if weights == "imagenet" else Path(weights)
    if not path.is_file():
        raise DataError(f"there are no weights at {path}; name a safetensors file, imagenet or none.")
    return _file_digest(path, path.stat().st_mtime_ns)


@cache
def _file_digest(path: Path, changed: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class Store:
    """Results on the disk, in ``<folder>/<key>/<part><number>-<fingerprint>/result.json``.

    Example:
        >>> import tempfile
        >>> store, job = Store(Path(tempfile.mkdtemp())), Job("alexnet", "seed", 0)
        >>> store.write(job, {"device": "cpu"}, {"error": 40.0})
        >>> store.read(job, {"device": "cpu"})["error"], store.read(job, {"device": "cuda"})
        (40.0, None)
        >>> store.made_otherwise(job, {"device": "cuda"})
        [{'device': ('cpu', 'cuda')}]
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, dict[str, Any]] = {}

    def path(self, job: Job, provenance: Mapping[str, Any]) -> Path:
        """The folder of a result."""
        return self.folder / job.key / f"{job.part}{job.number}-{fingerprint(provenance)}"

    def read(self, job: Job, provenance: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result of a job that was made by ``provenance``; None where there is none.

        Raises:
            DataError: the file is damaged, or has another provenance than its folder's name says.
        """
        path = self.path(job, provenance) / "result.json"
        if path in self._read:  # what is finished does not change
            return self._read[path]
        if not path.is_file():
            return None
        try:
            result: dict[str, Any] = read_json(path)
        except DataError as error:
            raise DataError(f"{error} To do the run again, remove its folder.") from error
        if fingerprint(result.get("provenance", {})) == fingerprint(provenance):
            return self._read.setdefault(path, result)
        raise DataError(f"{path} was not made by what its folder's name says; remove the folder.")

    def write(self, job: Job, provenance: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Keep a result."""
        path = self.path(job, provenance)
        path.mkdir(parents=True, exist_ok=True)
        content = {**result, "provenance": to_json(provenance)}
        atomic_write(path / "result.json", json.dumps(content, indent=1) + "\n")

    def made_otherwise(self, job: Job, provenance: Mapping[str, Any]) -> list[dict[str, tuple[Any, Any]]]:
        """What differs in the job's results that were made by something else: dotted name → (there, asked for)."""
        asked = to_json(provenance)
        paths = sorted((self.folder / job.key).glob(f"{job.part}{job.number}-*/result.json"))
        there = (read_json(path).get("provenance", {}) for path in paths)
        return [changes for one in there if (changes := differences(one, asked))]


log = logging.getLogger("matbackprop")

Device = Literal["cuda", "cpu"]
"""A kind of device, as far as numbers depend on it."""
NUMBERS_ONLY: dict[str, Any] = {"overwrite": True, "devices": "1", "checkpoints": False, "tensorboard": False,
                                "progress": False, "report": False}  # fmt: skip
"""Fields of the engine for a run of a table, of which only the numbers are kept."""


# ----------------------------------------------------------------------------------------------------------------- runs


class Clock:
    """Says whether what is to be started would end within ``limit`` seconds, by how long the like of it took before."""

    def __init__(self, limit: float | None = None) -> None:
        self._end = float("inf") if limit is None else time.monotonic() + limit
        self._known: dict[str, float] = {}

    def note(self, key: str, seconds: float) -> None:
        """Remember how long ``key`` took."""
        self._known[key] = max(seconds, self._known.get(key, 0.0))

    def allows(self, key: str) -> bool:
        """Whether ``key`` may be started; what was never seen is taken to last as long as the slowest."""
        estimate = self._known.get(key, max(self._known.values(), default=0.0))
        return time.monotonic() + 1.2 * estimate < self._end


@cache
def shared_workers(count: int) -> Workers:
    """Processes that all runs in this process share; they end with it."""
    return Workers(count)


class _Outcome(NamedTuple):
    line: str
    seconds: float
    failure: str | None = None


def run_jobs(runs: Reproduction, *, jobs: int = 1, clock: Clock | None = None) -> None:
    """Do all runs that can be done in time, ``jobs`` at a time, each once.

    With several at a time, a run that fails does not stop the others; the call fails at the end.

    Raises:
        RuntimeError: a run failed, or has ended without a result that :meth:`Reproduction.ready` recognises.
    """
    clock = clock or Clock()
    started, failures = set[Job](), list[str]()
    running: dict[Future[_Outcome], Job] = {}
    with Workers(jobs) as pool:
        try:
            while True:
                for job in runs.ready():
                    if len(running) >= max(jobs, 1):
                        break
                    if job not in started and clock.allows(f"{job.key} {job.part}"):
                        started.add(job)
                        running[pool.submit(_run, runs, job, jobs > 1)] = job
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job, outcome = running.pop(future), future.result()
                    if outcome.failure is None:
                        clock.note(f"{job.key} {job.part}", outcome.seconds)
                        log.info("%-34s %6.1f s  %s", job, outcome.seconds, outcome.line)
                    else:
                        failures.append(f"{job}:\n{outcome.failure}")
                        log.error("%s", failures[-1])
        except BaseException:
            pool.kill()  # finished runs are on the disk, half-written files are not
            raise
    if failures:
        raise RuntimeError(f"{len(failures)} of {len(started)} runs failed, the first: {failures[0]}")
    if lost := started.intersection(runs.ready()):
        raise RuntimeError(f"{min(map(str, lost))} has ended, but its result is not the one that was asked for.")


def _run(runs: Reproduction, job: Job, catch: bool) -> _Outcome:
    if catch:  # in a process of its own: what a run says is in its folder, the parent reports
        log.addHandler(logging.NullHandler())
        log.propagate = False
    before = time.perf_counter()
    try:
        return _Outcome(runs.run(job), time.perf_counter() - before)
    except Exception:
        if not catch:
            raise
        return _Outcome("", time.perf_counter() - before, traceback.format_exc())


# ---------------------------------------------------------------------------------------------------------------- table


class Reproduction(ABC):
    """A table that is filled by runs. What is finished is kept, what was made otherwise is not used."""

    rows: ClassVar[Mapping[str, Any]]
    """All rows by key."""
    parts: ClassVar[Mapping[str, tuple[str, ...]]]
    """Stage → the parts of the runs that it does."""

    def __init__(self, config: TableConfig) -> None:
        if unknown := [key for key in config.rows if key not in self.rows]:
            raise ConfigurationError(f"there is no row {unknown[0]!r}; the rows are {', '.join(self.rows)}.")
        self.store = Store(config.out / "runs")
        self.out, self.stage, self.at_a_time = config.out, config.stage, config.jobs
        self.time_limit, self.accelerator = config.time_limit, config.accelerator
        self.chosen = {key: row for key, row in self.rows.items() if not config.rows or key in config.rows}

    @property
    def device(self) -> Device:
        """The kind of device that runs are done on."""
        if self.accelerator == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return "cuda" if self.accelerator == "gpu" else "cpu"

    # ------------------------------------------------------------------------------------------- what a table tells

    @abstractmethod
    def prepare(self) -> None:
        """Make the caches that the runs share."""

    @abstractmethod
    def jobs(self, part: str) -> Iterable[Job]:
        """Runs of a part, finished or not, without those that wait for others; those to start first in front."""

    @abstractmethod
    def provenance(self, job: Job, device: Device) -> dict[str, Any] | None:
        """Everything that a run's numbers depend on; None where it is not known yet."""

    @abstractmethod
    def run(self, job: Job) -> str:
        """Carry out a run, keep its result and return a line about it."""

    def time(self, job: Job) -> dict[str, dict[str, Any]]:
        """Measure the speed of a run, alone on the device: row → numbers; nothing in a table without speeds."""
        return {}

    @abstractmethod
    def summarize(self) -> dict[str, Any]:
        """Collect everything that has finished into table.json, table.md and figures."""

    # ----------------------------------------------------------------------------------------------------- results

    def result(self, job: Job, device: Device | None = None) -> dict[str, Any] | None:
        """The result of a run on a kind of device, by default the one at hand; None where there is none."""
        provenance = self.provenance(job, device or self.device)
        return None if provenance is None else self.store.read(job, provenance)

    def place(self, job: Job, device: Device | None = None) -> Path:
        """The folder of a run that can be started or has ended."""
        provenance = self.provenance(job, device or self.device)
        assert provenance is not None, job
        return self.store.path(job, provenance)

    def keep(self, job: Job, result: Mapping[str, Any]) -> None:
        """Keep the result of a run on the device at hand."""
        provenance = self.provenance(job, self.device)
        assert provenance is not None, job
        self.store.write(job, provenance, result)

    def finished(self, jobs: Iterable[Job]) -> tuple[Device, dict[Job, dict[str, Any]]]:
        """Results of one kind of device: of the one at hand, or of the other where there are none."""
        jobs = list(jobs)
        other: Device = "cpu" if self.device == "cuda" else "cuda"
        for device in (self.device, other):
            if results := {job: result for job in jobs if (result := self.result(job, device)) is not None}:
                return device, results
        return self.device, {}

    def ready(self) -> list[Job]:
        """Runs of this stage that have not ended and can be started now."""
        parts = self.parts.get(self.stage, ())
        return [job for part in parts for job in self.jobs(part) if self.result(job) is None]

    # ------------------------------------------------------------------------------------------------------- speed

    def run_timing(self, clock: Clock) -> None:
        """Measure every row's speed in one go, so that all speeds of a table come from one run on one machine.

        What was measured before is dropped, unless it holds everything that is asked for.
        """
        jobs = {job: self._fingerprint(job, self.device) for job in self.jobs("timing")}
        known = {one["fingerprint"] for one in self._speed().get("rows", {}).values()}
        if known.issuperset(jobs.values()):
            return
        speed: dict[str, Any] = {"machine": machine(), "device": self.device, "rows": {}}
        for job, mark in jobs.items():
            if not clock.allows("timing"):
                log.info("the time is up: %s and those after it are not timed.", job.key)
                break
            started = time.monotonic()
            for row, numbers in self.time(job).items():
                speed["rows"][row] = {"fingerprint": mark, **numbers}
                log.info("%-34s %s", row, numbers)
            clock.note("timing", time.monotonic() - started)
            self._write("speed.json", json.dumps(speed, indent=1) + "\n")

    def speed(self, row: str, job: Job) -> dict[str, Any]:
        """What was measured of a row; empty where it was not, or was measured of something else."""
        stored = self._speed()
        numbers = stored.get("rows", {}).get(row, {})
        return numbers if numbers and numbers["fingerprint"] == self._fingerprint(job, stored["device"]) else {}

    def speed_note(self) -> str:
        """A sentence about the machine that was timed."""
        timed = self._speed().get("machine")
        if not timed:
            return ""
        processors = f" with {timed['processors']} processors" if timed.get("processors") else ""
        revision = f", revision {timed['git'][:7]}" if timed.get("git") else ""
        return f" Speeds: one run, each row alone on one {timed['device']}{processors}{revision}."

    def training_rate(self, job: Job) -> float:
        """Items per second of a run's training, its first third left out."""
        run = RunFolder(self.place(job))
        rates = [m["train/steps_per_second"] for m in run.read_metrics() if m.get("train/steps_per_second")]
        return statistics.median(rates[len(rates) // 3 :]) * run.read_config()["data"]["batch_size"]

    def _fingerprint(self, job: Job, device: Device) -> str:
        provenance = self.provenance(job, device)
        return "" if provenance is None else fingerprint(provenance)

    def _speed(self) -> dict[str, Any]:
        path = self.out / "speed.json"
        return read_json(path) if path.is_file() else {}

    # -------------------------------------------------------------------------------------------------------- main

    @log_on_screen()
    def main(self) -> None:
        """Do what the configuration asks for; the same command again resumes where it stopped."""
        self.out.mkdir(parents=True, exist_ok=True)
        clock = Clock(self.time_limit)
        if self.stage != "summary":
            self.prepare()
        if open_jobs := self.ready():
            self._tell_of_others(open_jobs)
            log.info("%d runs can be started, %d at a time", len(open_jobs), max(self.at_a_time, 1))
            run_jobs(self, jobs=self.at_a_time, clock=clock)
            if left := self.ready():
                log.info("the time is up: %d runs are left, and those that wait for them; give the same command "
                         "again to resume.", len(left))  # fmt: skip
                return
        if self.stage in ("all", "timing"):
            self.run_timing(clock)
        if self.stage not in ("prepare", "tune", "timing"):
            self.summarize()

    def _tell_of_others(self, jobs: list[Job]) -> None:
        """Name results that are there but were made otherwise."""
        others = [
            f"{job}: " + ", ".join(f"{name} {there!r} instead of {asked!r}" for name, (there, asked) in changes.items())
            for job in jobs
            for changes in self.store.made_otherwise(job, self.provenance(job, self.device) or {})
        ]
        if others:
            shown = "\n  ".join([*others[:3], *(["…"] if len(others) > 3 else [])])
            log.info("%d results were made with other settings and are not used:\n  %s", len(others), shown)

    def write_table(self, content: Mapping[str, Any], table: Table, *more: str) -> None:
        """Write table.json and table.md, and show the table."""
        self._write("table.json", json.dumps(content, indent=1) + "\n")
        self._write("table.md", "\n\n".join([table.markdown(), *more]) + "\n")
        print(table.markdown())

    def _write(self, name: str, content: str) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        atomic_write(self.out / name, content)


def machine() -> dict[str, Any]:
    """What a speed depends on besides the program."""
    process = versions()
    return {name: process.get(name) for name in ("time", "device", "platform", "git", "git_dirty")} | {
        "processors": os.cpu_count()
    }


def interval_text(interval: Mapping[str, float], digits: int) -> str:
    """A difference with its interval, as tables print it.

    Example:
        >>> interval_text({"difference": -2.546, "low": -3.271, "high": -1.858}, 2)
        '-2.55 [-3.27, -1.86]'
    """
    difference, low, high = (f"{interval[name]:+.{digits}f}" for name in ("difference", "low", "high"))
    return f"{difference} [{low}, {high}]"


def reproduce(config: TableConfig) -> dict[str, Any]:
    """Fill the table whose options are given, and say where it is."""
    module, name = config.table.split(":")
    table = getattr(importlib.import_module(f"experiments.{module}"), name)(config)
    table.main()
    files = [path for path in (table.out / "table.md", table.out / "table.json") if path.exists()]
    where = ", ".join(map(str, files)) or f"runs in {table.out}"
    return {"summary": f"table: {where}", "out": table.out, "files": files}
