"""Symmetric operators: a dense matrix, a sparse matrix, or a function of columns and parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import is_batched
from matbackprop.checks import check_finite, check_floating, prepare, wants_check
from matbackprop.errors import DomainError, DtypeError, ShapeError, SolverError, SymmetryError
from matbackprop.functional._function import Operation, apply
from matbackprop.functional._linear_solve import solve_by_products
from matbackprop.numerics import autocast_off, compute_dtype, half_of_the_digits, in_precision, is_double, symmetrize
from matbackprop.solvers.krylov import Leading, leading_pairs


class Products(NamedTuple):
    """Products with A(θ), or −A(θ) for the smallest eigenvalues, and the limits of the iterations."""

    matvec: Callable[..., Tensor]  # maps columns (n, r) and θ to A(θ) times the columns
    tolerance: float  # relative residual
    max_products: int  # largest number of products with one vector

    def outside(self, b: Tensor, v: Tensor, params: Sequence[Tensor]) -> Tensor:
        """Z outside the span of V with ZH − AZ = (I − VVᵀ)B and H = VᵀAV, which is diagonal up to rounding."""
        if v.shape[0] == v.shape[1]:
            return torch.zeros_like(v)
        h = symmetrize(v.mH @ self.matvec(v, *params))
        right = (b - v @ (v.mH @ b)).mT
        matvec = partial(_outside, self.matvec)
        z = solve_by_products(matvec, right, (v, h, *params), self.tolerance, self.max_products).mT
        return z - v @ (v.mH @ z)


def _outside(matvec: Callable[..., Tensor], x: Tensor, v: Tensor, h: Tensor, *params: Tensor) -> Tensor:
    """(XH − AX)ᵀ given Xᵀ ``(k, n)``, with a multiple of the identity on the span of V, where it is indefinite."""
    columns = x.mT
    inside = v.mH @ columns
    size = h.detach().abs().amax()
    lift = torch.where(size == 0, 1, size) * inside - inside @ h + h @ inside
    return (columns @ h - matvec(columns, *params) + v @ lift).mT


class SymmetricOperator(NamedTuple):
    products: Products
    params: tuple[Tensor, ...]  # θ, floating-point tensors in the dtype of the computation
    order: int
    like: Tensor  # has the device and dtype of results
    dtype: torch.dtype  # of the computation
    check_values: bool
    bad: Tensor | None = None  # whether A is not symmetric, if values are not checked

    def leading(self, k: int, generator: torch.Generator | None) -> Leading:
        """The k largest eigenpairs as constants."""
        source = torch.Generator().manual_seed(0) if generator is None else generator
        like = torch.empty(self.order, dtype=self.dtype, device=self.like.device)
        matvec, tolerance, max_products = self.products
        params = [p.detach() for p in self.params]
        with torch.no_grad():
            return leading_pairs(lambda x: matvec(x, *params), like, k, tolerance, max_products, source)


class _Places(NamedTuple):
    starts: Tensor  # compressed rows
    rows: Tensor
    columns: Tensor


class _SparseFactors(NamedTuple):
    values: Tensor
    x: Tensor
    places: _Places


class _SparseProduct(Operation):
    """AX for a symmetric A ``(n, n)`` with entries at given positions, with a symmetrized gradient."""

    @staticmethod
    def forward(values: Tensor, x: Tensor, places: _Places) -> Tensor:
        # Compressed rows, because products with COO are five times slower.
        size = (len(x), len(x))
        return torch.sparse_csr_tensor(places.starts, places.columns, values, size, check_invariants=False) @ x

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _SparseFactors:
        return _SparseFactors(*inputs)

    @staticmethod
    def adjoint(saved: _SparseFactors, needed: Sequence[bool], g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        values, x, places = saved
        _, rows, columns = places
        g_values = None
        if needed[0]:
            g_values = 0.5 * ((g[rows] * x[columns].conj()).sum(-1) + (x[rows] * g[columns].conj()).sum(-1))
        return g_values, apply(_SparseProduct, values, g, places) if needed[1] else None


def _sparse_product(a: Tensor, check_values: bool) -> tuple[Callable[..., Tensor], Tensor, Tensor]:
    """Products with a sparse matrix, its entries, and whether it is not symmetric."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        a = (a if a.layout == torch.sparse_coo else a.to_sparse_coo()).coalesce()
        fixed, (rows, columns) = a.detach(), a.indices()
        places = _Places(fixed.to_sparse_csr().crow_indices(), rows, columns)
    if check_values:
        check_finite(a.values(), "a")
    skew, sizes = (fixed - fixed.t().conj_physical()).coalesce(), fixed.values().abs()
    largest = sizes.new_zeros(len(a)).scatter_reduce(0, torch.cat([rows, columns]), sizes.repeat(2), "amax")
    floor = 4 * len(a) * torch.finfo(a.dtype).eps * largest.amax()  # as `checks.asymmetric`
    allowed = half_of_the_digits(a.dtype) * largest.sqrt()[skew.indices()].prod(0) + floor
    bad = ~(skew.values().abs() <= allowed).all()
    if check_values and bool(bad):
        worst = float(skew.values().abs().max())
        raise SymmetryError(
            f"a must be symmetric, but it differs from its transpose by up to {worst:.3g}. Pass its symmetric part."
        )
    return lambda x, entries: apply(_SparseProduct, entries, x, places), a.values(), bad


def _dense_product(x: Tensor, a: Tensor) -> Tensor:
    return a @ x if x.shape[-1] == 1 else (x.mH @ a).mH  # A is symmetric; this order is faster for few columns


def _negated(matvec: Callable[..., Tensor], x: Tensor, *params: Tensor) -> Tensor:
    return -matvec(x, *params)


def symmetric_operator(
    a: Tensor | Callable[..., Tensor],
    k: int,
    params: Sequence[Tensor],
    n: int | None,
    largest: bool,
    limits: tuple[float | None, int],
    check: bool | None,
    precision: torch.dtype | None,
) -> SymmetricOperator:
    bad = None
    if isinstance(a, Tensor):
        check_floating(a, "a", or_complex=True)
        if a.ndim != 2 or a.shape[0] != a.shape[1]:
            raise ShapeError(f"a must be one square matrix (n, n), got shape {tuple(a.shape)}. Loop over a batch.")
        like, n = a, len(a)
    else:
        like, n = _check_function(a, params, n, precision)
    check_count(k, n)
    check_values, dtype = wants_check(check, like), compute_dtype(precision, like.dtype)
    if not isinstance(a, Tensor):
        matvec = a
    elif a.layout == torch.strided:
        matvec, (x, _, bad, _) = _dense_product, prepare(a, "a", check, precision, sizes=None, symmetric=True)
        params = (x,)
    else:
        matvec, entries, bad = _sparse_product(a, check_values)
        params = (entries,)
    if torch.compiler.is_compiling() or any(is_batched(p) for p in params):
        raise SolverError(
            "The iteration for leading eigenpairs depends on values, which torch.compile and vmap cannot trace. "
            "Keep this call out of the compiled region, or use eigh with the matrix."
        )
    params = tuple(in_precision(p, dtype) for p in params)
    if not isinstance(a, Tensor):
        bad = _check_products(matvec, torch.empty(n, dtype=dtype, device=like.device), params, check_values)
    tolerance, max_products = limits
    if tolerance is None:
        tolerance = 1e-11 if is_double(dtype) else 1e-5
    products = Products(matvec if largest else partial(_negated, matvec), tolerance, max_products)
    return SymmetricOperator(products, params, n, like, dtype, check_values, bad)


def _check_function(
    a: Any, params: Sequence[Tensor], n: int | None, precision: torch.dtype | None
) -> tuple[Tensor, int]:
    """A tensor with the dtype and device of the results, and the order."""
    if not callable(a):
        raise DtypeError(f"a must be a torch.Tensor or a function of columns, got {type(a).__name__}.")
    if n is None:
        raise ShapeError("The order of a function is unknown. Pass n.")
    if any(not isinstance(p, Tensor) for p in params):
        raise DtypeError("params must be tensors. Bind other arguments into the function.")
    numbers = [p for p in params if p.dtype.is_floating_point or p.is_complex()]
    numbers.sort(key=lambda p: not p.is_complex())
    return numbers[0] if numbers else torch.empty(0, dtype=compute_dtype(precision)), n


def check_count(k: int, n: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= n:
        raise DomainError(f"k must be an integer in 1 … {n} for an operator of order {n}, got {k!r}.")


def _check_products(
    matvec: Callable[..., Tensor], like: Tensor, params: Sequence[Tensor], check_values: bool
) -> Tensor:
    """Check the shape and dtype of a product with two vectors. Return whether the operator is not symmetric."""
    ramp = torch.linspace(-1, 1, len(like), dtype=torch.float64, device=like.device)
    ramp = torch.complex(ramp, 0.3 * ramp.square()) if like.is_complex() else ramp
    probe = torch.stack([(7 * ramp).cos(), (11 * ramp + 1).sin()], -1).to(like.dtype)
    with torch.no_grad(), autocast_off(like.device.type):
        out = matvec(probe, *params)
    if not isinstance(out, Tensor) or out.shape != probe.shape or out.dtype != probe.dtype:
        kind = f"{out.dtype} of shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise ShapeError(
            f"The function must map columns {tuple(probe.shape)} of {probe.dtype} to the same shape and dtype, got "
            f"{kind}. Cast the tensors that it captures to {probe.dtype}, or pass them in params."
        )
    if check_values:
        check_finite(out, "the product of a")
    within = probe.mH @ out
    skew = (within - within.mH).abs().amax()
    size = torch.linalg.vector_norm(probe) * torch.linalg.vector_norm(out)
    bad = ~(skew <= half_of_the_digits(out.dtype) * size)
    if check_values and bool(bad):
        raise SymmetryError(
            f"a must be symmetric, but xᵀAy − yᵀAx is {float(skew):.3g} for two vectors. Return products with its "
            f"symmetric part."
        )
    return bad
