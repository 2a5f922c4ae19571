"""Configurations and presets of the recipes.

The configuration of a recipe is a dataclass with a field ``engine`` (:class:`EngineConfig`) and other sections. Presets
are instances of it. A file and command-line options override their fields. Torch is not imported here, so that
``--help`` is fast.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from matbackprop.errors import ConfigurationError, DataError
from matbackprop.vision.configuration import (
    Background,
    Count,
    Fraction,
    Natural,
    NonNegative,
    Pixels,
    Positive,
    PositiveRate,
    Rate,
    Threads,
    configuration,
    from_json,
    merge,
    read_config_file,
    suggest,
    to_json,
)
from matbackprop.vision.data.cache import default_cache_folder
from matbackprop.vision.files import atomic_folder
from matbackprop.vision.models.config import ContourModelConfig, NCutsModelConfig, RegionModelConfig

Scale = Annotated[float, Field(gt=0, le=16)]


@configuration
class EngineConfig:
    """Device, duration, metrics and checkpoints of a run."""

    run: Path | None = None  #: Run folder. Default: runs/<recipe>-<preset>-seed<seed>.
    seed: Natural = 0  #: Seed of weights, data order, augmentation and dropout.
    max_epochs: Count = 1  #: Number of epochs.
    resume: bool = False  #: Resume from the last checkpoint in the run folder, or start if there is none.
    overwrite: bool = False  #: Replace the run in the folder.
    devices: str = "auto"  #: Number of devices per node, or a list: auto, 1, 8, or 0,2.
    nodes: Count = 1  #: Number of nodes (with torchrun or SLURM).
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"  #: Type of device.
    #: Precision of the network. Structured layers compute in float64 by default.
    precision: Literal["32", "bf16-mixed"] = "32"
    #: Precision of float32 matrix products of the network. high allows TF32 on NVIDIA GPUs.
    matmul_precision: Literal["highest", "high"] = "high"
    deterministic: bool = False  #: Use deterministic algorithms only (slower on a GPU).
    gradient_clip: Positive | None = None  #: Maximum norm of the gradient.
    accumulate: Count = 1  #: Batches per optimizer step.
    log_every: Count = 50  #: Steps between logged metrics. Metrics are averaged over these steps.
    validate_every: Count = 1  #: Epochs between validations.
    #: Metric whose smallest value selects the best checkpoint, if validation uses held-out training data.
    monitor: str = "val/loss"
    checkpoints: bool = True  #: Write checkpoints. A run without them cannot be resumed.
    checkpoint_every_steps: Natural = 0  #: Steps between checkpoints within an epoch; 0 to disable them.
    #: Minimum seconds between checkpoints at the end of epochs. The last checkpoint is always written.
    checkpoint_min_seconds: NonNegative = 30.0
    guard_every: Count = 16  #: Batches between checks for NaN and Inf on a GPU. On the CPU, every step is checked.
    tensorboard: bool = True  #: Write TensorBoard curves in addition to metrics.jsonl.
    progress: bool = True  #: Show a progress bar on a terminal, otherwise a line every 30 seconds.
    report: bool = True  #: Draw figures and write report.html at the end.

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|[1-9]|[1-5]\d|6[0-4]|(\d+,)+\d*", self.devices):
            raise ConfigurationError(f"devices is {self.devices!r}. Use auto, a number from 1 to 64, or a list: 0,2.")
        if self.resume and self.overwrite:
            raise ConfigurationError("resume and overwrite contradict each other. Set one of them.")


@dataclass(frozen=True)
class Recipe:
    """Training recipe, as in ``matbackprop train NAME``.

    The preset ``smoke`` is the default, ``fine-tune`` the default for saved models.
    """

    name: str
    config_class: Any
    presets: Mapping[str, Any]

    @property
    def module(self) -> Any:
        """Module with the functions ``build(config)``, ``export(run, system, data)`` and ``figures``."""
        return importlib.import_module(f"matbackprop.vision.training.{self.name}")

    def preset(self, name: str) -> Any:
        """Return a copy of a preset."""
        if name not in self.presets:
            hint = suggest(name, self.presets, "Presets")
            raise ConfigurationError(f"Recipe {self.name!r} has no preset {name!r}. {hint}")
        return from_json(self.config_class, to_json(self.presets[name]))


def resolve(recipe: Recipe, preset: str, file: Path | None = None, source: str | None = None) -> Any:
    """Return a preset, overridden by the fields of a saved model (``source``) and of a file."""
    config = recipe.preset(preset)
    if source is not None:
        from matbackprop.vision.training.start import saved_fields

        config = merge(config, saved_fields(recipe, source))
    if file is None:
        return config
    try:
        return merge(config, read_config_file(file))
    except ConfigurationError as error:
        raise ConfigurationError(str(error) if str(file) in str(error) else f"{file}: {error}") from error


# ----------------------------------------------------------------------------------------------- region classification


@configuration
class DatasetConfig:
    """Location of a data set."""

    #: Folder in the layout of COCO (o2p) or BSDS500. Default: the folder coco or BSDS500 in $MATBACKPROP_DATA.
    root: Path | None = None
    #: Number of training images to generate (colored and textured shapes). Ignored if --data.root is set.
    generate: Annotated[int, Field(ge=0, le=100_000)] = 0
    cache: Path | None = None  #: Folder for prepared data. Default: $MATBACKPROP_CACHE, then ~/.cache/matbackprop.
    layout: ClassVar[Literal["coco", "BSDS500"]] = "BSDS500"

    def __post_init__(self) -> None:
        if self.root is not None:
            self.generate = 0

    def folder(self) -> Path:
        """Return the folder to read. Generated images, and fewer for validation, are written to the cache first."""
        if self.generate:
            from matbackprop.vision.data.shapes import write_shapes_bsds, write_shapes_coco

            folder = (self.cache or default_cache_folder()) / f"shapes-{self.layout.lower()}-{self.generate}"
            if not folder.exists():
                with atomic_folder(folder) as scratch:
                    if self.layout == "coco":
                        write_shapes_coco(scratch, train=self.generate, val=max(self.generate // 4, 1))
                    else:
                        write_shapes_bsds(scratch, train=self.generate, val=max(self.generate // 2, 1))
            return folder
        if self.root is not None:
            return self.root
        if "MATBACKPROP_DATA" not in os.environ:
            raise DataError(
                f"No data set was given. Pass --data.root FOLDER (in the layout of {self.layout}), set "
                f"MATBACKPROP_DATA to the folder that contains {self.layout}/, or generate images with "
                "--data.generate 64."
            )
        return Path(os.environ["MATBACKPROP_DATA"]) / self.layout


@configuration
class RegionDataConfig(DatasetConfig):
    """Regions and their augmentation."""

    layout = "coco"
    #: final: train on all images, validate on val, keep the last weights. tuning: hold out every fifth training image,
    #: keep the best weights on held-out images.
    split: Literal["final", "tuning"] = "final"
    side: Pixels = 200  #: Longest side of a region.
    margin: NonNegative = 0.0  #: Margin around the box of a region, as a fraction of its longest side.
    canvas: Pixels = 227  #: Side of the network input.
    #: Maximum shift of a region from the center in training, in pixels.
    jitter: Annotated[int, Field(ge=0, le=4096)] = 13
    flip: bool = True  #: Mirror half of the regions in training.
    background: Background = "mask"  #: Pixels around the object: keep them, or replace them with the mean color (mask).
    batch_size: Count = 100  #: Regions per training batch and device.
    validation_batch_size: Count = 500  #: Regions per validation batch.
    threads: Threads = 4  #: Number of reader threads.


@configuration
class OptimizerConfig:
    """SGD with momentum and a cosine schedule."""

    rate: PositiveRate = 0.01  #: Learning rate of the head.
    backbone_factor: Rate = 0.1  #: Learning rate of the backbone relative to the head.
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  #: Momentum.
    decay: Rate = 5e-4  #: Weight decay.
    warmup: NonNegative = 0.5  #: Epochs of linear warm-up.
    label_smoothing: Fraction = 0.0  #: Label smoothing: fraction of the target distributed evenly over all classes.


@configuration
class O2PConfig:
    """Configuration of the recipe ``o2p``."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    data: RegionDataConfig = field(default_factory=RegionDataConfig)
    model: RegionModelConfig = field(default_factory=RegionModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


_O2P_ENGINE = EngineConfig(max_epochs=12, precision="bf16-mixed", monitor="val/error", gradient_clip=100.0)


def _o2p(
    model: RegionModelConfig, data: RegionDataConfig | None = None, *, epochs: int = 12, **optimizer: float
) -> O2PConfig:
    engine = dataclasses.replace(_O2P_ENGINE, max_epochs=epochs)
    return O2PConfig(engine, data or RegionDataConfig(), model, OptimizerConfig(**optimizer))


_O2P_HUB: dict[str, Any] = {"head": "o2p", "reduce": 128, "feature_scale": 0.1, "vector_dropout": 0.5}

O2P_PRESETS = {
    # Generated images and a small network; seconds on a CPU.
    "smoke": O2PConfig(
        EngineConfig(
            max_epochs=8, monitor="val/error", log_every=4, gradient_clip=10.0, accelerator="cpu", devices="1"
        ),
        RegionDataConfig(generate=96, side=80, canvas=99, jitter=5, batch_size=16, threads=0),
        RegionModelConfig(
            head="o2p_fc", weights="none", taps=("relu5",), reduce=32, hidden=64, dropout=0.2, feature_scale=1.0
        ),
        OptimizerConfig(rate=0.005, backbone_factor=1.0),
    ),
    # Defaults of --from, with small batches for small data sets.
    "fine-tune": O2PConfig(
        EngineConfig(max_epochs=20, monitor="val/error", log_every=10, gradient_clip=10.0),
        RegionDataConfig(batch_size=16),
        RegionModelConfig(),
        OptimizerConfig(rate=0.005, backbone_factor=1.0),
    ),
    # A few epochs on COCO; minutes on one GPU.
    "small": _o2p(RegionModelConfig(head="o2p"), epochs=4, rate=0.001, backbone_factor=0.3),
    # DeepO2P-FC with ImageNet weights, the best model of the paper.
    "paper": _o2p(RegionModelConfig(head="o2p_fc")),
    # The classifier in the package: first and second order on EfficientNet-Lite2, with context around the region.
    "lite2": _o2p(
        RegionModelConfig(
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
        RegionDataConfig(side=224, canvas=224, jitter=20, margin=0.2, background="keep"),
        epochs=6,
        rate=0.003,
        backbone_factor=3.0,
        label_smoothing=0.1,
    ),
    # DeepO2P on backbones from the Hugging Face hub.
    "resnet50": _o2p(RegionModelConfig(backbone="hf:microsoft/resnet-50", taps=("stage4",), **_O2P_HUB)),
    "dinov2": _o2p(RegionModelConfig(backbone="hf:facebook/dinov2-small", taps=("stage12",), **_O2P_HUB)),
    # First and second order on four maps, the best variant beyond the paper.
    "maps": _o2p(
        RegionModelConfig(
            head="both", reduce=96, taps=("pool5", "relu2", "relu3", "relu4"), vector_scale=0.3, vector_dropout=0.8
        )
    ),
}


# ------------------------------------------------------------------------------------------------ deep normalized cuts


@configuration
class SegmentedDataConfig(DatasetConfig):
    """Images with human segmentations."""

    fold: Annotated[int, Field(ge=0, le=4)] = 0  #: Index of the held-out fifth of the training images, 0 to 4.
    limit: Count | None = None  #: Maximum number of training and of validation images.


@configuration
class NCutsDataConfig(SegmentedDataConfig):
    """Images and their augmentation."""

    #: tuning: hold out every fifth training image for validation. final: train on all images.
    split: Literal["tuning", "final"] = "tuning"
    batch_size: Count = 1  #: Images per training batch and device.
    flip: bool = True  #: Mirror half of the images in training.
    jitter: Fraction = 0.0  #: Maximum relative change of brightness, contrast and saturation in training.
    threads: Threads = 2  #: Number of reader threads.


@configuration
class AdamWConfig:
    """AdamW with a one-cycle schedule."""

    rate: PositiveRate = 1e-3  #: Learning rate of the new layers.
    backbone_rate: Rate = 1e-4  #: Learning rate of the backbone; 0 freezes it.
    decay: Rate = 5e-4  #: Weight decay.


@configuration
class ObjectiveConfig(AdamWConfig):
    """Objective, and AdamW with a one-cycle schedule."""

    objective: Literal["j1", "j2", "soft"] = "j2"  #: j1 and j2 of the paper, or the soft projector.


@configuration
class NCutsConfig:
    """Configuration of the recipe ``ncuts``."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    data: NCutsDataConfig = field(default_factory=NCutsDataConfig)
    model: NCutsModelConfig = field(default_factory=NCutsModelConfig)
    train: ObjectiveConfig = field(default_factory=ObjectiveConfig)

    def __post_init__(self) -> None:
        if self.model.affinity == "lambda" and self.train.objective != "j1":
            raise ConfigurationError(
                f"affinity is 'lambda' and objective is {self.train.objective!r}, which does not depend on Λ. Use "
                "affinity 'identity', or objective 'j1'."
            )


def _paper(variant: str, *, zoom: float = 1.0) -> NCutsConfig:
    """Recipe of the paper: J2, 20 channels, one image per batch, learning rate 1e-4, and 1e-3 for new layers.

    The paper does not specify optimizer, schedule and epochs. They were chosen by cross-validation on training images.
    """
    return NCutsConfig(
        engine=EngineConfig(max_epochs=4, log_every=20),
        model=NCutsModelConfig(variant=variant, zoom=zoom),  # type: ignore[arg-type]
    )


def _soft(variant: str, *, epochs: int = 12, backbone_rate: float = 2e-5) -> NCutsConfig:
    """Extended recipe: soft objective, AdamW with a one-cycle schedule, batches of eight, augmentation."""
    return NCutsConfig(
        engine=EngineConfig(max_epochs=epochs, precision="bf16-mixed", log_every=10),
        data=NCutsDataConfig(batch_size=8, jitter=0.2),
        model=NCutsModelConfig(variant=variant, space="soft"),  # type: ignore[arg-type]
        train=ObjectiveConfig(backbone_rate=backbone_rate, decay=1e-2, objective="soft"),
    )


NCUTS_PRESETS = {
    "smoke": merge(
        _soft("alexnet-relu5", epochs=6),
        {
            "engine": {"precision": "32", "log_every": 1},
            "data": {"generate": 24, "batch_size": 4},
            "model": {"weights": "none", "hidden": 16, "channels": 8},
        },
    ),
    "fine-tune": merge(_soft("alexnet-relu5", epochs=20), {"engine.precision": "32", "data.batch_size": 4}),
    "small": _soft("alexnet-relu5", epochs=4),
    "paper": _paper("vgg16-relu5"),
    **{f"paper-{name}": _paper(name) for name in ("alexnet-relu5", "vgg16-relu4", "vgg16-relu5")},
    **{f"paper-{name}-x2": _paper(name, zoom=2.0) for name in ("alexnet-relu5", "vgg16-relu5")},
    # Learning rates were chosen on the held-out training images.
    "soft-alexnet-relu5": _soft("alexnet-relu5"),
    "soft-vgg16-relu4": _soft("vgg16-relu4"),
    "soft-vgg16-relu5": _soft("vgg16-relu5", backbone_rate=5e-5),
}


# ------------------------------------------------------------------------------------------------------------ contours


@configuration
class ContourDataConfig(SegmentedDataConfig):
    """Random crops of images."""

    #: tuning: hold out every fifth training image for validation. final: train on all training images, and choose the
    #: threshold on val. train+val: train on both, and keep the threshold of the configuration.
    split: Literal["tuning", "final", "train+val"] = "tuning"
    batch_size: Count = 8  #: Crops per training batch and device.
    crop: Annotated[int, Field(ge=32, le=4096)] = 320  #: Side of a crop in pixels.
    scale: tuple[Scale, Scale] = (0.75, 1.5)  #: Range of the random scale of the image before cropping.
    jitter: Fraction = 0.2  #: Standard deviation of the random gain of each color channel.
    #: Train also on photographs without annotations: their folder, and a folder with their contours, written
    #: by 'matbackprop segment --format contours'. Half of the crops are from these photographs.
    predicted: tuple[Path, Path] | None = None
    threads: Threads = 1  #: Number of threads that prepare batches.


@configuration
class ContourTrainConfig(AdamWConfig):
    """AdamW with a one-cycle schedule, and the loss."""

    decay: Rate = 1e-2  #: Weight decay.
    freeze: str | None = None  #: Freeze the backbone up to this map.
    side_weight: NonNegative = 0.4  #: Weight of the loss of each level relative to the loss of the output.
    #: Decay of the moving average of the weights. The averaged network is saved.
    average: Annotated[float, Field(ge=0, lt=1)] = 0.995
    average_from: Natural = 50  #: Step at which the average starts.


@configuration
class ContoursConfig:
    """Configuration of the recipe ``contours``."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    data: ContourDataConfig = field(default_factory=ContourDataConfig)
    model: ContourModelConfig = field(default_factory=ContourModelConfig)
    train: ContourTrainConfig = field(default_factory=ContourTrainConfig)


_CONTOURS_ENGINE = EngineConfig(max_epochs=64, precision="bf16-mixed", log_every=5, gradient_clip=5.0)


def _contours_on(backbone: str, *taps: str, **model: float) -> ContoursConfig:
    return ContoursConfig(engine=_CONTOURS_ENGINE, model=ContourModelConfig(backbone, taps, **model))  # type: ignore[arg-type]


CONTOURS_PRESETS = {
    "smoke": ContoursConfig(
        engine=dataclasses.replace(
            _CONTOURS_ENGINE, max_epochs=4, precision="32", log_every=1, accelerator="cpu", devices="1"
        ),
        data=ContourDataConfig(generate=24, batch_size=4, crop=64),
        model=ContourModelConfig("alexnet", ("relu1", "relu2", "relu5"), "none", zoom=1.0, width=12, stem=6),
    ),
    "fine-tune": ContoursConfig(
        engine=dataclasses.replace(_CONTOURS_ENGINE, max_epochs=20, precision="32"),
        data=ContourDataConfig(batch_size=4, crop=256),
    ),
    "tiny-vit": ContoursConfig(engine=_CONTOURS_ENGINE, train=ContourTrainConfig(freeze="layer0")),
    "efficientnet-lite2": _contours_on(
        "efficientnet-lite2", "stage1", "stage2", "stage3", "stage5", "stage7", zoom=1.0, width=32, stem=16
    ),
    # Backbone from the Hugging Face hub.
    "resnet50": _contours_on("hf:microsoft/resnet-50", "stage1", "stage2", "stage3", "stage4", zoom=1.0),
    "dinov2": _contours_on("hf:facebook/dinov2-small", "stage3", "stage6", "stage9", "stage12"),
}


# ------------------------------------------------------------------------------------------------------------- recipes


#: The recipes of ``matbackprop train``.
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("o2p", O2PConfig, O2P_PRESETS),
        Recipe("ncuts", NCutsConfig, NCUTS_PRESETS),
        Recipe("contours", ContoursConfig, CONTOURS_PRESETS),
    )
}
