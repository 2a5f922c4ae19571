"""Checks of positive definite and semidefinite arguments."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop import checks
from matbackprop.checks import check_matrix, check_result, nan_where, out_of_range, wants_check
from matbackprop.errors import DomainError, ShapeError
from matbackprop.functional._linear_solve import broadcast_batches, shapes_of
from matbackprop.numerics import compute_dtype, eye_like, zero_tolerance


class DefiniteMatrices(NamedTuple):
    """Checked arguments."""

    matrices: list[Tensor]  # exactly symmetric, of one shape, in the compute dtype; the identity replaces invalid ones
    definite: Tensor  # whether all matrices of a batch element are positive definite
    bad: Tensor | None  # which batch elements contain an invalid matrix; None if values are checked
    check_values: bool
    dtype: torch.dtype  # of the results: that of the first matrix, complex if any is

    def result(self, out: Tensor, name: str, fix: str) -> Tensor:
        """Set undefined results to NaN; raise if a result is not finite and values are checked."""
        out = nan_where(self.bad, out).to(self.dtype)
        if self.check_values:
            check_result(out, name, fix)
        return out


def prepare_definite(
    matrices: dict[str, Tensor],
    check: bool | None,
    precision: torch.dtype | None,
    symmetric: Sequence[str] = (),
    semidefinite: bool = False,
    others: Sequence[object] = (),
) -> DefiniteMatrices:
    """Check and convert positive (semi)definite matrices; those named by ``symmetric`` need not be definite.

    ``others`` are further tensor arguments, as in `prepare`.
    """
    given = tuple(matrices.values())
    for name, a in matrices.items():
        check_matrix(a, name, square=True, or_complex=True)
    batch = broadcast_batches(matrices)
    if len({a.shape[-1] for a in given}) > 1:
        raise ShapeError(f"Matrices must have the same order, got {shapes_of(matrices)}.")
    has_complex = any(a.is_complex() for a in given)
    compute = compute_dtype(precision, torch.complex64 if has_complex else torch.float32)
    check_values = wants_check(check, *given, *others)
    converted, invalid, definite = [], [], []
    for name, a in matrices.items():
        ready = checks.prepare(a, name, check_values, precision, sizes="products", symmetric=True)
        x = ready.x.to(compute)
        regular = torch.ones((), dtype=torch.bool, device=a.device)
        if name not in symmetric:
            tolerance = a.shape[-1] * zero_tolerance(a.dtype, compute, 1)
            definite.append(exceed(x.detach(), tolerance))
            regular = definite[-1] | exceed(x.detach(), -tolerance) if semidefinite else definite[-1]
            if check_values and not bool(regular.all()):
                kind, bound = "definite", f"at most {tolerance:.1e}"
                if semidefinite:
                    kind, bound = "semidefinite", f"below −{tolerance:.1e}"
                raise DomainError(
                    f"{int((~regular).sum())} of {regular.numel()} matrices {name} are not positive {kind}: scaled to "
                    f"a unit diagonal, an eigenvalue is {bound}. Add a multiple of the identity."
                )
        if not check_values:
            parts = ready.bad, out_of_range(a, compute, "products"), ~regular, ~x.isfinite().all(-1).all(-1)
            bad = functools.reduce(torch.logical_or, [part for part in parts if part is not None])
            x = torch.where(bad[..., None, None], eye_like(x), nan_where(bad, x))  # with gradients of NaN
            invalid.append(bad)
        converted.append(x.expand(*batch, *x.shape[-2:]))
    dtype = torch.promote_types(given[0].dtype, torch.complex64) if has_complex else given[0].dtype
    every = functools.reduce(torch.logical_and, definite)
    any_bad = functools.reduce(torch.logical_or, invalid) if invalid else None
    return DefiniteMatrices(converted, every, any_bad, check_values, dtype)


def exceed(x: Tensor, tolerance: float) -> Tensor:
    """Return whether all eigenvalues exceed a tolerance after scaling to a unit diagonal.

    Rows of zeros exceed a negative tolerance.
    """
    shift = tolerance * x.diagonal(dim1=-2, dim2=-1)
    if tolerance < 0:
        shift = torch.where((x == 0).all(-1), -1, shift)
    lowered = x - torch.diag_embed(shift)
    return torch.linalg.cholesky_ex(lowered).info == 0
