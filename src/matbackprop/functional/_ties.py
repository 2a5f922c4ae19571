"""What the decomposition layers do where vectors are not determined, and how they say so without waiting for a GPU.

At a repeated eigenvalue or singular value any rotation of its vectors is as good as another: the gauge. A loss that
does not see the gauge has a gradient whose antisymmetric part vanishes on the tied pair; a loss that does see it has
no gradient there.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from matbackprop.errors import ConfigurationError, GaugeWarning, TieError
from matbackprop.numerics import values_checkable

__all__ = ["TiePolicy", "Ties", "raise_deferred", "tie_policy"]

Ties = Literal["raise", "drop", "broaden"]


@dataclass(frozen=True)
class TiePolicy:
    """How a decomposition layer treats tied pairs.

    Args:
        name: the operator, for messages.
        ties: ``"raise"``, ``"drop"`` or ``"broaden"``.
        tolerance: values closer than this share of the largest one are tied.
        broadening: η, as a share of the largest value: 1/x becomes x/(x² + η²).
        gauge_tolerance: share of the gradient that may be antisymmetric on a tied pair before it counts as
            gauge-dependent.
        check: False never looks at values, True looks at once, None at once on the CPU and later on other devices.
    """

    name: str
    ties: Ties
    tolerance: float
    broadening: float
    gauge_tolerance: float
    check: bool | None

    def tied(self, x: Tensor, scale: Tensor) -> Tensor:
        """Where a gap x is zero as far as the precision tells; ``scale`` broadcasts against x."""
        return x.abs() <= self.tolerance * scale

    def invert(self, x: Tensor, scale: Tensor) -> Tensor:
        """1/x by the policy: 0 for tied pairs, or broadened."""
        if self.ties == "broaden":
            width = self.broadening * scale
            square = x * x + width * width
            return x / torch.where(square == 0, 1, square)
        tied = self.tied(x, scale)
        return torch.where(tied, 0, 1 / torch.where(tied, 1, x))

    def report(self, *parts: tuple[Tensor, Tensor, Tensor | float]) -> None:
        """Complain when a part of a gradient that the gauge should not see is there.

        Each part is (mask of tied entries, the entries, the size they are measured by).
        """
        if self.check is False or not parts or not all(values_checkable(entry) for _, entry, _ in parts):
            return
        found = torch.stack(
            [(mask & (entry.abs() > self.gauge_tolerance * size)).any() for mask, entry, size in parts]
        ).any()
        _notify(found.detach(), self)


def tie_policy(
    name: str, ties: str, tie_tol: float | None, broadening: float, check: bool | None, a: Tensor, dtype: torch.dtype
) -> TiePolicy:
    """Resolve the arguments of a decomposition layer for an input ``a`` computed in ``dtype``."""
    if ties not in ("raise", "drop", "broaden"):
        raise ConfigurationError(f'ties must be "raise", "drop" or "broaden", got {ties!r}.')
    if tie_tol is not None and not tie_tol >= 0:
        raise ConfigurationError(f"tie_tol must not be negative, got {tie_tol}.")
    if not broadening > 0:
        raise ConfigurationError(f"broadening must be positive, got {broadening}.")
    carried = torch.finfo(a.dtype).eps
    if tie_tol is None:
        tie_tol = max(carried, max(a.shape[-2:]) * torch.finfo(dtype).eps)
    return TiePolicy(name, ties, tie_tol, broadening, carried**0.5, check)  # type: ignore[arg-type]


# Flags on their way from a device: (event, flag in pinned memory, policy). Backward passes run in threads of their own.
_deferred: deque[tuple[Any, Tensor, TiePolicy]] = deque()
_lock = threading.Lock()
_MOST_DEFERRED = 256  # the oldest flag is waited for when there are more: it arrived long ago


def _notify(found: Tensor, policy: TiePolicy) -> None:
    """Raise or warn when ``found`` holds; on a GPU only after the flag has arrived by itself."""
    if policy.check or found.device.type == "cpu":
        if bool(found):
            _complain(policy)
    elif found.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        flag.copy_(found, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        _defer(event, flag, policy)


def _defer(event: Any, flag: Tensor, policy: TiePolicy) -> None:
    with _lock:
        _deferred.append((event, flag, policy))
        full = len(_deferred) > _MOST_DEFERRED
        event, flag, policy = _deferred.popleft() if full else (event, flag, policy)
    if full:
        event.synchronize()
        if bool(flag):
            _complain(policy)


def _complain(policy: TiePolicy) -> None:
    what = (
        f"the loss of {policy.name} depends on the choice of vectors inside a repeated (or zero) value, closer than "
        f"{policy.tolerance:.2g} of the largest one; its gradient is not defined there."
    )
    if policy.ties == "raise":
        raise TieError(
            f'{what} Pass ties="drop" to leave such pairs out, ties="broaden" for a smooth approximation, or use '
            f"matrix_function, whose gradient is exact at ties."
        )
    warnings.warn(
        f'{what} The policy ties="{policy.ties}" gave a finite gradient that is not exact.', GaugeWarning, stacklevel=3
    )


def raise_deferred(*, wait: bool = False) -> None:
    """Raise or warn about gauge-dependent losses that a GPU has reported since.

    The decomposition layers call this without waiting each time they run, so that a complaint arrives a few calls
    late and the device is never waited for.

    Args:
        wait: wait for flags that are still on their way, for example at the end of an epoch.

    Raises:
        TieError: a loss depended on the gauge and the policy was to raise.

    Example:
        >>> from matbackprop.functional import raise_deferred
        >>> raise_deferred(wait=True)
    """
    if torch.compiler.is_compiling():  # a compiled graph holds no locks, and defers nothing
        return
    while (entry := _arrived(wait)) is not None:
        flag, policy = entry
        if bool(flag):
            _complain(policy)


def _arrived(wait: bool) -> tuple[Tensor, TiePolicy] | None:
    """Take the first flag that has arrived, or with ``wait`` the first one, out of the queue."""
    with _lock:
        index = next((i for i, (event, *_) in enumerate(_deferred) if wait or event.query()), None)
        if index is None:
            return None
        event, flag, policy = _deferred[index]
        del _deferred[index]
    event.synchronize()
    return flag, policy
