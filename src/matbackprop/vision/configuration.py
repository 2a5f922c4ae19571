"""Configuration dataclasses that validate their fields, and conversion from and to JSON and TOML."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from matbackprop.errors import ConfigurationError
from matbackprop.vision.files import read_bytes, read_json, shorten

T = TypeVar("T")

_MOST = 2**53  # largest integer that all JSON readers represent exactly
Count = Annotated[int, Field(ge=1, le=_MOST)]
Natural = Annotated[int, Field(ge=0, le=_MOST)]
Threads = Annotated[int, Field(ge=0, le=256)]
#: Number of channels of a layer. The bound prevents excessive allocation by malformed files.
Width = Annotated[int, Field(ge=1, le=1 << 16)]
Pixels = Annotated[int, Field(ge=1, le=4096)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(ge=0, le=1e6)]
PositiveRate = Annotated[float, Field(gt=0, le=1e6)]
Background = Literal["keep", "mask"]  #: Treatment of the pixels outside a region.

if TYPE_CHECKING:
    from dataclasses import dataclass as configuration
else:

    def configuration(kind: type[T]) -> type[T]:
        """Convert a class to a dataclass that validates its fields and raises ConfigurationError."""
        options = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)
        kind = pydantic.dataclasses.dataclass(kind, config=options)
        initialize = kind.__init__

        @functools.wraps(initialize)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                initialize(self, *args, **kwargs)
            except ValidationError as error:
                raise _problem(kind, error) from None

        kind.__init__ = __init__
        return kind


def _problem(kind: Any, error: ValidationError) -> ConfigurationError:
    first = error.errors()[0]
    *parents, last = first["loc"] or ("",)
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":
        return ConfigurationError(str(first["ctx"]["error"]))
    if first["type"] != "unexpected_keyword_argument":
        return ConfigurationError(f"{where} is {shorten(repr(first['input']))}. {first['msg']}.")
    for name in parents:
        kind = typing.get_type_hints(kind).get(str(name)) if dataclasses.is_dataclass(kind) else None
    fields = sorted(f.name for f in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else []
    return ConfigurationError(f"Unknown field {where!r}. {suggest(str(last), fields, 'Fields')}")


def suggest(name: str, known: typing.Iterable[str], what: str) -> str:
    """Return a hint for an unknown name.

    Example:
        >>> suggest("rat", ["rate", "decay"], "Fields"), suggest("x", ["rate", "decay"], "Fields")
        ("Did you mean 'rate'?", 'Fields: rate, decay.')
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"Did you mean {near[0]!r}?" if near else f"{what}: {', '.join(known)}."


def to_json(config: Any) -> Any:
    """Convert a configuration to dicts, lists and plain values.

    Example:
        >>> to_json({"run": Path("runs/a"), "taps": ("a",)})
        {'run': 'runs/a', 'taps': ['a']}
    """
    try:
        return to_jsonable_python(config)
    except PydanticSerializationError as error:
        raise ConfigurationError(f"A configuration cannot contain this value: {error}.") from None


def from_json(kind: type[T], data: Any) -> T:
    """Build a configuration from the result of :func:`to_json`. Missing fields keep their defaults."""
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        raise _problem(kind, error) from None


def merge(config: T, overrides: Mapping[str, Any]) -> T:
    """Return ``config`` with ``overrides`` applied. Their keys are nested tables or dotted names."""
    data = to_json(config)
    _override(data, overrides)
    return from_json(type(config), data)


def _override(fields: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    for key, value in overrides.items():
        first, _, rest = str(key).partition(".")
        if rest:
            value = {rest: value}
        if isinstance(value, Mapping) and isinstance(fields.setdefault(first, {}), dict):
            _override(fields[first], value)
        else:
            fields[first] = to_json(value)


def read_config_file(path: Path) -> dict[str, Any]:
    """Read the overrides for :func:`merge` from a TOML or JSON file."""
    path = Path(path)
    if path.suffix == ".json":
        return read_json(path, error=ConfigurationError)
    if path.suffix != ".toml":
        raise ConfigurationError(f"{path} is not a configuration file. Use a name that ends with .toml or .json.")
    data = read_bytes(path, 1 << 20, ConfigurationError)
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is damaged: {str(error)[:200]}. Correct the file.") from error


def differences(one: Any, two: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return dotted field → (value in ``one``, value in ``two``) for the differences between two JSON values.

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
