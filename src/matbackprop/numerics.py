"""Tolerances, precision policy and the small algebra that every operator shares."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from matbackprop.errors import DtypeError, NonFiniteError, ShapeError, SymmetryError


def symmetrize(a: Tensor) -> Tensor:
    """Return the symmetric part (A + Aᵀ)/2 of the last two dimensions."""
    return 0.5 * (a + a.mT)


def autocast_off(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Switch autocast off locally: a structured layer chooses its own precision."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def compute_dtype(dtype: torch.dtype, precision: torch.dtype | None) -> torch.dtype:
    """The dtype to compute in for an input of ``dtype``: ``precision`` if given, float64 otherwise.

    float64 is the default because squaring float32 features loses the small eigenvalues.
    """
    if precision is None:
        return torch.float64
    if precision not in (torch.float32, torch.float64):
        raise DtypeError(f"precision must be torch.float32 or torch.float64, got {precision}.")
    return precision


def check_floating(a: Tensor, name: str) -> None:
    """Raise unless ``a`` is a real floating-point tensor."""
    if not isinstance(a, Tensor):
        raise DtypeError(f"{name} must be a torch.Tensor, got {type(a).__name__}.")
    if not a.dtype.is_floating_point:
        raise DtypeError(f"{name} must be a real floating-point tensor, got {a.dtype}; convert it with .float() first.")


def check_matrix(a: Tensor, name: str, *, square: bool = False) -> None:
    """Raise unless ``a`` is a batch of (square) floating-point matrices."""
    check_floating(a, name)
    if a.ndim < 2:
        raise ShapeError(f"{name} must have at least two dimensions (*batch, m, n), got shape {tuple(a.shape)}.")
    if square and a.shape[-1] != a.shape[-2]:
        raise ShapeError(f"{name} must be square (*batch, n, n), got shape {tuple(a.shape)}.")


def values_checkable(a: Tensor) -> bool:
    """Whether the values of ``a`` may be looked at: not while compiling, under a functorch transform or on meta."""
    return not (
        torch.compiler.is_compiling()
        or a.device.type == "meta"
        or torch._C._functorch.maybe_get_level(a) > -1  # wrapped by vmap, grad or jvp
    )


def check_finite(a: Tensor, name: str) -> None:
    """Raise when ``a`` holds NaN or Inf."""
    if values_checkable(a) and not bool(torch.isfinite(a).all()):
        bad = int((~torch.isfinite(a)).sum())
        raise NonFiniteError(
            f"{name} holds {bad} non-finite of {a.numel()} entries; look for an exploding activation or a division by "
            f"zero upstream, or pass check=False to skip this test."
        )


def check_symmetric(a: Tensor, name: str) -> None:
    """Raise when ``a`` is further from its transpose than rounding explains."""
    if not values_checkable(a) or a.numel() == 0:
        return
    scale = a.abs().amax()
    gap = (a - a.mT).abs().amax()
    if bool(gap > 100 * torch.finfo(a.dtype).eps * max(a.shape[-1], 1) * scale):
        raise SymmetryError(
            f"{name} must be symmetric; its largest entry is {float(scale):.3g}, it differs from its transpose by "
            f"up to {float(gap):.3g}. Pass (A + A.mT)/2, or check=False to take the symmetric part without this test."
        )
