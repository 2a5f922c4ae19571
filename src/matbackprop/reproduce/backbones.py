"""Backbones × systems: how well regions are named on each network by first order, second order and both.

Tuned, trained over several seeds, timed and compared as the rows of :mod:`matbackprop.reproduce.table1` are; every row
is compared with first order on the same backbone. How well the same backbones segment is taken from the folder
``table2`` beside this table's, where ``reproduce table2`` has written one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from matbackprop.errors import DataError
from matbackprop.report.tables import Measured, Table
from matbackprop.reproduce.config import BackbonesConfig
from matbackprop.reproduce.table import Job
from matbackprop.reproduce.table1 import Row, Table1
from matbackprop.training.o2p import build_model, describe, open_regions

__all__ = ["BACKBONES", "ROWS", "Backbones"]

# Backbone → its name, the map whose cells are pooled, and the factor that makes its features equally large.
BACKBONES = {
    "alexnet": ("AlexNet", "relu5", 0.03),
    "vgg16": ("VGG-16", "relu5_3", 0.03),
    "efficientnet-lite2": ("EfficientNet-Lite2", "stage7", 0.03),
    "xception": ("Xception", "conv4", 0.05),
}
_SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "first": ("first order", {"model.head": "fc", "model.average": True}),
    "log": ("second order, log", {"model.head": "o2p", "model.function": "log"}),
    "sqrt": ("second order, square root", {"model.head": "o2p", "model.function": "sqrt"}),
    "power": (
        "second order, learned power",
        {"model.head": "o2p", "model.function": "power", "model.learn_power": True},
    ),
    "both": ("first and second order, log", {"model.head": "both", "model.function": "log", "model.average": True}),
}


def _row(backbone: str, system: str, frozen: bool) -> Row:
    name, tap, scale = BACKBONES[backbone]
    title, model = _SYSTEMS[system]
    kind: Literal["frozen", "fine"] = "frozen" if frozen else "fine"
    model = {**model, "model.backbone": backbone, "model.support": "mask+all"}
    model |= {"model.two_views": True, "model.frozen": frozen}
    if system != "first":
        model |= {"model.taps": [tap], "model.reduce": 64, "model.feature_scale": scale, "model.eps": 0.01}
        model |= {"model.vector_scale": 0.3, "model.vector_dropout": 0.5}
    rates = [{"optimizer.rate": rate} for rate in (0.01, 0.003)]
    if not frozen:
        rates = [{"optimizer.rate": a, "optimizer.backbone_factor": b} for a, b in ((0.003, 3.0), (0.01, 1.0))]
    return Row(
        f"{name}, {kind if frozen else 'fine-tuned'}, {title}",
        f"{backbone}-{kind}-{system}",
        kind,
        None,
        model,
        rates,
        reference=f"{backbone}-{kind}-first",
    )


ROWS = [
    _row(backbone, system, frozen)
    for backbone in BACKBONES
    for frozen in (True, False)
    for system in _SYSTEMS
    if not (frozen and system == "power")  # descriptors of a frozen network are computed once
]


class Backbones(Table1):
    """The table of backbones; see the module."""

    rows: ClassVar[dict[str, Row]] = {row.key: row for row in ROWS}
    title: ClassVar[str] = "Classification error of COCO's regions by backbone"
    compared: ClassVar[str] = "first order"

    def __init__(self, config: BackbonesConfig) -> None:
        super().__init__(config)
        self.epochs["frozen"] = config.frozen_epochs

    def prepare(self) -> None:
        """Crop the regions, and describe them by the frozen networks, each once for all of its runs."""
        super().prepare()
        train, validation = open_regions(self.config.data)
        for backbone in BACKBONES:
            rows = [r for r in self.chosen.values() if r.kind == "frozen" and r.model["model.backbone"] == backbone]
            if rows:
                configs = [self.run_config(Job(row.key, "trial"), {}, self.device) for row in rows]
                describe([build_model(one, train.classes) for one in configs], train, validation, self.config.data)

    def summarize(self) -> dict[str, Any]:
        """The table of all that has finished; where no seed has, of the trials alone."""
        if any(self.finished(self.seeds(row))[1] for row in self.chosen.values()):
            return super().summarize()
        tried = [
            {"name": row.name, "key": row.key, "model": row.model, "device": device, "trials": trials}
            for row in self.chosen.values()
            for device in ("cuda", "cpu")
            if (trials := self.trials(row, device))
        ]
        if not tried:
            raise DataError(f"no finished run was found in {self.store.folder}; train first.")
        content = {"rows": [], "candidates": tried}
        self.write_table(content, self._tuning(tried))
        return content

    def write_table(self, content: Mapping[str, Any], table: Table, *more: str) -> None:
        """Write the table, with how the same backbones segment below it."""
        segmentation = self._segmentation()
        super().write_table(content, table, *more, *([] if segmentation is None else [segmentation.markdown()]))

    def _segmentation(self) -> Table | None:
        path = self.out.parent / "table2" / "table.json"
        if not path.is_file():
            return None
        names = [name for name, _, _ in BACKBONES.values()]
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
        return Table(
            ["backbone", "system", "best", "average", "images/s"],
            body,
            title="Covering of BSDS300's test images by backbone",
            note="From table 2: best and average covering of eight segmentations, mean ± deviation over seeds.",
            formats={"best": ".3f", "average": ".3f", "images/s": ".0f"},
            best={"best": "max", "average": "max"},
        )
