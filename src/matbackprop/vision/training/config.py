"""Configuration of runs: the engine's, that of both recipes with its presets, and the way from and to JSON and TOML.

A recipe's configuration is a dataclass with a field ``engine`` (:class:`EngineConfig`) and nested dataclasses of its
own. Presets are instances of it. :func:`resolve` lays a file over a preset, the command line lays its options over
both, and the result is written to the run folder by :func:`to_json`, from which :func:`from_json` builds it again.
Nothing heavy is imported here, so that the command line can explain itself at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Union

from matbackprop.errors import ConfigurationError
from matbackprop.vision.files import read_bytes, read_json, shorten
from matbackprop.vision.models.config import (
    ADDED,
    Background,
    ContourModelConfig,
    NCutsModelConfig,
    RegionModelConfig,
    check_ranges,
)

if TYPE_CHECKING:
    from matbackprop.vision.training.engine import Data, System
    from matbackprop.vision.training.run_folder import RunFolder

T = TypeVar("T")


_MOST_DEVICES = 64  # per node; on a CPU each is a process
_AT_ONCE = "[0, 256]"  # threads or processes


@dataclass
class EngineConfig:
    """How a run is carried out: where, on what, how long, and how it is kept."""

    run: Path | None = None
    """Run folder. By default runs/<recipe>-<preset>-seed<seed>."""
    seed: int = 0
    """Seed of weights, data order, augmentation and dropout."""
    max_epochs: int = 1
    """Passes over the training data."""
    resume: bool = False
    """Resume from the last checkpoint of the run folder, or start if there is none."""
    overwrite: bool = False
    """Replace a run folder that is already there."""
    devices: str = "auto"
    """How many devices per node, or which ones: auto, 1, 8, or a list such as 0,2."""
    nodes: int = 1
    """Number of nodes (torchrun and SLURM are recognised)."""
    strategy: Literal["auto", "ddp"] = "auto"
    """How several devices share the work; auto is ddp where there are several."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Kind of device."""
    precision: Literal["32", "64", "bf16-mixed", "16-mixed"] = "32"
    """Precision of the network; the structured layers keep their own."""
    matmul_precision: Literal["highest", "high"] = "high"
    """float32 matrix products of the network: high allows TF32 on NVIDIA GPUs."""
    deterministic: bool = False
    """Only algorithms that give the same bits in every run (slower on a GPU)."""
    gradient_clip: float | None = None
    """Largest norm of the whole gradient; longer ones are scaled down to it."""
    accumulate: int = 1
    """Batches whose gradients are summed before a step."""
    log_every: int = 50
    """Steps between two lines of metrics; metrics are averaged on the device in between."""
    validate_every: int = 1
    """Epochs between two validations."""
    monitor: str = "val/loss"
    """Metric that decides which checkpoint is the best, where the validation data may choose."""
    monitor_mode: Literal["min", "max"] = "min"
    """Whether the monitored metric is to become small or large."""
    checkpoints: bool = True
    """Write checkpoints. Without them a run cannot be resumed, and only its numbers remain."""
    checkpoint_every_steps: int = 0
    """Steps between two checkpoints within an epoch; 0 saves at ends of epochs only."""
    checkpoint_every_epochs: int = 1
    """Epochs between two checkpoints."""
    checkpoint_min_seconds: float = 30.0
    """A checkpoint that is due sooner than this after the one before waits (the last one never does)."""
    guard_every: int = 16
    """Batches between two looks at the non-finite flag on a GPU (on the CPU every step)."""
    profile: bool = False
    """Print and save how a training step's time divides into data, network, layer and optimiser."""
    profile_steps: int = 20
    """Steps that the profile averages, after five that are left out."""
    tensorboard: bool = True
    """Write TensorBoard curves beside metrics.jsonl."""
    progress: bool = True
    """Say how far the training is: on a terminal in one line, elsewhere every half minute."""
    report: bool = True
    """Draw figures and write report.html at the end."""

    def __post_init__(self) -> None:
        whole = dict.fromkeys(("checkpoint_every_steps", "checkpoint_min_seconds"), "[0, inf)")
        counts = ("max_epochs", "nodes", "accumulate", "log_every", "validate_every", "checkpoint_every_epochs",
                  "guard_every")  # fmt: skip
        check_ranges("engine", self, **whole, **dict.fromkeys(counts, "[1, inf)"), gradient_clip="(0, inf)")
        check_ranges("engine", self, seed="[0, inf)", profile_steps="[1, inf)")
        number = int(self.devices) if self.devices.isdecimal() else None
        if number is None and self.devices != "auto" and not re.fullmatch(r"(\d+,)+\d*", self.devices):
            raise ConfigurationError(
                f"engine.devices is {self.devices!r}; it must be auto, a number, or a list such as 0,2."
            )
        if number is not None and not 1 <= number <= _MOST_DEVICES:
            raise ConfigurationError(f"engine.devices is {number}; a node has from 1 to {_MOST_DEVICES}.")
        if self.resume and self.overwrite:
            raise ConfigurationError("engine.resume and engine.overwrite contradict each other; give one of them.")


@dataclass(frozen=True)
class Recipe(Generic[T]):
    """One kind of run: its configuration, its presets and how modules and data are built from it."""

    name: str
    """The word after ``matbackprop train``."""
    config_class: type[T]
    """The configuration's dataclass; it has a field ``engine``."""
    presets: Mapping[str, T]
    """``smoke``, ``small``, ``paper``, … → configuration."""
    build: Callable[[T], tuple[System, Data]]
    """Configuration → (system, data). Called with the seed set."""
    export: Callable[[RunFolder, Any, Any], None] = lambda run, system, data: None
    """Called at the end with the run folder and both, on the first process only: what others use of the run."""
    figures: Callable[[RunFolder, Any, Any], None] = lambda run, system, data: None
    """Called after it in the same way, where a report is wanted."""
    summary: str = ""
    """One line for ``--help``."""

    def preset(self, name: str) -> T:
        """Return a copy of a preset."""
        if name not in self.presets:
            raise ConfigurationError(
                f"recipe {self.name!r} has no preset {name!r}; choose one of {', '.join(self.presets)}."
            )
        return from_json(self.config_class, to_json(self.presets[name]))


# ---------------------------------------------------------------------------------------------------------------- JSON


def to_json(config: Any) -> Any:
    """Turn a configuration into dicts, lists and plain values that ``json.dump`` accepts.

    Example:
        >>> to_json(EngineConfig(run=Path("runs/a"), seed=3))["run"]
        'runs/a'
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_json(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(key): to_json(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_json(value) for value in config]
    if isinstance(config, Path):
        return config.as_posix()
    if isinstance(config, float) and not math.isfinite(config):
        return repr(config)
    if config is None or isinstance(config, (bool, int, float, str)):
        return config
    raise ConfigurationError(f"a configuration cannot hold a {type(config).__name__}: {config!r}.")


def from_json(kind: type[T], data: Any) -> T:
    """Build a configuration dataclass from what :func:`to_json` gave; absent fields keep their defaults.

    Raises:
        ConfigurationError: a field is unknown or has the wrong type; the message names it and the nearest known one.

    Example:
        >>> from_json(EngineConfig, {"seed": 3, "run": "runs/a"}).run
        PosixPath('runs/a')
    """
    return _build(kind, data, "")


def merge(config: T, overrides: Mapping[str, Any]) -> T:
    """Return ``config`` with ``overrides`` laid over it: nested tables or dotted names."""
    data = to_json(config)
    _lay_over(data, overrides)
    return from_json(type(config), data)


def _lay_over(fields: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    for key, value in overrides.items():
        *parents, last = str(key).split(".")
        place = fields
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ConfigurationError(f"the field {key!r} is given both as a value and as a table.")
        if isinstance(place.get(last), dict) and isinstance(value, Mapping):
            _lay_over(place[last], value)
        else:
            place[last] = value


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file of overrides; keys may be nested tables or dotted names."""
    path = Path(path)
    if path.suffix == ".json":
        return read_json(path, error=ConfigurationError)
    if path.suffix != ".toml":
        raise ConfigurationError(f"{path}: a configuration file ends with .toml or .json.")
    data = read_bytes(path, 1 << 20, ConfigurationError)
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is damaged: {str(error)[:200]}.") from error


def resolve(recipe: Recipe[T], preset: str, file: Path | None = None) -> T:
    """Return a preset with a file's fields laid over it."""
    config = recipe.preset(preset)
    if file is None:
        return config
    try:
        return merge(config, read_config_file(file))
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}" if str(file) in str(error) else f"{file}: {error}") from error


def differences(one: Any, two: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return dotted field → (value in one, value in two) for two JSON forms that differ.

    Example:
        >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
        {'a.b': (1, 3)}
    """
    if isinstance(one, dict) and isinstance(two, dict):
        differing: dict[str, tuple[Any, Any]] = {}
        for key in [*one, *(k for k in two if k not in one)]:
            differing |= differences(one.get(key), two.get(key), f"{prefix}{key}.")
        return differing
    return {} if one == two else {prefix.rstrip("."): (one, two)}


def _build(kind: Any, data: Any, where: str) -> Any:
    """Build a value of type ``kind`` from plain data; ``where`` is the dotted name for messages."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, data, where)
    if origin in (Union, types.UnionType):
        return _build_union(arguments, data, where)
    if origin is Literal:
        if data not in arguments:
            raise _wrong(where, data, f"one of {', '.join(map(repr, arguments))}")
        return data
    if origin in (list, tuple):
        if not isinstance(data, (list, tuple)):
            raise _wrong(where, data, "a list")
        if origin is list or arguments[-1] is Ellipsis:
            arguments = arguments[:1] * len(data)
        if len(arguments) != len(data):
            raise _wrong(where, data, f"a list of {len(arguments)} values")
        return origin(_build(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(arguments, data, strict=True)))
    return _build_plain(kind, data, where)


def _build_union(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in arguments:
        return None
    problems = []
    for kind in sorted((a for a in arguments if a is not type(None)), key=lambda a: a is str):
        try:
            return _build(kind, data, where)
        except ConfigurationError as error:
            problems.append(error)
    raise problems[0]


def _build_dataclass(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise _wrong(where or kind.__name__, data, "a table of fields")
    hints = typing.get_type_hints(kind)
    fields = {f.name for f in dataclasses.fields(kind)}
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(sorted(fields))}."
            raise ConfigurationError(f"unknown field {(where + '.' if where else '') + key!r}; {hint}")
    return kind(**{k: _build(hints[k], v, f"{where}.{k}".lstrip(".")) for k, v in data.items()})


_PLAIN: dict[Any, Any] = {bool: bool, int: int, float: (int, float, str), str: (int, str), Path: (str, Path)}
"""What values are built from: JSON has no "inf" and "nan", and a file may say ``devices = 8``."""


def _build_plain(kind: Any, data: Any, where: str) -> Any:
    if isinstance(data, _PLAIN[kind]) and isinstance(data, bool) == (kind is bool):
        with suppress(ValueError, OverflowError):
            return kind(data)
    raise _wrong(where, data, "a number" if kind is float else kind.__name__)


def _wrong(where: str, data: Any, needed: str) -> ConfigurationError:
    return ConfigurationError(f"{where} is {shorten(repr(data))}; it must be {needed}.")


# ----------------------------------------------------------------------------------------------- region classification


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
        check_ranges("data", self, **dict.fromkeys(("minimum_area", "margin"), "[0, inf)"))
        check_ranges("data", self, jitter="[0, 4096]", threads=_AT_ONCE)


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


_O2P_ENGINE = EngineConfig(max_epochs=12, precision="bf16-mixed", monitor="val/error", gradient_clip=100.0)


def _o2p_on(backbone: str, tap: str) -> O2PConfig:
    model = RegionModelConfig(
        head="o2p", backbone=backbone, taps=(tap,), reduce=128, feature_scale=0.1, vector_dropout=0.5
    )
    return O2PConfig(engine=_O2P_ENGINE, model=model, optimizer=OptimizerConfig(rate=0.01))


O2P_PRESETS = {
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
        engine=dataclasses.replace(_O2P_ENGINE, max_epochs=4),
        model=RegionModelConfig(head="o2p"),
        optimizer=OptimizerConfig(rate=0.001, backbone_factor=0.3),
    ),
    # DeepO2P-FC from ImageNet, the best row of the paper's table.
    "paper": O2PConfig(
        engine=_O2P_ENGINE, model=RegionModelConfig(head="o2p_fc"), optimizer=OptimizerConfig(rate=0.01)
    ),
    # First and second order on EfficientNet-Lite2, with the surroundings of the region: the classifier in the package.
    "lite2": O2PConfig(
        engine=dataclasses.replace(_O2P_ENGINE, max_epochs=6),
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
        engine=_O2P_ENGINE,
        model=RegionModelConfig(
            head="both", reduce=96, taps=("pool5", "relu2", "relu3", "relu4"), vector_scale=0.3, vector_dropout=0.8
        ),
        optimizer=OptimizerConfig(rate=0.01),
    ),
}


# ------------------------------------------------------------------------------------------------ deep normalized cuts


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
        check_ranges("data", self, made="[0, 100000]", workers=_AT_ONCE, threads=_AT_ONCE)
        check_ranges("data", self, scale="(0, 16]", jitter="[0, 1]")


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


def paper_config(variant: str, *, epochs: int = 4, zoom: float = 1.0) -> NCutsConfig:
    """The paper's recipe: J2, 20 channels, one image per batch, 1e-4 and ten times that for new layers.

    The paper does not name its optimiser, schedule and epochs: these were best in cross-validation on training images.
    """
    return NCutsConfig(
        engine=EngineConfig(max_epochs=epochs, log_every=20),
        model=NCutsModelConfig(variant=variant, zoom=zoom),  # type: ignore[arg-type]
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


def _ncuts_smoke() -> NCutsConfig:
    config = soft_config("alexnet-relu5", epochs=6)
    config.engine = dataclasses.replace(config.engine, precision="32", log_every=1)
    config.data = dataclasses.replace(config.data, made=24, batch_size=4, superpixels=80)
    config.model = dataclasses.replace(config.model, weights="none", hidden=16, channels=8)
    return config


def _hypercolumns_on(backbone: str, *taps: str, zoom: float = 1.0, **changes: float) -> NCutsConfig:
    config = soft_config("hypercolumns", epochs=15, **changes)  # type: ignore[arg-type]
    config.model = dataclasses.replace(config.model, backbone=backbone, taps=taps, zoom=zoom)
    return config


NCUTS_PRESETS = {
    "smoke": _ncuts_smoke(),
    "small": soft_config("alexnet-relu5", epochs=4),
    "paper": paper_config("vgg16-relu5"),
    **{f"paper-{name}": paper_config(name) for name in ("alexnet-relu5", "vgg16-relu4", "vgg16-relu5")},
    **{f"paper-{name}-x2": paper_config(name, zoom=2.0) for name in ("alexnet-relu5", "vgg16-relu5")},
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


# ------------------------------------------------------------------------------------------------------------ contours


@dataclass
class ContourDataConfig:
    """Images with human segmentations, and how crops of them are drawn."""

    root: Path | None = None
    """Folder in BSDS500's layout; by default BSDS500 under $MATBACKPROP_DATA."""
    made: int = 0
    """Number of training images to generate, colored and textured shapes, instead of reading ``root``."""
    cache: Path | None = None
    """Folder for generated images; by default $MATBACKPROP_CACHE, then ~/.cache/matbackprop."""
    split: Literal["tuning", "final"] = "tuning"
    """tuning: hold out every fifth training image for validation. final: train on all of them, validate on none."""
    fold: int = 0
    """Which fifth of the training images is held out, 0 to 4."""
    limit: int | None = None
    """Use at most this many images of each part."""
    batch_size: int = 8
    """Crops in a training batch, on each device."""
    crop: int = 256
    """Side of a crop in pixels."""
    scale: tuple[float, float] = (0.75, 1.5)
    """Range of the random size of the image that a crop is cut from."""
    jitter: float = 0.2
    """Standard deviation of the random gain of each color."""
    threads: int = 1
    """Threads that prepare batches."""

    def __post_init__(self) -> None:
        check_ranges("data", self, made="[0, 100000]", fold="[0, 4]", limit="[1, inf)", batch_size="[1, inf)")
        check_ranges("data", self, crop="32 to 4096", scale="(0, 16]", jitter="[0, 1]", threads=_AT_ONCE)


@dataclass
class ContourTrainConfig:
    """AdamW with one cycle."""

    rate: float = 1e-3
    """Learning rate of the new layers."""
    backbone_rate: float = 1e-4
    """Learning rate of the backbone."""
    freeze: str | None = None
    """Map of the backbone up to which its layers stay as they start."""
    decay: float = 1e-2
    """Weight decay."""
    side_weight: float = 0.4
    """Weight of the loss of each level beside that of the output."""
    average: float = 0.995
    """Decay of the moving average of the weights, which is the result."""
    average_from: int = 50
    """Step at which the average starts."""

    def __post_init__(self) -> None:
        check_ranges("train", self, rate="(0, 1e6]", backbone_rate="[0, 1e6]", decay="[0, 1e6]")
        check_ranges("train", self, side_weight="[0, inf)", average="[0, 1)", average_from="[0, inf)")


@dataclass
class ContoursConfig:
    """Configuration of the recipe ``contours``."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    data: ContourDataConfig = field(default_factory=ContourDataConfig)
    model: ContourModelConfig = field(default_factory=ContourModelConfig)
    train: ContourTrainConfig = field(default_factory=ContourTrainConfig)


_CONTOURS_ENGINE = EngineConfig(max_epochs=40, precision="bf16-mixed", log_every=5, gradient_clip=5.0)

CONTOURS_PRESETS = {
    "smoke": ContoursConfig(
        engine=dataclasses.replace(
            _CONTOURS_ENGINE, max_epochs=4, precision="32", log_every=1, accelerator="cpu", devices="1"
        ),
        data=ContourDataConfig(made=24, batch_size=4, crop=64),
        model=ContourModelConfig("alexnet", ("relu1", "relu2", "relu5"), "none", zoom=1.0, width=12, stem=6),
    ),
    "tiny-vit": ContoursConfig(engine=_CONTOURS_ENGINE),
    "efficientnet-lite2": ContoursConfig(
        engine=_CONTOURS_ENGINE,
        model=ContourModelConfig(
            "efficientnet-lite2", ("stage1", "stage2", "stage3", "stage5", "stage7"), zoom=1.0, width=32, stem=16
        ),
    ),
}


# ------------------------------------------------------------------------------------------------------------- recipes


def _recipe(name: str, config_class: Any, presets: Mapping[str, Any], summary: str) -> Recipe[Any]:
    """A recipe whose ``build``, ``export`` and ``figures`` are imported from the module of its name when called."""

    def from_module(function: str) -> Callable[..., Any]:
        return lambda *arguments: getattr(importlib.import_module(f"matbackprop.vision.training.{name}"), function)(
            *arguments
        )

    parts = {function: from_module(function) for function in ("build", "export", "figures")}
    return Recipe(name, config_class, presets, summary=summary, **parts)


RECIPES: dict[str, Recipe[Any]] = {
    "o2p": _recipe("o2p", O2PConfig, O2P_PRESETS, "classify COCO's regions with second-order pooling (DeepO2P)"),
    "ncuts": _recipe("ncuts", NCutsConfig, NCUTS_PRESETS, "segment images by learned normalized cuts (DeepNCuts)"),
    "contours": _recipe("contours", ContoursConfig, CONTOURS_PRESETS, "find the contours of photographs (ContourNet)"),
}
"""The recipes that ``matbackprop train`` knows."""


def get_recipe(name: str) -> Recipe[Any]:
    """Return a recipe by name."""
    if name not in RECIPES:
        raise ConfigurationError(f"there is no recipe {name!r}; choose one of {', '.join(RECIPES)}.")
    return RECIPES[name]
