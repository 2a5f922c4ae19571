"""Treatment of repeated eigenvalues and singular values in the gradients of their vectors.

The vectors of a repeated value are unique up to a rotation, the gauge. A loss that depends on the gauge has no gradient
there. The gradient of any other loss is not determined by the gradients of values and vectors. For example, with
c = f(λ₁) = f(λ₂), the losses Σ c uᵢᵀGuᵢ and Σ f(λᵢ) uᵢᵀGuᵢ have equal gradients of values and vectors if all uᵢᵀGuᵢ
vanish, but their gradients of A differ by f'(λ) u₁ᵀGu₂. Therefore the default policy raises an error if a gradient
reaches a vector or value of a tied pair. If values cannot be checked, the gradient is NaN instead.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from matbackprop._torch import values_checkable
from matbackprop.checks import check_option, nan_where, wants_check
from matbackprop.errors import ConfigurationError, GaugeWarning, TieError
from matbackprop.numerics import half_of_the_digits
from matbackprop.refinement import noise_floor

Ties = Literal["raise", "drop", "broaden"]


def largest_entry(a: Tensor) -> Tensor:
    """Return the largest absolute value of each matrix ``(*batch, 1, 1)``."""
    size = a.abs()
    return size.amax((-2, -1), keepdim=True) if a.shape[-2] and a.shape[-1] else size.sum((-2, -1), keepdim=True)


def exceeds_rounding(variation: Tensor, size: Tensor) -> Tensor:
    """Return which entries ``(*batch, m, n)`` are not rounding errors of products with a direction of this size."""
    return variation.abs() > max(variation.shape[-2:]) * torch.finfo(variation.dtype).eps * size


def gaps_of(values: Tensor) -> Tensor:
    """λⱼ − λᵢ, the K̃ᵀ of the paper before inversion."""
    return values.unsqueeze(-2) - values.unsqueeze(-1)


def rates_apart(values: Tensor) -> Tensor:
    """1/(λⱼ − λᵢ) for values without ties; 0 for i = j."""
    gaps = gaps_of(values)
    gaps.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
    return gaps.reciprocal_()


def receives_gradient(g_vectors: Tensor, g_values: Tensor | None) -> Tensor:
    """Return which vectors or values ``(*batch, n)`` receive a nonzero gradient."""
    used = (g_vectors != 0).any(-2)
    return used if g_values is None else used | (g_values != 0)


@dataclass(frozen=True)
class TiePolicy:
    """Treatment of tied pairs by a decomposition layer."""

    name: str  # the operator, for messages
    ties: Ties
    tolerance: float  # values closer than this fraction of the largest one are tied
    broadening: float  # η, as a fraction of the largest value: 1/x becomes x/(x² + η²)
    gauge_tolerance: float  # fraction of a gradient that may depend on the choice of tied vectors without a warning
    check: bool | None  # whether ties raise or warn: None on the CPU only, True on every device, False never
    phase: bool = False  # whether the vectors are complex and have free phases

    def tied(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return where a gap x is zero within the tolerance; ``scale`` broadcasts against x."""
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
        """Return whether sorted values ``(*batch, n)`` are known to have no ties, a shortcut for the CPU."""
        if self.ties == "broaden" or not values.is_cpu or values.numel() == 0 or not values_checkable(values):
            return False
        values = values.detach()
        gaps, scale = values.diff(dim=-1).abs(), values.abs().amax(-1, keepdim=True)
        return bool((gaps > self.tolerance * scale).all())

    def visible(self, used: Tensor, skew: Tensor, size: Tensor) -> Tensor:
        """Return which pairs affect a loss: for ``"raise"`` those of ``used`` vectors, else gauge-dependent ones."""
        if self.ties == "raise":
            return used.unsqueeze(-1) | used.unsqueeze(-2)
        return self.gauge_dependent(skew, size)

    def gauge_dependent(self, skew: Tensor, size: Tensor) -> Tensor:
        return skew.abs() > self.gauge_tolerance * size

    def phases(self, within: Tensor, size: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Masks of the free phases of complex vectors: an imaginary diagonal of UᵀG_U, ``within``."""
        if not within.is_complex():
            return []
        phase = within.diagonal(dim1=-2, dim2=-1).imag.unsqueeze(-2)
        return [(torch.ones_like(phase, dtype=torch.bool), self.gauge_dependent(phase, size))]

    def over_gaps(self, values: Tensor, within: Tensor, g_vectors: Tensor, g_values: Tensor | None) -> Tensor:
        """(UᵀG_U)ᵢⱼ/(λⱼ − λᵢ), given UᵀG_U and the gradients G_U and G_λ."""
        if not within.is_complex() and self.apart(values):
            return rates_apart(values) * within
        size = largest_entry(g_vectors)
        out = self.invert(gaps_of(values), largest_entry(values.unsqueeze(-1))) * within
        visible = self.visible(receives_gradient(g_vectors, g_values), within - within.mH, size)
        return self.enforce(out, (tied_pairs(values, self), visible), *self.phases(within, size))

    def rotation(self, values: Tensor, variation: Tensor, size: Tensor) -> Tensor:
        """UᵀdU for a variation UᵀdAU: divided by the gaps λⱼ − λᵢ; ``size`` is that of dA."""
        out = self.invert(gaps_of(values), largest_entry(values.unsqueeze(-1))) * variation
        return self.enforce(out, (tied_pairs(values, self), exceeds_rounding(variation, size)))

    def enforce(self, out: Tensor, *ties: tuple[Tensor, Tensor]) -> Tensor:
        """Apply the policy to a derivative ``(*batch, m, n)``, given masks of tied and of visible entries."""
        bad = [(tied & visible).any(-1).any(-1) for tied, visible in ties]
        return self.enforce_flag(out, functools.reduce(torch.logical_or, bad))

    def enforce_flag(self, out: Tensor, bad: Tensor) -> Tensor:
        """`enforce` given which matrices are bad, ``(*batch,)`` or one flag for all."""
        if wants_check(self.check, bad):
            if bool(bad.any()):
                self._report()
            return out
        return nan_where(bad, out) if self.ties == "raise" else out

    def _report(self) -> None:
        where = f"a repeated (or zero) value, closer than {self.tolerance:.2g} of the largest one"
        if self.phase:
            where += ", or depends on the phase of a complex vector"
        if self.ties == "raise":
            raise TieError(
                f"The loss of {self.name} uses vectors of {where}. Its gradient is not determined there. Use "
                f"matrix_function, projector or spectral_projector, which are exact at ties, or pass "
                f'ties="drop" to omit such pairs or ties="broaden" for a smooth approximation.'
            )
        warnings.warn(
            f"The loss of {self.name} depends on the choice of vectors inside {where}. The policy "
            f'ties="{self.ties}" returned a finite gradient that is not exact.',
            GaugeWarning,
            stacklevel=3,
        )


def tied_pairs(values: Tensor, policy: TiePolicy, scale: Tensor | None = None) -> Tensor:
    """Return which values i ≠ j are tied, relative to the largest or to a scale ``(*batch, 1, 1)``."""
    gaps = gaps_of(values)
    pairs = ~torch.eye(gaps.shape[-1], dtype=torch.bool, device=gaps.device)
    return policy.tied(gaps, largest_entry(values.unsqueeze(-1)) if scale is None else scale) & pairs


def check_ties(ties: Ties, tie_tol: float | None, broadening: float) -> None:
    check_option(ties, get_args(Ties), "ties")
    if tie_tol is not None and not tie_tol >= 0:
        raise ConfigurationError(f"tie_tol must not be negative, got {tie_tol}.")
    if not broadening > 0:
        raise ConfigurationError(f"broadening must be positive, got {broadening}.")


def tie_policy(
    name: str, ties: Ties, tie_tol: float | None, broadening: float, check: bool | None, a: Tensor, dtype: torch.dtype
) -> TiePolicy:
    check_ties(ties, tie_tol, broadening)
    if tie_tol is None:
        tie_tol = max(torch.finfo(a.dtype).eps, noise_floor(a.shape, dtype))
    return TiePolicy(name, ties, tie_tol, broadening, half_of_the_digits(a.dtype), check, a.is_complex())
