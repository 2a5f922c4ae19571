"""Exact square root against five Newton–Schulz steps (iSQRT-COV) in second-order heads on frozen maps.

A head projects the cells of a region to a few channels, takes the square root of their second moments, and classifies
its upper triangle. Projection and classifier are trainable, so that gradients pass through the root. Both roots have
the same initialization, batches and budget. Maps of the frozen backbone are computed once per command.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.speed.peers import isqrt
from experiments import runs
from experiments.runs import Experiment, ExperimentConfig, Measured, Run, interval_text
from experiments.table1 import difference, wrong_by_image
from matbackprop import matrix_sqrt, vectorize_symmetric
from matbackprop.vision.data.coco import coco_files, open_regions, read_coco
from matbackprop.vision.data.coco_regions import crop_region, hold_out_images, pad_crops, place_regions
from matbackprop.vision.models.backbones.published import build_backbone, load_backbone_weights
from matbackprop.vision.progress import track
from matbackprop.vision.report.tables import Table
from matbackprop.vision.training.config import RegionDataConfig

SIDE, MARGIN, EPS = 224, 0.2, 1e-3
TAPS = {"efficientnet-lite2": "stage7", "tiny-vit": "layer3"}
RATES = (1e-3, 3e-3, 1e-2)


@dataclass
class Config(ExperimentConfig):
    """Train second-order heads with an exact square root and with five Newton–Schulz steps."""

    out: Path = Path("results/exact_root")  #: Folder of results.jsonl and table.md. Finished runs are not repeated.
    backbones: tuple[str, ...] = ("efficientnet-lite2", "tiny-vit")  #: Frozen backbones.
    root: Path | None = None  #: Folder in the layout of COCO; by default coco under MATBACKPROP_DATA.
    train_regions: int = 3000  #: Training regions, of the first images in a random order.
    val_regions: int = 1500  #: Validation regions.
    width: int = 32  #: Channels whose second moments are pooled.
    epochs: int = 10  #: Epochs of every training.
    seeds: int = 5  #: Seeds of every row.


class Maps(NamedTuple):
    """Maps of regions (n, cells, channels) in half precision, mask coverage of the cells, classes and image numbers."""

    cells: Tensor
    weight: Tensor
    label: Tensor
    image: np.ndarray

    def at(self, index: np.ndarray) -> Maps:
        rows = torch.from_numpy(index)
        return Maps(self.cells[rows], self.weight[rows], self.label[rows], self.image[index])


@functools.cache
@torch.no_grad()
def compute_maps(backbone: str, root: Path, split: str, count: int) -> Maps:
    """Compute the maps of about ``count`` regions, image by image in a random order."""
    tap = TAPS[backbone]
    network = build_backbone(backbone, [tap]).eval()
    load_backbone_weights(network, backbone)
    annotations, images = coco_files(root, split)
    entries = [entry for entry in read_coco(annotations, images).images if entry.regions]
    order = np.random.default_rng(0).permutation(len(entries))
    parts: dict[str, list[Any]] = {"cells": [], "weight": [], "label": [], "image": []}
    for number in track(order.tolist(), f"Maps of {split}"):
        if len(parts["label"]) >= count:
            break
        pixels, usable, *_ = open_regions(entries[number])
        if not usable:
            continue
        crops = [crop_region(pixels, mask, window, side=SIDE, margin=MARGIN) for _, mask, window in usable]
        store, sizes = map(torch.from_numpy, pad_crops(crops, SIDE))
        image, mask = place_regions(store, sizes, torch.zeros(len(crops), 3, dtype=torch.long), canvas=SIDE)
        found = network(image, [tap])[tap]
        coverage = nn.functional.adaptive_avg_pool2d(mask.unsqueeze(1), found.shape[-2:])
        parts["cells"].append(found.flatten(2).mT.half())
        parts["weight"].append(coverage.flatten(1) + 0.01)
        parts["label"] += [region.label for region, _, _ in usable]
        parts["image"] += [entries[number].image_id] * len(usable)
    return Maps(torch.cat(parts["cells"]), torch.cat(parts["weight"]), torch.tensor(parts["label"]),
                np.array(parts["image"]))  # fmt: skip


ROOTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "exact": ("exact", matrix_sqrt),
    "newton-schulz": ("five Newton–Schulz steps", isqrt),
}


class Head(nn.Module):
    """Projection, second moments, root, and a linear classifier."""

    def __init__(self, channels: int, width: int, classes: int, root: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.project = nn.Linear(channels, width, bias=False)
        nn.init.orthogonal_(self.project.weight)
        self.classify = nn.Sequential(nn.Dropout(0.5), nn.Linear(width * (width + 1) // 2, classes))
        self.root = root

    def moments(self, cells: Tensor, weight: Tensor) -> Tensor:
        """Weighted second moments of the projected cells, plus ε."""
        x = self.project(cells)
        fraction = weight / weight.sum(-1, keepdim=True)
        return x.mT @ (fraction.unsqueeze(-1) * x) + EPS * torch.eye(x.shape[-1])

    def forward(self, cells: Tensor, weight: Tensor) -> Tensor:
        return self.classify(vectorize_symmetric(self.root(self.moments(cells, weight))))


def fit(train: Maps, val: Maps, root: str, rate: float, seed: int, width: int, epochs: int) -> dict[str, Any]:
    """Train a head and score it once after the last epoch."""
    torch.manual_seed(seed)
    scale = train.cells[:200].float().square().mean().sqrt()
    head = Head(train.cells.shape[-1], width, int(max(train.label.max(), val.label.max())) + 1, ROOTS[root][1])
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, weight_decay=1e-2)
    batches = -(-len(train.label) // 128)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * batches)
    started = time.perf_counter()
    for _ in range(epochs):
        for index in torch.randperm(len(train.label)).split(128):
            logits = head(train.cells[index].float() / scale, train.weight[index])
            loss = nn.functional.cross_entropy(logits, train.label[index], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    seconds = time.perf_counter() - started
    head.eval()
    with torch.no_grad():
        parts = [(c.float() / scale, w) for c, w in zip(val.cells.split(256), val.weight.split(256), strict=True)]
        predicted = torch.cat([head(*part).argmax(-1) for part in parts])
        moments = head.moments(*parts[0])
        exact = matrix_sqrt(moments)
        gap = (isqrt(moments) - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
        spectrum = torch.linalg.eigvalsh(moments.double())
    wrong = wrong_by_image({"image": val.image, "target": val.label.numpy(), "predicted": predicted.numpy(),
                            "large": np.zeros(len(val.label))})  # fmt: skip
    return {
        "rate": rate,
        "error": float((predicted != val.label).double().mean() * 100),
        "seconds": round(seconds, 1),
        "condition": float((spectrum[:, -1] / spectrum[:, 0]).median()),
        "newton_schulz_error": float(gap.median()),
        **wrong,
    }


class ExactRoot(Experiment):
    """The table; see the module."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        rows = {f"{backbone}-{root}": (backbone, root) for backbone in config.backbones for root in ROOTS}
        self.rows: dict[str, tuple[str, str]] = config.chosen(rows)

    def train(self) -> None:
        """Try the rates of every row on held-out training images, then train the seeds."""
        for key in self.rows:
            for i, rate in enumerate(RATES):
                self.run(key, "trial", i, rate)
            trials = [run["metrics"] for run in self.results.runs(key, "trial")]
            rate = float(min(trials, key=lambda metrics: metrics["error"])["rate"])
            for seed in range(self.config.seeds):
                self.run(key, "seed", seed, rate)

    def run(self, key: str, part: str, number: int, rate: float) -> Run:
        """Train and score once, unless the run is finished."""
        config, (backbone, root) = self.config, self.rows[key]
        folder = RegionDataConfig(root=config.root).folder()

        def work() -> dict[str, Any]:
            train = compute_maps(backbone, folder, "train", config.train_regions)
            if part == "trial":
                fitted, scored = (train.at(index) for index in hold_out_images(train.image))
            else:
                fitted, scored = train, compute_maps(backbone, folder, "val", config.val_regions)
            seed = number if part == "seed" else 1000
            return fit(fitted, scored, root, rate, seed, config.width, config.epochs)

        provenance = {
            "configuration": {"backbone": backbone, "root": root, "rate": rate, "width": config.width, "part": part,
                              "epochs": config.epochs, "number": number, "regions": config.train_regions,
                              "val_regions": config.val_regions},
            "data": runs.data_hash(folder, ("train", "val")),
            "weights": runs.weights_hash(backbone, "imagenet"),
            "device": "cpu",
        }  # fmt: skip
        return self.results.run(key, part, number, provenance, work)

    def summarize(self) -> None:
        """Write table.md."""
        body: list[list[Any]] = []
        used: list[Run] = []
        for key, (backbone, root) in self.rows.items():
            if not (done := self.results.runs(key)):
                continue
            metrics = [run["metrics"] for run in done]
            exact = self.results.runs(f"{backbone}-exact")
            gain = None if root == "exact" else difference(self.results, done, exact)
            used += done
            body.append([
                backbone,
                ROOTS[root][0],
                Measured.of([m["error"] for m in metrics]),
                len(done),
                interval_text(gain, 2) if gain else None,
                float(np.mean([m["seconds"] for m in metrics])),
                float(np.mean([m["condition"] for m in metrics])),
                float(np.mean([m["newton_schulz_error"] for m in metrics])),
            ])  # fmt: skip
        columns = ["backbone", "square root", "error (%)", "seeds", "difference to exact", "seconds", "condition",
                   "error of the five steps"]  # fmt: skip
        self.results.require(used)
        first, rates = used[0]["provenance"]["configuration"], len(self.results.runs(used[0]["row"], "trial"))
        note = (
            f"{used[0]['metrics']['regions']} validation regions of COCO, {first['regions']} training regions (a "
            f"subset), {first['epochs']} epochs, {first['width']} channels, frozen backbone; rate chosen from {rates} "
            "on held-out training images. Difference: paired bootstrap over images, 95 % interval; negative is better. "
            "Seconds: one training, on a shared processor. Condition: median of the second moments after training. "
            "Last column: median relative error of five steps at the same matrices."
        )
        formats = {"seconds": ".0f", "condition": ".2g", "error of the five steps": ".2g"}
        table = Table(columns, body, title="Exact square root against Newton–Schulz", note=note, formats=formats)
        self.results.write_table(table, runs=used)


main = ExactRoot.main
