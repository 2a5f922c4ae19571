"""Options of the commands that reproduce the paper's tables; nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from matbackprop.vision.training.config import ImageDataConfig, RegionDataConfig


@dataclass
class TableConfig:
    """What all tables' commands take."""

    table: ClassVar[str]
    """Module and name of the table."""

    out: Path = Path("results")
    (
        "Folder of the results. What is finished with the same settings, data, weights, device and measure is not "
        "done again; what was made otherwise stays there and is not used."
    )
    rows: tuple[str, ...] = ()
    """Keys of the rows to do, all by default."""
    stage: str = "all"
    """Which step to do."""
    jobs: int = 1
    """Runs at the same time on the one device, each in a process of its own."""
    time_limit: float | None = None
    """Seconds after which no run is started that would not end in time; give the command again to resume."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Kind of device."""


@dataclass
class Table1Config(TableConfig):
    """Train and score the rows of the paper's first table, region classification; finished runs are kept."""

    table = "table1:Table1"
    out: Path = Path("results/table1")
    stage: Literal["all", "prepare", "tune", "train", "timing", "summary"] = "all"
    """Which step to do: prepare makes the caches only, all does one step after the other."""
    data: RegionDataConfig = field(default_factory=RegionDataConfig)
    """The regions, and how they are presented to every row alike."""
    trials: int = 4
    """Settings that each row tries."""
    fine_epochs: int = 12
    """Epochs of the fine-tuned rows."""
    scratch_epochs: int = 20
    """Epochs of the rows from scratch."""
    sift_epochs: int = 30
    """Epochs of SIFT-O2P's classifier."""
    fine_seeds: int = 5
    """Seeds of the fine-tuned rows."""
    other_seeds: int = 3
    """Seeds of the other rows."""
    precision: Literal["32", "bf16-mixed"] = "bf16-mixed"
    """Precision of the network on a GPU; on the CPU it is 32."""
    override: tuple[str, ...] = ()
    """Further fields for every run, by dotted name with the value in JSON, such as model.hidden=64."""


@dataclass
class BackbonesConfig(Table1Config):
    """Train and score region classifiers on several backbones: first order, second order and both."""

    table = "backbones:Backbones"
    out: Path = Path("results/backbones")
    data: RegionDataConfig = field(
        default_factory=lambda: RegionDataConfig(
            side=224, canvas=224, margin=0.2, background="keep", jitter=0, flip=False, batch_size=256
        )
    )
    """The regions, and how they are presented to every row alike."""
    fine_epochs: int = 5
    """Epochs of the fine-tuned rows."""
    frozen_epochs: int = 12
    """Epochs of the frozen rows' heads."""
    frozen_seeds: int = 5
    """Seeds of the frozen rows."""


@dataclass
class SegmentationConfig(TableConfig):
    """What both commands that segment take."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of each row."""
    workers: int = 0
    """Processes of each run for superpixels, merging and scores; 0 divides the cores among the jobs."""
    boundary: bool = False
    """Also the boundary F-measure, which takes most of the time of scoring."""
    data: ImageDataConfig = field(default_factory=ImageDataConfig)
    """Where images come from: root, made, cache, limit and superpixels; the rest is each row's own."""
    epochs: int | None = None
    """Epochs of every training, instead of each preset's."""
    weights: str | None = None
    """Starting weights instead of the presets': imagenet, none or a file."""


@dataclass
class Table2Config(SegmentationConfig):
    """Train and score the rows of the paper's second table, segmentation; finished runs are kept."""

    table = "table2:Table2"
    out: Path = Path("results/table2")
    stage: Literal["all", "train", "curves", "baselines", "timing", "summary"] = "all"
    """Which step to do; all does one after the other."""
    images: Literal["test", "tuning", "folds"] = "test"
    (
        "test: train on all training images, score the test images. tuning: hold out every fifth of them and score "
        "it. folds: cross-validation, where each seed of 0 to 4 also names the fifth that is held out."
    )
    shown: int = 8
    """Images in the qualitative figure."""


@dataclass
class Bsds500Config(SegmentationConfig):
    """Train on BSDS500, write contour maps (ucm2) of its test images, and score them where people's maps are there."""

    table = "bsds500:Bsds500"
    out: Path = Path("results/bsds500")
    stage: Literal["all", "train", "summary"] = "all"
    """Which step to do; all does one after the other."""
    images: Literal["test", "val"] = "test"
    """test: train on train and val, segment whatever images the folder test holds. val: train on train, segment val."""
    boundary: bool = True
    """Also the boundary F-measure, which takes most of the time of scoring."""
