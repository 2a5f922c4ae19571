"""Tolerances, compute dtypes, and basic matrix algebra."""

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


def data_rounding(dtype: torch.dtype, compute: torch.dtype) -> float:
    """Return the error of eigenvalues or singular values due to rounding, as a fraction of the largest.

    Rounding the entries to ``dtype`` contributes about ε/4. Computing the entries (in float32, or in float64 for
    float64 data) and decomposing the matrix contributes some tens of units.
    """
    eps = torch.finfo(dtype).eps
    return eps + 64 * max(torch.finfo(compute).eps, min(eps, torch.finfo(torch.float32).eps))


def check_rank_tolerance(rank_tol: float | torch.dtype | None) -> None:
    if not (rank_tol is None or isinstance(rank_tol, torch.dtype) or 0 <= rank_tol < 1):
        raise DomainError(f"The rank tolerance must be a dtype or be in [0, 1), got {rank_tol}.")


def rank_tolerance(dtype: torch.dtype, compute: torch.dtype, rank_tol: float | torch.dtype | None) -> float:
    """Return the relative size below which a singular value counts as zero.

    ``rank_tol`` is the tolerance itself, the dtype of the precision of the data, such as float32 for a float32 map cast
    to float64, or None for ``dtype`` (see `data_rounding`).
    """
    if isinstance(rank_tol, torch.dtype):
        dtype = rank_tol
    elif rank_tol is not None:
        check_rank_tolerance(rank_tol)
        return float(rank_tol)
    return data_rounding(dtype, compute)


def gram_tolerance(dtype: torch.dtype, compute: torch.dtype, d: int, rank_tol: float | torch.dtype | None) -> float:
    """:func:`rank_tolerance` for the d eigenvalues of FᵀF: squared, and at least the resolution of the product."""
    tol = rank_tolerance(dtype, compute, rank_tol) ** 2
    given = rank_tol is not None and not isinstance(rank_tol, torch.dtype)
    return tol if given else max(tol, 16 * d * torch.finfo(compute).eps)


def zero_tolerance(dtype: torch.dtype, compute: torch.dtype, n: int) -> float:
    """Return the fraction of the largest of n values up to which an eigenvalue or singular value counts as zero.

    Entries have a few units of rounding error in the dtype of the data, or in float32 for 16-bit data, which count as
    exact. The decomposition adds up to n units.
    """
    eps = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return 4 * max(eps, n * torch.finfo(compute).eps)


def rounding_of_zero(dtype: torch.dtype, compute: torch.dtype, n: int) -> float:
    """Return the rounding error of a zero eigenvalue as a fraction of the largest of n eigenvalues."""
    return max(data_rounding(dtype, compute), 4 * n * torch.finfo(compute).eps)


def definite_tolerance(dtype: torch.dtype, compute: torch.dtype, n: int) -> float:
    """Return the eigenvalue up to which a matrix of order n with a unit diagonal counts as singular."""
    data = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return 4 * n * max(torch.finfo(compute).eps, data)


def in_precision(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a real or complex parameter to the precision of ``dtype``; integers are returned unchanged."""
    if not (p.dtype.is_floating_point or p.is_complex()):
        return p
    return p.to(compute_dtype(real_dtype(dtype), p.dtype))


def tie_tolerance(dtype: torch.dtype, compute: torch.dtype, n: int) -> float:
    """Return the fraction of the largest of n values within which two values are tied."""
    return max(torch.finfo(dtype).eps, n * torch.finfo(compute).eps)


def gap_tolerance(compute: torch.dtype, n: int) -> float:
    """Return the fraction of the largest of n eigenvalues below which a gap does not separate two eigenspaces."""
    return 16 * n * torch.finfo(compute).eps


def half_of_the_digits(dtype: torch.dtype) -> float:
    """Return √ε, a relative tolerance for results with an unknown amount of cancellation."""
    return torch.finfo(dtype).eps ** 0.5
