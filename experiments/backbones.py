"""Backbones × systems: how well regions are named on each network by first order, second order and both.

Tuned, trained over several seeds and compared as the rows of :mod:`experiments.table1` are; every row is
compared with first order on the same backbone. In the frozen rows the classifier learns, and the exponent of a power;
the backbone's maps and what is pooled from them are computed once for all runs of a process. In the fine-tuned rows
second order's projection and the last layers of the backbone learn too, with the setting that the frozen row's trials
chose. How well the same backbones segment is taken from the folder ``table2`` beside this table's, where ``reproduce
table2`` has written one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch.nn import functional as nnf

from experiments.config import BackbonesConfig
from experiments.table import Device, Job, fingerprint, interval_text
from experiments.table1 import Row, Table1, as_option, paired_difference
from matbackprop.errors import DataError
from matbackprop.vision.devices import choose_device
from matbackprop.vision.files import read_json
from matbackprop.vision.report.figures import comparison
from matbackprop.vision.report.tables import Measured, Table
from matbackprop.vision.training.config import O2P_PRESETS, O2PConfig
from matbackprop.vision.training.o2p import build_model, open_regions
from matbackprop.vision.training.profile import StepProfile

__all__ = ["BACKBONES", "ROWS", "Backbones"]


class Place(NamedTuple):
    """A backbone's name in the table, and where its maps are taken.

    Attributes:
        name: as the table prints it.
        last: its last map, whose cells first order averages.
        pooled: the map that second order pools, and another that one of its trials pools instead.
        scale: factor on the features, which makes those of all backbones about equally large.
        start: the layers behind this map are fine-tuned.
        rate: the rate of those layers.
    """

    name: str
    last: str
    pooled: tuple[str, str]
    scale: float
    start: str
    rate: float


BACKBONES = {
    "alexnet": Place("AlexNet", "pool5", ("pool5", "relu5"), 0.03, "relu2", 0.003),
    "vgg16": Place("VGG-16", "pool5", ("pool5", "relu5_3"), 0.03, "pool4", 0.003),
    "efficientnet-lite2": Place("EfficientNet-Lite2", "head", ("stage7", "head"), 0.03, "stage5", 0.005),
    "xception": Place("Xception", "conv4", ("conv4", "conv3"), 0.05, "block11", 0.02),
    "tiny-vit": Place("MobileSAM's TinyViT", "layer3", ("layer3", "layer2"), 0.03, "layer1", 0.003),
}
_SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "first": ("first order", {"model.head": "fc", "model.average": True}),
    "sqrt": ("second order, square root", {"model.head": "o2p", "model.function": "sqrt", "model.eps": 0.01}),
    "log": ("second order, log", {"model.head": "o2p", "model.function": "log", "model.eps": 1.0}),
    "both": (
        "first and second order, square root",
        {"model.head": "both", "model.function": "sqrt", "model.eps": 0.01, "model.average": True},
    ),
    "power": (
        "second order, learned power",
        {"model.head": "o2p", "model.function": "power", "model.learn_power": True, "model.eps": 0.01},
    ),
}


def _trials(place: Place, system: str) -> list[dict[str, Any]]:
    """Four settings for each row: rate and dropout of first order; rate, width and map of second order."""
    first = [(0.003, 0.0), (0.01, 0.0), (0.01, 0.5), (0.03, 0.5)]
    slow, fast = (0.01, 0.02) if system == "both" else (0.02, 0.05)
    second = [(slow, 128, 0), (fast, 128, 0), (slow, 192, 0), (slow, 128, 1)]
    if system == "power":  # pools anew in every step, which is slow on the large maps
        second[-1] = (fast, 192, 0)
    out: list[dict[str, Any]] = []
    if system == "first":
        out = [{"optimizer.rate": rate, "model.input_dropout": share} for rate, share in first]
    else:
        for rate, width, which in second:
            tap = place.pooled[which]
            out.append({"optimizer.rate": rate, "model.reduce": width, "model.taps": [tap]})
    for setting in out:
        setting["optimizer.backbone_factor"] = round(place.rate / setting["optimizer.rate"], 3)
    return out


def _row(backbone: str, system: str, frozen: bool) -> Row:
    place = BACKBONES[backbone]
    title, model = _SYSTEMS[system]
    kind: Literal["frozen", "fine"] = "frozen" if frozen else "fine"
    model = {**model, "model.backbone": backbone, "model.support": "mask+all", "model.two_views": True}
    model |= {"model.train_from": place.last if frozen else place.start, "model.frozen": frozen}
    model |= {"optimizer.label_smoothing": 0.1}
    if system != "first":
        model |= {"model.feature_scale": place.scale, "model.vector_scale": 0.3, "model.vector_dropout": 0.5}
        model |= {"model.input_dropout": 0.5} if system == "both" else {}
    return Row(
        f"{place.name}, {kind if frozen else 'fine-tuned'}, {title}",
        f"{backbone}-{kind}-{system}",
        kind,
        None,
        model,
        _trials(place, system),
        reference=f"{backbone}-{kind}-first",
        follows="" if frozen else f"{backbone}-frozen-{system}",
    )


ROWS = [
    _row(backbone, system, frozen)
    for backbone in BACKBONES
    for frozen in (True, False)
    for system in _SYSTEMS
    if frozen or system in ("first", "sqrt", "both")
]


class Backbones(Table1):
    """The table of backbones; see the module."""

    rows: ClassVar[dict[str, Row]] = {row.key: row for row in ROWS}
    title: ClassVar[str] = "Classification error of COCO's regions by backbone"
    compared: ClassVar[str] = "first order"
    config: BackbonesConfig

    def __init__(self, config: BackbonesConfig) -> None:
        super().__init__(config)
        self.epochs["frozen"] = config.frozen_epochs

    def prepare(self) -> None:
        """Crop the regions; their maps are computed by the first run that needs them, once in each process."""
        open_regions(self.config.data)

    def jobs(self, part: str) -> Iterable[Job]:
        """Runs backbone by backbone, so that maps are computed once, and seed by seed; each row timed once."""
        backbones, rows = list(BACKBONES), list(self.rows)

        def order(job: Job) -> tuple[int, ...]:
            backbone = backbones.index(self.rows[job.key].model["model.backbone"])
            return backbone, job.number if job.part == "seed" else 0, rows.index(job.key)

        once = (job for job in super().jobs(part) if part != "timing" or self.rows[job.key].kind == "frozen")
        return sorted(once, key=order)

    def seeds(self, row: Row) -> list[Job]:
        """The final runs of a row."""
        count = self.config.fine_seeds if row.kind == "fine" else self.config.frozen_seeds
        return [Job(row.key, "seed", i) for i in range(count)]

    def run_config(self, job: Job, setting: dict[str, Any], device: Device) -> O2PConfig:
        """The complete configuration of a run: heads on frozen maps in single precision."""
        config = super().run_config(job, setting, device)
        if self.rows[job.key].kind == "frozen" and job.part != "timing":
            config.engine.precision = "32"
        return config

    def command(self, row: Row, device: Device) -> str:
        """The command that trains one seed of a row with its chosen setting, on regions as all rows see them."""
        preset, own = O2P_PRESETS["paper"].data, self.config.data
        fields = ("side", "canvas", "margin", "background", "jitter", "flip", "batch_size")
        changes = {f"data.{name}": getattr(own, name) for name in fields if getattr(own, name) != getattr(preset, name)}
        if row.kind == "frozen":
            changes["engine.precision"] = "32"
        return " ".join([super().command(row, device), *(as_option(*change) for change in changes.items())])

    def time(self, job: Job) -> dict[str, dict[str, Any]]:
        """Regions per second in use and in training on pictures, and the layer's share of a step."""
        trial = self.trial(job)
        assert trial is not None, job
        config = self.run_config(job, self.rows[job.key].trials[trial], self.device)
        config.model.train_from, config.data.batch_size = None, min(config.data.batch_size, 64)
        classes, steps = open_regions(self.config.data)[0].classes, 10 if self.device == "cuda" else 2
        return {job.key: measure_speed(config, classes, choose_device(self.device), steps)}

    def speed(self, row: str, job: Job) -> dict[str, Any]:
        """What was measured of a row; of a fine-tuned one its speed in use, which is the frozen one's."""
        key = row.replace("-fine-", "-frozen-")
        speed = super().speed(key, Job(key, job.part))
        return speed if key == row else {name: speed[name] for name in ("regions_per_second",) if name in speed}

    def summarize(self) -> dict[str, Any]:
        """The table of all that has finished; where no seed has, of the trials alone."""
        if any(self.finished(self.seeds(row))[1] for row in self.chosen.values()):
            return super().summarize()
        tried = self._tried(*self.chosen.values())
        if not tried:
            raise DataError(f"there is no finished run in {self.store.folder}; train first.")
        content = {"rows": [], "candidates": tried}
        self.write_table(content, self._tuning(tried))
        return content

    def write_table(self, content: Mapping[str, Any], table: Table, *more: str) -> None:
        """Write the table, with what trials say on held-out images and how the same backbones segment below it."""
        held_out = self._held_out()
        tables = [self._held_out_table(held_out)] if held_out else []
        tables += [] if (segmentation := self._segmentation()) is None else [segmentation]
        super().write_table({**content, "held_out": held_out}, table, *more, *(one.markdown() for one in tables))
        gains = {row["name"]: row["difference"]["all"] for row in content["rows"] if "difference" in row}
        comparison(
            {name: (gain["difference"], gain["low"], gain["high"]) for name, gain in gains.items()},
            self.out / "figures" / "differences.png",
            xlabel="points against first order, 95 % interval",
        )

    def curves(self, row: Row) -> str:
        """The figure that shows a row's training, one for each backbone."""
        return f"curves-{row.model['model.backbone']}"

    def _best(self, row: Row) -> tuple[Job, Device, dict[str, Any]] | None:
        """The trial with the smallest error among those that have ended, and where it was done."""
        jobs = [Job(row.key, "trial", i) for i in range(len(row.trials[: self.config.trials]))]
        devices: tuple[Device, Device] = ("cuda", "cpu")
        known = [(job, device, r) for job in jobs for device in devices if (r := self.result(job, device)) is not None]
        return min(known, key=lambda one: one[2]["error"], default=None)

    def _held_out(self) -> list[dict[str, Any]]:
        """The best trial of each row beside first order's, in pairs; as stored where predictions are not here."""
        path = self.out / "table.json"
        before = read_json(path).get("held_out", []) if path.is_file() else []
        stored = {tuple(one["fingerprints"]): one["difference"] for one in before}
        out = []
        for row in self.chosen.values():
            mine, other = self._best(row), self._best(self.rows[row.reference])
            if row.key == row.reference or mine is None or other is None:
                continue
            marks = [fingerprint(result["provenance"]) for *_, result in (mine, other)]
            seen = [self.predictions(job, device) for job, device, _ in (mine, other)]
            difference = stored.get(tuple(marks))
            if seen[0] is not None and seen[1] is not None:
                wrong = [(one["target"] != one["predicted"])[None].astype(float) for one in seen if one is not None]
                difference = paired_difference(wrong[0], wrong[1], seen[0]["image"])
            if difference is not None:
                errors = [result["error"] for *_, result in (mine, other)]
                out.append({"key": row.key, "errors": errors, "tried": [len(self.trials(r, self.device)) for r in (
                    row, self.rows[row.reference])], "fingerprints": marks, "difference": difference})  # fmt: skip
        return out

    def _held_out_table(self, held_out: list[dict[str, Any]]) -> Table:
        columns = ["model", "error", "settings", "first order", "its settings", "difference"]
        body = [
            [self.rows[one["key"]].name, one["errors"][0], one["tried"][0], one["errors"][1], one["tried"][1],
             interval_text(one["difference"], 2)]
            for one in held_out
        ]  # fmt: skip
        note = (
            "The best of the settings that were tried, one seed, chosen on the same held-out training regions. "
            "Differences: paired bootstrap over images, 95 % interval; negative is better."
        )
        formats = {"error": ".2f", "first order": ".2f"}
        return Table(columns, body, title="On held-out training images", note=note, formats=formats)

    def _segmentation(self) -> Table | None:
        path = self.out.parent / "table2" / "table.json"
        if not path.is_file():
            return None
        names = [place.name for place in BACKBONES.values()]
        rows = [r for r in json.loads(path.read_text())["rows"].values() if any(n in r["network"] for n in names)]
        body = [
            [
                row["network"],
                f"{row['title']} ({row['objective']})",
                *(Measured.of(row["scores"][name]["each"]) for name in ("paper_best", "paper_average")),
                row.get("speed", {}).get("testing"),
            ]
            for row in rows
        ]
        box = self.out.parent / "box" / "scores.json"
        if box.is_file():
            scores = json.loads(box.read_text())["scores"]
            body.append(
                [
                    "EfficientNet-Lite2",
                    "the segmenter in the package",
                    scores["paper_best"],
                    scores["paper_average"],
                    None,
                ]
            )
        return Table(
            ["backbone", "system", "best", "average", "images/s"],
            body,
            title="Covering of BSDS300's test images by backbone",
            note="From table 2 and the box: best and average of eight segmentations, mean ± deviation over seeds.",
            formats={"best": ".3f", "average": ".3f", "images/s": ".0f"},
            best={"best": "max", "average": "max"},
        )


def measure_speed(config: O2PConfig, classes: list[str], device: torch.device, steps: int) -> dict[str, Any]:
    """Regions per second of a classifier in use and in training from pictures, and how a training step divides.

    The pictures are noise of the size of the canvas, in batches of the training's size.
    """
    torch.manual_seed(0)
    count, side = config.data.batch_size, config.data.canvas
    model = build_model(config, classes).to(device)
    model.backbone.to(memory_format=model.backbone.memory_format)  # type: ignore[call-overload]
    image, mask = torch.randn(count, 3, side, side, device=device), torch.ones(count, side, side, device=device)
    target = torch.arange(count, device=device) % len(classes)
    half = torch.autocast(device.type, torch.bfloat16, enabled=config.engine.precision == "bf16-mixed")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def train(profile: StepProfile) -> None:
        profile.begin()
        with half:
            loss = nnf.cross_entropy(model(image, mask).float(), target)
        profile.mark("network forward")
        optimizer.zero_grad()
        loss.backward()
        profile.mark("network backward")
        optimizer.step()
        profile.mark("optimizer")
        profile.end()

    @torch.no_grad()
    def use() -> None:
        with half:
            model(image, mask)

    def rate(step: Callable[[], None]) -> int:
        for _ in range(3):
            step()
        start = now()
        for _ in range(steps):
            step()
        return round(steps * count / (now() - start))

    with half:
        model.calibrate([(image, mask)])
    with TemporaryDirectory() as folder:
        profile = StepProfile(model, Path(folder) / "profile.json", steps + 5, steps)
        for _ in range(steps + 5):
            train(profile)
        training = rate(lambda: train(profile))  # the profile has ended: nothing waits
    model.eval()
    return {"regions_per_second": rate(use), "training_regions_per_second": training, "profile": profile.result}
