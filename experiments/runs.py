"""Runs of an experiment: one JSON object per line of ``results.jsonl``.

A run is identified by the hash of its *provenance*: configuration, hashes of the data and of the starting weights, and
kind of device. Rerunning a command skips every run whose hash is in the file. If a row, part and number occur several
times, the last line is used. Each line also records the git revision, whether the tree was dirty, and a hash of the
source code; a table lists the revisions of its runs if they differ.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from matplotlib.figure import Figure

from matbackprop.errors import ConfigurationError, DataError, ShapeError
from matbackprop.vision.configuration import Count, configuration, to_json
from matbackprop.vision.data.bsds import BSDS, find_root
from matbackprop.vision.data.cache import cache_key
from matbackprop.vision.devices import processors
from matbackprop.vision.files import atomic_write
from matbackprop.vision.metrics import paired_bootstrap
from matbackprop.vision.models.backbones.published import find_weights
from matbackprop.vision.progress import log_on_screen
from matbackprop.vision.report.figures import PALETTE, figure, finish, styled
from matbackprop.vision.report.tables import Table, format_number
from matbackprop.vision.training.config import DatasetConfig
from matbackprop.vision.training.run_folder import RunFolder
from matbackprop.vision.versions import versions
from matbackprop.vision.workers import Workers

log = logging.getLogger("matbackprop")

#: Fields of the engine that affect results.
ENGINE = ("seed", "max_epochs", "precision", "matmul_precision", "deterministic", "gradient_clip", "accumulate")
#: Fields of the data that do not affect results; the content of the data is hashed.
PLACES = ("root", "cache", "threads")
#: Engine fields of runs that keep only their metrics.
NUMBERS_ONLY: dict[str, Any] = {"overwrite": True, "devices": "1", "checkpoints": False, "tensorboard": False,
                                "progress": False, "report": False}  # fmt: skip
WORK = Path("runs")  #: Folder of trained models, predictions and logs, which are not published.
IMAGES = {".jpg", ".jpeg", ".png", ".bmp"}
READABLE = IMAGES | {".mat", ".json", ".npy", ".npz"}

Run = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """A mean with its standard deviation over repetitions; no spread for a single value."""

    mean: float
    spread: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Measured:
        if not values:
            raise ShapeError("values is empty. Pass at least one value.")
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    def __format__(self, spec: str) -> str:
        mean = format_number(self.mean, spec)
        return mean if self.spread is None else f"{mean} ± {format_number(self.spread, spec)}"

    def __float__(self) -> float:
        return self.mean

    def __str__(self) -> str:
        return format(self)


@styled
def comparison(
    rows: Mapping[str, tuple[float, float, float]],
    path: str | Path | None = None,
    *,
    reference: Mapping[str, float] | None = None,
    xlabel: str = "",
    title: str = "",
) -> Figure:
    """Draw named values with intervals (value, low, high), one per line, with the paper's values as open marks."""
    names = list(rows)
    fig, (ax,) = figure(width=max(6.4, 3.8 + 0.072 * max(map(len, names), default=0)), height=0.36 * len(names) + 1.3)
    where = np.arange(len(names))[::-1]
    values, low, high = np.array([rows[name] for name in names], dtype=np.float64).reshape(-1, 3).T
    ax.hlines(where, low, high, color=PALETTE[0], linewidth=2.4, alpha=0.45)
    ax.plot(values, where, "o", color=PALETTE[0], markersize=6.5, label="here")
    if reference:
        known = [(reference[name], y) for name, y in zip(names, where, strict=True) if name in reference]
        ax.plot(*np.array(known).T, "D", color=PALETTE[1], markerfacecolor="none", label="paper")
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    ax.set_yticks(where, names)
    ax.grid(False, axis="y")
    ax.margins(y=0.6 / max(len(names), 1))
    ax.set(xlabel=xlabel, title=title)
    return finish(fig, path)


@dataclass
class ExperimentConfig:
    """Options of every experiment."""

    out: Path = Path("results")  #: Folder of results.jsonl, table.md and figures. Finished runs are not repeated.
    rows: tuple[str, ...] = ()  #: Rows to run, all by default.
    summary: bool = False  #: Only rebuild the table and the figures from results.jsonl.
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"  #: Kind of device.
    #: Fields of every training as name=value, the value in JSON, such as model.hidden=64.
    override: tuple[str, ...] = ()

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """Kind of device that runs use. It need not be available to rebuild a table."""
        gpu = torch.cuda.is_available() if self.accelerator == "auto" else self.accelerator == "gpu"
        return "cuda" if gpu else "cpu"

    def engine(self, run: str, seed: int, **fields: Any) -> dict[str, Any]:
        """Engine fields of a training in the run folder ``run`` that keeps only its metrics."""
        place = {"run": str(WORK / self.out.name / run), "seed": seed, "accelerator": self.accelerator}
        return NUMBERS_ONLY | place | fields

    def overrides(self) -> dict[str, Any]:
        """Parse ``override``; a value that is not JSON is text."""
        fields = {}
        for word in self.override:
            name, equals, value = word.partition("=")
            if not equals:
                raise ConfigurationError(f"{word!r} is not an override. Write name=value, such as model.hidden=64.")
            try:
                fields[name] = json.loads(value)
            except json.JSONDecodeError:
                fields[name] = value
        return fields

    def chosen(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Select the requested rows."""
        if unknown := [key for key in self.rows if key not in rows]:
            raise ConfigurationError(f"Unknown row {unknown[0]!r}. Rows: {', '.join(rows)}.")
        return {key: row for key, row in rows.items() if not self.rows or key in self.rows}


@configuration
class Images(DatasetConfig):
    """Source of the images."""

    limit: Count | None = None  #: Maximum number of images of each split.


@dataclass
class ImagesConfig(ExperimentConfig):
    """Options of every experiment on BSDS500."""

    workers: int = 0  #: Processes for scoring; 0 for one per core.
    data: Images = field(default_factory=Images)  #: Source of the images.

    @property
    def root(self) -> Path:
        """Folder that contains ``images``."""
        return find_root(self.data.folder())

    def limited(self, data: BSDS) -> BSDS:
        """The first images of a data set, up to the limit."""
        return BSDS(data.root, data.split, ids=data.ids[: self.data.limit])

    def pool(self) -> Workers:
        """Processes for scoring."""
        return Workers(self.workers or processors())


class Results:
    """The file ``results.jsonl`` of an experiment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "results.jsonl"
        self.records: list[dict[str, Any]] = []
        for number, line in enumerate(self.path.read_text().splitlines() if self.path.is_file() else (), 1):
            try:
                self.records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{self.path}, line {number} is not JSON. Remove the line to repeat its run."
                ) from error

    def append(self, record: dict[str, Any]) -> None:
        """Add a line in one write, so that several processes may append."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
        self.records.append(record)

    def run(
        self, row: str, part: str, number: int, provenance: dict[str, Any], work: Callable[[], dict[str, Any]]
    ) -> Run:
        """Return the finished run with this provenance, or call ``work`` and store its metrics."""
        provenance = to_json(provenance)
        mark = cache_key(provenance)
        for record in self.records:
            if (record["kind"], record.get("hash"), record["row"], record.get("part")) == ("run", mark, row, part):
                return record
        log.info("%s %s %d", row, part, number)
        started = time.perf_counter()
        metrics = work()
        metrics.setdefault("seconds", round(time.perf_counter() - started, 2))
        known = versions()
        record = {
            "kind": "run",
            "row": row,
            "part": part,
            "number": number,
            "hash": mark,
            "provenance": provenance,
            "code": {"git": known.get("git"), "dirty": known.get("git_dirty"), "source": source_hash()},
            **{name: known[name] for name in ("time", "device", "packages")},
            "metrics": metrics,
        }
        self.append(record)
        return record

    def runs(self, row: str, part: str = "seed") -> list[Run]:
        """Return the runs of a row, sorted by number; the last line of a number is used."""
        chosen = {r["number"]: r for r in self.records if (r["kind"], r["row"], r.get("part")) == ("run", row, part)}
        return [run for _, run in sorted(chosen.items())]

    def require(self, finished: T) -> T:
        """Return finished runs, or raise DataError if there are none."""
        if not finished:
            raise DataError(f"{self.path} has no finished run. Run the command without --summary.")
        return finished

    def recorded(self, kind: str, row: str) -> dict[str, Any]:
        """Return the last record of another kind, such as a row's speed; empty if there is none."""
        return next((r for r in reversed(self.records) if (r["kind"], r["row"]) == (kind, row)), {})

    def write_table(self, table: Table, *more: str, runs: Iterable[Run]) -> None:
        """Write table.md with the revisions of its runs, and print the table."""
        text = "\n\n".join([table.markdown(), *more, revisions(runs)]) + "\n"
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic_write(self.folder / "table.md", text)
        print(table.markdown())


class Experiment(ABC):
    """Base class of a table: its options and its runs."""

    def __init__(self, config: Any) -> None:
        self.config, self.results = config, Results(config.out)

    @abstractmethod
    def train(self) -> None:
        """Train and score all runs that are missing."""

    @abstractmethod
    def summarize(self) -> None:
        """Write table.md and the figures from all finished runs."""

    @classmethod
    def main(cls, config: Any) -> dict[str, Any]:
        """Complete the runs, then rebuild the table."""
        table = cls(config)
        with log_on_screen():
            if not config.summary:
                table.train()
            table.summarize()
        return {"summary": f"table: {config.out / 'table.md'}", "out": config.out}


def settings(config: Any) -> dict[str, Any]:
    """The fields of a recipe's configuration that its numbers depend on."""
    fields: dict[str, Any] = to_json(config)
    fields["engine"] = {name: fields["engine"][name] for name in ENGINE}
    fields["data"] = {name: value for name, value in fields["data"].items() if name not in PLACES}
    return fields


@cache
def source_hash() -> str:
    """Hash of the source code of the package and of the experiments."""
    import matbackprop

    roots = (Path(matbackprop.__file__).parent, Path(__file__).parent)
    files = [(root, path) for root in roots for path in root.rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".h")]
    total = hashlib.sha256()
    for root, path in sorted(files):
        total.update(f"{root.name}/{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return total.hexdigest()[:16]


@cache
def data_hash(root: Path, splits: tuple[str, ...]) -> str:
    """Hash the splits of a data set: names and sizes of its images, contents of its annotations."""
    names = {split + year for split in splits for year in ("", "2014", "2017")}
    total, files = hashlib.sha256(), 0
    for path in sorted(root.rglob("*")):
        place = path.relative_to(root)
        words = {*place.parts[:-1], path.stem.removeprefix("instances_")}
        if path.suffix.lower() not in READABLE or not names & words or not path.is_file():
            continue
        files += 1
        total.update(f"{place.as_posix()}\0{path.stat().st_size}\0".encode())
        if path.suffix.lower() not in IMAGES or "groundTruth" in place.parts:
            total.update(hashlib.sha256(path.read_bytes()).digest())
    if not files:
        raise DataError(f"{root} has no image or annotation of {', '.join(splits)}. Check --data.root.")
    return total.hexdigest()[:16]


@cache
def weights_hash(backbone: str, weights: str) -> str:
    """Hash of a backbone's starting weights: ``"imagenet"``, ``"none"`` or a file."""
    if weights == "none":
        return "none"
    return file_hash(find_weights(backbone) if weights == "imagenet" else Path(weights))


def file_hash(path: Path) -> str:
    """Hash of a weights file."""
    if not path.is_file():
        raise DataError(f"{path} does not exist. Pass a safetensors file, imagenet or none.")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def revisions(runs: Iterable[Run]) -> str:
    """A sentence about the code that produced the runs of a table."""
    counts: dict[str, list[bool]] = {}
    for run in runs:
        code = run.get("code") or {}
        counts.setdefault((code.get("git") or "unrecorded")[:7], []).append(bool(code.get("dirty")))
    texts = []
    for name, dirty in sorted(counts.items()):
        name = "an unrecorded revision" if name == "unrecor" else name
        number = f"{len(dirty)} run" + "s" * (len(dirty) > 1)
        texts.append(f"{name} ({number}{f', {sum(dirty)} with uncommitted changes' if any(dirty) else ''})")
    several = f"{len(texts)} revisions: " if len(texts) > 1 else "revision "
    return f"Runs come from {several}{', '.join(texts)}."


def training_rate(run: RunFolder) -> float | None:
    """Median items per second of a training, without its first third."""
    rates = [m["train/steps_per_second"] for m in run.read_metrics() if m.get("train/steps_per_second")]
    if not rates:
        return None
    return statistics.median(rates[len(rates) // 3 :]) * run.read_config()["data"]["batch_size"]


def speed_note(speeds: Iterable[Mapping[str, Any]]) -> str:
    """A sentence about the machines that speeds were measured on."""
    places = []
    for speed in speeds:
        if machine := speed.get("machine"):
            processors = f" with {machine['processors']} processors" if machine.get("processors") else ""
            revision = f", revision {machine['git'][:7]}" if machine.get("git") else ""
            places.append(f"{machine['device']}{processors}{revision}")
    where = "; ".join(dict.fromkeys(places))
    return f" Speeds: one run, each row alone on one {where}." if where else ""


def interval_text(interval: Mapping[str, float], digits: int) -> str:
    """A difference with its interval, such as ``'-2.55 [-3.27, -1.86]'``."""
    difference, low, high = (f"{interval[name]:+.{digits}f}" for name in ("difference", "low", "high"))
    return f"{difference} [{low}, {high}]"


def contour_table(
    done: Mapping[str, Sequence[Run]],
    columns: Mapping[str, str],
    *,
    title: str,
    note: str,
    milliseconds: Mapping[str, Any] | None = None,
) -> Table:
    """Mean scores of each row, the difference of its coverings to those of the row ``contours``, and its time."""
    if "contours" not in done:
        raise DataError("The row contours has no finished run. Run the command without --summary.")
    covering = {row: np.mean([run["metrics"]["covering"] for run in each], 0) for row, each in done.items()}
    body: list[list[Any]] = []
    for row, each in done.items():
        gain = interval_text(paired_bootstrap(covering[row], covering["contours"])._asdict(), 3)
        means = [Measured.of([run["metrics"]["scores"][name] for run in each]) for name in columns.values()]
        body.append([row, *means, "" if row == "contours" else gain])
    formats, names = dict.fromkeys(columns, ".3f"), ["row", *columns, "difference"]
    if milliseconds is not None:
        body = [[*cells, milliseconds[cells[0]]] for cells in body]
        formats, names = formats | {"ms": ".0f"}, [*names, "ms"]
    return Table(names, body, title=title, note=note, formats=formats)


def as_option(name: str, value: Any) -> str:
    """A field as a command-line option.

    Example:
        >>> as_option("model.two_views", False), as_option("model.taps", ["pool5", "relu5"])
        ('--model.no-two-views', '--model.taps pool5 relu5')
    """
    path, _, field_name = name.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return f"--{path}.{'' if value else 'no-'}{field_name}"
    if isinstance(value, list):
        return f"--{path}.{field_name} {shlex.join(value)}"
    return f"--{path}.{field_name} {shlex.quote(str(value))}"
