"""Configuration of runs: dataclasses, presets, and the way from and to JSON, TOML and the command line.

A recipe's configuration is a dataclass with a field ``engine`` (:class:`EngineConfig`) and nested dataclasses of its
own. Presets are instances of it. :func:`resolve` lays a file over a preset, the command line lays its options over
both, and the result is written to the run folder by :func:`to_json`, from which :func:`from_json` builds it again.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Union

from matbackprop.errors import ConfigurationError
from matbackprop.files import read_bytes, read_json, shorten

if TYPE_CHECKING:
    from matbackprop.training.engine import Data, System
    from matbackprop.training.run_folder import RunFolder

T = TypeVar("T")

RECIPES = {"o2p": "matbackprop.training.o2p_config", "ncuts": "matbackprop.training.ncuts_config"}
"""The recipes that ``matbackprop train`` knows: name → module with ``RECIPE``. Imported only when asked for."""

_MOST_DEVICES = 64  # per node; on a CPU each is a process


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
        whole = dict.fromkeys(("max_epochs", "checkpoint_every_steps", "checkpoint_min_seconds"), "[0, inf)")
        counts = ("nodes", "accumulate", "log_every", "validate_every", "checkpoint_every_epochs", "guard_every")
        check_ranges("engine", self, **whole, **dict.fromkeys(counts, "[1, inf)"), gradient_clip="(0, inf)")
        check_ranges("engine", self, seed=f"[0, {2**53}]", profile_steps="[1, inf)")
        number = int(self.devices) if self.devices.isdecimal() else None
        if number is None and self.devices != "auto" and not re.fullmatch(r"(\d+,)+\d*", self.devices):
            raise ConfigurationError(
                f"engine.devices is {self.devices!r}; it must be auto, a number, or a list such as 0,2."
            )
        if number is not None and not 1 <= number <= _MOST_DEVICES:
            raise ConfigurationError(f"engine.devices is {number}; a node has from 1 to {_MOST_DEVICES}.")
        if self.resume and self.overwrite:
            raise ConfigurationError("engine.resume and engine.overwrite contradict each other; give one of them.")


def check_ranges(where: str, config: Any, **ranges: str) -> None:
    """Raise unless numbers lie in their intervals; None passes, NaN does not, and of a tuple all must.

    Args:
        where: name of the section, for the message.
        config: its dataclass.
        ranges: field → interval, such as ``"[0, 1)"`` or ``"(0, inf)"``.

    Example:
        >>> check_ranges("engine", EngineConfig(), log_every="[1, 10]")
        Traceback (most recent call last):
        matbackprop.errors.ConfigurationError: engine.log_every is 50; it must lie in [1, 10].
    """
    for name, interval in ranges.items():
        value = getattr(config, name)
        low, high = (float(end) for end in interval[1:-1].split(","))
        for number in value if isinstance(value, (tuple, list)) else [] if value is None else [value]:
            above = number > low or (interval[0] == "[" and number == low)
            below = number < high or (interval[-1] == "]" and number == high)
            if not (above and below):
                raise ConfigurationError(f"{where}.{name} is {value}; it must lie in {interval}.")


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


def lazily(module: str, name: str) -> Callable[..., Any]:
    """A function that is imported when it is called, so that a recipe can be described without what it runs.

    Example:
        >>> lazily("math", "hypot")(3.0, 4.0)
        5.0
    """

    def call(*arguments: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments)

    return call


def get_recipe(name: str) -> Recipe[Any]:
    """Import and return a recipe by name."""
    if name not in RECIPES:
        raise ConfigurationError(f"there is no recipe {name!r}; choose one of {', '.join(RECIPES)}.")
    return importlib.import_module(RECIPES[name]).RECIPE


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
            raise ConfigurationError(
                f"{where} is {shorten(repr(data))}; it must be one of {', '.join(map(repr, arguments))}."
            )
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


def _build_plain(kind: Any, data: Any, where: str) -> Any:
    if kind is Path and isinstance(data, str):
        return Path(data)
    if kind is float and isinstance(data, str):  # "inf" and "nan", which JSON does not have
        try:
            return float(data)
        except ValueError:
            raise _wrong(where, data, "a number") from None
    if isinstance(data, bool) and kind is not bool:
        raise _wrong(where, data, kind.__name__)
    if kind is float and isinstance(data, (int, float)):
        return float(data)
    if kind is str and isinstance(data, int):
        return str(data)  # devices = 8 in a file
    if kind is not float and isinstance(data, kind):
        return data
    raise _wrong(where, data, kind.__name__)


def _wrong(where: str, data: Any, needed: str) -> ConfigurationError:
    return ConfigurationError(f"{where} is {shorten(repr(data))}; it must be {needed}.")
