"""Configuration of deep normalized cuts: its fields, its presets, and the recipe that ``matbackprop train ncuts`` runs.

Nothing heavy is imported here, so that the command line can explain itself at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from matbackprop.errors import ConfigurationError
from matbackprop.models.config import NCutsModelConfig
from matbackprop.training.config import EngineConfig, Recipe, check_ranges, lazily


@dataclass
class ImageDataConfig:
    """Where images come from and how they are presented."""

    root: Path | None = None
    """Folder in BSDS500's layout; by default BSDS500 under $MATBACKPROP_DATA."""
    made: int = 0
    """Number of training images to make on the fly, coloured and textured shapes, instead of reading ``root``."""
    cache: Path | None = None
    """Folder for prepared images; by default $MATBACKPROP_CACHE, then ~/.cache/matbackprop."""
    split: Literal["tuning", "final"] = "tuning"
    """tuning: hold out every fifth training image for validation. final: train on all of them, validate on none."""
    fold: int = 0
    """Which fifth of the training images is held out, 0 to 4."""
    limit: int | None = None
    """Use at most so many images of each part."""
    superpixels: int = 600
    """About how many superpixels an image is divided into."""
    batch_size: int = 1
    """Images in a training batch, on each device."""
    flip: bool = True
    """Mirror half the images in training."""
    scale: tuple[float, float] = (1.0, 1.0)
    """Range of the random size of a training batch."""
    jitter: float = 0.0
    """Largest relative change of brightness, contrast and saturation in training."""
    workers: int = 0
    """Processes that prepare images; 0 for one per core, at most 16."""
    threads: int = 2
    """Threads that read batches."""

    def __post_init__(self) -> None:
        check_ranges("data", self, superpixels="[1, inf)", batch_size="[1, inf)", limit="[1, inf)", fold="[0, 4]")
        check_ranges("data", self, made="[0, 100000]", workers="[0, inf)", threads="[0, inf)")
        check_ranges("data", self, scale="(0, inf)", jitter="[0, 1]")


@dataclass
class ObjectiveConfig:
    """What is minimised and how."""

    objective: Literal["j1", "j2", "soft"] = "j2"
    """The paper's J1 or J2, or the soft projector."""
    rows: Literal["grid", "superpixels"] = "grid"
    """Rows of F: the cells of the feature map, or its means on superpixels, weighted by area."""
    boundary_weight: float = 1.0
    """Weight of the edges' cross-entropy, where the model looks at edges."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum .9, or AdamW."""
    rate: float = 1e-3
    """Learning rate of the new layers."""
    backbone_rate: float = 1e-4
    """Learning rate of the backbone; 0 freezes it."""
    decay: float = 5e-4
    """Weight decay."""
    schedule: Literal["constant", "one-cycle"] = "constant"
    """Course of the learning rate."""
    graphs: bool = True
    (
        "Replay steps as CUDA graphs, where one GPU takes one image per step in full precision, rows are grid and "
        "the objective is j2 or soft."
    )
    score_images: int = 0
    """Validation images that are also segmented and scored (covering, best and average) after each validation."""

    def __post_init__(self) -> None:
        check_ranges("train", self, rate="(0, 1e6]", backbone_rate="[0, 1e6]", decay="[0, 1e6]")
        check_ranges("train", self, boundary_weight="[0, inf)", score_images="[0, inf)")


@dataclass
class NCutsConfig:
    """Configuration of the recipe ``ncuts``."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    data: ImageDataConfig = field(default_factory=ImageDataConfig)
    model: NCutsModelConfig = field(default_factory=NCutsModelConfig)
    train: ObjectiveConfig = field(default_factory=ObjectiveConfig)

    def __post_init__(self) -> None:
        if self.model.affinity == "lambda" and self.train.objective != "j1":
            raise ConfigurationError(
                f"affinity 'lambda' learns with objective 'j1' only, got {self.train.objective!r}: J2 and the soft "
                f"objective do not depend on Λ. Choose affinity 'identity', or objective 'j1'."
            )


def paper_config(variant: str, *, epochs: int = 4) -> NCutsConfig:
    """The paper's recipe: J2, 20 channels, one image per batch, 1e-4 and ten times that for new layers.

    The paper does not name its optimiser, schedule and epochs: these were best in cross-validation on training images.
    """
    return NCutsConfig(
        engine=EngineConfig(max_epochs=epochs, log_every=20),
        model=NCutsModelConfig(variant=variant),  # type: ignore[arg-type]
        train=ObjectiveConfig(optimizer="adamw", schedule="one-cycle"),
    )


def soft_config(
    variant: str, *, epochs: int = 12, backbone_rate: float = 2e-5, boundary_weight: float = 1.0
) -> NCutsConfig:
    """The extended recipe: the soft objective on superpixels, AdamW, one cycle, batches of eight, augmentation."""
    return NCutsConfig(
        engine=EngineConfig(max_epochs=epochs, precision="bf16-mixed", log_every=10),
        data=ImageDataConfig(batch_size=8, scale=(0.7, 1.2), jitter=0.2),
        model=NCutsModelConfig(variant=variant, space="soft"),  # type: ignore[arg-type]
        train=ObjectiveConfig(
            objective="soft",
            rows="superpixels",
            optimizer="adamw",
            rate=1e-3,
            backbone_rate=backbone_rate,
            boundary_weight=boundary_weight,
            decay=1e-2,
            schedule="one-cycle",
        ),
    )


def _smoke() -> NCutsConfig:
    config = soft_config("alexnet-relu5", epochs=6)
    config.engine = dataclasses.replace(config.engine, precision="32", log_every=1)
    config.data = dataclasses.replace(config.data, made=24, batch_size=4, superpixels=80)
    config.model = dataclasses.replace(config.model, weights="none", hidden=16, channels=8)
    return config


def _hypercolumns_on(backbone: str, *taps: str, zoom: float = 1.0, **changes: float) -> NCutsConfig:
    config = soft_config("hypercolumns", epochs=15, **changes)  # type: ignore[arg-type]
    config.model = dataclasses.replace(config.model, backbone=backbone, taps=taps, zoom=zoom)
    return config


PRESETS: dict[str, NCutsConfig] = {
    "smoke": _smoke(),
    "small": soft_config("alexnet-relu5", epochs=4),
    "paper": paper_config("vgg16-relu5"),
    **{f"paper-{name}": paper_config(name) for name in ("alexnet-relu5", "vgg16-relu4", "vgg16-relu5")},
    # Rates and weights that differ from the others' were better on the tuning images.
    "soft-alexnet-relu5": soft_config("alexnet-relu5"),
    "soft-vgg16-relu4": soft_config("vgg16-relu4"),
    "soft-vgg16-relu5": soft_config("vgg16-relu5", backbone_rate=5e-5),
    "hypercolumns": soft_config("hypercolumns", epochs=15, backbone_rate=0.0),
    "hypercolumns-tuned": soft_config("hypercolumns", epochs=15, boundary_weight=4.0),
    # The segmenter that comes with the package, on the first five of EfficientNet-Lite2's seven stages. In
    # cross-validation rates of 2e-4, 5e-4 and 1e-3 were alike, and so were all stages.
    "hypercolumns-lite2": _hypercolumns_on(
        "efficientnet-lite2", *(f"stage{i}" for i in range(1, 6)), backbone_rate=5e-4, boundary_weight=4.0
    ),
    # MobileSAM's encoder, made for larger images. In cross-validation 1.5 was better than 1, and 2 no better than 1.5.
    "hypercolumns-tiny-vit": _hypercolumns_on(
        "tiny-vit", "layer0", "layer1", "layer2", "layer3", "neck", backbone_rate=1e-4, boundary_weight=4.0, zoom=1.5
    ),
    # From the hub.
    "hypercolumns-resnet50": _hypercolumns_on("hf:microsoft/resnet-50", "stage1", "stage2", "stage3", "stage4"),
    "hypercolumns-dinov2": _hypercolumns_on("hf:facebook/dinov2-small", "stage3", "stage6", "stage9", "stage12"),
}


RECIPE: Recipe[NCutsConfig] = Recipe(
    name="ncuts",
    config_class=NCutsConfig,
    presets=PRESETS,
    build=lazily("matbackprop.training.ncuts", "build"),
    export=lazily("matbackprop.training.ncuts", "export"),
    figures=lazily("matbackprop.training.ncuts", "figures"),
    summary="Train DeepNCuts: features whose normalized cuts are the human segmentations.",
)
