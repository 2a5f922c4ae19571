"""Every check of an argument: shape, dtype, device, values. Messages say what came, what was needed, what to try.

Checks of values wait for a GPU, so that operators make them there only when asked (``check=True``), and never while
compiling or under a transformation, where there are no values.
"""

from __future__ import annotations

import cmath
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from matbackprop._torch import is_wrapped
from matbackprop.errors import ConfigurationError, DomainError, DtypeError, NonFiniteError, ShapeError, SymmetryError
from matbackprop.numerics import half_of_the_digits, real_dtype

_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_COMPLEX = (torch.complex128, torch.complex64)


def check_floating(a: Tensor, name: str, *, or_complex: bool = False) -> None:
    """Raise unless ``a`` is a floating-point tensor of 16 bits or more, real unless ``or_complex``."""
    if not isinstance(a, Tensor):
        raise DtypeError(f"{name} must be a torch.Tensor, got {type(a).__name__}.")
    if a.dtype in _FLOATING or (or_complex and a.dtype in _COMPLEX):
        return
    remedy = "convert it with .float() first"
    if a.dtype.is_complex:
        remedy = "convert it to torch.complex64" if or_complex else "this operator has no complex form, pass .real"
    kind = "floating-point or complex" if or_complex else "real floating-point"
    raise DtypeError(f"{name} must be a {kind} tensor, got {a.dtype}; {remedy}.")


def check_matrix(a: Tensor, name: str, *, square: bool = False, or_complex: bool = False) -> None:
    """Raise unless ``a`` is a batch of (square) floating-point matrices, real unless ``or_complex``."""
    check_floating(a, name, or_complex=or_complex)
    if a.ndim < 2:
        raise ShapeError(f"{name} must have at least two dimensions (*batch, m, n), got shape {tuple(a.shape)}.")
    if square and a.shape[-1] != a.shape[-2]:
        raise ShapeError(f"{name} must be square (*batch, n, n), got shape {tuple(a.shape)}.")


def values_checkable(a: Tensor) -> bool:
    """Whether the values of ``a`` may be looked at: not while compiling, transforming, on meta or in a fake tensor."""
    return not (
        torch.compiler.is_compiling()
        or a.is_meta
        or type(a).__torch_dispatch__ is not Tensor.__torch_dispatch__  # fake, distributed and other tensors
        or is_wrapped(a)
    )


def is_plain(*tensors: Tensor) -> bool:
    """Whether tensors have memory to point to: neither compiled, transformed, fake nor of a class of their own."""
    if torch.compiler.is_compiling():
        return False
    return all(type(t) in (Tensor, torch.nn.Parameter) and not (t.is_meta or is_wrapped(t)) for t in tensors)


def wants_check(check: bool | None, a: Tensor) -> bool:
    """Resolve a ``check`` argument: None looks at values on the CPU only, where looking costs no synchronisation.

    True looks on every device, False never. No value is looked at while compiling, under a functorch transform or on
    meta.
    """
    if check is None:
        check = a.device.type == "cpu"
    return check and values_checkable(a)


def check_option(value: object, options: Sequence[str], name: str) -> None:
    """Raise unless a named choice is one of the options."""
    if value not in options:
        raise ConfigurationError(f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}.")


def check_finite(a: Tensor, name: str) -> None:
    """Raise when ``a`` holds NaN or Inf."""
    # The sum of finite numbers is finite unless it overflows: one pass in the usual case, a count only when it is not.
    if values_checkable(a) and not cmath.isfinite(a.detach().sum()) and (bad := int((~torch.isfinite(a)).sum())):
        raise NonFiniteError(
            f"{name} holds {bad} non-finite of {a.numel()} entries; look for an exploding activation or a division by "
            f"zero upstream."
        )


def check_large(a: Tensor, dtype: torch.dtype, name: str) -> None:
    """Raise where fourth powers of matrices computed in ``dtype`` would overflow."""
    _check_size(a, dtype, name, 0.0, torch.finfo(dtype).max ** 0.25)


def check_result(out: Tensor, name: str, remedy: str) -> None:
    """Raise where a result of finite inputs is not finite: it overflowed."""
    if values_checkable(out) and not cmath.isfinite(out.detach().sum()) and not bool(torch.isfinite(out).all()):
        raise DomainError(f"{name} overflows {out.dtype}. {remedy}")


def check_scale(a: Tensor, dtype: torch.dtype, name: str) -> None:
    """Raise where fourth powers of matrices computed in ``dtype`` would overflow or vanish; zero itself may stand."""
    info = torch.finfo(dtype)
    _check_size(a, dtype, name, info.tiny**0.25, info.max**0.25)


def check_range(a: Tensor, dtype: torch.dtype, name: str) -> None:
    """Raise where sums of matrices computed in ``dtype`` would overflow, or their rounding vanish; zero may stand."""
    info = torch.finfo(dtype)
    _check_size(a, dtype, name, info.tiny / info.eps, info.max * info.eps)


def into_range(a: Tensor, dtype: torch.dtype) -> Tensor:
    """A, or A times a power of two, one per matrix, where its fourth powers in ``dtype`` would leave the range.

    For what does not see the scale. Tensors whose values cannot be looked at stay as they are.
    """
    return into_range_and_back(a, dtype)[0]


def into_range_and_back(a: Tensor, dtype: torch.dtype) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """`into_range`, and what takes eigenvalues or singular values ``(*batch, n)`` of the result back to those of A."""
    factors = _range_factors(a, dtype)
    if factors is None:
        return a, lambda values: values
    one, other = (x.unsqueeze(-1) for x in factors)
    scaled = a * one.unsqueeze(-1) * other.unsqueeze(-1)
    if scaled.requires_grad:  # in its units a gradient may leave the range on the way to one that does not
        scaled.register_hook(
            lambda g: check_result(g, "a gradient at matrices near the ends of the range", "Scale them.")
        )
    return scaled, lambda values: values / one / other


def _range_factors(a: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Two powers of two per matrix, whose product may itself be out of range; None where A is in range as it is."""
    info = torch.finfo(dtype)
    bad = _sizes_outside(a, info.tiny**0.25, info.max**0.25)
    if bad is None:
        return None
    largest, outside = bad
    exponent = torch.where(outside, torch.frexp(largest).exponent, 0).to(largest.dtype)
    half = (0.5 * exponent).trunc()
    return torch.exp2(-half), torch.exp2(half - exponent)


def _sizes_outside(a: Tensor, least: float, most: float) -> tuple[Tensor, Tensor] | None:
    """The largest entry of each matrix, and where it is neither zero nor between two sizes; None where it always is."""
    if a.numel() == 0 or torch.finfo(a.dtype).max <= most or not values_checkable(a):
        return None
    largest = a.detach().abs().amax((-2, -1))  # vector_norm takes ten times as long
    bad = (largest > most) | ((largest < least) & (largest > 0))
    return (largest, bad) if bool(bad.any()) else None


def _check_size(a: Tensor, dtype: torch.dtype, name: str, least: float, most: float) -> None:
    """Raise unless the largest entry of each matrix lies between two sizes, or is zero."""
    if (outside := _sizes_outside(a, least, most)) is not None:
        largest, bad = outside
        raise DomainError(
            f"{name} has a matrix whose largest entry is {float(largest[bad].flatten()[0]):.3g}: products of its "
            f"entries leave the range of {dtype}. Scale it to a largest entry between {least:.0e} and {most:.0e}."
        )


def check_weight(weight: Tensor, rows: Tensor, *, regions: bool = False, name: str = "weight") -> None:
    """Raise unless ``weight`` is a mask or floating point ``(*b, m)`` on the device of ``rows`` ``(*b, m, d)``.

    With ``regions`` it may also be ``(*b, r, m)``.
    """
    if not isinstance(weight, Tensor):
        raise DtypeError(f"{name} must be a torch.Tensor, got {type(weight).__name__}; pass torch.tensor({name}).")
    if weight.dtype != torch.bool and not weight.dtype.is_floating_point:
        raise DtypeError(
            f"{name} must be boolean or floating point, got {weight.dtype}; convert it with .bool() or .float()."
        )
    if weight.device != rows.device:
        raise ShapeError(
            f"{name} is on {weight.device} and the features on {rows.device}; move one of them with .to()."
        )
    batch, m = tuple(rows.shape[:-2]), rows.shape[-2]
    several = regions and weight.ndim == rows.ndim and weight.shape[:-2] == batch and weight.shape[-1] == m
    if weight.shape != (*batch, m) and not several:
        sizes = "".join(f"{n}, " for n in batch)
        raise ShapeError(
            f"{name} must have shape {(*batch, m)}, one value per row"
            + (f", or ({sizes}r, {m}) for r regions" if regions else "")
            + f"; got {tuple(weight.shape)} for features of shape {tuple(rows.shape)}."
        )


def check_weight_values(weight: Tensor, name: str = "weight") -> None:
    """Raise when a weight is negative, NaN or Inf."""
    if weight.dtype == torch.bool:
        return
    check_finite(weight, name)
    if values_checkable(weight) and bool((weight < 0).any()):
        raise DomainError(f"{name} must not be negative, its smallest entry is {float(weight.detach().min()):.3g}.")


def check_symmetric(a: Tensor, name: str, unit: float = 0.0) -> bool:
    """Raise when ``a`` is further from its (conjugate) transpose than rounding explains: by half of its digits.

    Products such as S^(−½)AS^(−½) lose digits by cancellation, and the matrix does not tell how many; a mistake shows
    in the first ones. ``unit`` is a size below which A counts as zero, 1 for exp: where a sum cancels to nothing, no
    digit is symmetric, and none need be. Return whether A is its transpose to the bit.
    """
    a = a.detach()
    if not values_checkable(a) or a.numel() == 0:
        return False
    if torch.equal(a, a.mH):
        return True
    scale, gap = a.abs().amax((-2, -1)).flatten(), (a - a.mH).abs().amax((-2, -1)).flatten()
    beyond = gap - half_of_the_digits(a.dtype) * scale.clamp_min(unit)
    worst = beyond.argmax()
    if bool(beyond[worst] > 0):
        scale, gap = scale[worst], gap[worst]
        kind, transpose = ("Hermitian", "conjugate transpose") if a.is_complex() else ("symmetric", "transpose")
        raise SymmetryError(
            f"{name} must be {kind}; its largest entry is {float(scale):.3g}, it differs from its {transpose} by up to "
            f"{float(gap):.3g}. Pass (A + A.mH)/2, or check=False to take the {kind} part without this test."
        )
    return False


def parameter_tensor(p: float | Tensor | None, name: str, batch: torch.Size, like: Tensor) -> Tensor | None:
    """Make a number or a tensor one value per matrix, (*batch,), without waiting for the device."""
    if p is None:
        return None
    if not isinstance(p, Tensor):
        value = torch.scalar_tensor(p, dtype=real_dtype(like.dtype), device=like.device)
        return value.expand(batch) if batch else value
    p = p.to(dtype=real_dtype(like.dtype), device=like.device)
    extra = p.ndim - len(batch)
    try:
        # One value may come with more dimensions than the batch has, as a parameter of shape (1,) does.
        return (p.reshape(p.shape[extra:]) if extra > 0 and p.shape[:extra].numel() == 1 else p).expand(batch)
    except RuntimeError as error:
        raise ShapeError(
            f"{name} must broadcast to the batch shape {tuple(batch)}, one value per matrix; got shape "
            f"{tuple(p.shape)}."
        ) from error


def check_ks(ks: Sequence[int]) -> list[int]:
    """Return numbers of regions or clusters as a list of positive integers, or raise."""
    try:
        out = [operator.index(k) for k in ks]
    except TypeError:
        out = []
    if not out or min(out) < 1:
        raise ConfigurationError(f"ks must name at least one number, all of them whole and positive; got {list(ks)}.")
    return out
