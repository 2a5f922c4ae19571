"""The paper's first table: region classifiers, tuned in the same way and trained with several seeds.

1. *Tuning.* The same number of settings is tried for every row, on training images only: four fifths to fit, one
   fifth to choose. Trials have as many epochs as the final runs, because shorter ones favor rows that overfit.
2. *Training.* The chosen setting is trained on all training images with several seeds; the validation images are
   scored once, after the last epoch.
3. *Summary.* Means and standard deviations, paired differences with bootstrap intervals, figures and commands.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from experiments import runs
from experiments.networks import ADDED, sift_o2p
from experiments.runs import Experiment, ExperimentConfig, Measured, Results, Run, interval_text
from matbackprop.errors import ConfigurationError, DataError, NonFiniteError
from matbackprop.vision.configuration import merge
from matbackprop.vision.metrics.bootstrap import paired_bootstrap
from matbackprop.vision.report import figures
from matbackprop.vision.report.tables import Table
from matbackprop.vision.training.checkpoint import seed_all
from matbackprop.vision.training.config import O2P_PRESETS, O2PConfig, RegionDataConfig
from matbackprop.vision.training.engine import fit
from matbackprop.vision.training.o2p import LARGE, build, save_predictions

log = logging.getLogger("matbackprop")


@dataclass
class Config(ExperimentConfig):
    """Train and score the rows of the paper's first table, region classification."""

    #: Folder of results.jsonl, table.md and figures. Finished runs are not repeated.
    out: Path = Path("results/table1")
    data: RegionDataConfig = field(default_factory=RegionDataConfig)  #: Source of the regions, the same for all rows.
    trials: int = 4  #: Number of settings tried for each row.
    fine_epochs: int = 12  #: Epochs of the fine-tuned rows.
    scratch_epochs: int = 20  #: Epochs of the rows from scratch.
    sift_epochs: int = 30  #: Epochs of SIFT-O2P's classifier.
    fine_seeds: int = 5  #: Seeds of the fine-tuned rows.
    other_seeds: int = 3  #: Seeds of the other rows.
    precision: Literal["32", "bf16-mixed"] = "bf16-mixed"  #: Precision of the network on a GPU; on the CPU it is 32.


@dataclass(frozen=True, eq=False)
class Row:
    """One line of the table: a model, and the settings that tuning chooses from.

    Rows of one ``kind`` share epochs and the number of seeds, and only the row of a ``group`` with the smallest error
    in tuning is trained on all images. A row is compared with ``reference``, by default that of its kind, and uses the
    setting of the row that it ``follows``, without trials. ``paper`` is the paper's error in percent.
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
    """Learning rates of the head, each with the backbone's fraction of it."""
    return [{"optimizer.rate": rate, "optimizer.backbone_factor": factor, **more} for rate, factor in pairs]


_SCRATCH = {"model.weights": "none"}
_FC = {"model.head": "fc"}
_O2P = {"model.head": "o2p", "model.function": "log"}
_O2P_FC = {"model.head": "o2p_fc", "model.function": "log"}
_SQRT_FC = {"model.head": "o2p_fc", "model.function": "sqrt"}
_SIFT = {"model.support": "mask", "optimizer.decay": 1e-3}
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
    # Beyond the paper. The plain DeepO2P overfits (loss 0.1 after 12 epochs, 0.25 after 20 from scratch), so these drop
    # half of the descriptor or more.
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

REFERENCES = {"fine": "alexnet", "scratch": "alexnet-s", "sift": "alexnet"}  #: The row that each kind is compared with.
_FORMATS = {"paper": ".1f", "all regions": ".2f", "≥ 400 px": ".2f", "layer (%)": ".1f"}


class Table1(Experiment):
    """The first table; see the module."""

    rows: ClassVar[dict[str, Row]] = {row.key: row for row in ROWS}
    title: ClassVar[str] = "Classification error of COCO's regions"
    compared: ClassVar[str] = "AlexNet"

    def __init__(self, config: Config) -> None:
        if config.data.split != type(config.data)().split:
            raise ConfigurationError(
                "--data.split is set by the table. Trials hold training images out, seeds use all."
            )
        super().__init__(config)
        self.chosen = config.chosen(self.rows)
        self.epochs = {"fine": config.fine_epochs, "scratch": config.scratch_epochs, "sift": config.sift_epochs}
        self.seeds = {"fine": config.fine_seeds, "scratch": config.other_seeds, "sift": config.other_seeds}

    def train(self) -> None:
        """Run the trials of all rows, then the seeds of the best rows."""
        for row in self.chosen.values():
            for i, setting in enumerate(row.trials[: self.config.trials] if not row.follows else ()):
                self.run(row, "trial", i, setting)
        for row in self.chosen.values():
            if self.wins(row):
                for seed in range(self.seeds[row.kind]):
                    self.run(row, "seed", seed, self.choice(row)["setting"])

    def trials(self, row: Row) -> list[dict[str, Any]]:
        """Metrics of the finished trials of a row, or of the row that it follows."""
        tried = self.results.runs(row.follows or row.key, "trial")
        return [run["metrics"] for run in tried if run["number"] < self.config.trials]

    def choice(self, row: Row) -> dict[str, Any]:
        """The trial with the smallest error on the held-out training images."""
        if not (trials := self.trials(row)):
            raise DataError(f"{row.follows or row.key} has no trial in {self.results.path}. Run its trials first.")
        return min(trials, key=lambda metrics: metrics["error"])

    def wins(self, row: Row) -> bool:
        """Whether no row of its group has a smaller error in tuning."""
        rivals = [r for r in self.chosen.values() if row.group is not None and r.group == row.group] or [row]
        return min(rivals, key=lambda rival: self.choice(rival)["error"]) is row

    def recipe(self, row: Row, part: str, number: int, setting: dict[str, Any]) -> O2PConfig:
        """The configuration of a run."""
        config, epochs = self.config, self.epochs[row.kind]
        precision = config.precision if config.device == "cuda" and row.kind != "sift" else "32"
        seed = number if part == "seed" else 1000
        engine = config.engine(
            f"{row.key}-{part}{number}", seed, max_epochs=epochs, validate_every=epochs, precision=precision
        )
        split = {"data.split": "tuning" if part == "trial" else "final"}
        fields = {**self.model(row), **setting, "engine": engine, **split, **config.overrides()}
        return merge(replace(O2P_PRESETS["paper"], data=config.data), fields)

    def model(self, row: Row) -> dict[str, Any]:
        """Return the fields that define a row."""
        return {**row.model, **(sift_o2p(self.config.data.canvas) if row.kind == "sift" else {})}

    def run(self, row: Row, part: str, number: int, setting: dict[str, Any]) -> Run:
        """Train and score once, unless the run is finished."""
        recipe = self.recipe(row, part, number, setting)
        provenance = {
            "configuration": runs.settings(recipe),
            "data": runs.data_hash(self.config.data.folder(), ("train", "val")),
            "weights": runs.weights_hash(recipe.model.backbone, recipe.model.weights),
            "device": self.config.device,
        }
        run = self.results.run(row.key, part, number, provenance, lambda: self._fit(recipe, row, setting))
        log.info("%-34s error %5.2f  %s", f"{row.key} {part} {number}", run["metrics"]["error"], json.dumps(setting))
        return run

    def _fit(self, recipe: O2PConfig, row: Row, setting: dict[str, Any]) -> dict[str, Any]:
        seed_all(recipe.engine.seed)
        module, data = build(recipe)
        metrics: dict[str, Any] = {"setting": setting, "parameters": sum(p.numel() for p in module.parameters())}
        try:
            run = fit(recipe, module, data, name=row.key)
        except NonFiniteError as error:  # divergence is recorded as a result
            return metrics | {"error": 100.0, "error_large": 100.0, "diverged": str(error)}
        summary = run.read_summary()
        metrics |= {name: summary[f"val/{name}"] for name in ("error", "error_large", "loss")}
        metrics |= {"steps": summary["steps"], "predictions_sha256": save_predictions(run, module)}
        metrics |= wrong_by_image(module.predictions)
        losses = [(m["step"], m["train/loss"]) for m in run.read_metrics() if m.get("train/loss") is not None]
        metrics["curve"] = [[step, round(loss, 6)] for step, loss in losses]
        if rate := row.kind != "frozen" and runs.training_rate(run):
            metrics["regions_per_second"] = round(rate)
        return metrics

    def summarize(self) -> None:
        """Write table.md and the figures from all finished runs."""
        lines = {row: done for row in self.chosen.values() if (done := self.results.runs(row.key))}
        tried = {row: trials for row in self.chosen.values() if not row.follows and (trials := self.trials(row))}
        self.results.require(lines or tried)
        tuning = self._tuning({row: tried[row] for row in sorted(tried, key=lambda row: row not in lines)})
        used = [run for row in lines for run in lines[row]]
        if not lines:
            self.results.write_table(tuning, runs=[run for row in tried for run in self.results.runs(row.key, "trial")])
            return
        commands = "\n".join(
            f"- {row.name}: `{self.command(row, done[0])} --engine.seed 0`" for row, done in lines.items()
        )
        commands = f"One seed of a row, with the setting that its tuning chose:\n\n{commands}"
        self.results.write_table(self._table(lines), commands, tuning.markdown(), *self.more(), runs=used)
        self._draw(lines)

    def more(self) -> list[str]:
        """Further tables below."""
        return []

    def difference(self, row: Row) -> dict[str, float] | None:
        """Paired difference of a row's errors to those of its reference, in points; None if there is none."""
        key = row.reference or REFERENCES[row.kind]
        return None if key == row.key else difference(self.results, self.results.runs(row.key), self.results.runs(key))

    def speed(self, row: Row, done: Sequence[Run]) -> dict[str, Any]:
        """Regions per second, the layer's fraction of a step and the machine."""
        rates = [run for run in done if "regions_per_second" in run["metrics"]]
        if not rates:
            return self.results.recorded("speed", row.key)
        machine = {"device": rates[0]["device"], "git": rates[0]["code"]["git"], "processors": os.cpu_count()}
        return {**rates[0]["metrics"], "machine": machine}

    def _table(self, lines: dict[Row, list[Run]]) -> Table:
        columns = ["model", "paper", "all regions", "≥ 400 px", "seeds", f"difference to {self.compared}", "regions/s",
                   "layer (%)"]  # fmt: skip
        body, speeds = [], [self.speed(row, done) for row, done in lines.items()]
        for (row, done), speed in zip(lines.items(), speeds, strict=True):
            gain = self.difference(row)
            body.append([
                row.name,
                row.paper,
                *(Measured.of([run["metrics"][name] for run in done]) for name in ("error", "error_large")),
                len(done),
                interval_text(gain, 2) if gain else None,
                speed.get("regions_per_second"),
                speed.get("layer_percent"),
            ])  # fmt: skip
        if not any(row.paper for row in self.rows.values()):
            columns.remove("paper")
            body = [[name, *rest] for name, _, *rest in body]
        metrics = [m for done in lines.values() for run in done if "regions" in (m := run["metrics"])]
        counted = "{regions} validation regions ({large_regions} of at least {large} px)"
        counted = counted.format(large=LARGE, **metrics[0]) if metrics else "no region"
        note = (
            f"Error in percent on {counted}, mean ± standard deviation over seeds. Differences: paired bootstrap over "
            f"images, 95 % interval, against {self.compared} of the same kind; negative is better. Each row tried "
            f"{self.config.trials} settings on training images that were held out.{runs.speed_note(speeds)}"
        )
        formats = {name: f for name, f in _FORMATS.items() if name in columns}
        best: dict[str, Literal["min", "max"]] = {"all regions": "min", "≥ 400 px": "min"}
        return Table(columns, body, title=self.title, note=note, formats=formats, best=best)

    def _tuning(self, tried: dict[Row, list[dict[str, Any]]]) -> Table:
        error = "error on held-out training images"
        body = [
            [
                row.name,
                ", ".join(f"{k.rpartition('.')[-1]} {v}" for k, v in trial["setting"].items()),
                trial["error"],
                trial["error_large"],
            ]
            for row, trials in tried.items()
            for trial in trials
        ]
        formats = {error: ".2f", "≥ 400 px": ".2f"}
        return Table(["model", "setting", error, "≥ 400 px"], body, title="Tuning", formats=formats)

    def command(self, row: Row, run: Run) -> str:
        """The command that trains one seed of a row with its chosen setting."""
        options = {
            **self.model(row),
            **run["metrics"]["setting"],
            "engine.max-epochs": self.epochs[row.kind],
            "engine.precision": "32" if row.kind == "sift" else self.config.precision,
            **self.config.overrides(),
        }
        words = " ".join(runs.as_option(name, value) for name, value in options.items())
        program = "python -m experiments.networks" if options.get("model.backbone") in ADDED else "matbackprop"
        return f"{program} train o2p --preset paper {words}"

    def curves(self, row: Row) -> str:
        """Name of the figure with a row's training loss."""
        return "curves"

    def _draw(self, lines: dict[Row, list[Run]]) -> None:
        folder = self.config.out / "figures"
        folder.mkdir(parents=True, exist_ok=True)
        errors = {row.name: [run["metrics"]["error"] for run in done] for row, done in lines.items()}
        paper = {row.name: row.paper for row in lines if row.paper is not None}
        bars = {name: (float(np.mean(e)), min(e), max(e)) for name, e in errors.items()}
        runs.comparison(
            bars, folder / "errors.png", reference=paper, xlabel="error (%)", title="all regions; bars span the seeds"
        )
        curves: dict[str, dict[str, Any]] = {}
        for row, done in lines.items():
            if points := done[0]["metrics"].get("curve"):
                curves.setdefault(self.curves(row), {})[row.name] = tuple(np.transpose(points))
        for name, series in curves.items():
            figures.lines(series, folder / f"{name}.png", xlabel="step", ylabel="training loss", log="y")


def wrong_by_image(predictions: dict[str, np.ndarray]) -> dict[str, Any]:
    """Number of wrongly classified regions of each image, in the order of the image numbers."""
    _, image = np.unique(predictions["image"], return_inverse=True)
    wrong = np.bincount(image, weights=predictions["target"] != predictions["predicted"])
    large = int(predictions["large"].sum())
    return {"regions": len(image), "large_regions": large, "wrong_by_image": wrong.astype(int).tolist()}


def difference(results: Results, mine: Sequence[Run], other: Sequence[Run]) -> dict[str, float] | None:
    """Difference of the mean errors in points with its 95 % interval; None if it cannot be computed.

    Seeds are averaged first. Images are resampled, not regions, because the regions of one image resemble each other:
    an image counts with the sum over its regions, scaled so that the mean over images is the mean over regions. Runs
    without ``wrong_by_image`` have the difference that was recorded for exactly these runs.
    """
    hashes = [[run["hash"] for run in done] for done in (mine, other)]
    for record in results.records:
        if record["kind"] == "difference" and record["runs"] == hashes:
            return record["difference"]
    sums = [
        [m["wrong_by_image"] for run in done if "wrong_by_image" in (m := run["metrics"])] for done in (mine, other)
    ]
    if not all(sums):
        return None
    regions = next(run["metrics"]["regions"] for run in mine if "regions" in run["metrics"])
    means = [np.mean(one, axis=0) * 100 * len(one[0]) / regions for one in sums]
    return paired_bootstrap(means[0], means[1], seed=0)._asdict()


main = Table1.main
