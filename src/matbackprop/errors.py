"""Errors and warnings. Each message states the problem and a fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "DataError",
    "DeviceError",
    "DomainError",
    "DtypeError",
    "GaugeWarning",
    "LabelError",
    "MissingExtraError",
    "NonFiniteError",
    "NumericalError",
    "NumericalWarning",
    "OrderError",
    "ShapeError",
    "SolverError",
    "SymmetryError",
    "TieError",
    "WeightsError",
    "WorkerError",
]


class ShapeError(ValueError):
    """The shape of an argument does not fit the operator."""


class DtypeError(TypeError):
    """The dtype of an argument does not fit the operator, for example integer features."""


class DeviceError(RuntimeError):
    """Arguments are on different devices."""


class NumericalError(ValueError):
    """The values of an argument make the result undefined."""


class NonFiniteError(NumericalError, RuntimeError):
    """An argument holds NaN or Inf. Also a RuntimeError, as in torch."""


class SymmetryError(NumericalError):
    """A matrix that has to be symmetric is not."""


class DomainError(NumericalError):
    """An eigenvalue or a parameter is outside the domain of the function."""


class TieError(NumericalError):
    """Vectors or spaces are not determined at a repeated value."""


class OrderError(RuntimeError):
    """A derivative of higher order than the operator provides was requested."""


class LabelError(ValueError):
    """Labels have the wrong length, dtype, device or range, or label no element at all."""


class SolverError(RuntimeError):
    """An eigensolver or linear solver failed or did not converge."""


class DataError(ValueError):
    """A data set or a file of it is missing, damaged or inconsistent."""


class WeightsError(ValueError):
    """A file of weights is missing, damaged or belongs to another architecture."""


class CheckpointError(ValueError):
    """A checkpoint is damaged or belongs to another configuration."""


class ConfigurationError(ValueError):
    """A configuration has an unknown or contradictory field."""


class WorkerError(RuntimeError):
    """A worker process died before its work was done."""


class MissingExtraError(ImportError):
    """An optional dependency is not installed."""


@contextmanager
def needs(reason: str, install: str) -> Iterator[None]:
    """Name the package to install if an import inside fails; ``install`` are arguments of ``pip install``."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(f"{reason}. Install it with: pip install {install}") from error


class NumericalWarning(UserWarning):
    """A result was computed by a documented fallback."""


class GaugeWarning(NumericalWarning):
    """A loss depends on the arbitrary sign or rotation of singular or eigenvectors."""


class Problem(NamedTuple):
    """A bad file of a data set, or a bad entry of one: readers collect it, ``data check`` prints it."""

    path: Path
    reason: str  # the problem, and the entry that has it
    kind: str = "bad file"  # a label by which problems are counted

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def first_problems(problems: Sequence[Problem], count: int = 5) -> str:
    """The first few problems in one line, and how many more there are."""
    more = f"; and {len(problems) - count} more" if len(problems) > count else ""
    return "; ".join(map(str, problems[:count])) + more
