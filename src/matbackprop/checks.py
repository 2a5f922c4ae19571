"""Checks of arguments: shape, dtype, device and values. Every operator first calls `prepare`.

Checking values synchronizes with the device, so on a GPU values are checked only if ``check=True``. Values cannot be
read while compiling or under a transformation. `wants_check` decides once per call. Without checks, `nan_where` sets
invalid results to NaN on the device.
"""

from __future__ import annotations

import cmath
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import is_differentiated, values_checkable
from matbackprop.errors import (
    ConfigurationError,
    DeviceError,
    DomainError,
    DtypeError,
    NonFiniteError,
    NumericalError,
    ShapeError,
    SymmetryError,
)
from matbackprop.numerics import compute_dtype, half_of_the_digits, real_dtype, symmetrize

_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_COMPLEX = (torch.complex128, torch.complex64)

Range = Literal["sums", "products", "large", "rescale"]
"""Accepted sizes of the largest entry. ``"sums"``: sums of entries are in the range of the dtype. ``"products"``:
fourth powers are. ``"large"``: fourth powers do not overflow. ``"rescale"``: scale by a power of two instead."""


def check_floating(a: Tensor, name: str, *, or_complex: bool = False) -> None:
    if not isinstance(a, Tensor):
        raise DtypeError(f"{name} must be a torch.Tensor, got {type(a).__name__}.")
    if a.dtype in _FLOATING or (or_complex and a.dtype in _COMPLEX):
        return
    fix = "Convert it with .float() first"
    if a.dtype.is_complex:
        fix = "Convert it to torch.complex64" if or_complex else "Pass .real; the operator has no complex form"
    kind = "floating-point or complex" if or_complex else "real floating-point"
    raise DtypeError(f"{name} must be a {kind} tensor, got {a.dtype}. {fix}.")


def check_matrix(a: Tensor, name: str, *, square: bool = False, or_complex: bool = False) -> None:
    check_floating(a, name, or_complex=or_complex)
    if a.ndim < 2:
        raise ShapeError(f"{name} must have at least two dimensions (*batch, m, n), got shape {tuple(a.shape)}.")
    if square and a.shape[-1] != a.shape[-2]:
        raise ShapeError(f"{name} must be square (*batch, n, n), got shape {tuple(a.shape)}.")


def check_same_kind(a: Tensor, b: Tensor) -> None:
    if a.is_complex() != b.is_complex():
        raise DtypeError(f"a and b must both be real or both complex, got {a.dtype} and {b.dtype}.")


def wants_check(check: bool | None, a: Tensor, *others: object) -> bool:
    """Return whether to check values: None on the CPU only, True on every device, False never.

    Values are checked only if those of all tensors can be read.
    """
    if check is None:
        check = a.device.type == "cpu"
    return check and all(values_checkable(t) for t in (a, *others) if isinstance(t, Tensor))


def check_option(value: object, options: Sequence[str], name: str) -> None:
    if value not in options:
        raise ConfigurationError(f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}.")


def all_finite(a: Tensor) -> bool:
    """Return whether all entries are finite, in one pass unless their sum overflows."""
    return cmath.isfinite(a.detach().sum()) or bool(torch.isfinite(a).all())


def check_finite(a: Tensor, name: str) -> None:
    if values_checkable(a) and not all_finite(a):
        raise NonFiniteError(
            f"{int((~torch.isfinite(a)).sum())} of {a.numel()} entries of {name} are non-finite. Check for exploding "
            f"activations or a division by zero in preceding layers."
        )


def check_result(out: Tensor, name: str, fix: str) -> None:
    """Raise if a result overflowed; the inputs are finite."""
    if values_checkable(out) and not all_finite(out):
        raise DomainError(f"{name} overflows {out.dtype}. {fix}")


def _limits(dtype: torch.dtype, sizes: Range) -> tuple[float, float]:
    info = torch.finfo(dtype)
    if sizes == "sums":
        return info.tiny / info.eps, info.max * info.eps
    return 0.0 if sizes == "large" else info.tiny**0.25, info.max**0.25


def out_of_range(a: Tensor, dtype: torch.dtype, sizes: Range) -> Tensor | None:
    """Return which matrices ``(*batch,)`` are out of range, without synchronization; None if the dtype excludes it."""
    least, most = _limits(dtype, sizes)
    if a.numel() == 0 or torch.finfo(a.dtype).max <= most:
        return None
    largest = _largest(a.detach())
    return (largest > most) | ((largest < least) & (largest > 0))


def check_size(a: Tensor, dtype: torch.dtype, name: str, sizes: Range) -> None:
    bad = out_of_range(a, dtype, sizes)
    if bad is not None and bool(bad.any()):
        largest = float(_largest(a.detach())[bad].flatten()[0])
        least, most = _limits(dtype, sizes)
        raise DomainError(
            f"{name} has a matrix whose largest entry is {largest:.3g}: products of its entries leave the range of "
            f"{dtype}. Scale it to a largest entry between {least:.0e} and {most:.0e}."
        )


def rescaled(a: Tensor, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Scale matrices by powers of two if fourth powers of their entries leave the range of ``dtype``.

    Also return two factors per matrix ``(*batch, 1)``, whose product may itself be out of range; None if all are 1.
    """
    bad = out_of_range(a, dtype, "rescale")
    if bad is None or not bool(bad.any()):
        return a, None
    largest = _largest(a.detach())
    exponent = torch.where(bad, torch.frexp(largest).exponent, 0).to(largest.dtype).unsqueeze(-1)
    half = (0.5 * exponent).trunc()
    one, other = torch.exp2(-half), torch.exp2(half - exponent)
    x = a * one.unsqueeze(-1) * other.unsqueeze(-1)
    if x.requires_grad:  # the scaled gradient may overflow although the final one does not
        x.register_hook(lambda g: check_result(g, "A gradient at matrices near the limits of the range", "Scale them."))
    return x, (one, other)


def into_range(a: Tensor, dtype: torch.dtype) -> Tensor:
    return rescaled(a, dtype)[0]


def _largest(a: Tensor) -> Tensor:
    """Return the largest absolute value of each matrix, without a copy of real matrices."""
    if a.is_complex():
        return a.abs().amax((-2, -1))
    return torch.maximum(a.amax((-2, -1)), -a.amin((-2, -1)))  # aminmax takes ten times as long


def nan_where(bad: Tensor | None, out: Tensor) -> Tensor:
    """Set batch elements for which ``bad`` ``(*batch,)`` is True, and their derivatives, to NaN."""
    if bad is None:
        return out
    factor = torch.where(bad, torch.nan, 1.0).to(real_dtype(out.dtype))
    return out * factor.reshape(factor.shape + (1,) * (out.ndim - factor.ndim))


def raise_or_nan(bad: Tensor, out: Tensor, check_values: bool, error: type[NumericalError], fault: str) -> Tensor:
    """Raise an error if any matrix is ``bad`` ``(*batch,)``, or set it to NaN if values are not checked."""
    if not (check_values and values_checkable(bad)):
        return nan_where(bad, out)
    if bool(bad.any()):
        raise error(f"{int(bad.sum())} of {max(bad.numel(), 1)} matrices {fault}")
    return out


def narrowed(a: Tensor, dtype: torch.dtype, name: str, check_values: bool) -> Tensor:
    """Cast matrices. If the range of ``dtype`` is narrower, raise if they are out of it, or set them to NaN."""
    if torch.finfo(a.dtype).max > torch.finfo(dtype).max:
        if check_values:
            check_size(a, dtype, name, "sums")
        else:
            a = nan_where(out_of_range(a, dtype, "sums"), a)
    return a.to(dtype)


class Prepared(NamedTuple):
    """Checked and converted matrices."""

    x: Tensor  # in the dtype of the computation; the symmetric part for operators on symmetric matrices
    check_values: bool  # whether later values (eigenvalues, weights) are checked
    bad: Tensor | None = None  # (*batch,), unchecked matrices that must become NaN: not symmetric or not finite
    factors: tuple[Tensor, Tensor] | None = None  # of `rescaled`

    def marked(self, out: Tensor) -> Tensor:
        return nan_where(self.bad, out)

    def scaled(self, values: Tensor) -> Tensor:
        """Apply the rescaling to numbers in the units of the matrices ``(*batch, n)``."""
        return values if self.factors is None else values * self.factors[0] * self.factors[1]

    def back(self, values: Tensor) -> Tensor:
        """Undo the rescaling of eigenvalues or singular values ``(*batch, n)``."""
        return values if self.factors is None else values / self.factors[0] / self.factors[1]


def prepare(
    a: Tensor,
    name: str,
    check: bool | None,
    precision: torch.dtype | None,
    *,
    sizes: Range | None,
    square: bool = False,
    symmetric: bool = False,
    or_complex: bool = True,
    unit: float = 0.0,
    others: Sequence[object] = (),
) -> Prepared:
    """Check matrices ``(*batch, m, n)`` and cast them to the dtype of the computation.

    Args:
        a, name, check, precision: arguments of the operator.
        sizes: accepted sizes of the largest entry, or None for any.
        square, symmetric, or_complex: accepted matrices.
        unit: as in `asymmetric`.
        others: further arguments for `wants_check`.
    """
    check_matrix(a, name, square=square or symmetric, or_complex=or_complex)
    dtype = compute_dtype(precision, a.dtype)
    checked = wants_check(check, a, *others)
    equal, factors, x = False, None, a
    if checked:
        check_finite(a, name)
        if symmetric:
            equal = check_symmetric(a, name, unit)
        if sizes == "rescale":
            x, factors = rescaled(a, dtype)
        elif sizes is not None:
            check_size(a, dtype, name, sizes)
    elif sizes == "large":
        x = nan_where(out_of_range(a, dtype, sizes), a)
    x = x.to(dtype) if sizes == "large" else narrowed(x, dtype, name, checked)
    if symmetric and not (equal and not is_differentiated(x)):
        x = symmetrize(x)
        if checked and sizes is None:
            check_result(x, f"The sum of {name} and its transpose", "Scale the matrices.")
    bad = asymmetric(a, unit) if symmetric and not checked else None
    return Prepared(x, checked, bad, factors)


def check_weight(weight: Tensor, rows: Tensor, *, regions: bool = False, name: str = "weight") -> None:
    """Raise unless ``weight`` has shape ``(*batch, m)``, or ``(*batch, r, m)`` with ``regions``, and fits ``rows``."""
    if not isinstance(weight, Tensor):
        raise DtypeError(f"{name} must be a torch.Tensor, got {type(weight).__name__}. Pass torch.tensor({name}).")
    if weight.dtype != torch.bool and not weight.dtype.is_floating_point:
        raise DtypeError(
            f"{name} must be boolean or floating point, got {weight.dtype}. Convert it with .bool() or .float()."
        )
    if weight.device != rows.device:
        raise DeviceError(
            f"{name} is on {weight.device} and the features are on {rows.device}. Move one of them with .to()."
        )
    batch, m = tuple(rows.shape[:-2]), rows.shape[-2]
    several = regions and weight.ndim == rows.ndim and weight.shape[:-2] == batch and weight.shape[-1] == m
    if weight.shape != (*batch, m) and not several:
        sizes = "".join(f"{n}, " for n in batch)
        raise ShapeError(
            f"{name} must have shape {(*batch, m)}, one value per row"
            + (f", or ({sizes}r, {m}) for r regions" if regions else "")
            + f", got {tuple(weight.shape)} for features of shape {tuple(rows.shape)}."
        )


def check_weight_values(weight: Tensor, name: str = "weight") -> None:
    if weight.dtype == torch.bool:
        return
    check_finite(weight, name)
    if bool((weight < 0).any()):
        raise DomainError(f"{name} must not be negative, got {float(weight.detach().min()):.3g}.")


def valid_weight(weight: Tensor, dtype: torch.dtype, check_values: bool) -> Tensor:
    """Convert weights ``(*batch, m)``. If one is negative, raise, or set all to NaN if values are not checked."""
    if check_values:
        check_weight_values(weight)
        return weight.to(dtype)
    return nan_where((weight < 0).any(-1), weight.to(dtype))


def check_weight_totals(weight: Tensor) -> None:
    """`check_weight_values`, and raise if all weights are zero."""
    check_weight_values(weight)
    empty = weight.detach().sum(-1) == 0
    if bool(empty.any()):
        raise DomainError(
            f"All weights are zero in {int(empty.sum())} of {empty.numel()} batches. "
            f"Pass a positive weight for at least one sample."
        )


def asymmetric(a: Tensor, unit: float = 0.0) -> Tensor | None:
    """Return which matrices ``(*batch,)`` are not symmetric or not finite, without synchronization; None if empty.

    Entries (i, j) and (j, i) may differ by the rounding error of the largest entry, plus half of the digits of √(rᵢrⱼ),
    where rᵢ is the largest entry of row and column i, at least ``unit``. Products such as S^(−½)AS^(−½) lose that many
    digits by cancellation.
    """
    if a.shape[-1] == 0:
        return None
    a = a.detach()
    size = a.abs()
    rows = torch.maximum(size.amax(-1), size.amax(-2)).clamp_min(unit)
    floor = 4 * a.shape[-1] * torch.finfo(a.dtype).eps * rows.amax(-1)
    root = rows.sqrt()
    allowed = half_of_the_digits(a.dtype) * root.unsqueeze(-1) * root.unsqueeze(-2) + floor[..., None, None]
    return ~((a - a.mH).abs() <= allowed).all(-1).all(-1)  # true also for NaN, the difference of infinite entries


def _equals_transpose(a: Tensor, tile: int = 256) -> bool:
    """Compare matrices with their (conjugate) transposes tile by tile, because strided reads of many rows are slow."""
    if a.shape[-1] <= tile:
        return torch.equal(a, a.mH)
    starts = range(0, a.shape[-1], tile)
    return all(
        torch.equal(a[..., i : i + tile, j : j + tile], a[..., j : j + tile, i : i + tile].mH)
        for i in starts
        for j in range(i, a.shape[-1], tile)
    )


def check_symmetric(a: Tensor, name: str, unit: float = 0.0) -> bool:
    """Raise if a matrix is `asymmetric`. Return whether A equals its (conjugate) transpose exactly."""
    a = a.detach()
    if a.numel() == 0:
        return False
    if _equals_transpose(a):
        return True
    size, gap = _largest(a), _largest(a - a.mH)
    if bool((gap <= 4 * a.shape[-1] * torch.finfo(a.dtype).eps * size).all()):  # the usual case, in a third of the time
        return False
    bad = asymmetric(a, unit)
    if bad is not None and bool(bad.any()):
        kind, transpose = ("Hermitian", "conjugate transpose") if a.is_complex() else ("symmetric", "transpose")
        raise SymmetryError(
            f"{name} must be {kind}, but it differs from its {transpose} by up to {float(gap[bad][0]):.3g}, with a "
            f"largest entry of {float(size[bad][0]):.3g}. Pass (A + A.mH)/2 to use the {kind} part."
        )
    return False


def parameter_tensor(p: float | Tensor, name: str, batch: torch.Size, like: Tensor) -> Tensor:
    """Convert a number or a tensor to one value per matrix ``(*batch,)``, without synchronization."""
    if not isinstance(p, Tensor):
        value = torch.scalar_tensor(p, dtype=real_dtype(like.dtype), device=like.device)
        return value.expand(batch) if batch else value
    p = p.to(dtype=real_dtype(like.dtype), device=like.device)
    extra = p.ndim - len(batch)
    try:
        # One value may have more dimensions than the batch, such as a parameter of shape (1,).
        return (p.reshape(p.shape[extra:]) if extra > 0 and p.shape[:extra].numel() == 1 else p).expand(batch)
    except RuntimeError as error:
        raise ShapeError(
            f"{name} must broadcast to the batch shape {tuple(batch)}, one value per matrix, got shape "
            f"{tuple(p.shape)}."
        ) from error
