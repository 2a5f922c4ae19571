"""Paired bootstrap confidence intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from matbackprop.errors import DomainError, NonFiniteError, ShapeError


class PairedInterval(NamedTuple):
    """Mean difference of paired scores with its bootstrap confidence interval.

    Attributes:
        difference: mean of first − second.
        low, high: bounds of the interval.
        standard_error: standard error of the mean difference.
        confidence: confidence level of the interval.
        pairs: number of paired scores.
    """

    difference: float
    low: float
    high: float
    standard_error: float
    confidence: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.difference:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def paired_bootstrap(
    first: ArrayLike | Sequence[float],
    second: ArrayLike | Sequence[float],
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> PairedInterval:
    """Compute a bootstrap confidence interval for the mean difference of two methods on the same images.

    Args:
        first: scores ``(n,)`` of the first method, one per image.
        second: scores ``(n,)`` of the second method, in the same order.
        confidence: confidence level of the interval (percentile method).
        seed: seed of the resampling.

    Returns:
        Mean difference first − second, its interval and standard error.

    Raises:
        ShapeError: the scores are not two vectors of one length ≥ 2.
        NonFiniteError: a score is NaN or infinite.
        DomainError: ``confidence`` is outside (0, 1).

    Example:
        >>> interval = paired_bootstrap([0.7, 0.8, 0.9, 0.75], [0.6, 0.72, 0.83, 0.7])
        >>> round(interval.difference, 3), interval.low > 0
        (0.075, True)

    Reference: Efron, Tibshirani, "An introduction to the bootstrap", 1993, chapter 13.
    """
    a, b = (np.asarray(scores, dtype=np.float64) for scores in (first, second))
    if a.ndim != 1 or a.shape != b.shape or a.size < 2:
        raise ShapeError(f"Paired scores have shapes {a.shape} and {b.shape}. Pass two vectors of one length ≥ 2.")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise NonFiniteError("A paired score is NaN or infinite. Leave the image out of both methods.")
    if not 0 < confidence < 1:
        raise DomainError(f"confidence must be in (0, 1), got {confidence}.")
    difference = a - b
    generator = np.random.default_rng(seed)
    # In blocks, to bound memory.
    means = np.concatenate([difference[generator.integers(0, a.size, (1000, a.size))].mean(1) for _ in range(10)])
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    error = float(difference.std(ddof=1) / np.sqrt(a.size))
    return PairedInterval(float(difference.mean()), float(low), float(high), error, confidence, a.size)
