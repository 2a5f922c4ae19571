"""Tolerances, compute dtypes, and basic matrix algebra.

Tolerances are fractions of the largest eigenvalue or singular value. With u the machine epsilon of the data (of float32
for 16-bit data in τ), v that of the computation, and n the order:

    an eigenvalue is zero, a matrix is singular    zero_tolerance          τ = 4 max(u, nv)
    a singular value does not count for the rank   rank_tolerance          ρ = u + 64 max(v, u)
    the same for an eigenvalue of FᵀF              gram_tolerance          max(ρ², 16nv)
    a gap does not separate two subspaces          gap_tolerance           16nv
    two values are tied                            `tie_policy`            max(u, nv)
    a singular value is a rounding error           refinement.noise_floor  nv

The stability page states which matrices are accepted as a result.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from matbackprop._torch import transforms_active
from matbackprop.errors import DomainError, DtypeError

# Tables, because torch.compile does not trace dtype.to_complex().
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def symmetrize(a: Tensor) -> Tensor:
    """Return the symmetric part (A + Aᵀ)/2, or the Hermitian part of a complex A."""
    total = a + a.mH
    # torch 2.11 compiles changes in place before a Function wrongly, and vmap(jvp) of constant tangents rejects them.
    # torch.func.linearize, which uses dual numbers alone, folds this product wrongly.
    if torch.compiler.is_compiling() or transforms_active():
        return 0.5 * total
    return total.mul_(0.5)  # fresh memory costs more than the sum


def eye_like(a: Tensor) -> Tensor:
    """Return the identity of the order, dtype and device of square matrices."""
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)


def inner(a: Tensor, b: Tensor, dims: tuple[int, ...] = (-2, -1)) -> Tensor:
    """Return the real inner product Re Σ āb over dimensions."""
    return (a.conj() * b).real.sum(dims)


def autocast_off(device_type: str) -> contextlib.AbstractContextManager[Any]:
    # torch.compile cannot trace this query before torch 2.12, so CPU and CUDA skip it.
    if device_type not in ("cpu", "cuda") and not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext()
    if not torch.compiler.is_compiling() and not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()  # entering autocast costs more than a small layer's products
    return torch.autocast(device_type, enabled=False)


def compute_dtype(precision: torch.dtype | None, data: torch.dtype = torch.float64) -> torch.dtype:
    """Return the compute dtype: ``precision``, float64 by default, or its complex counterpart for complex data."""
    if precision is None:
        precision = torch.float64  # squares of float32 features lose the small eigenvalues
    elif precision not in (torch.float32, torch.float64):
        raise DtypeError(f"precision must be torch.float32 or torch.float64, got {precision}.")
    return _COMPLEX[precision] if data.is_complex else precision


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    return _REAL.get(dtype, dtype)


def is_double(dtype: torch.dtype) -> bool:
    return dtype in (torch.float64, torch.complex128)


def zero_tolerance(data: torch.dtype, compute: torch.dtype, n: int) -> float:
    """Return τ, the fraction of the largest of n values up to which a value counts as zero."""
    u = min(torch.finfo(data).eps, torch.finfo(torch.float32).eps)
    return 4 * max(u, n * torch.finfo(compute).eps)


def check_rank_tolerance(rank_tol: float | torch.dtype | None) -> None:
    if not (rank_tol is None or isinstance(rank_tol, torch.dtype) or 0 <= rank_tol < 1):
        raise DomainError(f"The rank tolerance must be a dtype or be in [0, 1), got {rank_tol}.")


def rank_tolerance(data: torch.dtype, compute: torch.dtype, rank_tol: float | torch.dtype | None = None) -> float:
    """Return ρ, the fraction of the largest singular value below which others do not count towards the rank.

    ``rank_tol`` replaces ρ, or is the dtype of the precision of the data, such as float32 for a float32 map cast to
    float64. Rounding entries contributes about u/4; computing them (in float32, or in float64 for float64 data) and
    the decomposition contribute some tens of units.
    """
    check_rank_tolerance(rank_tol)
    if rank_tol is not None and not isinstance(rank_tol, torch.dtype):
        return float(rank_tol)
    u = torch.finfo(data if rank_tol is None else rank_tol).eps
    return u + 64 * max(torch.finfo(compute).eps, min(u, torch.finfo(torch.float32).eps))


def gram_tolerance(data: torch.dtype, compute: torch.dtype, d: int, rank_tol: float | torch.dtype | None) -> float:
    """Return `rank_tolerance` for the d eigenvalues of FᵀF: squared, and at least the resolution of the product."""
    squared = rank_tolerance(data, compute, rank_tol) ** 2
    given = rank_tol is not None and not isinstance(rank_tol, torch.dtype)
    return squared if given else max(squared, gap_tolerance(compute, d))


def gap_tolerance(compute: torch.dtype, n: int) -> float:
    """Return the fraction of the largest of n values up to which a gap does not separate two subspaces."""
    return 16 * n * torch.finfo(compute).eps


def in_precision(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a real or complex parameter to the precision of ``dtype``; integers are returned unchanged."""
    if not (p.dtype.is_floating_point or p.is_complex()):
        return p
    return p.to(compute_dtype(real_dtype(dtype), p.dtype))


def half_of_the_digits(dtype: torch.dtype) -> float:
    """Return √ε, a relative tolerance for results with an unknown amount of cancellation."""
    return torch.finfo(dtype).eps ** 0.5
