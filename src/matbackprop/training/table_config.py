"""Options of the commands that reproduce the paper's tables; nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from matbackprop.training.ncuts_config import ImageDataConfig
from matbackprop.training.o2p_config import RegionDataConfig


@dataclass
class Table1Config:
    """Train and score the rows of the paper's first table, region classification; finished runs are kept."""

    out: Path = Path("results/table1")
    """Folder of the results; finished runs in it are not done again."""
    rows: tuple[str, ...] = ()
    """Keys of the rows to do, all by default."""
    stage: Literal["all", "prepare", "tune", "train", "timing", "summary"] = "all"
    """Which step to do: prepare makes the caches only, all does one step after the other."""
    data: RegionDataConfig = field(default_factory=RegionDataConfig)
    """The regions, and how they are presented to every row alike."""
    jobs: int = 1
    """Runs at the same time on the one device, each in a process of its own."""
    time_limit: float | None = None
    """Seconds after which no run is started that would not end in time; start the command again to go on."""
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
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Kind of device."""
    override: tuple[str, ...] = ()
    """Further fields for every run, by dotted name with the value in JSON, such as model.hidden=64."""


@dataclass
class Table2Config:
    """Train and score the rows of the paper's second table, segmentation; finished runs are kept."""

    out: Path = Path("results/table2")
    """Folder of the results; finished runs in it are not done again."""
    runs: Path = Path("runs/table2")
    """Folder of the run folders, models and pictures."""
    rows: tuple[str, ...] = ()
    """Rows to do, all by default."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of each row."""
    images: Literal["test", "tuning", "folds"] = "test"
    """test: train on all training images, score the test images. tuning: hold out every fifth of them and score it.
    folds: cross-validation, where each seed of 0 to 4 also names the fifth that is held out."""
    stage: Literal["all", "train", "timing", "curves", "baselines", "summary"] = "all"
    """Which step to do; all does one after the other."""
    jobs: int = 1
    """Runs at the same time on the one device, each in a process of its own."""
    workers: int = 0
    """Processes of each run for superpixels, merging and scores; 0 divides the cores among the jobs."""
    time_limit: float | None = None
    """Seconds after which nothing is started that would not end in time; start the command again to go on."""
    boundary: bool = False
    """Also the boundary F-measure, which takes a few seconds a row."""
    data: ImageDataConfig = field(default_factory=ImageDataConfig)
    """Where images come from: root, made, cache, limit and superpixels; the rest is each row's own."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Kind of device."""
    epochs: int | None = None
    """Epochs of every training, instead of each preset's."""
    weights: str | None = None
    """Starting weights instead of the presets': imagenet, none or a file."""
    shown: int = 8
    """Images in the qualitative figure."""
