"""The paper's second table: full-image segmentation on BSDS300.

Rows: methods without a network of ours, normalized cuts on untrained feature maps, the same maps trained with the
paper's J2, the soft objective with its own clustering space, hypercolumns, and merging into a hierarchy. Every row with
a network is done with several seeds. The test images are only scored; what is chosen was chosen on training images
(``--images tuning`` and ``--images folds``).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.baselines import HUMANS, run_baseline
from experiments.config import SegmentationConfig, Table2Config
from experiments.table import (
    NUMBERS_ONLY,
    Device,
    Job,
    Reproduction,
    data_digest,
    fingerprint,
    interval_text,
    settings,
    shared_workers,
    weights_digest,
)
from matbackprop.errors import ConfigurationError, DataError
from matbackprop.vision.data.bsds import BSDS, FOLDS, PreparedImages, tuning_split
from matbackprop.vision.data.cache import cache_key
from matbackprop.vision.devices import processors
from matbackprop.vision.inference.image_sets import Segmented, segment_images, warm
from matbackprop.vision.metrics.bootstrap import paired_bootstrap
from matbackprop.vision.metrics.evaluation import ImageScores, score_image, summarize
from matbackprop.vision.models.config import VARIANTS
from matbackprop.vision.models.deep_ncuts import DeepNCuts, default_ks
from matbackprop.vision.report.figures import curves, segmentation_grid
from matbackprop.vision.report.tables import Measured, Table
from matbackprop.vision.training.config import RECIPES, NCutsConfig
from matbackprop.vision.training.engine import fit, seed_all
from matbackprop.vision.training.ncuts import build, data_folder, open_images, split_images, untrained_model
from matbackprop.vision.training.run_folder import RunFolder, versions
from matbackprop.vision.workers import Workers

log = logging.getLogger("matbackprop")


# ----------------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        key: its name in files and on the command line.
        title: its name in the table.
        network: which feature maps.
        objective: what they were trained with.
        inference: how segmentations are made, ``"cluster"``, ``"merge"``, or ``""`` for a baseline's own way.
        against: the row that a paired interval compares it with, or "".
        paper: the paper's best (average) covering, or "".
        space: where clusters are sought, if not in the space that the model's configuration names.
    """

    key: str
    title: str
    network: str = "none"
    objective: str = "none"
    inference: str = ""
    against: str = ""
    paper: str = ""
    space: str | None = None

    @property
    def name(self) -> str:
        """Title and network."""
        return self.title if self.network == "none" else f"{self.title} ({self.network})"


@dataclass(frozen=True)
class Group:
    """What is computed together: one training, or none, and the rows that its model fills.

    Attributes:
        key: its name.
        rows: the rows.
        preset: the training preset, or "" for none.
        variant: the untrained network, or "" for none.
        zoom: by how much it sees images enlarged.
        seconds: roughly how long a training takes on a fast GPU; long ones are started first.
    """

    key: str
    rows: tuple[Row, ...]
    preset: str = ""
    variant: str = ""
    zoom: float = 1.0
    seconds: float = 1.0

    @property
    def baseline(self) -> bool:
        """Whether it is a method that knows no seed."""
        return not self.rows[0].inference


_BASELINES = {
    "one_region": ("One region", ""),
    "fixed_grids": ("Fixed grids", ""),
    "ncut_pytorch": ("ncut-pytorch, Lab and position", ""),
    "sklearn_spectral": ("scikit-learn's spectral clustering", ""),
    "multiscale_ncut": ("Multiscale NCuts with intervening contours (Cour et al.)", ".55 (.44)"),
    "felzenszwalb": ("Felzenszwalb and Huttenlocher", ""),
    HUMANS: ("Humans, leave one out", ""),
}
NETWORKS = {"alexnet-relu5": "AlexNet ReLU-5", "vgg16-relu4": "VGG-16 ReLU-4", "vgg16-relu5": "VGG-16 ReLU-5"}
_PAPER = {
    "alexnet-relu5": (".59 (.49)", ".65 (.56)"),
    "vgg16-relu4": (".65 (.56)", ".73 (.62)"),
    "vgg16-relu5": (".70 (.58)", ".74 (.63)"),
}


def _groups() -> dict[str, Group]:
    groups = [Group(key, (Row(key, title, paper=paper),)) for key, (title, paper) in _BASELINES.items()]
    for name, network in NETWORKS.items():
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
    for name in ("alexnet-relu5", "vgg16-relu5"):  # the paper does not say at which size its networks see images
        double, network, (before, after) = f"{name}-x2", f"{NETWORKS[name]}, image enlarged twice", _PAPER[name]
        plain = Row(f"ncuts-{double}", "NCuts", network, "none", "cluster", paper=before)
        deep = Row(f"deepncuts-{double}", "DeepNCuts", network, "J2", "cluster", plain.key, after)
        span = Row(f"span-{double}", "DeepNCuts, J2's own space", network, "J2", "cluster", plain.key, space="soft")
        groups.append(Group(plain.key, (plain,), variant=name, zoom=2))
        groups.append(Group(deep.key, (deep, span), preset=f"paper-{double}", seconds=30))
    for suffix, network in (
        ("", "VGG-16, frozen"),
        ("-tuned", "VGG-16, tuned"),
        ("-lite2", "EfficientNet-Lite2, tuned"),
        ("-tiny-vit", "MobileSAM's TinyViT, tuned"),
    ):
        groups.append(
            Group(
                f"hypercolumns{suffix}",
                (Row(f"hypercolumns{suffix}", "Hypercolumns", network, "soft", "cluster", "ncuts-vgg16-relu5"),),
                preset=f"hypercolumns{suffix}",
                seconds=15,
            )
        )
    return {group.key: group for group in groups}


GROUPS = _groups()
"""All groups by name."""
GROUP_OF = {row.key: group for group in GROUPS.values() for row in group.rows}
ROWS = {row.key: row for group in GROUPS.values() for row in group.rows}
"""All rows by name, in the order of the table."""


# ---------------------------------------------------------------------------------------------------------------- table

_MEASURES = ("paper_best", "paper_average", "covering_ods", "covering_ois", "covering_best", "pri_ods", "pri_ois",
             "vi_ods", "vi_ois")  # fmt: skip
_BOUNDARY = ("boundary_ods", "boundary_ois")
_OBJECTS = ("objects_ods", "objects_ois")

_PLACES = ("root", "made", "cache", "limit", "superpixels")
"""Fields of the data that a table's command sets for every row."""

_IMAGES = {
    "test": "test images",
    "tuning": "tuning images",
    "folds": "training images, each scored by a network that was trained without it",
}


class SegmentationTable(Reproduction):
    """A table whose rows segment images, with networks that are trained for it or without any.

    Raises:
        ConfigurationError: an option of the data is given that would change nothing, because every row has its own.
    """

    def __init__(self, config: SegmentationConfig) -> None:
        super().__init__(config)
        self.config = config
        default = type(config.data)()
        names = [field.name for field in dataclasses.fields(default) if field.name not in (*_PLACES, "workers")]
        if given := [name for name in names if getattr(config.data, name) != getattr(default, name)]:
            raise ConfigurationError(
                f"--data.{given[0].replace('_', '-')} is each row's own; a table's command sets only "
                f"{', '.join(_PLACES)} and workers."
            )

    @property
    def workers(self) -> Workers:
        """The processes of a run."""
        return shared_workers(self.config.workers or max(1, processors() // max(self.config.jobs, 1)))

    def recipe(self, preset: str, device: Device, *, seed: int, **data: Any) -> NCutsConfig:
        """A preset's training as the command wants it, with ``data`` that the command does not name."""
        config, recipe = self.config, RECIPES["ncuts"].preset(preset)
        recipe.engine = dataclasses.replace(
            recipe.engine,
            seed=seed,
            accelerator=config.accelerator,
            **NUMBERS_ONLY,
            max_epochs=config.epochs or recipe.engine.max_epochs,
            precision=recipe.engine.precision if device == "cuda" else "32",
        )
        places = {name: getattr(config.data, name) for name in _PLACES}
        recipe.data = dataclasses.replace(recipe.data, **(places | data))
        if config.weights is not None:
            recipe.model.weights = config.weights
        return recipe

    def train(self, recipe: NCutsConfig, job: Job, **notes: Any) -> tuple[DeepNCuts, float]:
        """Train in the run's folder, save the model beside it, and return it with the seconds that training took."""
        recipe.engine.run = folder = self.place(job)
        seed_all(recipe.engine.seed)
        started = time.perf_counter()
        module, data = build(recipe)
        fit(recipe, module, data, name=folder.name)
        seconds = time.perf_counter() - started
        module.model.save_pretrained(folder / "model", dtype=torch.float16, seed=recipe.engine.seed, **notes)
        return module.model, seconds

    def on_device(self, model: DeepNCuts) -> DeepNCuts:
        """A model on the device of the table's runs, in the layout that its convolutions want."""
        return model.to(self.device).to(memory_format=model.backbone.memory_format)  # type: ignore[call-overload]


class Table2(SegmentationTable):
    """The second table; see the module."""

    config: Table2Config

    rows: ClassVar[dict[str, Row]] = ROWS
    parts: ClassVar[dict[str, tuple[str, ...]]] = {
        "all": ("seed", "curve", "baseline"),
        "train": ("seed",),
        "curves": ("curve",),
        "baselines": ("baseline",),
    }

    def __init__(self, config: Table2Config) -> None:
        super().__init__(config)
        if config.images == "folds" and not {*config.seeds} <= {*range(FOLDS)}:
            raise ConfigurationError(
                f"--images folds takes seeds of 0 to {FOLDS - 1}, one per fold; got {config.seeds}."
            )
        groups = {group.key: group for group in map(GROUP_OF.__getitem__, self.chosen)}
        self.groups = sorted(groups.values(), key=lambda group: -group.seconds)

    # ---------------------------------------------------------------------------------------------------------- runs

    def prepare(self) -> None:
        """Decode the images and find their superpixels."""
        if self.stage == "baselines":
            return
        for split in ("train", "val") if self.config.images == "test" else ("train",):
            images = open_images(self.config.data, split)  # type: ignore[arg-type]
            log.info("%s: %d images prepared in %s", split, len(images), data_folder(self.config.data))

    def jobs(self, part: str) -> Iterable[Job]:
        """Seeds, curves and timings of the groups, the first seed of all groups first; baselines."""
        if part == "baseline":
            return [Job(group.key, part) for group in self.groups if group.baseline]
        groups = [group for group in self.groups if not group.baseline and (group.preset or part != "curve")]
        seeds = {"seed": self.config.seeds, "curve": self.config.seeds[:1], "timing": (0,)}[part]
        return [Job(group.key, part, seed) for seed in seeds for group in groups]

    def run_config(self, job: Job, device: Device) -> NCutsConfig:
        """The training configuration of a run."""
        held_out = self.config.images != "test" or job.part == "curve"
        split, fold = "tuning" if held_out else "final", job.number if self.config.images == "folds" else 0
        recipe = self.recipe(GROUPS[job.key].preset, device, seed=job.number, split=split, fold=fold)
        if job.part == "timing":
            recipe.engine.max_epochs = 3
        if job.part == "curve":
            recipe.train.score_images = 16
        return recipe

    def provenance(self, job: Job, device: Device) -> dict[str, Any]:
        """Configuration, images, starting weights, device and measure of a run."""
        group, config = GROUPS[job.key], self.config
        weights = "none"
        configuration: dict[str, Any] = {"images": config.images, "limit": config.data.limit, "seed": job.number}
        if group.baseline:
            configuration["method"], device = group.key, "cpu"
        elif group.preset:
            recipe = self.run_config(job, device)
            configuration["training"] = settings(recipe)
            weights = weights_digest(recipe.model.resolved()["backbone"], recipe.model.weights)
        elif group.variant:
            configuration["network"] = group.variant if group.zoom == 1 else f"{group.variant}-x{group.zoom:g}"
            weights = weights_digest(VARIANTS[group.variant]["backbone"], config.weights or "imagenet")
        if not group.baseline and job.part != "curve":
            configuration["superpixels"] = config.data.superpixels
            configuration["inference"] = {
                row.key: {"method": row.inference, "ks": list(default_ks(row.inference)), "space": row.space}
                for row in group.rows
            }
        return {
            "configuration": configuration,
            "data": data_digest(data_folder(config.data), ("train", "val") if config.images == "test" else ("train",)),
            "weights": weights,
            "device": device,
            "measure": {"boundary": config.boundary, "digest": measure_digest(config.boundary)},
        }

    def test_images(self, seed: int = 0) -> PreparedImages:
        """The images to score, which depend on the seed in cross-validation only."""
        config = self.config
        if config.images != "test":
            data = dataclasses.replace(config.data, split="tuning", fold=seed if config.images == "folds" else 0)
            return split_images(open_images(config.data, "train"), data)[1]
        images = open_images(config.data, "val")
        return images.subset(range(len(images))[: config.data.limit])

    @property
    def split(self) -> str:
        """The split of BSDS500 that the scored images are of."""
        return "val" if self.config.images == "test" else "train"

    def run(self, job: Job) -> str:
        """Train a group if need be, segment, score, and keep the results of its rows."""
        if job.part == "baseline":
            rows = {job.key: self._baseline(job.key)}
            self.keep(job, {"rows": rows, "versions": versions()})
            return _scores_line(rows)
        model, seconds = self._model(job)
        if job.part == "curve":
            self.keep(job, {"training_seconds": seconds})
            return "curve"
        group, images = GROUPS[job.key], self.test_images(job.number)
        root, rows = data_folder(self.config.data), {}
        for row in group.rows:
            segmented = self._segment(row, model, images, job.number)
            tasks = [(name, maps, root, self.split, self.config.boundary) for name, maps in segmented.labels.items()]
            scores = sorted(self.workers.map(_score, tasks, 2), key=lambda s: s.id)
            rows[row.key] = {
                "scores": summarize(scores),
                "regions": float(np.mean([[m.max() + 1 for m in maps] for maps in segmented.labels.values()])),
                "per_image": {s.id: {"paper_best": s.paper_best, "paper_average": s.paper_average} for s in scores},
            }
            if job.number == self.config.seeds[0]:
                self._keep_pictures(row.key, scores, segmented)
        self.keep(job, {"rows": rows, "training_seconds": seconds, "versions": versions()})
        return _scores_line(rows)

    def _baseline(self, method: str) -> dict[str, Any]:
        root = data_folder(self.config.data)
        ids = list(BSDS(root, self.split).ids)
        ids = (tuning_split(ids)[1] if self.config.images == "tuning" else ids)[: self.config.data.limit]
        return run_baseline(method, BSDS(root, self.split, ids=ids), self.workers, boundary=self.config.boundary)

    def _model(self, job: Job) -> tuple[DeepNCuts | None, float | None]:
        """The network of a group on its device, trained if need be, and the seconds that training took."""
        group = GROUPS[job.key]
        if group.preset:
            model, seconds = self.train(self.run_config(job, self.device), job, trained_on=self.config.images)
            return self.on_device(model), seconds
        if group.variant:
            weights = self.config.weights or "imagenet"
            return self.on_device(untrained_model(group.variant, weights=weights, zoom=group.zoom)), None
        return None, None

    def _segment(
        self, row: Row, model: DeepNCuts | None, images: PreparedImages, seed: int, prepared: bool = True
    ) -> Segmented:
        """Segment images as the row does; what is timed computes superpixels itself (``prepared=False``)."""
        assert model is not None
        half = torch.bfloat16 if self.device == "cuda" and row.objective == "soft" else torch.float32
        options: dict[str, Any] = {"method": row.inference, "space": row.space, "seed": seed, "precision": half}
        return segment_images(model, images, workers=self.workers, prepared=prepared, **options)

    def _keep_pictures(self, row: str, scores: list[ImageScores], segmented: Segmented) -> None:
        """Keep each shown image's best segmentation for the qualitative figure."""
        folder = self.out / "pictures"
        folder.mkdir(parents=True, exist_ok=True)
        chosen = {s.id: segmented.labels[s.id][s.covering.mean(1).argmax()] for s in scores[: self.config.shown]}
        np.savez_compressed(folder / f"{row}.npz", **chosen)  # type: ignore[arg-type]

    def time(self, job: Job) -> dict[str, dict[str, Any]]:
        """Images per second in training, and in testing with eight segmentations."""
        group, images, training = GROUPS[job.key], self.test_images(), None
        warm(self.workers)
        model, _ = self._model(job)
        if group.preset:
            training = self.training_rate(job)
        speeds = {}
        few = images.subset(range(min(16, len(images))))
        for row in group.rows:
            self._segment(row, model, few, 0, prepared=False)
            seconds = min(self._segment(row, model, images, 0, prepared=False).seconds for _ in range(2))
            speeds[row.key] = {"training": training, "testing": len(images) / seconds}
        return speeds

    # ------------------------------------------------------------------------------------------------------- summary

    def line(self, row: Row) -> _Line:
        """A row with its finished results, by seed."""
        group = GROUP_OF[row.key]
        jobs = [Job(group.key, "baseline")] if group.baseline else self._seed_jobs(group)
        _, results = self.finished(jobs)
        return _Line({job.number: result for job, result in results.items()}, row.key)

    def _seed_jobs(self, group: Group) -> list[Job]:
        return [Job(group.key, "seed", seed) for seed in self.config.seeds]

    def summarize(self) -> dict[str, Any]:
        """Collect finished rows into table.json, table.md and figures."""
        table: dict[str, Any] = {"images": self.config.images, "rows": {}}
        body = []
        for key, row in self.chosen.items():
            line = self.line(row)
            if line.results:
                entry = table["rows"][key] = self._entry(row, line)
                body.append(self._cells(row, entry))
        if not body:
            raise DataError(f"there is no finished run in {self.store.folder}; train first.")
        self.write_table(table, self._table(body, table["rows"]))
        self._draw_curves()
        self._draw_pictures()
        return table

    def _entry(self, row: Row, line: _Line) -> dict[str, Any]:
        """A line as table.json keeps it."""
        entry: dict[str, Any] = {
            **{name: getattr(row, name) for name in ("title", "network", "objective", "inference", "paper")},
            "device": next(iter(line.results.values()))["provenance"]["device"],
            "seeds": list(line.results),
            "fingerprints": [fingerprint(result["provenance"]) for result in line.results.values()],
            "scores": {name: {"mean": float(np.mean(v)), "each": v} for name, v in line.scores().items()},
            "speed": self.speed(row.key, Job(GROUP_OF[row.key].key, "timing")),
        }
        other = self.line(ROWS[row.against]) if row.against else None
        for name in ("best", "average"):
            mine, theirs = line.per_image(f"paper_{name}"), other.per_image(f"paper_{name}") if other else {}
            if mine.keys() == theirs.keys() and len(mine) > 1:
                interval = paired_bootstrap(list(mine.values()), list(theirs.values()))
                entry["against"] = row.against
                entry.setdefault("difference", {})[name] = interval.to_dict()
        return entry

    def _cells(self, row: Row, entry: dict[str, Any]) -> list[Any]:
        scores = {name: Measured.of(values["each"]) for name, values in entry["scores"].items()}
        means = [scores[n].mean if n in scores else None for n in ("covering_ods", "pri_ois", "vi_ois")]
        gains = entry.get("difference", {})
        return [
            row.name,
            row.objective,
            {"merge": "merging", "cluster": "clustering"}.get(row.inference, ""),
            scores["paper_best"],
            scores["paper_average"],
            *means,
            *(interval_text(gains[name], 3) if gains else "" for name in ("best", "average")),
            entry["speed"].get("training"),
            entry["speed"].get("testing"),
            row.paper,
        ]

    def _table(self, body: list[list[Any]], entries: dict[str, dict[str, Any]]) -> Table:
        columns = ["method", "trained with", "segments by", "best", "average", "covering ODS", "PRI OIS", "VI OIS",
                   "best, gain", "average, gain", "training images/s", "testing images/s", "paper"]  # fmt: skip
        number = max(len(entry["seeds"]) for entry in entries.values())
        ours = {key: entry["device"] for key, entry in entries.items() if ROWS[key].inference}
        on_cpu = [ROWS[key].name for key, device in ours.items() if device == "cpu"]
        mixed = f" Computed on a CPU, the others on a GPU: {'; '.join(on_cpu)}." if 0 < len(on_cpu) < len(ours) else ""
        return Table(
            columns,
            body,
            title=f"BSDS300, {_IMAGES[self.config.images]}, 8 segmentations per image",
            note=f"best and average covering in the paper's convention, mean ± deviation over {number} "
            f"{'fifths of the images' if self.config.images == 'folds' else 'seeds'}; gain: paired bootstrap over "
            f"images against the untrained counterpart, 95 %.{mixed}{self.speed_note()}",
            formats=dict.fromkeys(("best", "average", "covering ODS", "PRI OIS", "VI OIS"), ".3f")
            | {"training images/s": ".0f", "testing images/s": ".0f"},
            best={"best": "max", "average": "max", "covering ODS": "max", "PRI OIS": "max", "VI OIS": "min"},
        )

    def _draw_curves(self) -> None:
        """Curves of each training: with scores of held-out images where there are any."""
        wanted = {
            "objective": ["train/objective", "val/objective"],
            "rank": ["layer/rank", "layer/soft_rank"],
            "covering of held-out images": ["val/best", "val/average"],
        }
        for group in self.groups:
            if not group.preset:
                continue
            for jobs in ([Job(group.key, "curve", self.config.seeds[0])], self._seed_jobs(group)):
                device, results = self.finished(jobs)
                metrics = RunFolder(self.place(next(iter(results)), device)).read_metrics() if results else []
                if metrics:
                    seen = {name for m in metrics for name in m}
                    panels = {title: [n for n in names if n in seen] for title, names in wanted.items()}
                    path = self.out / "figures" / f"{group.key}.png"
                    curves(metrics, path, panels={t: n for t, n in panels.items() if n})
                    break

    def _draw_pictures(self) -> None:
        """The qualitative figure laid out like the paper's; it shows the data set's pictures and is not published."""
        folder = self.out / "pictures"
        kinds = (("ncuts", "NCuts"), ("deepncuts", "DeepNCuts"), ("soft", "soft"))
        columns = {
            f"{kind}-{name}": (*network.split(" ", 1), title)
            for name, network in NETWORKS.items()
            for kind, title in kinds
        }
        columns["hypercolumns-tuned"] = ("Hypercolumns", "clustering")
        columns["merging-tuned"] = ("Hypercolumns", "merging")
        stored = {key: np.load(folder / f"{key}.npz") for key in columns if (folder / f"{key}.npz").exists()}
        if not stored:
            return
        rows = []
        for name in next(iter(stored.values())).files:
            data = BSDS(data_folder(self.config.data), self.split, ids=[name])
            photograph = data.image(name).permute(1, 2, 0).numpy()
            human = np.asarray(data.segmentations(name)[0])
            rows.append([photograph, *(s[name] if name in s.files else None for s in stored.values()), human])
        names = ["Image", *(columns[key] for key in stored), "Human"]
        segmentation_grid(names, rows, folder / "segmentations.png", width=2.0 * len(names))


@dataclass(frozen=True)
class _Line:
    """The finished results of a row: seed → result of the row's group."""

    results: dict[int, dict[str, Any]]
    key: str

    def scores(self) -> dict[str, list[float]]:
        """Measure → its value for each seed."""
        each = [result["rows"][self.key]["scores"] for result in self.results.values()]
        return {name: [scores[name] for scores in each] for name in each[0]}

    def per_image(self, name: str) -> dict[str, float]:
        """A measure of each image, averaged over the seeds that segmented it."""
        values: dict[str, list[float]] = {}
        for result in self.results.values():
            for image, scores in result["rows"][self.key]["per_image"].items():
                values.setdefault(image, []).append(scores[name])
        return {image: float(np.mean(values[image])) for image in sorted(values)}


@cache
def measure_digest(boundary: bool, objects: bool = False) -> str:
    """The hash of what the measures say about a made-up image: it changes when their numbers do."""
    y, x = np.mgrid[:24, :36]
    maps = [(x // width) + 10 * (y // height) for width, height in ((6, 24), (9, 8), (14, 5))]
    people = [(x + y) // 20, (x // 12) + 10 * (y // 11)]
    scores = summarize([score_image("made-up", maps, people, boundary=boundary, objects=objects)])
    names = (*_MEASURES, *(_BOUNDARY if boundary else ()), *(_OBJECTS if objects else ()))
    return cache_key({name: f"{scores[name]:.9f}" for name in names})


def _score(task: tuple[str, NDArray[np.int32], Path, str, bool]) -> ImageScores:
    name, labels, root, split, boundary = task
    truth = [np.asarray(s) for s in BSDS(root, split, ids=[name]).segmentations(name)]
    return score_image(name, list(labels), truth, boundary=boundary)


def _scores_line(rows: dict[str, dict[str, Any]]) -> str:
    covering = {key: (row["scores"]["paper_best"], row["scores"]["paper_average"]) for key, row in rows.items()}
    return ", ".join(f"{key} {best:.4f} ({average:.4f})" for key, (best, average) in covering.items())
