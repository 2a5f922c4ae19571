"""Tolerances, precision policy and the small algebra that every operator shares."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from matbackprop._torch import apply_directly, forward_level, is_wrapped, jvp_nesting, transforms_active
from matbackprop._torch import keep_signature as _torch_keep_signature
from matbackprop.errors import DomainError, DtypeError, NonFiniteError, OrderError, ShapeError, SymmetryError

_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def symmetrize(a: Tensor) -> Tensor:
    """Return the symmetric part (A + Aᵀ)/2 of the last two dimensions."""
    return 0.5 * (a + a.mT)


def autocast_off(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Switch autocast off locally: a structured layer chooses its own precision."""
    # CPU and CUDA are not asked: torch.compile cannot trace the question in releases before 2.12.
    if device_type not in ("cpu", "cuda") and not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext()
    if not torch.compiler.is_compiling() and not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()  # entering autocast costs more than a small layer's products
    return torch.autocast(device_type, enabled=False)


def compute_dtype(dtype: torch.dtype, precision: torch.dtype | None) -> torch.dtype:
    """The dtype to compute in for an input of ``dtype``: ``precision`` if given, float64 otherwise.

    float64 is the default because squaring float32 features loses the small eigenvalues.
    """
    if precision is None:
        return torch.float64
    if precision not in (torch.float32, torch.float64):
        raise DtypeError(f"precision must be torch.float32 or torch.float64, got {precision}.")
    return precision


def data_rounding(dtype: torch.dtype, compute: torch.dtype) -> float:
    """Share of the largest singular value, or eigenvalue, by which rounding moves the others.

    Rounding the entries to a precision ε moves them by about ε/4 of the largest; what computed the entries (in float32,
    or in float64 for float64 data) adds some tens of its own ε. So it belongs to the ``dtype`` that the data carry, and
    not to the one that they are decomposed in, which is the floor.
    """
    eps = torch.finfo(dtype).eps
    return eps + 64 * max(torch.finfo(compute).eps, min(eps, torch.finfo(torch.float32).eps))


def differentiated_again() -> bool:
    """Whether what a backward computes may be differentiated in its turn.

    Where it may not (an ordinary training step, a compiled graph), a formula can run bare instead of inside a Function.
    """
    return not torch.compiler.is_compiling() and (torch.is_grad_enabled() or forward_mode_active())


def forward_mode_active() -> bool:
    """Whether inputs may be dual numbers: inside ``torch.func.jvp`` or a dual level, and not compiling."""
    return not torch.compiler.is_compiling() and forward_level()


def refuse_nested_forward_mode(name: str) -> None:
    """Raise in a jvp that runs inside another one: torch would differentiate its operations to zero without a word."""
    if jvp_nesting() > 1:
        raise OrderError(
            f"{name} was asked for forward mode twice over, which torch does not carry through custom functions; "
            f"use torch.func.hessian (forward over reverse) or jacrev for the inner derivative."
        )


def keep_signature(function: Callable[..., Any]) -> Callable[..., Any]:
    """Store the signature on a Function's forward, which `Function.apply` would work out again at every call."""
    _torch_keep_signature(function)
    return function


def apply(function: type[Function], *arguments: Any) -> Any:
    """``function.apply`` without the inspection of its signature, which costs more than a small layer.

    Inspection fills in default arguments, which no Function here has. Under a transformation torch's own way is taken.
    """
    if torch.compiler.is_compiling() or transforms_active():
        return function.apply(*arguments)
    return apply_directly(function, *arguments)


def check_floating(a: Tensor, name: str) -> None:
    """Raise unless ``a`` is a real floating-point tensor of 16 bits or more."""
    if not isinstance(a, Tensor):
        raise DtypeError(f"{name} must be a torch.Tensor, got {type(a).__name__}.")
    if a.dtype not in _FLOATING:
        remedy = "complex matrices are not supported" if a.dtype.is_complex else "convert it with .float() first"
        raise DtypeError(f"{name} must be a real floating-point tensor, got {a.dtype}; {remedy}.")


def check_matrix(a: Tensor, name: str, *, square: bool = False) -> None:
    """Raise unless ``a`` is a batch of (square) floating-point matrices."""
    check_floating(a, name)
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


def wants_check(check: bool | None, a: Tensor) -> bool:
    """Resolve a ``check`` argument: None looks at values on the CPU only, where looking costs no synchronisation.

    True looks on every device, False never. No value is looked at while compiling, under a functorch transform or on
    meta.
    """
    if check is None:
        check = a.device.type == "cpu"
    return check and values_checkable(a)


def check_finite(a: Tensor, name: str) -> None:
    """Raise when ``a`` holds NaN or Inf."""
    # The sum of finite numbers is finite unless it overflows: one pass in the usual case, a count only when it is not.
    if values_checkable(a) and not math.isfinite(a.detach().sum()) and (bad := int((~torch.isfinite(a)).sum())):
        raise NonFiniteError(
            f"{name} holds {bad} non-finite of {a.numel()} entries; look for an exploding activation or a division by "
            f"zero upstream."
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


def check_symmetric(a: Tensor, name: str, unit: float = 0.0) -> None:
    """Raise when ``a`` is further from its transpose than rounding explains: by more than half of its digits.

    Products such as S^(−½)AS^(−½) lose digits by cancellation, and the matrix does not tell how many; a mistake shows
    in the first ones. ``unit`` is a size below which A counts as zero, 1 for exp: where a sum cancels to nothing, no
    digit is symmetric, and none need be.
    """
    a = a.detach()
    if not values_checkable(a) or a.numel() == 0 or torch.equal(a, a.mT):
        return
    scale, gap = a.abs().amax((-2, -1)).flatten(), (a - a.mT).abs().amax((-2, -1)).flatten()
    beyond = gap - torch.finfo(a.dtype).eps ** 0.5 * scale.clamp_min(unit)
    worst = beyond.argmax()
    if bool(beyond[worst] > 0):
        scale, gap = scale[worst], gap[worst]
        raise SymmetryError(
            f"{name} must be symmetric; its largest entry is {float(scale):.3g}, it differs from its transpose by "
            f"up to {float(gap):.3g}. Pass (A + A.mT)/2, or check=False to take the symmetric part without this test."
        )
