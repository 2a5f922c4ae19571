"""Configuration of region classification: its fields, its presets, and the recipe that ``matbackprop train o2p`` runs.

Nothing heavy is imported here, so that the command line can explain itself at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from matbackprop.models.config import ADDED, Background, RegionModelConfig
from matbackprop.training.config import EngineConfig, Recipe, check_ranges, lazily


@dataclass
class RegionDataConfig:
    """Where regions come from and how they are presented."""

    root: Path | None = None
    """Folder in COCO's layout; by default coco under $MATBACKPROP_DATA."""
    made: int = 0
    """Number of training images to make on the fly, coloured and textured shapes, instead of reading ``root``."""
    cache: Path | None = None
    """Folder for cached regions; by default $MATBACKPROP_CACHE, then ~/.cache/matbackprop."""
    split: Literal["final", "tuning"] = "final"
    (
        "final: train on all training images, report on the validation images, keep the last weights. tuning: hold "
        "out training images and keep the weights that are best on them."
    )
    hold_out: int = 5
    """One in how many training images the tuning split holds out."""
    minimum_area: float = 0.0
    """Smallest area of a region in the original image, in pixels."""
    missing_images: Literal["raise", "skip"] = "raise"
    """What happens when image files are missing or damaged."""
    side: int = 200
    """Longest side of a region."""
    margin: float = field(default=0.0, metadata=ADDED)
    """What belongs to a region around its box, as a share of the box's longest side."""
    canvas: int = 227
    """Side of the network's input."""
    jitter: int = 13
    """Largest shift of a region from the centre in training, in pixels."""
    flip: bool = True
    """Mirror half the regions in training."""
    background: Background = "mask"
    """Keep the pixels around the object, put the mean colour there, or leave them half of their contrast (dim)."""
    sampling: Literal["natural", "balanced"] = "natural"
    """Take each region once per epoch, or draw all classes equally often."""
    batch_size: int = 100
    """Regions in a training batch, on each device."""
    validation_batch_size: int = 500
    """Regions in a validation batch."""
    resident: Literal["auto", "yes", "no"] = "auto"
    """Keep all regions in the GPU's memory; auto does so when they take at most a quarter of it."""
    threads: int = 4
    """Threads that read batches when they are not resident."""

    def __post_init__(self) -> None:
        counts = ("batch_size", "validation_batch_size")
        check_ranges("data", self, **dict.fromkeys(counts, "[1, inf)"), hold_out="[2, inf)")
        check_ranges("data", self, made="[0, 100000]", side="[1, 4096]", canvas="[1, 4096]")
        check_ranges("data", self, **dict.fromkeys(("minimum_area", "margin", "threads"), "[0, inf)"))
        check_ranges("data", self, jitter="[0, 4096]")


@dataclass
class OptimizerConfig:
    """SGD with momentum and a cosine schedule."""

    rate: float = 0.01
    """Learning rate of the head."""
    backbone_factor: float = 0.1
    """Learning rate of the backbone as a share of the head's."""
    momentum: float = 0.9
    """Momentum."""
    decay: float = 5e-4
    """Weight decay."""
    warmup: float = 0.5
    """Epochs of linear warm-up."""
    label_smoothing: float = 0.0
    """Share of the target spread over all classes."""

    def __post_init__(self) -> None:
        check_ranges("optimizer", self, rate="(0, 1e6]", backbone_factor="[0, 1e6]", decay="[0, 1e6]")
        check_ranges("optimizer", self, momentum="[0, 1)", warmup="[0, inf)", label_smoothing="[0, 1]")


@dataclass
class O2PConfig:
    """Configuration of the recipe ``o2p``."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    data: RegionDataConfig = field(default_factory=RegionDataConfig)
    model: RegionModelConfig = field(default_factory=RegionModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


# ------------------------------------------------------------------------------------------------------------- presets

_ENGINE = EngineConfig(max_epochs=12, precision="bf16-mixed", monitor="val/error", gradient_clip=100.0)


def _o2p_on(backbone: str, tap: str) -> O2PConfig:
    model = RegionModelConfig(
        head="o2p", backbone=backbone, taps=(tap,), reduce=128, feature_scale=0.1, vector_dropout=0.5
    )
    return O2PConfig(engine=_ENGINE, model=model, optimizer=OptimizerConfig(rate=0.01))


PRESETS = {
    # Made on the fly, a small network: seconds on a CPU.
    "smoke": O2PConfig(
        engine=EngineConfig(
            max_epochs=8, monitor="val/error", log_every=4, gradient_clip=10.0, accelerator="cpu", devices="1"
        ),
        data=RegionDataConfig(made=96, side=80, canvas=99, jitter=5, batch_size=16, threads=0),
        model=RegionModelConfig(
            head="o2p_fc", weights="none", taps=("relu5",), reduce=32, hidden=64, dropout=0.2, feature_scale=1.0
        ),
        optimizer=OptimizerConfig(rate=0.005, backbone_factor=1.0),
    ),
    # A few epochs on COCO's regions: minutes on one GPU.
    "small": O2PConfig(
        engine=dataclasses.replace(_ENGINE, max_epochs=4),
        model=RegionModelConfig(head="o2p"),
        optimizer=OptimizerConfig(rate=0.001, backbone_factor=0.3),
    ),
    # DeepO2P-FC from ImageNet, the best row of the paper's table.
    "paper": O2PConfig(
        engine=_ENGINE,
        model=RegionModelConfig(head="o2p_fc"),
        optimizer=OptimizerConfig(rate=0.01),
    ),
    # First and second order on EfficientNet-Lite2, with the surroundings of the region: the classifier in the package.
    "lite2": O2PConfig(
        engine=dataclasses.replace(_ENGINE, max_epochs=6),
        data=RegionDataConfig(side=224, canvas=224, jitter=20, margin=0.2, background="keep"),
        model=RegionModelConfig(
            head="both",
            average=True,
            two_views=True,
            backbone="efficientnet-lite2",
            taps=("stage7",),
            reduce=64,
            support="mask+all",
            feature_scale=0.03,
            eps=0.01,
            vector_scale=0.3,
            vector_dropout=0.5,
            input_dropout=0.2,
        ),
        optimizer=OptimizerConfig(rate=0.003, backbone_factor=3.0, label_smoothing=0.1),
    ),
    # DeepO2P on other backbones, from the hub.
    "resnet50": _o2p_on("hf:microsoft/resnet-50", "stage4"),
    "dinov2": _o2p_on("hf:facebook/dinov2-small", "stage12"),
    # First and second order on four maps, the best of all that were tried beyond the paper.
    "maps": O2PConfig(
        engine=_ENGINE,
        model=RegionModelConfig(
            head="both",
            reduce=96,
            taps=("pool5", "relu2", "relu3", "relu4"),
            vector_scale=0.3,
            vector_dropout=0.8,
        ),
        optimizer=OptimizerConfig(rate=0.01),
    ),
}


RECIPE: Recipe[O2PConfig] = Recipe(
    name="o2p",
    config_class=O2PConfig,
    presets=PRESETS,
    build=lazily("matbackprop.training.o2p", "build"),
    export=lazily("matbackprop.training.o2p", "export"),
    figures=lazily("matbackprop.training.o2p", "write_figures"),
    summary="classify COCO's regions with second-order pooling (DeepO2P)",
)
