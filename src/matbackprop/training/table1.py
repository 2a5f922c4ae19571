"""The paper's first table: seven region classifiers, tuned alike, trained over several seeds, compared in pairs.

``matbackprop reproduce table1`` does all of it and may be stopped at any time: what is finished is not done again.

1. *Tuning.* Every row tries the same number of settings, each for as many epochs as the final runs, on the training
   images alone: four fifths to fit, one fifth to choose. Shorter trials would prefer what learns fast and overfits.
2. *Training.* The chosen setting is trained on all training images, once for each seed, and the validation images are
   looked at once, after the last epoch.
3. *Timing.* Each row alone on the device for two epochs: regions per second and the structured layer's share of a step.
4. *Summary.* Means and spreads, paired differences with bootstrap intervals, figures, hashes and commands.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import queue
import shlex
import statistics
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from matbackprop.data.coco_regions import resident_store
from matbackprop.errors import ConfigurationError, DataError, NonFiniteError
from matbackprop.files import atomic_write
from matbackprop.metrics.bootstrap import paired_bootstrap
from matbackprop.processes import follow_parent, signals_held
from matbackprop.report import figures
from matbackprop.report.tables import Measured, Table
from matbackprop.training.config import merge, to_json
from matbackprop.training.engine import fit, seed_all
from matbackprop.training.o2p import (
    build,
    confusion,
    open_regions,
    save_predictions,
    sift_vectors,
)
from matbackprop.training.o2p_config import PRESETS, O2PConfig
from matbackprop.training.run_folder import RunFolder
from matbackprop.training.table_config import Table1Config

log = logging.getLogger("matbackprop")

Kind = Literal["fine", "scratch", "sift"]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: as the table prints it.
        key: as folders and options write it.
        kind: which rows it shares epochs and the number of seeds with.
        paper: the paper's error in percent, or None for a row that the paper does not have.
        model: fields of the configuration that make the row what it is, by dotted name.
        trials: settings to choose from, most promising first.
        group: rows of one group compete: only the one with the smallest error in tuning is trained to the end.
    """

    name: str
    key: str
    kind: Kind
    paper: float | None
    model: dict[str, Any]
    trials: list[dict[str, Any]]
    group: str | None = None


def _rates(*pairs: tuple[float, float], **more: Any) -> list[dict[str, Any]]:
    return [{"optimizer.rate": rate, "optimizer.backbone_factor": factor, **more} for rate, factor in pairs]


_SCRATCH = {"model.weights": "none"}
_FC = {"model.head": "fc"}
_O2P = {"model.head": "o2p", "model.function": "log"}
_O2P_FC = {"model.head": "o2p_fc", "model.function": "log"}
_BOTH = {"model.head": "both", "model.function": "log", "model.vector_scale": 0.3}
_NARROW = {"model.reduce": 96}
_MAPS = {**_NARROW, "model.further_taps": ["relu2", "relu3", "relu4"]}
_HALF = {"model.vector_dropout": 0.5}
_MOST = {"model.vector_dropout": 0.8}
_LOUD = {"model.feature_scale": 0.1}  # features of random filters are small

ROWS = [
    Row(
        "SIFT-O2P",
        "sift",
        "sift",
        36.4,
        {"model.head": "sift", "model.support": "mask", "optimizer.decay": 1e-3},
        _rates((1e-3, 1.0), (3e-4, 1.0), (3e-3, 1.0), (1e-4, 1.0)),
    ),
    Row("AlexNet", "alexnet", "fine", 25.3, _FC, _rates((0.01, 0.1), (0.02, 0.05), (0.02, 0.1), (0.005, 0.2))),
    Row(
        "AlexNet (S)",
        "alexnet-s",
        "scratch",
        27.2,
        {**_FC, **_SCRATCH},
        _rates((0.01, 1.0), (0.02, 1.0), (0.005, 1.0), (0.02, 0.5)),
    ),
    Row(
        "DeepO2P",
        "o2p",
        "fine",
        28.6,
        _O2P,
        [*_rates((1e-3, 0.3), (1e-3, 1.0), (3e-4, 1.0)), *_rates((1e-3, 0.3), **_HALF)],
    ),
    Row(
        "DeepO2P (S)",
        "o2p-s",
        "scratch",
        32.4,
        {**_O2P, **_SCRATCH},
        [*_rates((1e-3, 10.0), (1e-3, 3.0), (3e-4, 10.0)), *_rates((1e-3, 10.0), **_LOUD)],
    ),
    Row("DeepO2P-FC", "o2p-fc", "fine", 25.2, _O2P_FC, _rates((0.01, 0.1), (0.01, 0.03), (0.003, 0.1), (0.003, 0.3))),
    Row(
        "DeepO2P-FC (S)",
        "o2p-fc-s",
        "scratch",
        28.9,
        {**_O2P_FC, **_SCRATCH},
        [*_rates((0.01, 1.0), (0.003, 3.0), (0.003, 1.0)), *_rates((0.01, 1.0), **_LOUD)],
    ),
    # Beyond the paper: of each group the best in tuning is trained to the end. The plain DeepO2P knows its training
    # regions by heart (loss 0.1 after 12 epochs, 0.25 after 20 from scratch), so these drop half of the descriptor or
    # more.
    Row(
        "DeepO2P, dropout",
        "o2p-drop",
        "fine",
        None,
        _O2P,
        [*_rates((1e-3, 1.0), **_HALF), *_rates((1e-3, 1.0), (1e-3, 0.3), (3e-3, 0.3), **_MOST)],
        "fine",
    ),
    Row(
        "DeepO2P-FC, square root",
        "sqrt-fc",
        "fine",
        None,
        {"model.head": "o2p_fc", "model.function": "sqrt"},
        _rates((0.01, 0.1), (0.01, 0.03), (0.003, 0.1), (0.02, 0.1)),
        "fine",
    ),
    Row(
        "first and second order, log at 6×6",
        "both-log",
        "fine",
        None,
        _BOTH,
        [*_rates((0.01, 0.1), **_HALF), *_rates((0.01, 0.1), (0.02, 0.05), (0.02, 0.1), **_MOST)],
        "fine",
    ),
    Row(
        "DeepO2P on 96 channels",
        "o2p-narrow",
        "fine",
        None,
        {**_O2P, **_NARROW},
        [*_rates((1e-3, 1.0), (3e-3, 0.3), **_MOST), *_rates((1e-3, 1.0), (3e-3, 0.3), **_HALF)],
        "fine",
    ),
    Row(
        "DeepO2P on four maps",
        "o2p-maps",
        "fine",
        None,
        {**_O2P, **_MAPS},
        [*_rates((1e-3, 1.0), (1e-3, 0.3), (3e-3, 0.3), **_MOST), *_rates((1e-3, 1.0), **_HALF)],
        "fine",
    ),
    Row(
        "first and second order on four maps",
        "both-maps",
        "fine",
        None,
        {**_BOTH, **_MAPS},
        [
            *_rates((0.01, 0.1), (0.02, 0.05), (0.02, 0.1), **_MOST),
            *_rates((0.01, 0.1), **_MOST, **{"model.vector_scale": 0.6}),
        ],
        "fine",
    ),
    Row(
        "DeepO2P, dropout (S)",
        "o2p-drop-s",
        "scratch",
        None,
        {**_O2P, **_SCRATCH},
        [*_rates((3e-4, 10.0), **_HALF), *_rates((3e-4, 10.0), (3e-4, 30.0), (1e-3, 3.0), **_MOST)],
        "scratch",
    ),
    Row(
        "first and second order on four maps (S)",
        "both-maps-s",
        "scratch",
        None,
        {**_BOTH, **_MAPS, **_SCRATCH, "model.vector_scale": 0.1},
        [
            *_rates((0.02, 1.0), (0.01, 1.0), (0.02, 0.5), **_MOST),
            *_rates((0.01, 1.0), **_MOST, **{"model.vector_scale": 0.2}),
        ],
        "scratch",
    ),
    Row(
        "first and second order, log at 6×6 (S)",
        "both-log-s",
        "scratch",
        None,
        {**_BOTH, **_SCRATCH, "model.vector_scale": 0.1},
        [
            *_rates((0.02, 0.5), **_HALF),
            *_rates((0.02, 0.5), (0.01, 1.0), **_MOST),
            *_rates((0.02, 0.5), **_MOST, **{"model.vector_scale": 0.3}),
        ],
        "scratch",
    ),
]

REFERENCES = {"fine": "alexnet", "scratch": "alexnet-s", "sift": "alexnet"}
"""The row that each kind is compared with."""


def chosen_rows(config: Table1Config) -> list[Row]:
    """The rows that ``config.rows`` names."""
    known = {row.key: row for row in ROWS}
    unknown = [key for key in config.rows if key not in known]
    if unknown:
        raise ConfigurationError(f"there is no row {unknown[0]!r}; the rows are {', '.join(known)}.")
    return [row for row in ROWS if not config.rows or row.key in config.rows]


@dataclass(frozen=True)
class Job:
    """One run: a trial of a row's tuning, a seed of its training, or its timing."""

    row: str
    part: Literal["trial", "seed", "timing"]
    number: int

    @property
    def name(self) -> str:
        return self.part if self.part == "timing" else f"{self.part}{self.number}"


def run_path(config: Table1Config, job: Job) -> Path:
    """The run folder of a job."""
    return config.out / "runs" / job.row / job.name


def result(config: Table1Config, job: Job) -> dict[str, Any] | None:
    """The stored result of a job; None where it has not ended, or was done with another model, setting or length."""
    path = run_path(config, job) / "result.json"
    if not path.is_file():
        return None
    row = _row(job.row)
    number = job.number if job.part == "trial" else choose(config, row)
    if number is None:
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    epochs = run_config(config, row, job, row.trials[number]).engine.max_epochs  # an override may have changed it
    wanted = {"model": row.model, "setting": row.trials[number], "epochs": epochs}
    return found if all(found[name] == value for name, value in wanted.items()) else None


def epochs_of(config: Table1Config, row: Row, part: str) -> int:
    """Epochs of a run: the same for all rows of a kind."""
    whole = {"fine": config.fine_epochs, "scratch": config.scratch_epochs, "sift": config.sift_epochs}[row.kind]
    return 2 if part == "timing" else whole


def run_config(config: Table1Config, row: Row, job: Job, setting: dict[str, Any]) -> O2PConfig:
    """The complete configuration of a run."""
    epochs = epochs_of(config, row, job.part)
    cuda = torch.cuda.is_available() and config.accelerator != "cpu"
    base = dataclasses.replace(PRESETS["paper"], data=config.data)
    return merge(
        base,
        {
            **row.model,
            **setting,
            "engine.run": run_path(config, job).as_posix(),
            "engine.seed": job.number if job.part == "seed" else 1000,
            "engine.max_epochs": epochs,
            "engine.validate_every": epochs,
            "engine.overwrite": True,
            "engine.devices": "1",
            "engine.accelerator": config.accelerator,
            "engine.precision": config.precision if cuda and row.kind != "sift" else "32",
            "engine.log_every": 50,
            "engine.checkpoints": False,
            "engine.profile": job.part == "timing" and row.kind != "sift",
            "engine.progress": False,
            "engine.report": False,
            "engine.tensorboard": False,
            "data.split": "tuning" if job.part == "trial" else "final",
            **_overrides(config.override),
        },
    )


def _overrides(words: tuple[str, ...]) -> dict[str, Any]:
    """Read ``name=value`` with values in JSON; what is not JSON is text."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigurationError(f"{word!r} is no override; write it as name=value, such as model.hidden=64.")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def run_job(config: Table1Config, job: Job, setting: dict[str, Any]) -> dict[str, Any]:
    """Carry out a run and store its result; a run that diverges is a result too."""
    row = next(r for r in ROWS if r.key == job.row)
    recipe = run_config(config, row, job, setting)
    started = time.perf_counter()
    found: dict[str, Any] = {"row": row.key, "part": job.part, "number": job.number, "model": row.model}
    found |= {"setting": setting, "epochs": recipe.engine.max_epochs}
    seed_all(recipe.engine.seed)
    module, data = build(recipe)
    run = RunFolder(run_path(config, job))
    try:
        fit(recipe, module, data, name=f"table1-{row.key}")
    except NonFiniteError as error:
        found |= {"error": 100.0, "error_large": 100.0, "diverged": str(error)}
    else:
        summary = run.read_summary()
        found |= {
            "error": summary["val/error"],
            "error_large": summary["val/error_large"],
            "loss": summary["val/loss"],
            "steps": summary["steps"],
            "predictions_sha256": save_predictions(run, module),
        }
        if job.part == "timing":
            found |= _speed(run, recipe)
    found["seconds"] = round(time.perf_counter() - started, 2)
    found["parameters"] = sum(p.numel() for p in module.parameters())
    run.path.mkdir(parents=True, exist_ok=True)
    atomic_write(run.path / "result.json", json.dumps(found, indent=2) + "\n")
    del module, data
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def _speed(run: RunFolder, recipe: O2PConfig) -> dict[str, Any]:
    """Regions per second, and the layer's share of a step where it was profiled."""
    rates = [m["train/steps_per_second"] for m in run.read_metrics() if m.get("train/steps_per_second")]
    found: dict[str, Any] = {
        "regions_per_second": round(statistics.median(rates[1:] or rates) * recipe.data.batch_size)
    }
    if run.profile_path.is_file():
        profile = json.loads(run.profile_path.read_text())
        found["profile"] = profile
    return found


# ---------------------------------------------------------------------------------------------------------- scheduling


def choose(config: Table1Config, row: Row) -> int | None:
    """The trial with the smallest error on the held-out training images; None while trials are missing."""
    found = [result(config, Job(row.key, "trial", i)) for i in range(min(config.trials, len(row.trials)))]
    if any(r is None for r in found):
        return None
    errors = [r["error"] for r in found if r is not None]
    return int(np.argmin(errors))


def wins(config: Table1Config, row: Row) -> bool | None:
    """Whether a row is trained to the end: it competes with none, or its best trial beats those of its group.

    None while trials are missing.
    """
    rivals = [r for r in chosen_rows(config) if row.group is not None and r.group == row.group] or [row]
    best: dict[str, float] = {}
    for rival in rivals:
        choice = choose(config, rival)
        if choice is None:
            return None
        best[rival.key] = (result(config, Job(rival.key, "trial", choice)) or {})["error"]
    return min(best, key=lambda key: best[key]) == row.key


def open_jobs(config: Table1Config) -> tuple[list[tuple[Job, dict[str, Any]]], int]:
    """Runs that can be started now, the longest first, and how many there are to do in all, waiting ones included."""
    ready: list[tuple[Job, dict[str, Any]]] = []
    waiting = 0
    for row in chosen_rows(config):
        seeds = config.fine_seeds if row.kind == "fine" else config.other_seeds
        trials = row.trials[: config.trials]
        if config.stage in ("all", "tune"):
            jobs = [Job(row.key, "trial", i) for i in range(len(trials))]
            ready += [(j, trials[j.number]) for j in jobs if result(config, j) is None]
        if config.stage in ("all", "train"):
            jobs = [j for j in (Job(row.key, "seed", i) for i in range(seeds)) if result(config, j) is None]
            best, chosen = choose(config, row), wins(config, row)
            if best is None or chosen is None:
                waiting += len(jobs)
            elif chosen:
                ready += [(j, trials[best]) for j in jobs]
    ready.sort(key=lambda item: -_cost(config, item[0]))
    return ready, len(ready) + waiting


def _row(key: str) -> Row:
    return next(row for row in ROWS if row.key == key)


def _cost(config: Table1Config, job: Job) -> float:
    """Relative duration of a run, for the order of starting only."""
    row = _row(job.row)
    head = {"fc": 1.0, "o2p": 1.2, "o2p_fc": 2.0, "both": 2.0, "sift": 0.1}[row.model["model.head"]]
    head *= 1.5 if row.model.get("model.tap") == "relu5" else 1.0
    return epochs_of(config, row, job.part) * head * (0.8 if job.part == "trial" else 1.0)


def _estimate(config: Table1Config, job: Job, seen: dict[str, list[float]]) -> float:
    """Seconds that a run will take, from the finished runs of its row, or else of the slowest row."""
    known = [statistics.median(values) for key, values in seen.items() if key == job.row]
    known = known or [statistics.median(values) for values in seen.values()]
    return 1.1 * max(known, default=0.0) * epochs_of(config, _row(job.row), job.part)


def _worker(config: Table1Config, tasks: Any, results: Any) -> None:
    follow_parent()
    torch.set_num_threads(2)
    log.addHandler(logging.NullHandler())  # what a run says is in its folder; the parent reports
    log.propagate = False
    if torch.cuda.is_available() and config.accelerator != "cpu":
        for regions in open_regions(config.data):
            resident_store(regions, torch.device("cuda", 0))  # once a process, before the first run is timed
    while (task := tasks.get()) is not None:
        job, setting = task
        try:
            results.put((job, run_job(config, job, setting), None))
        except Exception:
            results.put((job, None, traceback.format_exc()))


def run_all(config: Table1Config) -> bool:
    """Do all runs of the stage, several at a time; return whether nothing is left to do.

    With several at a time a run that fails does not stop the others, but the command fails at the end.
    """
    started = time.monotonic()
    seen: dict[str, list[float]] = {}

    def left() -> float:
        return float("inf") if config.time_limit is None else config.time_limit - (time.monotonic() - started)

    def note(job: Job, found: dict[str, Any]) -> None:
        seen.setdefault(job.row, []).append(found["seconds"] / epochs_of(config, _row(job.row), job.part))
        log.info(
            "%-10s %-7s error %5.2f  %5.1f s  %s",
            job.row,
            job.name,
            found["error"],
            found["seconds"],
            json.dumps(found["setting"]),
        )

    def next_job(running: set[Job]) -> tuple[Job, dict[str, Any]] | None:
        for job, setting in open_jobs(config)[0]:
            if job not in running and _estimate(config, job, seen) < left():
                return job, setting
        return None

    if config.jobs <= 1:
        while (task := next_job(set())) is not None:
            note(task[0], run_job(config, *task))
        return open_jobs(config)[1] == 0

    context = multiprocessing.get_context("spawn")
    tasks: Any = context.Queue()
    results: Any = context.Queue()
    workers = [context.Process(target=_worker, args=(config, tasks, results), daemon=True) for _ in range(config.jobs)]
    with signals_held():  # they are the parent's to act on
        for worker in workers:
            worker.start()
    running: set[Job] = set()
    failures: dict[Job, str] = {}
    try:
        while True:
            while len(running) < config.jobs and (task := next_job(running | failures.keys())) is not None:
                running.add(task[0])
                tasks.put(task)
            if not running:
                break
            try:
                job, found, failure = results.get(timeout=5)
            except queue.Empty:
                dead = [w for w in workers if not w.is_alive()]
                if dead:
                    raise RuntimeError(
                        f"a worker ended with exit code {dead[0].exitcode} (out of memory?); try fewer --jobs."
                    ) from None
                continue
            running.discard(job)
            if failure is not None:
                failures[job] = f"{job.row} {job.name}:\n{failure}"
                log.error("%s", failures[job])
            else:
                note(job, found)
    except BaseException:
        for worker in workers:
            worker.kill()  # finished runs are on the disk, half-written files are not
        raise
    finally:
        for worker in workers:
            if worker.is_alive():
                tasks.put(None)
        for worker in workers:
            worker.join(timeout=10)
            if worker.is_alive():
                worker.terminate()
    if failures:
        raise RuntimeError(f"{len(failures)} runs failed, the first: {next(iter(failures.values()))}")
    return open_jobs(config)[1] == 0


def run_timing(config: Table1Config) -> None:
    """Time each row alone on the device, with its chosen setting."""
    for row in chosen_rows(config):
        job = Job(row.key, "timing", 0)
        best = choose(config, row)
        if best is not None and wins(config, row) and result(config, job) is None:
            found = run_job(config, job, row.trials[best])
            log.info("%-10s %s regions/s", row.key, found.get("regions_per_second"))


# ------------------------------------------------------------------------------------------------------------- summary


def predictions(config: Table1Config, job: Job) -> dict[str, np.ndarray]:
    """What a finished run predicted on the validation regions."""
    with np.load(run_path(config, job) / "predictions" / "validation.npz") as file:
        return {name: file[name] for name in file.files}


def wrong(config: Table1Config, row: Row) -> np.ndarray:
    """Errors of a row: 0 or 1, one line for each finished seed, one column for each validation region."""
    stored = [predictions(config, job) for job in predicting_seeds(config, row)]
    lines = [(one["target"] != one["predicted"]).astype(np.float64) for one in stored]
    return np.stack(lines) if lines else np.zeros((0, 0))


def finished_seeds(config: Table1Config, row: Row) -> list[Job]:
    """The row's final runs that have ended."""
    seeds = config.fine_seeds if row.kind == "fine" else config.other_seeds
    jobs = [Job(row.key, "seed", i) for i in range(seeds)]
    return [j for j in jobs if result(config, j) is not None]


def predicting_seeds(config: Table1Config, row: Row) -> list[Job]:
    """The row's final runs that have predictions: those that did not diverge."""
    return [job for job in finished_seeds(config, row) if "diverged" not in (result(config, job) or {})]


def command(config: Table1Config, row: Row) -> str | None:
    """The command that trains one seed of a row with its chosen setting."""
    best = choose(config, row)
    if best is None:
        return None
    options = {
        **row.model,
        **row.trials[best],
        "engine.max-epochs": epochs_of(config, row, "seed"),
        "engine.precision": "32" if row.kind == "sift" else config.precision,
    }
    words = [_option(name, value) for name, value in options.items()]
    return f"matbackprop train o2p --preset paper {' '.join(words)}"


def _option(name: str, value: Any) -> str:
    """A field as the command line takes it."""
    path, _, field_name = name.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return f"--{path}.{'' if value else 'no-'}{field_name}"
    if isinstance(value, list):
        return f"--{path}.{field_name} {shlex.join(value)}"
    return f"--{path}.{field_name} {shlex.quote(str(value))}"


def summarize(config: Table1Config) -> dict[str, Any]:
    """Collect everything that has finished into table.json, table.md and the figures."""
    rows = [row for row in chosen_rows(config) if finished_seeds(config, row)]
    if not rows:
        raise DataError(f"no finished run was found in {config.out / 'runs'}; train first.")
    errors = {row.key: wrong(config, row) for row in rows}
    predicting = [job for row in rows for job in predicting_seeds(config, row)]
    if not predicting:
        raise DataError(f"every finished run in {config.out / 'runs'} diverged; there is nothing to compare.")
    first = predictions(config, predicting[0])
    large, images = first["large"], first["image"]
    table: dict[str, Any] = {"rows": [], "regions": len(large), "large_regions": int(large.sum())}
    for row in rows:
        found = [r for j in finished_seeds(config, row) if (r := result(config, j)) is not None]
        reference = REFERENCES[row.kind]
        entry: dict[str, Any] = {
            "name": row.name,
            "key": row.key,
            "kind": row.kind,
            "paper": row.paper,
            "model": row.model,
            "trials": _trials(config, row),
            "chosen": choose(config, row),
            "seeds": [
                {"seed": r["number"], **_brief(r), "predictions_sha256": r.get("predictions_sha256")} for r in found
            ],
            "error": _mean_and_spread([r["error"] for r in found]),
            "error_large": _mean_and_spread([r["error_large"] for r in found]),
            "parameters": found[0]["parameters"],
            "command": command(config, row),
        }
        if row.key != reference and reference in errors and errors[reference].size and errors[row.key].size:
            mine, other = errors[row.key], errors[reference]
            entry["difference"] = {
                "to": reference,
                "all": _difference(mine, other, images),
                "large": _difference(mine[:, large], other[:, large], images[large]),
            }
        timing = result(config, Job(row.key, "timing", 0))
        if timing is not None:
            entry["timing"] = {k: timing.get(k) for k in ("regions_per_second", "profile")}
        table["rows"].append(entry)
    table["candidates"] = [
        {"name": row.name, "key": row.key, "model": row.model, "trials": _trials(config, row)}
        for row in chosen_rows(config)
        if row not in rows and any(_trials(config, row))
    ]
    table["versions"] = RunFolder(run_path(config, finished_seeds(config, rows[0])[0])).read_versions()[-1]
    table["versions"].pop("command", None)
    table["budget"] = {
        "trials": config.trials,
        "epochs": {"fine": config.fine_epochs, "scratch": config.scratch_epochs, "sift": config.sift_epochs},
        "data": to_json(dataclasses.replace(config.data, root=None, cache=None)),
    }
    atomic_write(config.out / "table.json", json.dumps(table, indent=2) + "\n")
    _write_markdown(config, table)
    _draw(config, rows, table, errors)
    return table


def _trials(config: Table1Config, row: Row) -> list[dict[str, Any]]:
    """Settings that a row tried, with what they gave."""
    tried = enumerate(row.trials[: config.trials])
    found = ((setting, result(config, Job(row.key, "trial", i))) for i, setting in tried)
    return [{"setting": setting, **_brief(r)} for setting, r in found if r is not None]


def _brief(found: dict[str, Any] | None) -> dict[str, Any]:
    keys = ("error", "error_large", "steps", "seconds", "diverged")
    return {} if found is None else {k: found[k] for k in keys if k in found}


def _mean_and_spread(values: list[float]) -> dict[str, Any]:
    measured = Measured.of(values)
    return {"mean": measured.mean, "spread": measured.spread, "values": values}


def _difference(mine: np.ndarray, other: np.ndarray, images: np.ndarray) -> dict[str, float]:
    """Difference of the mean errors in points with its 95 % interval.

    Seeds are averaged first. Images are resampled, not regions, because the regions of one image resemble each other:
    an image counts with the sum over its regions, scaled so that the mean over images is the mean over regions.

    Args:
        mine, other: errors (seeds, n) of two rows on the same regions.
        images: (n,) the image of each region.
    """
    _, group = np.unique(images, return_inverse=True)
    scale = 100 * (group.max() + 1) / len(images)
    first, second = (scale * np.bincount(group, weights=e.mean(0)) for e in (mine, other))
    found = paired_bootstrap(first, second, seed=0)
    return {"points": found.difference, "low": found.low, "high": found.high}


def _share(entry: dict[str, Any]) -> float | None:
    """The structured layer's share of a step, in percent."""
    profile = (entry.get("timing") or {}).get("profile")
    if not profile:
        return None
    parts = profile["milliseconds"]
    return 100 * (parts["layer forward"] + parts["layer backward"]) / profile["total_milliseconds"]


def _interval(entry: dict[str, Any], which: str) -> str | None:
    if "difference" not in entry:
        return None
    d = entry["difference"][which]
    return f"{d['points']:+.2f} [{d['low']:+.2f}, {d['high']:+.2f}]"


def _write_markdown(config: Table1Config, table: dict[str, Any]) -> None:
    columns = ["model", "paper", "all regions", "≥ 400 px", "seeds", "difference to AlexNet", "regions/s", "layer (%)"]
    body: list[list[Any]] = []
    for entry in table["rows"]:
        error, large = entry["error"], entry["error_large"]
        body.append(
            [
                entry["name"],
                entry["paper"],
                Measured(error["mean"], error["spread"]),
                Measured(large["mean"], large["spread"]),
                len(entry["seeds"]),
                _interval(entry, "all"),
                (entry.get("timing") or {}).get("regions_per_second"),
                _share(entry),
            ]
        )
    note = (
        f"Error in percent on {table['regions']} validation regions ({table['large_regions']} of at least 400 px), "
        "mean ± standard deviation over seeds. Differences: paired bootstrap over images, 95 % interval, against "
        f"AlexNet of the same kind; negative is better. Each row tried {config.trials} settings on training images "
        "that were held out."
    )
    out = Table(
        columns,
        body,
        title="Classification error of COCO's regions",
        note=note,
        formats={"paper": ".1f", "all regions": ".2f", "≥ 400 px": ".2f", "layer (%)": ".1f"},
        best={"all regions": "min", "≥ 400 px": "min"},
    )
    commands = "\n".join(f"- {e['name']}: `{e['command']} --engine.seed 0`" for e in table["rows"] if e["command"])
    tried = Table(
        ["model", "setting", "error on held-out training images", "≥ 400 px"],
        [
            [
                entry["name"],
                ", ".join(f"{k.rpartition('.')[-1]} {v}" for k, v in trial["setting"].items()),
                trial["error"],
                trial["error_large"],
            ]
            for entry in [*table["rows"], *table["candidates"]]
            for trial in entry["trials"]
        ],
        title="Tuning",
        formats={"error on held-out training images": ".2f", "≥ 400 px": ".2f"},
    )
    text = (
        f"{out.markdown()}\n\nOne seed of a row, with the setting that its tuning chose:\n\n{commands}\n\n"
        f"{tried.markdown()}\n"
    )
    atomic_write(config.out / "table.md", text)
    out.show()


def _draw(config: Table1Config, rows: list[Row], table: dict[str, Any], errors: dict[str, np.ndarray]) -> None:
    folder = config.out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    by_key = {entry["key"]: entry for entry in table["rows"]}
    bars = {}
    for row in rows:
        values = by_key[row.key]["error"]["values"]
        bars[row.name] = (by_key[row.key]["error"]["mean"], min(values), max(values))
    paper = {row.name: row.paper for row in rows if row.paper is not None}
    figures.comparison(
        bars, folder / "errors.png", reference=paper, xlabel="error (%)", title="all regions; bars span the seeds"
    )
    series = {}
    for row in rows:
        metrics = RunFolder(run_path(config, finished_seeds(config, row)[0])).read_metrics()
        points = [(m["step"], m["train/loss"]) for m in metrics if m.get("train/loss") is not None]
        if points:
            steps, losses = zip(*points, strict=True)
            series[row.name] = (list(steps), list(losses))
    if series:
        figures.lines(series, folder / "curves.png", xlabel="step", ylabel="training loss", log="y")
    names = open_regions(config.data)[0].classes
    per_class: dict[str, Any] = {}
    for row in rows:
        if not errors[row.key].size:
            continue
        target = predictions(config, predicting_seeds(config, row)[0])["target"].astype(np.int64)
        count = np.bincount(target, minlength=len(names))
        sums = np.bincount(target, weights=errors[row.key].mean(0), minlength=len(names))
        per_class[row.name] = {
            name: round(100 * float(s / c), 2) for name, s, c in zip(names, sums, count, strict=True) if c
        }
    per_class["regions"] = {name: int(c) for name, c in zip(names, count, strict=True)}
    atomic_write(config.out / "per_class.json", json.dumps(per_class, indent=2) + "\n")
    best = min(rows, key=lambda row: by_key[row.key]["error"]["mean"])
    for row in {best.key: best, **{r.key: r for r in rows if r.key == "alexnet"}}.values():
        total = sum(
            confusion(p["target"], p["predicted"], len(names))
            for p in (predictions(config, job) for job in predicting_seeds(config, row))
        )
        figures.confusion_matrix(total, names, folder / f"confusion-{row.key}.png", title=row.name)


# ---------------------------------------------------------------------------------------------------------------- main


def prepare(config: Table1Config) -> None:
    """Make the caches that the workers share, before they start."""
    for regions in open_regions(config.data):
        log.info("%s", regions.report())
        if any(row.kind == "sift" for row in chosen_rows(config)):
            model = run_config(config, _row("sift"), Job("sift", "trial", 0), {}).model
            sift_vectors(regions, model, config.data)


def main(config: Table1Config) -> None:
    """Do what the configuration asks for; the same command again goes on where it stopped."""
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    config.out.mkdir(parents=True, exist_ok=True)
    if config.stage in ("all", "prepare", "tune", "train"):
        prepare(config)
    if config.stage in ("all", "tune", "train") and not run_all(config):
        done = sum(1 for _ in config.out.glob("runs/*/*/result.json"))
        left = open_jobs(config)[1]
        log.info("%d runs are finished, %d are left; start the same command again to go on.", done, left)
        return
    if config.stage in ("all", "timing"):
        run_timing(config)
    if config.stage in ("all", "summary"):
        summarize(config)


__all__ = ["ROWS", "Row", "main", "run_all", "run_job", "summarize"]
