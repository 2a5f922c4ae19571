"""What the decomposition layers do where vectors are not determined, and how they say so without waiting for a GPU.

At a repeated eigenvalue or singular value any rotation of its vectors is as good as another: the gauge. A loss that
sees the gauge has no gradient there. One that does not has a gradient, but the gradients of values and vectors do not
determine it: with c = f(λ₁) = f(λ₂) the losses Σ c uᵢᵀGuᵢ and Σ f(λᵢ) uᵢᵀGuᵢ have the same ones where the uᵢᵀGuᵢ
vanish, and gradients that differ by f'(λ) u₁ᵀGu₂. So a tied pair raises as soon as a gradient reaches one of its
vectors or values, unless the policy says otherwise.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from matbackprop.checks import check_option, values_checkable
from matbackprop.errors import ConfigurationError, GaugeWarning, TieError
from matbackprop.numerics import half_of_the_digits, tie_tolerance

__all__ = ["TiePolicy", "Ties", "check_ties", "raise_deferred", "tie_policy"]

Ties = Literal["raise", "drop", "broaden"]


@dataclass(frozen=True)
class TiePolicy:
    """How a decomposition layer treats tied pairs.

    Args:
        name: the operator, for messages.
        ties: ``"raise"``, ``"drop"`` or ``"broaden"``.
        tolerance: values closer than this share of the largest one are tied.
        broadening: η, as a share of the largest value: 1/x becomes x/(x² + η²).
        gauge_tolerance: share of the gradient that may be antisymmetric on a tied pair before ``"drop"`` and
            ``"broaden"`` count it as gauge-dependent and warn.
        check: False never looks at values, True looks at once, None at once on the CPU and later on other devices.
        phase: whether the vectors are complex, so that their phases are free too.
    """

    name: str
    ties: Ties
    tolerance: float
    broadening: float
    gauge_tolerance: float
    check: bool | None
    phase: bool = False

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

    def apart(self, values: Tensor) -> bool:
        """Whether no two of sorted values ``(*batch, n)`` are tied; looked at on the CPU only, where it costs little.

        Then there is nothing to leave out and nothing to report, which takes longer than the formula.
        """
        if self.ties == "broaden" or not values.is_cpu or values.numel() == 0 or not values_checkable(values):
            return False
        values = values.detach()
        gaps, scale = values.diff(dim=-1).abs(), values.abs().amax(-1, keepdim=True)
        return bool((gaps > self.tolerance * scale).all())

    def visible(self, used: Tensor, skew: Tensor, size: Tensor) -> Tensor:
        """Which pairs of vectors matter to a loss: for ``"raise"`` those that it uses, else those whose gauge it sees.

        ``used`` marks vectors ``(*batch, n)``; ``skew`` ``(*batch, n, n)`` is the antisymmetric part of their gradient
        and ``size`` what it is measured by.
        """
        if self.ties == "raise":
            return used.unsqueeze(-1) | used.unsqueeze(-2)
        return self.sees_gauge(skew, size)

    def sees_gauge(self, skew: Tensor, size: Tensor) -> Tensor:
        """Where the part of a gradient that should vanish does not."""
        return skew.abs() > self.gauge_tolerance * size

    def report(self, *ties: tuple[Tensor, Tensor]) -> None:
        """Complain where an entry is both tied and visible, given as pairs of masks; first what a GPU has found."""
        if torch.compiler.is_compiling():
            return
        if self.check is False or not all(values_checkable(mask) for pair in ties for mask in pair):
            raise_deferred()
            return
        self.report_flag(torch.stack([(tied & visible).any() for tied, visible in ties]).any())

    def report_flag(self, flag: Tensor | None) -> None:
        """Complain if ``flag`` is true, which a GPU may tell later; first what one has told since."""
        raise_deferred()
        if flag is not None:
            _notify(flag, self)


def check_ties(ties: Ties, tie_tol: float | None, broadening: float) -> None:
    """Raise unless these are options of a decomposition layer."""
    check_option(ties, get_args(Ties), "ties")
    if tie_tol is not None and not tie_tol >= 0:
        raise ConfigurationError(f"tie_tol must not be negative, got {tie_tol}.")
    if not broadening > 0:
        raise ConfigurationError(f"broadening must be positive, got {broadening}.")


def tie_policy(
    name: str, ties: Ties, tie_tol: float | None, broadening: float, check: bool | None, a: Tensor, dtype: torch.dtype
) -> TiePolicy:
    """Resolve the arguments of a decomposition layer for an input ``a`` computed in ``dtype``."""
    check_ties(ties, tie_tol, broadening)
    if tie_tol is None:
        tie_tol = tie_tolerance(a.dtype, dtype, max(a.shape[-2:]))
    return TiePolicy(name, ties, tie_tol, broadening, half_of_the_digits(a.dtype), check, a.is_complex())


# Flags on their way from a device: (event, flag in pinned memory, policy). Backward passes run in threads of their own.
_deferred: deque[tuple[Any, Tensor, TiePolicy]] = deque()
_free: dict[torch.device, list[tuple[Any, Tensor]]] = {}  # events and flags that arrived and can travel again
_lock = threading.Lock()
_MOST_DEFERRED = 256  # the oldest flag is waited for when there are more: it arrived long ago


def _notify(flagged: Tensor, policy: TiePolicy) -> None:
    """Raise or warn when ``flagged`` holds; on a GPU only after the flag has arrived by itself."""
    if policy.check or flagged.device.type == "cpu":
        if bool(flagged):
            _complain(policy)
    elif flagged.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        with _lock:
            free = _free.setdefault(flagged.device, [])
            slot = free.pop() if free else None
        event, flag = slot or (torch.cuda.Event(), torch.empty((), dtype=torch.bool, pin_memory=True))
        flag.copy_(flagged, non_blocking=True)
        event.record(torch.cuda.current_stream(flagged.device))
        _defer(event, flag, policy)


def _defer(event: Any, flag: Tensor, policy: TiePolicy) -> None:
    with _lock:
        _deferred.append((event, flag, policy))
        oldest = _deferred.popleft() if len(_deferred) > _MOST_DEFERRED else None
    if oldest is not None and _read(*oldest[:2]):
        _complain(oldest[2])


def _read(event: Any, flag: Tensor) -> bool:
    """What a flag says, waited for if need be; its place is free again."""
    event.synchronize()
    value = bool(flag)
    with _lock:
        if (device := getattr(event, "device", None)) in _free:
            _free[device].append((event, flag))
    return value


def _complain(policy: TiePolicy) -> None:
    where = f"a repeated (or zero) value, closer than {policy.tolerance:.2g} of the largest one"
    if policy.phase:
        where += ", or depends on the phase of a complex vector"
    if policy.ties == "raise":
        raise TieError(
            f"the loss of {policy.name} uses vectors of {where}. It has no gradient if it depends on the choice of "
            f"vectors, and if it does not, the gradients of values and vectors do not determine it. Use "
            f"matrix_function, projector or spectral_projector, which are exact at ties, or pass "
            f'ties="drop" to leave such pairs out or ties="broaden" for a smooth approximation.'
        )
    warnings.warn(
        f"the loss of {policy.name} depends on the choice of vectors inside {where}; the policy "
        f'ties="{policy.ties}" gave a finite gradient that is not exact.',
        GaugeWarning,
        stacklevel=3,
    )


def raise_deferred(*, wait: bool = False) -> None:
    """Raise or warn about ties that a GPU has reported since.

    The decomposition layers call this without waiting each time they run, so that a complaint arrives a few calls
    late and the device is never waited for.

    Args:
        wait: wait for flags that are still on their way, for example at the end of an epoch.

    Raises:
        TieError: a loss used a tied pair and the policy was to raise.

    Example:
        >>> from matbackprop.functional import raise_deferred
        >>> raise_deferred(wait=True)
    """
    if torch.compiler.is_compiling():  # a compiled graph holds no locks, and defers nothing
        return
    while (entry := _arrived(wait)) is not None:
        event, flag, policy = entry
        if _read(event, flag):
            _complain(policy)


def _arrived(wait: bool) -> tuple[Any, Tensor, TiePolicy] | None:
    """Take the first flag that has arrived, or with ``wait`` the first one, out of the queue."""
    with _lock:
        index = next((i for i, (event, *_) in enumerate(_deferred) if wait or event.query()), None)
        if index is None:
            return None
        entry = _deferred[index]
        del _deferred[index]
    return entry
