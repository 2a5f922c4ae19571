"""The paper's second table: full-image segmentation on BSDS300, from one command that may be stopped and given again.

Rows: normalized cuts on untrained feature maps, the same maps trained with the paper's J2, the soft objective with its
own clustering space, hypercolumns, and merging into a hierarchy; beside them methods without a network. Every row is
done with several seeds. The test images are only scored; what is chosen was chosen on the tuning split
(``--images tuning``).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import queue
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from matbackprop.baselines import BASELINES, HUMANS, run_baselines
from matbackprop.data.bsds import BSDS, FOLDS, tuning_split
from matbackprop.data.prepared import PreparedImages
from matbackprop.errors import ConfigurationError
from matbackprop.files import atomic_write
from matbackprop.inference.colour_merging import COST, TEXTURE, WIDTH, merge_by_colour
from matbackprop.metrics.bootstrap import paired_bootstrap
from matbackprop.metrics.evaluation import ImageScores, score_image, summarize
from matbackprop.models.deep_ncuts import DeepNCuts, default_ks
from matbackprop.processes import Workers, follow_parent, signals_held
from matbackprop.training.config import to_json
from matbackprop.training.engine import fit, load_weights, seed_all
from matbackprop.training.ncuts import (
    build,
    data_folder,
    open_images,
    split_images,
    untrained_model,
)
from matbackprop.training.ncuts_config import RECIPE, NCutsConfig
from matbackprop.training.run_folder import RunFolder, versions
from matbackprop.training.segmenting import Segmented, segment_images, warm
from matbackprop.training.table_config import Table2Config

__all__ = ["GROUPS", "ROWS", "Group", "Row", "main", "run_job"]

log = logging.getLogger("matbackprop")


# ---------------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        key: its name in files and on the command line.
        title: its name in the table.
        network: which feature maps.
        objective: what they were trained with.
        inference: how segmentations are made, ``"cluster"`` or ``"merge"``.
        against: the row that a paired interval compares it with, or "".
        paper: the paper's best (average) covering, or "".
        space: where clusters are sought, if not in the space that the model's configuration names.
    """

    key: str
    title: str
    network: str
    objective: str
    inference: str
    against: str = ""
    paper: str = ""
    space: str | None = None


@dataclass(frozen=True)
class Group:
    """What is computed together: one training, or none, and the rows that its model fills.

    Attributes:
        key: its name.
        rows: the rows.
        preset: the training preset, or "" for none.
        variant: the untrained network, or "" for none.
        seconds: roughly how long a training takes on a fast GPU; long ones are started first.
    """

    key: str
    rows: tuple[Row, ...]
    preset: str = ""
    variant: str = ""
    seconds: float = 1.0


_NETWORKS = {"alexnet-relu5": "AlexNet ReLU-5", "vgg16-relu4": "VGG-16 ReLU-4", "vgg16-relu5": "VGG-16 ReLU-5"}
_PAPER = {
    "alexnet-relu5": (".59 (.49)", ".65 (.56)"),
    "vgg16-relu4": (".65 (.56)", ".73 (.62)"),
    "vgg16-relu5": (".70 (.58)", ".74 (.63)"),
}


def _groups() -> dict[str, Group]:
    groups = [Group("lab", (Row("lab-merging", "Merging by Lab colour and contrast", "none", "none", "merge"),))]
    for name, network in _NETWORKS.items():
        before, after = _PAPER[name]
        plain = Row(f"ncuts-{name}", "NCuts", network, "none", "cluster", paper=before)
        deep = Row(f"deepncuts-{name}", "DeepNCuts", network, "J2", "cluster", plain.key, after)
        span = Row(f"span-{name}", "DeepNCuts, J2's own space", network, "J2", "cluster", plain.key, space="soft")
        soft = Row(f"soft-{name}", "DeepNCuts, soft", network, "soft", "cluster", plain.key)
        groups += [
            Group(plain.key, (plain,), variant=name),
            Group(deep.key, (deep, span), preset=f"paper-{name}", seconds=20),
            Group(soft.key, (soft,), preset=f"soft-{name}", seconds=10),
        ]
    for suffix, body in (("", "frozen"), ("-tuned", "tuned")):
        network = f"VGG-16, {body}"
        groups.append(
            Group(
                f"hypercolumns{suffix}",
                (
                    Row(f"hypercolumns{suffix}", "Hypercolumns", network, "soft", "cluster", "ncuts-vgg16-relu5"),
                    Row(f"merging{suffix}", "Hypercolumns, merging", network, "soft", "merge", "lab-merging"),
                ),
                preset=f"hypercolumns{suffix}",
                seconds=15,
            )
        )
    return {group.key: group for group in groups}


GROUPS = _groups()
"""All groups by name."""
_GROUP_OF = {row.key: group for group in GROUPS.values() for row in group.rows}
ROWS = {row.key: row for group in GROUPS.values() for row in group.rows}
"""All rows by name."""


BASELINE_TITLES = {
    "one_region": ("One region", ""),
    "fixed_grids": ("Fixed grids", ""),
    "ncut_pytorch": ("ncut-pytorch, Lab and position", ""),
    "sklearn_spectral": ("scikit-learn's spectral clustering", ""),
    "multiscale_ncut": ("Multiscale NCuts with intervening contours (Cour et al.)", ".55 (.44)"),
    "felzenszwalb": ("Felzenszwalb and Huttenlocher", ""),
    HUMANS: ("Humans, leave one out", ""),
}
"""Baseline → its name in the table and the paper's best (average) covering."""


def chosen_groups(config: Table2Config) -> list[Group]:
    """The groups that fill the chosen rows, the longest first."""
    unknown = [key for key in config.rows if key not in ROWS]
    if unknown:
        raise ConfigurationError(f"there is no row {unknown[0]!r}; the rows are {', '.join(ROWS)}.")
    wanted = set(config.rows or ROWS)
    groups = [group for group in GROUPS.values() if any(row.key in wanted for row in group.rows)]
    return sorted(groups, key=lambda group: -group.seconds)


def result_path(config: Table2Config, row: str, seed: int) -> Path:
    """Where the scores of a row and seed are kept."""
    return config.out / "rows" / row / f"seed{seed}.json"


_LAB_SETTINGS = {"cost": dataclasses.asdict(COST), "texture": TEXTURE, "width": WIDTH}
"""What merging without a network depends on."""
_PLACES = ("root", "cache", "workers", "threads")  # fields of the data that say where and how, not what


def read_result(config: Table2Config, row: str, seed: int) -> dict[str, Any] | None:
    """The stored result of a row and seed; None where there is none, or where it was made with other settings."""
    path = result_path(config, row, seed)
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    group, then = _GROUP_OF[row], found["config"]
    same = found["ks"] == list(default_ks(ROWS[row].inference)) and found["images"] == config.images
    if group.preset:
        now = to_json(row_config(config, group, seed))
        same = same and then["engine"]["max_epochs"] == now["engine"]["max_epochs"]
        for part in ("data", "model", "train"):  # a field that is no more cannot be compared
            known = (then[part].keys() & now[part].keys()) - {*_PLACES}
            same = same and all(now[part][name] == then[part][name] for name in known)
    elif not group.variant:
        same = same and then == _LAB_SETTINGS
    return found if same else None


def run_summary(config: Table2Config, group: str, seed: int) -> Path:
    """Where the summary of a training is kept: what is small and shows no picture of the run folder."""
    return config.out / "runs" / group / f"seed{seed}"


def device_of(config: Table2Config) -> torch.device:
    """The device that networks run on."""
    return torch.device("cuda" if torch.cuda.is_available() and config.accelerator != "cpu" else "cpu")


def row_config(config: Table2Config, group: Group, seed: int) -> NCutsConfig:
    """The training configuration of a group and seed."""
    recipe = RECIPE.preset(group.preset)
    recipe.engine = dataclasses.replace(
        recipe.engine,
        run=config.runs / group.key / f"seed{seed}",
        seed=seed,
        accelerator=config.accelerator,
        overwrite=True,
        tensorboard=False,
        progress=False,
        report=False,
        checkpoint_min_seconds=1e9,
        max_epochs=config.epochs or recipe.engine.max_epochs,
    )
    if device_of(config).type == "cpu":
        recipe.engine.precision = "32"
    recipe.data = dataclasses.replace(
        recipe.data,
        root=config.data.root,
        made=config.data.made,
        cache=config.data.cache,
        limit=config.data.limit,
        superpixels=config.data.superpixels,
        split="final" if config.images == "test" else "tuning",
        fold=seed if config.images == "folds" else 0,
    )
    if config.weights is not None:
        recipe.model.weights = config.weights
    return recipe


def test_images(config: Table2Config, seed: int = 0) -> PreparedImages:
    """The images to score, which depend on the seed in cross-validation only."""
    if config.images != "test":
        data = dataclasses.replace(config.data, split="tuning", fold=seed if config.images == "folds" else 0)
        return split_images(open_images(config.data, "train"), data)[1]
    images = open_images(config.data, "val")
    return images.subset(range(len(images))[: config.data.limit])


def scored_split(config: Table2Config) -> str:
    """The split of BSDS500 that the scored images are of."""
    return "val" if config.images == "test" else "train"


# ----------------------------------------------------------------------------------------------------------------- job


def _truth(root: Path, split: str, name: str) -> list[NDArray[Any]]:
    return [np.asarray(s) for s in BSDS(root, split, ids=[name]).segmentations(name)]


def _score(task: tuple[str, NDArray[np.int32], Path, str, bool]) -> ImageScores:
    name, labels, root, split, boundary = task
    return score_image(name, list(labels), _truth(root, split, name), boundary=boundary)


def _lab_merging(task: tuple[NDArray[np.uint8], int | NDArray[np.int16]]) -> NDArray[np.int32]:
    """Merging without a network, of given superpixels or so many of SLIC's."""
    return merge_by_colour(task[0].transpose(1, 2, 0), superpixels=task[1]).labels.astype(np.int32)


def _segment(
    config: Table2Config,
    row: Row,
    model: DeepNCuts | None,
    images: PreparedImages,
    seed: int,
    workers: Workers,
    prepared: bool = True,
) -> Segmented:
    """Segment images as the row does; what is timed computes superpixels itself (``prepared=False``)."""
    if model is None:
        tasks = [(image.image, image.superpixels if prepared else config.data.superpixels) for image in images]
        started = time.perf_counter()
        maps = list(workers.map(_lab_merging, tasks))
        return Segmented(dict(zip(images.ids, maps, strict=True)), time.perf_counter() - started)
    half = torch.bfloat16 if device_of(config).type == "cuda" and row.objective == "soft" else torch.float32
    return segment_images(
        model,
        images,
        method=row.inference,
        ks=default_ks(row.inference),
        space=row.space,
        seed=seed,
        precision=half,
        workers=workers,
        prepared=prepared,
    )


def _train(config: Table2Config, group: Group, seed: int) -> tuple[DeepNCuts, RunFolder, float]:
    """Train a group and return its model, its run folder and the seconds that it took."""
    recipe = row_config(config, group, seed)
    seed_all(seed)
    started = time.perf_counter()
    module, data = build(recipe)
    run = fit(recipe, module, data, name=group.key)
    load_weights(run, module, "last")
    seconds = time.perf_counter() - started
    module.model.save_pretrained(run.path / "model", dtype=torch.float16, trained_on=config.images, seed=seed)
    return module.model, run, seconds


def run_job(config: Table2Config, key: str, seed: int, workers: Workers) -> dict[str, Any]:
    """Train a group if need be, segment, score, and write the results of its rows.

    Returns:
        Row → its summary.
    """
    group = GROUPS[key]
    device = device_of(config)
    seconds = None
    model: DeepNCuts | None = None
    run_settings: Any = None
    if group.preset:
        model, run, seconds = _train(config, group, seed)
        run_settings = run.read_config()
        _keep_summary(run, run_summary(config, key, seed))
    elif group.variant:
        model = untrained_model(group.variant, weights=config.weights or "imagenet")
    else:
        run_settings = _LAB_SETTINGS
    if model is not None:
        model = model.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = test_images(config, seed)
    root, split = data_folder(config.data), scored_split(config)
    found = {}
    for row in group.rows:
        segmented = _segment(config, row, model, images, seed, workers)
        tasks = [(name, maps, root, split, config.boundary) for name, maps in segmented.labels.items()]
        scores = sorted(workers.map(_score, tasks, 2), key=lambda s: s.id)
        summary = summarize(scores)
        result = {
            "row": row.key,
            "seed": seed,
            "images": config.images,
            "ks": list(default_ks(row.inference)),
            "scores": summary,
            "regions": float(np.mean([[m.max() + 1 for m in maps] for maps in segmented.labels.values()])),
            "per_image": {s.id: [s.paper_best, s.paper_average] for s in scores},
            "training_seconds": seconds,
            "config": run_settings,
            "versions": versions(),
        }
        path = result_path(config, row.key, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        if seed == config.seeds[0]:
            _keep_pictures(config, row.key, scores, segmented)
        atomic_write(path, json.dumps(result, indent=1) + "\n")
        found[row.key] = summary
    return found


def _keep_summary(run: RunFolder, folder: Path) -> None:
    """Copy configuration, versions, metrics and final numbers of a run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "versions.json", "metrics.jsonl", "summary.json"):
        shutil.copyfile(run.path / name, folder / name)


def _keep_pictures(config: Table2Config, row: str, scores: list[ImageScores], segmented: Segmented) -> None:
    """Keep each shown image's best segmentation for the qualitative figure (in the run folders, not the results)."""
    folder = config.runs / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {s.id: segmented.labels[s.id][s.covering.mean(1).argmax()] for s in scores[: config.shown]}
    np.savez_compressed(folder / f"{row}.npz", **chosen)  # type: ignore[arg-type]


def open_jobs(config: Table2Config) -> list[tuple[str, int]]:
    """(group, seed) that are not done yet, or were done with other settings; the first seed of all groups first."""
    jobs = []
    for seed in config.seeds:
        for group in chosen_groups(config):
            if any(read_result(config, row.key, seed) is None for row in group.rows):
                jobs.append((group.key, seed))
    return jobs


def _worker_count(config: Table2Config) -> int:
    return config.workers or max(1, (os.cpu_count() or 1) // max(config.jobs, 1))


def _work(config: Table2Config, tasks: Any, results: Any) -> None:
    follow_parent()
    torch.set_num_threads(1)
    with Workers(_worker_count(config)) as workers:
        while (task := tasks.get()) is not None:
            started = time.perf_counter()
            try:
                function, key, seed = task
                found = function(config, key, seed, workers)
                results.put((key, seed, found, time.perf_counter() - started, None))
            except Exception:
                results.put((key, seed, None, 0.0, traceback.format_exc()))


class Clock:
    """Says whether what is to be started would end in time, from how long the like of it took before.

    Args:
        limit: seconds from now on; None for no limit.
    """

    def __init__(self, limit: float | None = None) -> None:
        self._end = float("inf") if limit is None else time.monotonic() + limit
        self._seen: dict[str, list[float]] = {}

    def note(self, key: str, seconds: float) -> None:
        """Remember how long ``key`` took."""
        self._seen.setdefault(key, []).append(seconds)

    def allows(self, key: str) -> bool:
        """Whether ``key`` may be started; what was never seen is taken to last as long as the slowest."""
        known = self._seen.get(key) or [s for seconds in self._seen.values() for s in seconds]
        return time.monotonic() + 1.2 * max(known, default=0.0) < self._end


def run_all(config: Table2Config, function: Callable[..., Any], jobs: list[tuple[str, int]], clock: Clock) -> bool:
    """Do jobs, several at a time; a failed one does not stop the others, but the command fails at the end.

    Returns:
        Whether all were done; those that the clock did not allow to be started are left.
    """
    started = time.monotonic()
    waiting = list(jobs)
    done = 0
    if jobs:
        log.info("%d runs to do, %d at a time", len(jobs), min(max(config.jobs, 1), len(jobs)))

    def next_job() -> tuple[str, int] | None:
        found = next((job for job in waiting if clock.allows(job[0])), None)
        if found is not None:
            waiting.remove(found)
        return found

    def note(key: str, seed: int, found: Any, seconds: float) -> None:
        nonlocal done
        done += 1
        clock.note(key, seconds)
        progress = f"{done}/{len(jobs)} after {time.monotonic() - started:.0f} s"
        log.info("%-26s seed %d  %5.1f s  (%s)", key, seed, seconds, progress)
        for row, scores in (found or {}).items():
            log.info("  %-24s best %.4f  average %.4f", row, scores["paper_best"], scores["paper_average"])

    if config.jobs <= 1:
        with Workers(_worker_count(config)) as workers:
            while (job := next_job()) is not None:
                before = time.perf_counter()
                note(*job, function(config, *job, workers), time.perf_counter() - before)
        return not waiting
    context = multiprocessing.get_context("spawn")
    tasks: Any = context.Queue()
    results: Any = context.Queue()
    # No daemons: they have processes of their own.
    processes = [
        context.Process(target=_work, args=(config, tasks, results)) for _ in range(min(config.jobs, len(jobs)))
    ]
    failures = []
    running = 0
    with signals_held():  # they are the parent's to act on
        for process in processes:
            process.start()
    try:
        while True:
            while running < len(processes) and (job := next_job()) is not None:
                tasks.put((function, *job))
                running += 1
            if not running:
                break
            try:
                key, seed, found, seconds, failure = results.get(timeout=5)
            except queue.Empty:
                if not all(p.is_alive() for p in processes):
                    raise RuntimeError("a worker process ended early (out of memory?); try fewer --jobs.") from None
                continue
            running -= 1
            if failure is None:
                note(key, seed, found, seconds)
            else:
                failures.append(f"{key} seed {seed}:\n{failure}")
                log.error("%s", failures[-1])
    except BaseException:
        for process in processes:
            process.kill()  # finished runs are on the disk, half-written files are not
        raise
    finally:
        for _ in processes:
            tasks.put(None)
        for process in processes:
            process.join()
    if failures:
        raise RuntimeError(f"{len(failures)} of {len(jobs)} runs failed, the first: {failures[0]}")
    return not waiting


# ------------------------------------------------------------------------------------------------------ timing, curves


def run_timing(config: Table2Config, clock: Clock) -> None:
    """Measure training and testing speed of each group, alone on the device: images/s, testing with 8 segmentations."""
    images = test_images(config)
    path = config.out / "speed.json"
    speed: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    with Workers(_worker_count(dataclasses.replace(config, jobs=1))) as workers:
        warm(workers)
        for group in chosen_groups(config):
            if all(row.key in speed for row in group.rows) or not clock.allows("timing"):
                continue
            started = time.monotonic()
            model: DeepNCuts | None = None
            training = None
            if group.preset:
                short = dataclasses.replace(config, epochs=3, runs=config.runs / "timing")
                model, run, _ = _train(short, group, 0)
                recipe = row_config(short, group, 0)
                rates = [m["train/steps_per_second"] for m in run.read_metrics() if "train/steps_per_second" in m]
                training = float(np.median(rates[len(rates) // 3 :])) * recipe.data.batch_size
            elif group.variant:
                model = untrained_model(group.variant, weights=config.weights or "imagenet")
            if model is not None:
                model = model.to(device_of(config)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            for row in group.rows:
                few = images.subset(range(min(16, len(images))))
                _segment(config, row, model, few, 0, workers, prepared=False)
                runs = [_segment(config, row, model, images, 0, workers, prepared=False) for _ in range(2)]
                seconds = min(run.seconds for run in runs)
                speed[row.key] = {"training": training, "testing": len(images) / seconds}
                log.info("%-26s %s", row.key, speed[row.key])
            speed["device"] = torch.cuda.get_device_name() if device_of(config).type == "cuda" else "cpu"
            atomic_write(path, json.dumps(speed, indent=1) + "\n")
            clock.note("timing", time.monotonic() - started)


def curve_job(config: Table2Config, key: str, seed: int, workers: Workers) -> None:
    """Train a group on the tuning split, scoring held-out images after every epoch; keeps the curves."""
    tuning = dataclasses.replace(config, images="tuning", runs=config.runs / "curves")
    recipe = row_config(tuning, GROUPS[key], seed)
    recipe.train.score_images = 16
    seed_all(seed)
    module, data = build(recipe)
    run = fit(recipe, module, data, name=key)
    folder = config.out / "curves"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({k: v for k, v in m.items() if k != "time"}) for m in run.read_metrics()]
    atomic_write(folder / f"{key}.jsonl", "\n".join(lines) + "\n")


def baselines(config: Table2Config) -> None:
    """Score the methods without a network of ours on the same images (CPU only)."""
    folder = config.out / "baselines"
    methods = [name for name in (*BASELINES, HUMANS) if not (folder / f"{name}.json").exists()]
    if not methods:
        return
    root = data_folder(config.data)
    ids = BSDS(root, scored_split(config)).ids
    data = BSDS(root, scored_split(config), ids=tuning_split(ids)[1] if config.images == "tuning" else ids)
    workers = _worker_count(dataclasses.replace(config, jobs=1))
    command = f"matbackprop reproduce table2 --stage baselines --images {config.images}"
    run_baselines(data, folder, methods, config.data.limit, boundary=config.boundary, workers=workers, command=command)


# ------------------------------------------------------------------------------------------------------------- summary


def read_results(config: Table2Config, row: str) -> list[dict[str, Any]]:
    """The results of a row, by seed."""
    seeds = sorted(int(p.stem.removeprefix("seed")) for p in (config.out / "rows" / row).glob("seed*.json"))
    return [found for seed in seeds if (found := read_result(config, row, seed)) is not None]


def read_baselines(config: Table2Config) -> list[dict[str, Any]]:
    """The results of the methods without a network of ours, worst first; people come last of them."""
    found = [json.loads(path.read_text()) for path in (config.out / "baselines").glob("*.json")]
    return sorted(found, key=lambda one: (one["method"] == HUMANS, one["scores"]["paper_best"]))


def _image_scores(results: list[dict[str, Any]], which: int) -> dict[str, float]:
    """Scores of each image, averaged over the seeds that segmented it."""
    found: dict[str, list[float]] = {}
    for result in results:
        for name, scores in result["per_image"].items():
            found.setdefault(name, []).append(scores[which])
    return {name: float(np.mean(found[name])) for name in sorted(found)}


_IMAGES = {
    "test": "test images",
    "tuning": "tuning images",
    "folds": "training images, each scored by a network that was trained without it",
}


def summarize_table(config: Table2Config) -> dict[str, Any]:
    """Collect finished rows into table.json, table.md and figures."""
    from matbackprop.report.tables import Measured, Table

    path = config.out / "speed.json"
    speed = json.loads(path.read_text()) if path.exists() else {}
    table: dict[str, Any] = {"images": config.images, "device": speed.get("device"), "rows": {}}
    lines: list[list[Any]] = []
    for found in read_baselines(config):
        key, scores, seconds = found["method"], found["scores"], found.get("seconds_per_image")
        title, paper = BASELINE_TITLES.get(key, (key.replace("_", " "), ""))
        table["rows"][key] = {"title": title, "network": "none", "paper": paper, "scores": scores}
        measures = [scores.get(n) for n in ("paper_best", "paper_average", "covering_ods", "pri_ois", "vi_ois")]
        lines.append([title, "none", "", *measures, "", "", None, 1 / seconds if seconds else None, paper])
    for key, row in ROWS.items():
        results = read_results(config, key)
        if not results:
            continue
        names = [name for name in results[0]["scores"] if all(name in r["scores"] for r in results)]
        values = {name: [r["scores"][name] for r in results] for name in names}
        entry: dict[str, Any] = {
            "title": row.title,
            "network": row.network,
            "objective": row.objective,
            "inference": row.inference,
            "paper": row.paper,
            "seeds": [r["seed"] for r in results],
            "scores": {name: {"mean": float(np.mean(v)), "each": v} for name, v in values.items()},
            "speed": speed.get(key),
        }
        other = read_results(config, row.against) if row.against else []
        for which, name in enumerate(("best", "average")):
            mine, theirs = _image_scores(results, which), _image_scores(other, which)
            if mine.keys() == theirs.keys() and len(mine) > 1:
                interval = paired_bootstrap(list(mine.values()), list(theirs.values()))
                entry["against"] = row.against
                entry.setdefault("difference", {})[name] = dataclasses.asdict(interval)
        table["rows"][key] = entry
        gains = entry.get("difference", {})
        lines.append(
            [
                f"{row.title} ({row.network})" if row.network != "none" else row.title,
                row.objective,
                "merging" if row.inference == "merge" else "clustering",
                Measured.of(values["paper_best"]) if len(results) > 1 else values["paper_best"][0],
                Measured.of(values["paper_average"]) if len(results) > 1 else values["paper_average"][0],
                float(np.mean(values["covering_ods"])),
                float(np.mean(values["pri_ois"])),
                float(np.mean(values["vi_ois"])),
                *(
                    f"{gains[n]['difference']:+.3f} [{gains[n]['low']:+.3f}, {gains[n]['high']:+.3f}]" if gains else ""
                    for n in ("best", "average")
                ),
                (speed.get(key) or {}).get("training"),
                (speed.get(key) or {}).get("testing"),
                row.paper,
            ]
        )
    columns = ["method", "trained with", "segments by", "best", "average", "covering ODS", "PRI OIS", "VI OIS",
               "best, gain", "average, gain", "training images/s", "testing images/s", "paper"]  # fmt: skip
    number = max((len(row["seeds"]) for row in table["rows"].values() if "seeds" in row), default=0)
    out = Table(
        columns,
        lines,
        title=f"BSDS300, {_IMAGES[config.images]}, 8 segmentations an image",
        note=f"best and average covering in the paper's convention, mean ± deviation over {number} "
        f"{'fifths of the images' if config.images == 'folds' else 'seeds'}; gain: paired bootstrap over images "
        "against the untrained counterpart, 95 %.",
        formats=dict.fromkeys(("best", "average", "covering ODS", "PRI OIS", "VI OIS"), ".3f")
        | {"training images/s": ".0f", "testing images/s": ".0f"},
        best={"best": "max", "average": "max", "covering ODS": "max", "PRI OIS": "max", "VI OIS": "min"},
    )
    config.out.mkdir(parents=True, exist_ok=True)
    atomic_write(config.out / "table.json", json.dumps(table, indent=1) + "\n")
    atomic_write(config.out / "table.md", out.markdown() + "\n")
    print(out.markdown())
    _draw_curves(config)
    _draw_pictures(config)
    return table


def _draw_curves(config: Table2Config) -> None:
    from matbackprop.report.figures import curves

    for group in chosen_groups(config):
        path = config.out / "curves" / f"{group.key}.jsonl"
        if not path.exists():  # without scores of held-out images
            path = run_summary(config, group.key, config.seeds[0]) / "metrics.jsonl"
        if not path.exists():
            continue
        metrics = [json.loads(line) for line in path.read_text().splitlines()]
        wanted = {
            "objective": ["train/objective", "val/objective"],
            "rank": ["layer/rank", "layer/soft_rank"],
            "covering of held-out images": ["val/best", "val/average"],
        }
        seen = {name for m in metrics for name in m}
        panels = {title: [n for n in names if n in seen] for title, names in wanted.items()}
        curves(metrics, config.out / "figures" / f"{group.key}.png", panels={t: n for t, n in panels.items() if n})


def _draw_pictures(config: Table2Config) -> None:
    """The qualitative figure laid out like the paper's, into the run folders: it shows the data set's pictures."""
    from matbackprop.report.figures import segmentation_grid

    folder = config.runs / "pictures"
    columns: list[Any] = ["Image"]
    keys = []
    for name, network in _NETWORKS.items():
        for key, title in ((f"ncuts-{name}", "NCuts"), (f"deepncuts-{name}", "DeepNCuts"), (f"soft-{name}", "soft")):
            if (folder / f"{key}.npz").exists():
                keys.append(key)
                columns.append((*network.split(" ", 1), title))
    for key, title in (("hypercolumns-tuned", "clustering"), ("merging-tuned", "merging")):
        if (folder / f"{key}.npz").exists():
            keys.append(key)
            columns.append(("Hypercolumns", title))
    if not keys:
        return
    stored = [np.load(folder / f"{key}.npz") for key in keys]
    root, split = data_folder(config.data), scored_split(config)
    rows = []
    for name in stored[0].files:
        data = BSDS(root, split, ids=[name])
        photograph = data.image(name).permute(1, 2, 0).numpy()
        human = np.asarray(data.segmentations(name)[0])
        rows.append([photograph, *(s[name] if name in s.files else None for s in stored), human])
    segmentation_grid([*columns, "Human"], rows, folder / "segmentations.png", width=2.0 * (len(columns) + 1))


# ---------------------------------------------------------------------------------------------------------------- main


def main(config: Table2Config) -> None:
    """Do what the configuration asks for; the same command again goes on where it stopped."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    if config.images == "folds" and not {*config.seeds} <= {*range(FOLDS)}:
        raise ConfigurationError(f"--images folds takes seeds of 0 to {FOLDS - 1}, one a fold; got {config.seeds}.")
    config.out.mkdir(parents=True, exist_ok=True)
    if config.stage not in ("summary", "baselines"):
        for split in ("train", "val") if config.images == "test" else ("train",):
            images = open_images(config.data, split)  # type: ignore[arg-type]
            log.info("%s: %d images prepared in %s", split, len(images), data_folder(config.data))
    clock = Clock(config.time_limit)
    if config.stage in ("all", "train") and not run_all(config, run_job, open_jobs(config), clock):
        log.info("%d runs are left; start the same command again to go on.", len(open_jobs(config)))
    if config.stage in ("all", "timing"):
        run_timing(config, clock)
    if config.stage in ("all", "curves"):
        open_curves = [g.key for g in chosen_groups(config) if g.preset]
        open_curves = [key for key in open_curves if not (config.out / "curves" / f"{key}.jsonl").exists()]
        run_all(config, curve_job, [(key, config.seeds[0]) for key in open_curves], clock)
    if config.stage in ("all", "baselines"):
        baselines(config)
    if config.stage != "timing":
        summarize_table(config)
