"""Symmetric operators that are known by their products, dense and sparse matrices too, and their leading pairs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import is_batched
from matbackprop.checks import check_finite, check_floating, check_matrix, check_symmetric, wants_check
from matbackprop.errors import DomainError, DtypeError, ShapeError, SolverError, SymmetryError, TieError
from matbackprop.functional._function import Operation, apply
from matbackprop.functional._linear_solve import in_precision
from matbackprop.numerics import compute_dtype, gap_tolerance, half_of_the_digits, symmetrize
from matbackprop.solvers.krylov import Leading, leading_pairs

__all__ = ["SymmetricOperator", "check_count", "find_leading", "refuse_tie", "symmetric_operator"]


class SymmetricOperator(NamedTuple):
    """A(θ) of order n.

    Attributes:
        matvec: maps columns ``(n, r)`` and θ to A(θ) times the columns.
        params: θ, in the dtype of the computation where they are floating point.
        order: n.
        like: a tensor of the device and dtype of results.
        dtype: of the computation.
        wanted: whether values are checked.
    """

    matvec: Callable[..., Tensor]
    params: tuple[Tensor, ...]
    order: int
    like: Tensor
    dtype: torch.dtype
    wanted: bool


class _Places(NamedTuple):
    """Where the entries of a sparse matrix lie: compressed rows, and the row and column of each."""

    starts: Tensor
    rows: Tensor
    columns: Tensor


class _SparseProduct(Operation):
    """AX for a symmetric A ``(n, n)`` with entries at given places, whose gradient is symmetrised."""

    @staticmethod
    def forward(values: Tensor, x: Tensor, places: _Places) -> Tensor:
        return _sparse_product(values, x, places)

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        (values, x, places), (g,) = saved, gradients
        _, rows, columns = places
        g_values = None
        if needed[0]:
            g_values = 0.5 * ((g[rows] * x[columns].conj()).sum(-1) + (x[rows] * g[columns].conj()).sum(-1))
        return g_values, apply(_SparseProduct, values, g, places) if needed[1] else None

    @staticmethod
    def tangent(saved: Sequence[Any], dv: Tensor | None, dx: Tensor | None, _: None) -> Tensor:
        values, x, places = saved
        out = torch.zeros_like(x)
        if dv is not None:
            turned = torch.zeros_like(x).index_add(0, places.columns, dv.conj().unsqueeze(-1) * x[places.rows])
            out = out + 0.5 * (_sparse_product(dv, x, places) + turned)
        return out if dx is None else out + _sparse_product(values, dx, places)


def _sparse_product(values: Tensor, x: Tensor, places: _Places) -> Tensor:
    # Compressed rows: products with COO take five times as long.
    size = (len(x), len(x))
    return torch.sparse_csr_tensor(places.starts, places.columns, values, size, check_invariants=False) @ x


def _sparse_operator(a: Tensor, wanted: bool) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A sparse matrix as products with its entries as the parameter."""
    check_floating(a, "a", or_complex=True)
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        raise ShapeError(f"a sparse matrix must be one square matrix (n, n), got shape {tuple(a.shape)}.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        a = (a if a.layout == torch.sparse_coo else a.to_sparse_coo()).coalesce()
        rows, columns = a.indices().unbind(0)
        places = _Places(a.detach().to_sparse_csr().crow_indices(), rows, columns)
    values = a.values()
    if wanted:
        check_finite(values, "a")
        turned = torch.sparse_coo_tensor(a.indices().flip(0), values.detach().conj(), a.shape, check_invariants=False)
        skew = (a.detach() - turned).coalesce().values().abs()
        worst = float(skew.max()) if skew.numel() else 0.0
        if worst > half_of_the_digits(a.dtype) * float(values.detach().abs().max() if values.numel() else 0):
            raise SymmetryError(f"a must be symmetric, it differs from its transpose by up to {worst:.3g}.")
    return lambda x, entries: apply(_SparseProduct, entries, x, places), (values,)


def _dense_product(x: Tensor, a: Tensor) -> Tensor:
    return a @ x


def symmetric_operator(
    a: Tensor | Callable[..., Tensor],
    k: int,
    params: Sequence[Tensor],
    n: int | None,
    largest: bool,
    check: bool | None,
    precision: torch.dtype | None,
) -> SymmetricOperator:
    """Make one of a dense matrix, a sparse one or a function; of −A where the smallest eigenvalues lead."""
    matvec: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]
    if not isinstance(a, Tensor):
        if not callable(a):
            raise DtypeError(f"a must be a torch.Tensor, got {type(a).__name__}; or a function of columns.")
        if n is None:
            raise ShapeError("a function does not tell its order; pass n.")
        if any(not isinstance(p, Tensor) for p in params):
            raise DtypeError("params must be tensors; bind other arguments into the function.")
        matvec, leaves = a, tuple(params)
        numbers = [p for p in params if p.dtype.is_floating_point or p.is_complex()]
        numbers.sort(key=lambda p: not p.is_complex())
        like = numbers[0] if numbers else torch.empty(0, dtype=compute_dtype(precision))
        wanted = wants_check(check, like)
    else:
        wanted = wants_check(check, a)
        if a.layout != torch.strided:
            matvec, leaves = _sparse_operator(a, wanted)
        else:
            check_matrix(a, "a", square=True, or_complex=True)
            if a.ndim > 2:
                raise ShapeError(
                    f"a must be one matrix (n, n), got shape {tuple(a.shape)}; call it for each of a batch."
                )
            if wanted:
                check_finite(a, "a")
                check_symmetric(a, "a")
            matvec, leaves = _dense_product, (symmetrize(a.to(compute_dtype(precision, a.dtype))),)
        n, like = a.shape[-1], a
    check_count(k, n)
    if torch.compiler.is_compiling() or any(is_batched(p) for p in leaves):
        raise SolverError(
            "the iteration for leading eigenpairs decides while it runs, which torch.compile and vmap cannot follow; "
            "keep this call out of the compiled region, or use eigh with the matrix."
        )
    dtype = compute_dtype(precision, like.dtype)
    cast = tuple(in_precision(p, dtype) for p in leaves)
    return SymmetricOperator(matvec if largest else lambda x, *more: -matvec(x, *more), cast, n, like, dtype, wanted)


def find_leading(
    operator: SymmetricOperator,
    k: int,
    tolerance: float,
    max_products: int,
    generator: torch.Generator | None,
) -> Leading:
    """The k largest eigenpairs as constants; raise where no gap lies behind them."""
    source = torch.Generator().manual_seed(0) if generator is None else generator
    like = torch.empty(operator.order, dtype=operator.dtype, device=operator.like.device)
    with torch.no_grad():
        frozen = tuple(p.detach() for p in operator.params)
        _check_products(operator.matvec, like, frozen, operator.wanted)
        pairs = leading_pairs(lambda x: operator.matvec(x, *frozen), like, k, tolerance, max_products, source)
    if operator.wanted and k < operator.order:
        gap = pairs.values[-1] - pairs.following
        refuse_tie(gap, gap <= gap_tolerance(operator.dtype, operator.order) * pairs.scale, k)
    return pairs


def check_count(k: int, n: int) -> None:
    """Raise unless k pairs of an operator of order n can be asked for."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= n:
        raise DomainError(f"k must be a whole number in 1 … {n} for an operator of order {n}, got {k!r}.")


def _check_products(matvec: Callable[..., Tensor], like: Tensor, params: tuple[Tensor, ...], wanted: bool) -> None:
    """Raise unless a product has the shape and dtype of what it is of, and is symmetric as far as two vectors tell."""
    ramp = torch.linspace(-1, 1, len(like), dtype=torch.float64, device=like.device)
    ramp = torch.complex(ramp, 0.3 * ramp.square()) if like.is_complex() else ramp
    probe = torch.stack([(7 * ramp).cos(), (11 * ramp + 1).sin()], -1).to(like.dtype)
    out = matvec(probe, *params)
    if not isinstance(out, Tensor) or out.shape != probe.shape or out.dtype != probe.dtype:
        kind = f"{out.dtype} of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise ShapeError(
            f"the function must map columns {tuple(probe.shape)} of {probe.dtype} to as many of the same dtype, got "
            f"{kind}; cast what it holds to {probe.dtype}, or pass it through params."
        )
    if wanted and out.numel():
        check_finite(out, "the product of a")
        inner = probe.mH @ out
        skew = float((inner - inner.mH).abs().max())
        size = float(torch.linalg.vector_norm(probe) * torch.linalg.vector_norm(out))
        if skew > half_of_the_digits(out.dtype) * size:
            raise SymmetryError(f"a must be symmetric; for two vectors xᵀAy − yᵀAx is {skew:.3g}.")


def refuse_tie(gap: Tensor, tied: Tensor, k: int) -> None:
    """Raise where an eigenvalue on each side of k is the same."""
    if bool(tied.any()):
        raise TieError(
            f"{int(tied.sum())} of {tied.numel()} matrices have equal eigenvalues on both sides of k = {k} (gap "
            f"{float(gap.min()):.3g}), so the leading eigenspace is not determined; choose another k, or pass "
            f"check=False where only the eigenvalues matter."
        )
