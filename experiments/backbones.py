"""Classification of COCO's regions by first order, second order and both, on several backbones.

Rows are tuned and trained like those of :mod:`experiments.table1`. Each is compared with first
order on the same backbone. In the frozen rows, only the classifier (and the exponent of a power) is
trainable. In the fine-tuned rows, the projection of second order and the last layers of the
backbone are trainable too, with the setting chosen for the frozen row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from experiments import runs
from experiments import table1 as regions
from experiments.runs import Run, interval_text
from experiments.table1 import Row, Table1
from matbackprop.vision.report.tables import Table
from matbackprop.vision.training.config import O2P_PRESETS, O2PConfig, RegionDataConfig


@dataclass
class Config(regions.Config):
    """Train and score region classifiers with first order, second order and both on several backbones."""

    #: Folder of results.jsonl, table.md and figures. Finished runs are not repeated.
    out: Path = Path("results/backbones")
    #: Source of the regions, the same for all rows.
    data: RegionDataConfig = field(
        default_factory=lambda: RegionDataConfig(
            side=224, canvas=224, margin=0.2, background="keep", jitter=0, flip=False, batch_size=256
        )
    )
    fine_epochs: int = 5  #: Epochs of the fine-tuned rows.
    frozen_epochs: int = 12  #: Epochs of the frozen rows.
    frozen_seeds: int = 5  #: Seeds of the frozen rows.


class Place(NamedTuple):
    """A backbone's name in the table, and its feature maps.

    First order averages the map ``last``. Second order pools the first map of ``pooled``; one of its trials uses the
    other. ``scale`` brings the features of all backbones to about the same size. Layers after the map ``start`` are
    fine-tuned with the learning rate ``rate``.
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
    """Return four settings: rate and dropout of first order, or rate, width and map of second order."""
    first = [(0.003, 0.0), (0.01, 0.0), (0.01, 0.5), (0.03, 0.5)]
    slow, fast = (0.01, 0.02) if system == "both" else (0.02, 0.05)
    second = [(slow, 128, 0), (fast, 128, 0), (slow, 192, 0), (slow, 128, 1)]
    if system == "power":  # pools in every step, which is slow on the large maps
        second[-1] = (fast, 192, 0)
    out: list[dict[str, Any]] = []
    if system == "first":
        out = [{"optimizer.rate": rate, "model.input_dropout": dropout} for rate, dropout in first]
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
    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.epochs["frozen"], self.seeds["frozen"] = config.frozen_epochs, config.frozen_seeds

    def recipe(self, row: Row, part: str, number: int, setting: dict[str, Any]) -> O2PConfig:
        """The configuration of a run; heads on frozen maps are trained in single precision."""
        config = super().recipe(row, part, number, setting)
        if row.kind == "frozen":
            config.engine.precision = "32"
        return config

    def command(self, row: Row, run: Run) -> str:
        """The command that trains one seed of a row with its chosen setting, on the regions of all rows."""
        preset, own = O2P_PRESETS["paper"].data, self.config.data
        fields = ("side", "canvas", "margin", "background", "jitter", "flip", "batch_size")
        changes = {f"data.{name}": getattr(own, name) for name in fields if getattr(own, name) != getattr(preset, name)}
        if row.kind == "frozen":
            changes["engine.precision"] = "32"
        return " ".join([super().command(row, run), *(runs.as_option(*change) for change in changes.items())])

    def curves(self, row: Row) -> str:
        """Name of the figure with a row's training loss, one per backbone."""
        return f"curves-{row.model['model.backbone']}"

    def more(self) -> list[str]:
        """Differences on held-out training images."""
        body = []
        for row in self.chosen.values():
            tried = [self.results.runs(key, "trial") for key in (row.key, row.reference)]
            if row.key == row.reference or not all(tried):
                continue
            best = [min(one, key=lambda run: run["metrics"]["error"]) for one in tried]
            gain = regions.difference(self.results, best[:1], best[1:])
            if gain is not None:
                pairs = zip(best, tried, strict=True)
                cells = [cell for run, one in pairs for cell in (run["metrics"]["error"], len(one))]
                body.append([row.name, *cells, interval_text(gain, 2)])
        columns = ["model", "error", "settings", "first order", "its settings", "difference"]
        note = (
            "The best of the settings that were tried, one seed, chosen on the same held-out training regions. "
            "Differences: paired bootstrap over images, 95 % interval; negative is better."
        )
        formats = {"error": ".2f", "first order": ".2f"}
        table = Table(columns, body, title="On held-out training images", note=note, formats=formats)
        return [table.markdown()] if body else []

    def summarize(self) -> None:
        """Write table.md and the figures."""
        super().summarize()
        gains = {row.name: gain for row in self.chosen.values() if (gain := self.difference(row))}
        if gains:
            runs.comparison(
                {name: (gain["difference"], gain["low"], gain["high"]) for name, gain in gains.items()},
                self.config.out / "figures" / "differences.png",
                xlabel="points against first order, 95 % interval",
            )


main = Backbones.main
