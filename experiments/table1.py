"""The paper's first table: seven region classifiers, tuned alike, trained over several seeds, compared in pairs.

1. *Tuning.* Every row tries the same number of settings, each for as many epochs as the final runs, on the training
   images alone: four fifths to fit, one fifth to choose. Shorter trials would prefer what learns fast and overfits.
2. *Training.* The chosen setting is trained on all training images, once for each seed, and the validation images are
   scored once, after the last epoch.
3. *Timing.* Each row alone on the device for two epochs: regions per second and the structured layer's share of a step.
4. *Summary.* Means and spreads, paired differences with bootstrap intervals, figures, hashes and commands.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from experiments.config import Table1Config
from experiments.table import (
    NUMBERS_ONLY,
    Device,
    Job,
    Reproduction,
    data_digest,
    fingerprint,
    interval_text,
    settings,
    weights_digest,
)
from matbackprop.errors import ConfigurationError, DataError, NonFiniteError
from matbackprop.vision.devices import choose_device
from matbackprop.vision.files import atomic_write, read_json
from matbackprop.vision.metrics.bootstrap import paired_bootstrap
from matbackprop.vision.report import figures
from matbackprop.vision.report.tables import Measured, Table
from matbackprop.vision.training.config import O2P_PRESETS, O2PConfig, merge, to_json
from matbackprop.vision.training.engine import fit, seed_all
from matbackprop.vision.training.o2p import (
    LARGE,
    build,
    build_model,
    confusion,
    data_folder,
    describe,
    open_regions,
    save_predictions,
)
from matbackprop.vision.training.run_folder import RunFolder

log = logging.getLogger("matbackprop")


# ----------------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Row:
    """One line of the table: a model, and the settings that tuning chooses from.

    Attributes:
        name: as the table prints it.
        key: as folders and options write it.
        kind: which rows it shares epochs and the number of seeds with.
        paper: the paper's error in percent, or None for a row that the paper does not have.
        model: fields of the configuration that make the row what it is, by dotted name.
        trials: settings to choose from, most promising first.
        group: rows of one group compete: only the one with the smallest error in tuning is trained to the end.
        reference: key of the row that it is compared with; by default the one that its kind names.
        follows: key of the row whose choice it takes over, without trials of its own.
    """

    name: str
    key: str
    kind: Literal["fine", "scratch", "sift", "frozen"]
    paper: float | None
    model: dict[str, Any]
    trials: list[dict[str, Any]]
    group: str | None = None
    reference: str = ""
    follows: str = ""


def _rates(*pairs: tuple[float, float], **more: Any) -> list[dict[str, Any]]:
    """Settings with rates of the head and shares of them for the backbone."""
    return [{"optimizer.rate": rate, "optimizer.backbone_factor": factor, **more} for rate, factor in pairs]


_SCRATCH = {"model.weights": "none"}
_FC = {"model.head": "fc"}
_O2P = {"model.head": "o2p", "model.function": "log"}
_O2P_FC = {"model.head": "o2p_fc", "model.function": "log"}
_SQRT_FC = {"model.head": "o2p_fc", "model.function": "sqrt"}
_SIFT = {"model.head": "sift", "model.support": "mask", "optimizer.decay": 1e-3}
_BOTH = {"model.head": "both", "model.function": "log", "model.vector_scale": 0.3}
_BOTH_S = {**_BOTH, **_SCRATCH, "model.vector_scale": 0.1}
_NARROW = {"model.reduce": 96}
_MAPS = {**_NARROW, "model.taps": ["pool5", "relu2", "relu3", "relu4"]}
_HALF = {"model.vector_dropout": 0.5}
_MOST = {"model.vector_dropout": 0.8}
_LOUD = {"model.feature_scale": 0.1}  # features of random filters are small


def _scale(value: float) -> dict[str, Any]:
    return {**_MOST, "model.vector_scale": value}


# fmt: off
ROWS = [
    Row("SIFT-O2P", "sift", "sift", 36.4, _SIFT,
        _rates((1e-3, 1.0), (3e-4, 1.0), (3e-3, 1.0), (1e-4, 1.0))),
    Row("AlexNet", "alexnet", "fine", 25.3, _FC,
        _rates((0.01, 0.1), (0.02, 0.05), (0.02, 0.1), (0.005, 0.2))),
    Row("AlexNet (S)", "alexnet-s", "scratch", 27.2, {**_FC, **_SCRATCH},
        _rates((0.01, 1.0), (0.02, 1.0), (0.005, 1.0), (0.02, 0.5))),
    Row("DeepO2P", "o2p", "fine", 28.6, _O2P,
        [*_rates((1e-3, 0.3), (1e-3, 1.0), (3e-4, 1.0)), *_rates((1e-3, 0.3), **_HALF)]),
    Row("DeepO2P (S)", "o2p-s", "scratch", 32.4, {**_O2P, **_SCRATCH},
        [*_rates((1e-3, 10.0), (1e-3, 3.0), (3e-4, 10.0)), *_rates((1e-3, 10.0), **_LOUD)]),
    Row("DeepO2P-FC", "o2p-fc", "fine", 25.2, _O2P_FC,
        _rates((0.01, 0.1), (0.01, 0.03), (0.003, 0.1), (0.003, 0.3))),
    Row("DeepO2P-FC (S)", "o2p-fc-s", "scratch", 28.9, {**_O2P_FC, **_SCRATCH},
        [*_rates((0.01, 1.0), (0.003, 3.0), (0.003, 1.0)), *_rates((0.01, 1.0), **_LOUD)]),
    # Beyond the paper: of each group the best in tuning is trained to the end. The plain DeepO2P knows its training
    # regions by heart (loss 0.1 after 12 epochs, 0.25 after 20 from scratch), so these drop half of the descriptor or
    # more.
    Row("DeepO2P, dropout", "o2p-drop", "fine", None, _O2P,
        [*_rates((1e-3, 1.0), **_HALF), *_rates((1e-3, 1.0), (1e-3, 0.3), (3e-3, 0.3), **_MOST)], "fine"),
    Row("DeepO2P-FC, square root", "sqrt-fc", "fine", None, _SQRT_FC,
        _rates((0.01, 0.1), (0.01, 0.03), (0.003, 0.1), (0.02, 0.1)), "fine"),
    Row("first and second order, log at 6×6", "both-log", "fine", None, _BOTH,
        [*_rates((0.01, 0.1), **_HALF), *_rates((0.01, 0.1), (0.02, 0.05), (0.02, 0.1), **_MOST)], "fine"),
    Row("DeepO2P on 96 channels", "o2p-narrow", "fine", None, {**_O2P, **_NARROW},
        [*_rates((1e-3, 1.0), (3e-3, 0.3), **_MOST), *_rates((1e-3, 1.0), (3e-3, 0.3), **_HALF)], "fine"),
    Row("DeepO2P on four maps", "o2p-maps", "fine", None, {**_O2P, **_MAPS},
        [*_rates((1e-3, 1.0), (1e-3, 0.3), (3e-3, 0.3), **_MOST), *_rates((1e-3, 1.0), **_HALF)], "fine"),
    Row("first and second order on four maps", "both-maps", "fine", None, {**_BOTH, **_MAPS},
        [*_rates((0.01, 0.1), (0.02, 0.05), (0.02, 0.1), **_MOST), *_rates((0.01, 0.1), **_scale(0.6))], "fine"),
    Row("DeepO2P, dropout (S)", "o2p-drop-s", "scratch", None, {**_O2P, **_SCRATCH},
        [*_rates((3e-4, 10.0), **_HALF), *_rates((3e-4, 10.0), (3e-4, 30.0), (1e-3, 3.0), **_MOST)], "scratch"),
    Row("first and second order on four maps (S)", "both-maps-s", "scratch", None, {**_BOTH_S, **_MAPS},
        [*_rates((0.02, 1.0), (0.01, 1.0), (0.02, 0.5), **_MOST), *_rates((0.01, 1.0), **_scale(0.2))], "scratch"),
    Row("first and second order, log at 6×6 (S)", "both-log-s", "scratch", None, _BOTH_S,
        [*_rates((0.02, 0.5), **_HALF), *_rates((0.02, 0.5), (0.01, 1.0), **_MOST),
         *_rates((0.02, 0.5), **_scale(0.3))], "scratch"),
]
# fmt: on

_FORMATS = {"paper": ".1f", "all regions": ".2f", "≥ 400 px": ".2f", "layer (%)": ".1f"}
REFERENCES = {"fine": "alexnet", "scratch": "alexnet-s", "sift": "alexnet"}
"""The row that each kind is compared with."""


# ---------------------------------------------------------------------------------------------------------------- table


class Table1(Reproduction):
    """The first table; see the module."""

    rows: ClassVar[dict[str, Row]] = {row.key: row for row in ROWS}
    title: ClassVar[str] = "Classification error of COCO's regions"
    compared: ClassVar[str] = "AlexNet"
    parts: ClassVar[dict[str, tuple[str, ...]]] = {"all": ("trial", "seed"), "tune": ("trial",), "train": ("seed",)}

    def __init__(self, config: Table1Config) -> None:
        super().__init__(config)
        if config.data.split != type(config.data)().split:
            raise ConfigurationError("--data.split is the table's own: trials hold training images out, seeds use all.")
        self.config = config
        self.epochs = {"fine": config.fine_epochs, "scratch": config.scratch_epochs, "sift": config.sift_epochs}
        self._provenances: dict[tuple[Job, Device, int], dict[str, Any]] = {}

    # ---------------------------------------------------------------------------------------------------------- runs

    def prepare(self) -> None:
        """Crop the regions, and describe them by SIFT where that is asked for."""
        train, validation = open_regions(self.config.data)
        for regions in (train, validation):
            log.info("%s", regions.report())
        if "sift" in self.chosen:
            sift = self.run_config(Job("sift", "trial"), {}, self.device)
            network, device = build_model(sift, train.classes), choose_device(self.accelerator)
            describe(network, train, validation, self.config.data, device)

    def jobs(self, part: str) -> Iterable[Job]:
        """Trials of all rows, or seeds (or the timing) of those whose tuning is finished and won; long ones first."""
        rows = sorted(self.chosen.values(), key=lambda row: -self._cost(row))
        if part == "trial":
            rows = [row for row in rows if not row.follows]
            return [Job(row.key, part, i) for row in rows for i in range(len(row.trials[: self.config.trials]))]
        winners = [row for row in rows if self.wins(row)]
        return [job for row in winners for job in (self.seeds(row) if part == "seed" else [Job(row.key, part)])]

    def seeds(self, row: Row) -> list[Job]:
        """The final runs of a row."""
        count = self.config.fine_seeds if row.kind in ("fine", "frozen") else self.config.other_seeds
        return [Job(row.key, "seed", i) for i in range(count)]

    def _cost(self, row: Row) -> float:
        """Relative duration of a run, for the order of starting only."""
        head = {"fc": 1.0, "o2p": 1.2, "o2p_fc": 2.0, "both": 2.0, "sift": 0.1}[row.model["model.head"]]
        return self.epochs[row.kind] * head

    def choose(self, row: Row, device: Device | None = None) -> int | None:
        """The trial with the smallest error on the held-out training images; None while trials are missing."""
        trials = range(len(row.trials[: self.config.trials]))
        results = [self.tried(Job(row.follows or row.key, "trial", i), device) for i in trials]
        errors = [result["error"] for result in results if result is not None]
        return int(np.argmin(errors)) if len(errors) == len(results) else None

    def tried(self, job: Job, device: Device | None = None) -> dict[str, Any] | None:
        """The result of a trial: of a kind of device, or of the other where that has none."""
        device = device or self.device
        return self.result(job, device) or self.result(job, "cpu" if device == "cuda" else "cuda")

    def wins(self, row: Row) -> bool:
        """Whether a row is trained to the end: its tuning is finished, and best in its group if it has one."""
        rivals = [r for r in self.chosen.values() if row.group is not None and r.group == row.group] or [row]
        best: dict[str, float] = {}
        for rival in rivals:
            choice = self.choose(rival)
            result = None if choice is None else self.tried(Job(rival.follows or rival.key, "trial", choice))
            if result is None:
                return False
            best[rival.key] = result["error"]
        return min(best, key=lambda key: best[key]) == row.key

    def trial(self, job: Job, device: Device | None = None) -> int | None:
        """Which of its row's settings a run tries, or which one tuning chose; None while trials are missing."""
        return job.number if job.part == "trial" else self.choose(self.rows[job.key], device)

    def run_config(self, job: Job, setting: dict[str, Any], device: Device) -> O2PConfig:
        """The complete configuration of a run."""
        row, config = self.rows[job.key], self.config
        timing = job.part == "timing"
        epochs = 2 if timing else self.epochs[row.kind]
        base = dataclasses.replace(O2P_PRESETS["paper"], data=config.data)
        return merge(
            base,
            {
                **row.model,
                **setting,
                **{f"engine.{name}": value for name, value in NUMBERS_ONLY.items()},
                "engine.seed": job.number if job.part == "seed" else 1000,
                "engine.max_epochs": epochs,
                "engine.validate_every": epochs,
                "engine.accelerator": config.accelerator,
                "engine.precision": config.precision if device == "cuda" and row.kind != "sift" else "32",
                "engine.log_every": 50,
                "engine.profile": timing and row.kind != "sift",
                "data.split": "tuning" if job.part == "trial" else "final",
                **self._overrides,
            },
        )

    @cached_property
    def _overrides(self) -> dict[str, Any]:
        """``name=value`` with values in JSON; what is not JSON is text."""
        fields = {}
        for word in self.config.override:
            name, equals, value = word.partition("=")
            if not equals:
                raise ConfigurationError(f"{word!r} is not an override; write name=value, such as model.hidden=64.")
            try:
                fields[name] = json.loads(value)
            except json.JSONDecodeError:
                fields[name] = value
        return fields

    def provenance(self, job: Job, device: Device) -> dict[str, Any] | None:
        """Configuration, regions, starting weights, device and measure of a run."""
        trial = self.trial(job, device)
        if trial is None:
            return None
        known = self._provenances.get((job, device, trial))
        if known is None:
            recipe = self.run_config(job, self.rows[job.key].trials[trial], device)
            known = self._provenances[job, device, trial] = self._provenance(recipe, device)
        return known

    def _provenance(self, recipe: O2PConfig, device: Device) -> dict[str, Any]:
        sift = recipe.model.head == "sift"
        return {
            "configuration": settings(recipe),
            "data": data_digest(data_folder(self.config.data), ("train", "val")),
            "weights": "none" if sift else weights_digest(recipe.model.backbone, recipe.model.weights),
            "device": device,
            "measure": {"errors": "percent of all regions, and of large ones", "large": LARGE},
        }

    def run(self, job: Job) -> str:
        """Train; a run that diverges is a result too."""
        result = self._train(job)
        self.keep(job, result)
        return f"error {result['error']:5.2f}  {json.dumps(result['setting'])}"

    def _train(self, job: Job) -> dict[str, Any]:
        trial = self.trial(job)
        assert trial is not None, job
        setting = self.rows[job.key].trials[trial]
        recipe = self.run_config(job, setting, self.device)
        recipe.engine.run = self.place(job)
        started = time.perf_counter()
        seed_all(recipe.engine.seed)
        module, data = build(recipe)
        result: dict[str, Any] = {"row": job.key, "part": job.part, "number": job.number, "setting": setting}
        result["parameters"] = sum(p.numel() for p in module.parameters())
        try:
            run = fit(recipe, module, data, name=f"{self.out.name}-{job.key}")
        except NonFiniteError as error:
            result |= {"error": 100.0, "error_large": 100.0, "diverged": str(error)}
        else:
            summary = run.read_summary()
            result |= {name: summary[f"val/{name}"] for name in ("error", "error_large", "loss")}
            result |= {"steps": summary["steps"], "predictions_sha256": save_predictions(run, module)}
        result["seconds"] = round(time.perf_counter() - started, 2)
        del module, data
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return result

    def time(self, job: Job) -> dict[str, dict[str, Any]]:
        """Regions per second, and the division of a step's time."""
        self._train(job)
        speed: dict[str, Any] = {"regions_per_second": round(self.training_rate(job))}
        profile = RunFolder(self.place(job)).profile_path
        return {job.key: speed | ({"profile": read_json(profile)} if profile.is_file() else {})}

    # ------------------------------------------------------------------------------------------------------- summary

    def predictions(self, job: Job, device: Device) -> dict[str, np.ndarray] | None:
        """What a finished run predicted on the validation regions; None where it was not kept."""
        path = self.place(job, device) / "predictions" / "validation.npz"
        if not path.is_file():
            return None
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}

    def summarize(self) -> dict[str, Any]:
        """Collect everything that has finished into table.json, table.md and the figures."""
        lines = [line for row in self.chosen.values() if (line := _Line.read(self, row)) is not None]
        if not lines:
            raise DataError(f"there is no finished run in {self.store.folder}; train first.")
        if any(line.incomplete for line in lines):
            return self._summarize_published(lines)
        predicting = [line for line in lines if line.predictions]
        if not predicting:
            raise DataError(f"every finished run in {self.store.folder} diverged; there is nothing to compare.")
        first = predicting[0].predictions[0]
        by_key = {line.row.key: line for line in predicting}
        table: dict[str, Any] = {
            "rows": [line.entry(self, by_key.get(line.row.reference or REFERENCES[line.row.kind])) for line in lines],
            "regions": len(first["large"]),
            "large_regions": int(first["large"].sum()),
            "candidates": self._tried(*(row for row in self.chosen.values() if row not in [one.row for one in lines])),
            "budget": {
                "trials": self.config.trials,
                "epochs": self.epochs,
                "data": to_json(dataclasses.replace(self.config.data, root=None, cache=None)),
            },
        }
        self.write_table(table, *self._tables(table))
        self._draw(lines)
        return table

    def _summarize_published(self, lines: list[_Line]) -> dict[str, Any]:
        """Write the table again with the speeds of now and the differences of table.json, which were computed from the
        same runs: published results come without the predictions that differences and figures need."""
        path = self.out / "table.json"
        stored = read_json(path) if path.is_file() else {"rows": []}
        entries = [line.entry(self, None) for line in lines]
        if {e["key"]: _fingerprints(e) for e in stored["rows"]} != {e["key"]: _fingerprints(e) for e in entries}:
            missing = ", ".join(line.row.key for line in lines if line.incomplete)
            raise DataError(
                f"predictions of {missing} are missing in {self.store.folder}, and {path} is not a table of the same "
                "runs, so rows cannot be compared. Remove the runs' folders to do them again, or give another --out."
            )
        for entry, before in zip(entries, stored["rows"], strict=True):
            entry |= {name: before[name] for name in ("difference",) if name in before}
        table = stored | {"rows": entries}
        self.write_table(table, *self._tables(table))
        return table

    def trials(self, row: Row, device: Device) -> list[dict[str, Any]]:
        """Settings that a row tried, with what they gave."""
        if row.follows:
            return []
        tried = ((s, self.tried(Job(row.key, "trial", i), device)) for i, s in enumerate(row.trials))
        return [{"setting": s, **_brief(r)} for s, r in list(tried)[: self.config.trials] if r is not None]

    def _tried(self, *rows: Row) -> list[dict[str, Any]]:
        """Those rows that tried anything, as table.json keeps them."""
        tried = ((row, self.trials(row, self.device)) for row in rows)
        return [{"name": row.name, "key": row.key, "model": row.model, "trials": t} for row, t in tried if t]

    def command(self, row: Row, device: Device) -> str:
        """The command that trains one seed of a row with its chosen setting."""
        trial = self.choose(row, device)
        assert trial is not None, row
        options = {
            **row.model,
            **row.trials[trial],
            "engine.max-epochs": self.epochs[row.kind],
            "engine.precision": "32" if row.kind == "sift" else self.config.precision,
            **self._overrides,
        }
        return f"matbackprop train o2p --preset paper {' '.join(as_option(k, v) for k, v in options.items())}"

    def _tables(self, table: dict[str, Any]) -> tuple[Table, str, str]:
        columns = ["model", "paper", "all regions", "≥ 400 px", "seeds", f"difference to {self.compared}", "regions/s",
                   "layer (%)"]  # fmt: skip
        body = [
            [
                entry["name"],
                entry["paper"],
                Measured(entry["error"]["mean"], entry["error"]["spread"]),
                Measured(entry["error_large"]["mean"], entry["error_large"]["spread"]),
                len(entry["seeds"]),
                interval_text(entry["difference"]["all"], 2) if "difference" in entry else None,
                entry["timing"].get("regions_per_second"),
                _share(entry["timing"].get("profile")),
            ]
            for entry in table["rows"]
        ]
        if not any(row.paper for row in self.rows.values()):
            columns.remove("paper")
            body = [[name, *rest] for name, _, *rest in body]
        note = (
            f"Error in percent on {table['regions']} validation regions ({table['large_regions']} of at least "
            f"{LARGE} px), mean ± standard deviation over seeds. Differences: paired bootstrap over images, 95 % "
            f"interval, against {self.compared} of the same kind; negative is better. Each row tried "
            f"{self.config.trials} settings on training images that were held out.{self.speed_note()}"
        )
        out = Table(
            columns,
            body,
            title=self.title,
            note=note,
            formats={name: f for name, f in _FORMATS.items() if name in columns},
            best={"all regions": "min", "≥ 400 px": "min"},
        )
        commands = "\n".join(f"- {e['name']}: `{e['command']} --engine.seed 0`" for e in table["rows"])
        tried = self._tuning([*table["rows"], *table["candidates"]])
        return out, f"One seed of a row, with the setting that its tuning chose:\n\n{commands}", tried.markdown()

    def _tuning(self, entries: list[dict[str, Any]]) -> Table:
        """What rows tried."""
        error = "error on held-out training images"
        return Table(
            ["model", "setting", error, "≥ 400 px"],
            [
                [
                    entry["name"],
                    ", ".join(f"{k.rpartition('.')[-1]} {v}" for k, v in trial["setting"].items()),
                    trial["error"],
                    trial["error_large"],
                ]
                for entry in entries
                for trial in entry["trials"]
            ],
            title="Tuning",
            formats={error: ".2f", "≥ 400 px": ".2f"},
        )

    def curves(self, row: Row) -> str:
        """The figure that shows a row's training."""
        return "curves"

    def _draw(self, lines: list[_Line]) -> None:
        folder = self.out / "figures"
        folder.mkdir(parents=True, exist_ok=True)
        bars = {line.row.name: (float(np.mean(e)), min(e), max(e)) for line in lines if (e := line.values("error"))}
        paper = {line.row.name: line.row.paper for line in lines if line.row.paper is not None}
        figures.comparison(
            bars, folder / "errors.png", reference=paper, xlabel="error (%)", title="all regions; bars span the seeds"
        )
        curves: dict[str, dict[str, Any]] = {}
        for line in lines:
            points = [(m["step"], m["train/loss"]) for m in line.metrics if m.get("train/loss") is not None]
            if points:
                curves.setdefault(self.curves(line.row), {})[line.row.name] = tuple(np.transpose(points))
        for name, series in curves.items():
            figures.lines(series, folder / f"{name}.png", xlabel="step", ylabel="training loss", log="y")
        names = open_regions(self.config.data)[0].classes
        predicting = [line for line in lines if line.predictions]
        target = predicting[0].predictions[0]["target"].astype(np.int64)
        count = np.bincount(target, minlength=len(names))
        per_class: dict[str, Any] = {}
        for line in predicting:
            sums = np.bincount(target, weights=line.wrong.mean(0), minlength=len(names))
            shares = zip(names, sums, count, strict=True)
            per_class[line.row.name] = {name: round(100 * float(s / c), 2) for name, s, c in shares if c}
        per_class["regions"] = {name: int(c) for name, c in zip(names, count, strict=True)}
        atomic_write(self.out / "per_class.json", json.dumps(per_class, indent=2) + "\n")
        best = min(predicting, key=lambda line: float(np.mean(line.values("error"))))
        for line in {id(one): one for one in (best, *(p for p in predicting if p.row.key == "alexnet"))}.values():
            total = sum(confusion(p["target"], p["predicted"], len(names)) for p in line.predictions)
            figures.confusion_matrix(total, names, folder / f"confusion-{line.row.key}.png", title=line.row.name)


@dataclass(frozen=True)
class _Line:
    """A row with the results of its final runs by seed, the predictions of those that did not diverge and kept them,
    and the metrics of the first; ``incomplete`` where predictions are missing."""

    row: Row
    device: Device
    results: list[dict[str, Any]]
    predictions: list[dict[str, np.ndarray]]
    metrics: list[dict[str, Any]]
    incomplete: bool

    @classmethod
    def read(cls, table: Table1, row: Row) -> _Line | None:
        """The line of a row; None where no final run has ended."""
        device, results = table.finished(table.seeds(row))
        if not results:
            return None
        predicting = [table.predictions(job, device) for job, r in results.items() if "diverged" not in r]
        kept = [one for one in predicting if one is not None]
        metrics = RunFolder(table.place(next(iter(results)), device)).read_metrics()
        return cls(row, device, list(results.values()), kept, metrics, len(kept) < len(predicting))

    @property
    def wrong(self) -> np.ndarray:
        """0 or 1: one line for each seed that did not diverge, one column for each validation region."""
        return np.stack([(p["target"] != p["predicted"]).astype(np.float64) for p in self.predictions])

    def values(self, name: str) -> list[float]:
        """A number of each final run."""
        return [result[name] for result in self.results]

    def entry(self, table: Table1, reference: _Line | None) -> dict[str, Any]:
        """The line as table.json keeps it."""
        row = self.row
        entry: dict[str, Any] = {
            **{name: getattr(row, name) for name in ("name", "key", "kind", "paper", "model")},
            "device": self.device,
            "trials": table.trials(row, self.device),
            "chosen": table.choose(row, self.device),
            "seeds": [
                {"seed": r["number"], **_brief(r), "fingerprint": fingerprint(r["provenance"])} for r in self.results
            ],
            "error": _mean_and_spread(self.values("error")),
            "error_large": _mean_and_spread(self.values("error_large")),
            "parameters": self.results[0]["parameters"],
            "command": table.command(row, self.device),
            "timing": table.speed(row.key, Job(row.key, "timing")),
        }
        if reference is not None and reference.row is not row and self.predictions:
            large, images = self.predictions[0]["large"], self.predictions[0]["image"]
            entry["difference"] = {
                "to": reference.row.key,
                "all": paired_difference(self.wrong, reference.wrong, images),
                "large": paired_difference(self.wrong[:, large], reference.wrong[:, large], images[large]),
            }
        return entry


def _fingerprints(entry: dict[str, Any]) -> list[str]:
    return [seed["fingerprint"] for seed in entry["seeds"]]


def _brief(result: dict[str, Any]) -> dict[str, Any]:
    keys = ("error", "error_large", "steps", "seconds", "diverged", "predictions_sha256")
    return {k: result[k] for k in keys if k in result}


def _mean_and_spread(values: list[float]) -> dict[str, Any]:
    measured = Measured.of(values)
    return {"mean": measured.mean, "spread": measured.spread, "values": values}


def paired_difference(mine: np.ndarray, other: np.ndarray, images: np.ndarray) -> dict[str, float]:
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
    return paired_bootstrap(first, second, seed=0).to_dict()


def _share(profile: dict[str, Any] | None) -> float | None:
    """The structured layer's share of a step, in percent."""
    if not profile:
        return None
    parts = profile["milliseconds"]
    return 100 * (parts["layer forward"] + parts["layer backward"]) / profile["total_milliseconds"]


def as_option(name: str, value: Any) -> str:
    """A field as the command line takes it."""
    path, _, field_name = name.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return f"--{path}.{'' if value else 'no-'}{field_name}"
    if isinstance(value, list):
        return f"--{path}.{field_name} {shlex.join(value)}"
    return f"--{path}.{field_name} {shlex.quote(str(value))}"
