"""Errors and warnings. Each message states the problem and a fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class ShapeError(ValueError):
    """An argument has an invalid shape."""


class DtypeError(TypeError):
    """An argument has an invalid dtype, for example integer features."""


class DeviceError(RuntimeError):
    """Arguments are on different devices."""


class NumericalError(ValueError):
    """The result is undefined for the values of an argument."""


class NonFiniteError(NumericalError, RuntimeError):
    """An argument contains NaN or Inf. Also a RuntimeError, as in torch."""


class SymmetryError(NumericalError):
    """A matrix is not symmetric or not Hermitian."""


class DomainError(NumericalError):
    """An eigenvalue or a parameter is outside the domain of the function."""


class TieError(NumericalError):
    """Vectors or subspaces are not unique at a repeated eigenvalue or singular value."""


class OrderError(RuntimeError):
    """The requested order of differentiation is not supported."""


class LabelError(ValueError):
    """Labels have an invalid shape, dtype, device or range, or all are ignored."""


class SolverError(RuntimeError):
    """An eigensolver or linear solver failed or did not converge."""


class DataError(ValueError):
    """A data set or one of its files is missing, corrupted or inconsistent."""


class WeightsError(ValueError):
    """A weights file is missing, corrupted or belongs to another architecture."""


class CheckpointError(ValueError):
    """A checkpoint is corrupted or belongs to another configuration."""


class ConfigurationError(ValueError):
    """An option is unknown, invalid or in conflict with another."""


class WorkerError(RuntimeError):
    """A worker process terminated unexpectedly."""


class MissingExtraError(ImportError):
    """An optional dependency is not installed."""


@contextmanager
def needs(reason: str, install: str) -> Iterator[None]:
    """Raise MissingExtraError if an import fails in this context; ``install`` are arguments of ``pip install``."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(f"{reason}. Install it with: pip install {install}") from error


class NumericalWarning(UserWarning):
    """A result was computed by a documented fallback."""


class GaugeWarning(NumericalWarning):
    """A loss depends on the arbitrary sign or rotation of eigenvectors or singular vectors."""


class Problem(NamedTuple):
    """An invalid file or entry of a data set, as reported by ``data check``."""

    path: Path
    reason: str  # the problem, and the entry that has it
    kind: str = "bad file"  # a label by which problems are counted

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def first_problems(problems: Sequence[Problem], count: int = 5) -> str:
    """Return the first problems and the number of others in one line."""
    more = f"; and {len(problems) - count} more" if len(problems) > count else ""
    return "; ".join(map(str, problems[:count])) + more


__all__ = [name for name, value in globals().items() if isinstance(value, type) and issubclass(value, Exception)]
