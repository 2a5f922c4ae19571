"""The paper's second table: full-image segmentation on BSDS300.

Rows: methods without training (``python -m experiments baselines``), normalized cuts on untrained feature maps, the
same maps trained with the paper's J2, the soft objective with its clustering space, and hypercolumns. Every row with a
network has several seeds. The test images are only scored; choices were made by cross-validation on training images
(``--images folds``). The code of multiscale normalized cuts and of rows trained on superpixels (soft, hypercolumns,
merging) was removed; their recorded numbers are kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from experiments import runs
from experiments.runs import Experiment, ImagesConfig, Measured, Run, interval_text
from matbackprop.errors import ConfigurationError
from matbackprop.vision.configuration import merge
from matbackprop.vision.data.bsds import BSDS, FOLDS, PreparedImage, prepare_images
from matbackprop.vision.metrics.bootstrap import paired_bootstrap
from matbackprop.vision.metrics.evaluation import ImageScores, score_image, summarize
from matbackprop.vision.models.config import VARIANTS
from matbackprop.vision.models.deep_ncuts import DeepNCuts
from matbackprop.vision.report.figures import curves
from matbackprop.vision.report.tables import Table
from matbackprop.vision.segmentation import CLUSTER_KS
from matbackprop.vision.training.checkpoint import seed_all
from matbackprop.vision.training.config import RECIPES, NCutsConfig
from matbackprop.vision.training.engine import fit
from matbackprop.vision.training.ncuts import build, split_images
from matbackprop.vision.training.start import load_start

log = logging.getLogger("matbackprop")


@dataclass
class Config(ImagesConfig):
    """Train and score the rows of the paper's second table, segmentation."""

    #: Folder of results.jsonl, table.md and figures. Finished runs are not repeated.
    out: Path = Path("results/table2")
    #: test: train on all training images, score the test images. folds: cross-validation on the training images, where
    #: each seed of 0 to 4 also selects the fifth that is held out.
    images: Literal["test", "folds"] = "test"
    seeds: tuple[int, ...] = (0, 1, 2)  #: Seeds of each row.
    boundary: bool = False  #: Also score the boundary F-measure, which takes most of the time of scoring.
    weights: str | None = None  #: Starting weights instead of the presets': imagenet, none or a file.

    def __post_init__(self) -> None:
        if self.images == "folds" and not {*self.seeds} <= {*range(FOLDS)}:
            raise ConfigurationError(f"--images folds takes seeds of 0 to {FOLDS - 1}, one per fold. Got {self.seeds}.")

    @property
    def split(self) -> Literal["train", "val"]:
        """The split of BSDS500 that is scored: BSDS300's test images are ``val``."""
        return "val" if self.images == "test" else "train"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Rows with one ``preset`` share a trained network; ``variant`` and ``zoom`` describe an untrained one. Rows with
    neither keep their recorded numbers. ``inference`` is ``"cluster"``, ``"merge"`` (recorded numbers only), or ``""``
    for a method without a network. ``against`` is the row that a paired interval compares it with. ``space`` is the
    space of the clusters, if not the one of the model. ``paper`` is the paper's best (average) covering.
    """

    key: str
    title: str
    network: str = "none"
    objective: str = "none"
    inference: str = ""
    against: str = ""
    paper: str = ""
    space: str | None = None
    preset: str = ""
    variant: str = ""
    zoom: float = 1.0

    @property
    def name(self) -> str:
        """Title and network."""
        return self.title if self.network == "none" else f"{self.title} ({self.network})"

    @property
    def part(self) -> str:
        """Kind of the row's runs."""
        return "seed" if self.inference else "baseline"


_BASELINES = {
    "one_region": ("One region", ""),
    "fixed_grids": ("Fixed grids", ""),
    "ncut_pytorch": ("ncut-pytorch, Lab and position", ""),
    "sklearn_spectral": ("scikit-learn's spectral clustering", ""),
    "multiscale_ncut": ("Multiscale NCuts with intervening contours (Cour et al.)", ".55 (.44)"),
    "felzenszwalb": ("Felzenszwalb and Huttenlocher", ""),
    "humans": ("Humans, leave one out", ""),
}
NETWORKS = {"alexnet-relu5": "AlexNet ReLU-5", "vgg16-relu4": "VGG-16 ReLU-4", "vgg16-relu5": "VGG-16 ReLU-5"}
_PAPER = {
    "alexnet-relu5": (".59 (.49)", ".65 (.56)"),
    "vgg16-relu4": (".65 (.56)", ".73 (.62)"),
    "vgg16-relu5": (".70 (.58)", ".74 (.63)"),
}


def _rows() -> Iterator[Row]:
    for key, (title, paper) in _BASELINES.items():
        yield Row(key, title, paper=paper)
    yield Row("lab-merging", "Merging by Lab color and contrast", inference="merge")
    places = [(name, name, NETWORKS[name], 1.0) for name in NETWORKS]
    # The paper does not state the size of its images.
    places += [
        (name, f"{name}-x2", f"{NETWORKS[name]}, image enlarged twice", 2.0)
        for name in ("alexnet-relu5", "vgg16-relu5")
    ]
    for variant, name, network, zoom in places:
        (before, after), plain, preset = _PAPER[variant], f"ncuts-{name}", f"paper-{name}"
        yield Row(plain, "NCuts", network, "none", "cluster", paper=before, variant=variant, zoom=zoom)
        yield Row(f"deepncuts-{name}", "DeepNCuts", network, "J2", "cluster", plain, after, preset=preset)
        title = "DeepNCuts, J2's own space"
        yield Row(f"span-{name}", title, network, "J2", "cluster", plain, space="soft", preset=preset)
        if zoom == 1:
            yield Row(f"soft-{name}", "DeepNCuts, soft", network, "soft", "cluster", plain)
    for suffix, network in (
        ("", "VGG-16, frozen"),
        ("-tuned", "VGG-16, tuned"),
        ("-lite2", "EfficientNet-Lite2, tuned"),
        ("-tiny-vit", "MobileSAM's TinyViT, tuned"),
    ):
        yield Row(f"hypercolumns{suffix}", "Hypercolumns", network, "soft", "cluster", "ncuts-vgg16-relu5")
        yield Row(f"merging{suffix}", "Hypercolumns, merging", network, "soft", "merge", "lab-merging")


ROWS = {row.key: row for row in _rows()}  #: All rows by name, in the order of the table.


def segment_images(
    model: DeepNCuts,
    images: Sequence[PreparedImage],
    *,
    ks: Sequence[int] = CLUSTER_KS,
    space: str | None = None,
    seed: int = 0,
    precision: torch.dtype = torch.float32,
) -> tuple[dict[str, NDArray[np.int32]], float]:
    """Segment the images one by one at their full size by clustering, as in the paper.

    Returns:
        id → (n, h, w) label maps, and the seconds from decoded images in memory to label maps in memory.
    """
    model.eval()
    device = next(model.parameters()).device
    started = time.perf_counter()
    labels: dict[str, NDArray[np.int32]] = {}
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
        for image in images:
            pixels = torch.from_numpy(image.image).unsqueeze(0).to(device)
            labels[image.id] = model.cluster(pixels, ks, seed=seed, space=space).labels[0].to(torch.int32).cpu().numpy()
    return labels, time.perf_counter() - started


class Table2(Experiment):
    """The second table; see the module."""

    rows: ClassVar[dict[str, Row]] = ROWS

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.chosen = config.chosen(ROWS)

    def train(self) -> None:
        """Train and score every row that has a network, the first seed of all rows first."""
        network = lru_cache(1)(self.model)  # rows with one network follow each other

        def score(row: Row, seed: int) -> dict[str, Any]:
            return self.score(row, *network(row.preset, row.variant, row.zoom, seed), seed)

        for seed in self.config.seeds:
            for row in self.chosen.values():
                if row.preset or row.variant:
                    run = self.results.run(row.key, "seed", seed, self.provenance(row, seed), partial(score, row, seed))
                    scores = run["metrics"]["scores"]
                    log.info("%-40s %.4f (%.4f)", f"{row.key} {seed}", scores["paper_best"], scores["paper_average"])

    def recipe(self, preset: str, seed: int) -> NCutsConfig:
        """The training configuration of a preset and a seed."""
        config, recipe = self.config, RECIPES["ncuts"].preset(preset)
        folds = config.images == "folds"
        precision = {} if config.device == "cuda" else {"precision": "32"}
        engine = config.engine(f"{preset}-seed{seed}", seed, **precision)
        recipe.data = replace(recipe.data, **vars(config.data))
        data = {"split": "tuning" if folds else "final", "fold": seed if folds else 0}
        weights = {} if config.weights is None else {"model.weights": config.weights}
        return merge(recipe, {"engine": engine, "data": data, **weights, **config.overrides()})

    def provenance(self, row: Row, seed: int) -> dict[str, Any]:
        """Configuration, data, starting weights and device of a run."""
        config = self.config
        inference = {"method": row.inference, "ks": list(CLUSTER_KS), "space": row.space}
        configuration: dict[str, Any] = {"images": config.images, "limit": config.data.limit, "seed": seed,
                                         "boundary": config.boundary, "inference": inference}  # fmt: skip
        if row.preset:
            recipe = self.recipe(row.preset, seed)
            configuration["training"] = runs.settings(recipe)
            weights = runs.weights_hash(recipe.model.resolved()["backbone"], recipe.model.weights)
        else:
            configuration["network"] = {"variant": row.variant, "zoom": row.zoom}
            weights = runs.weights_hash(VARIANTS[row.variant]["backbone"], config.weights or "imagenet")
        splits = ("train", "val") if config.images == "test" else ("train",)
        data = runs.data_hash(config.data.folder(), splits)
        return {"configuration": configuration, "data": data, "weights": weights, "device": config.device}

    def model(self, preset: str, variant: str, zoom: float, seed: int) -> tuple[DeepNCuts, dict[str, Any]]:
        """The network of a row on its device, trained if it has a preset, and the training's speed and curves."""
        training: dict[str, Any] = {}
        if preset:
            recipe = self.recipe(preset, seed)
            seed_all(seed)
            module, data = build(recipe)
            run = fit(recipe, module, data, name=preset)
            model = module.model
            if rate := runs.training_rate(run):
                training["training"] = round(rate, 1)
            if seed == self.config.seeds[0]:
                training["curve"] = training_curve(run.read_metrics())
        else:
            model = DeepNCuts(variant=variant, head="none", zoom=zoom)  # type: ignore[arg-type]
            load_start(model, VARIANTS[variant]["backbone"], self.config.weights or "imagenet")
        model = model.to(self.config.device)
        return model.to(memory_format=model.backbone.memory_format), training  # type: ignore[call-overload]

    def score(self, row: Row, model: DeepNCuts, training: dict[str, Any], seed: int) -> dict[str, Any]:
        """Segment and score the images."""
        images = self.images(seed)
        half = torch.bfloat16 if self.config.device == "cuda" and row.objective == "soft" else torch.float32

        def segment(some: list[PreparedImage]) -> Any:
            return segment_images(model, some, space=row.space, seed=seed, precision=half)

        segment(images[:4])  # warm up: the next call is timed
        labels, seconds = segment(images)
        root = self.config.data.folder()
        tasks = [(name, maps, root, self.config.split, self.config.boundary) for name, maps in labels.items()]
        with self.config.pool() as pool:
            scores = sorted(pool.map(_score, tasks), key=lambda s: s.id)
        return {
            "scores": summarize(scores),
            "regions": float(np.mean([[m.max() + 1 for m in maps] for maps in labels.values()])),
            "per_image": {s.id: [round(s.paper_best, 6), round(s.paper_average, 6)] for s in scores},
            "testing": round(len(images) / seconds, 1),
            **training,
        }

    def images(self, seed: int) -> list[PreparedImage]:
        """The images to score; in cross-validation they depend on the seed."""
        images = prepare_images(BSDS(self.config.data.folder(), self.config.split), 16)
        if self.config.images == "folds":
            return split_images(images, self.recipe("paper", seed).data)[1]
        return images[: self.config.data.limit]

    def finished(self, key: str) -> list[Run]:
        """The runs of a row by seed."""
        return self.results.runs(key, ROWS[key].part)

    def summarize(self) -> None:
        """Write table.md and the figures."""
        lines = self.results.require({row: done for key, row in self.chosen.items() if (done := self.finished(key))})
        self.results.write_table(self._table(lines), runs=[run for done in lines.values() for run in done])
        for key in self.chosen:
            points = [run["metrics"]["curve"] for run in self.finished(key) if "curve" in run["metrics"]]
            for one in points[:1]:
                names = {name for point in one for name in point}
                panels = {title: [n for n in shown if n in names] for title, shown in PANELS.items()}
                path = self.config.out / "figures" / f"{key}.png"
                curves(one, path, panels={title: shown for title, shown in panels.items() if shown})

    def _table(self, lines: dict[Row, list[Run]]) -> Table:
        columns = ["method", "trained with", "segments by", "best", "average", "covering ODS", "PRI OIS", "VI OIS",
                   "best, gain", "average, gain", "training images/s", "testing images/s", "paper"]  # fmt: skip
        speeds = {row: self._speed(row, done) for row, done in lines.items()}
        body = []
        for row, done in lines.items():
            each = [run["metrics"]["scores"] for run in done]
            means = [
                np.mean([s[n] for s in each]) if n in each[0] else None for n in ("covering_ods", "pri_ois", "vi_ois")
            ]
            body.append([
                row.name,
                row.objective,
                {"merge": "merging", "cluster": "clustering"}.get(row.inference, ""),
                *(Measured.of([s[f"paper_{name}"] for s in each]) for name in ("best", "average")),
                *(None if mean is None else float(mean) for mean in means),
                *self._gains(row, done),
                speeds[row].get("training"),
                speeds[row].get("testing"),
                row.paper,
            ])  # fmt: skip
        number = max(len(done) for done in lines.values())
        ours = {row: done[0]["provenance"]["device"] for row, done in lines.items() if row.inference}
        on_cpu = [row.name for row, device in ours.items() if device == "cpu"]
        mixed = f" Computed on a CPU, the others on a GPU: {'; '.join(on_cpu)}." if 0 < len(on_cpu) < len(ours) else ""
        folds = self.config.images == "folds"
        scored = "training images, each scored by a network that was trained without it" if folds else "test images"
        return Table(
            columns,
            body,
            title=f"BSDS300, {scored}, 8 segmentations per image",
            note=f"best and average covering in the paper's convention, mean ± deviation over {number} "
            f"{'fifths of the images' if folds else 'seeds'}; gain: paired bootstrap over "
            f"images against the untrained counterpart, 95 %.{mixed}{runs.speed_note(speeds.values())}",
            formats=dict.fromkeys(("best", "average", "covering ODS", "PRI OIS", "VI OIS"), ".3f")
            | {"training images/s": ".0f", "testing images/s": ".0f"},
            best={"best": "max", "average": "max", "covering ODS": "max", "PRI OIS": "max", "VI OIS": "min"},
        )

    def _gains(self, row: Row, done: list[Run]) -> list[str]:
        """Gains in best and average over the row that it is compared with."""
        mine, other = per_image(done), per_image(self.finished(row.against) if row.against else [])
        if mine.keys() != other.keys() or len(mine) < 2:
            return ["", ""]
        pairs = np.array([(mine[name], other[name]) for name in mine])
        return [interval_text(paired_bootstrap(pairs[:, 0, i], pairs[:, 1, i])._asdict(), 3) for i in (0, 1)]

    def _speed(self, row: Row, done: list[Run]) -> dict[str, Any]:
        metrics = done[0]["metrics"]
        if "testing" not in metrics:
            return self.results.recorded("speed", row.key)
        return {**metrics, "machine": {"device": done[0]["device"], "git": done[0]["code"]["git"]}}


#: Panels of a figure of training curves.
PANELS = {
    "objective": ["train/objective", "val/objective"],
    "rank": ["layer/rank", "layer/soft_rank"],
    "covering of held-out images": ["val/best", "val/average"],
}


def training_curve(metrics: Iterable[dict[str, Any]]) -> list[dict[str, float]]:
    """The metrics that a figure of training curves shows."""
    names = [name for shown in PANELS.values() for name in shown]
    points = [{"step": m["step"], **{n: float(f"{m[n]:.6g}") for n in names if m.get(n) is not None}} for m in metrics]
    return [point for point in points if len(point) > 1]


def per_image(done: Iterable[Run]) -> dict[str, NDArray[np.float64]]:
    """Best and average covering of each image, averaged over the seeds that segmented it."""
    values: dict[str, list[list[float]]] = {}
    for run in done:
        for image, scores in run["metrics"]["per_image"].items():
            values.setdefault(image, []).append(scores)
    return {image: np.mean(values[image], axis=0) for image in sorted(values)}


def _score(task: tuple[str, NDArray[np.int32], Path, str, bool]) -> ImageScores:
    name, labels, root, split, boundary = task
    truth = [np.asarray(s) for s in BSDS(root, split, ids=[name]).segmentations(name)]
    return score_image(name, list(labels), truth, boundary=boundary)


main = Table2.main
