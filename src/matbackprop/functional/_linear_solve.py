"""Linear systems with implicit differentiation at the solution: A given by its entries, or A(θ) by its products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import is_batched
from matbackprop.checks import check_finite, check_floating, check_same_kind, nan_where, narrowed, prepare, raise_or_nan
from matbackprop.cuda.cusolver import without_magma
from matbackprop.errors import DomainError, ShapeError, SolverError
from matbackprop.functional._function import Operation, apply
from matbackprop.numerics import autocast_off, inner, symmetrize, zero_tolerance


class _Solution(NamedTuple):
    a: Tensor
    x: Tensor
    factor: Tensor
    pivots: Tensor | None
    transposed: bool

    def solve(self, b: Tensor, transposed: bool) -> Tensor:
        return apply(_Solve, self.a, b, self.factor, self.pivots, transposed)


class _Solve(Operation):
    """A⁻¹b for b ``(*batch, n, r)``. The factors of A are constants and are also used by the adjoint."""

    forward_twice = "linear_solve"

    @staticmethod
    def forward(a: Tensor, b: Tensor, factor: Tensor, pivots: Tensor | None, transposed: bool) -> Tensor:
        with without_magma(factor):
            if pivots is None:
                return torch.cholesky_solve(b, factor)
            return torch.linalg.lu_solve(factor, pivots, b, adjoint=transposed)

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _Solution:
        return _Solution(inputs[0], outputs, *inputs[2:])

    @staticmethod
    def adjoint(saved: _Solution, needed: Sequence[bool], g: Tensor) -> tuple[Tensor | None, Tensor]:
        g_b = saved.solve(g, not saved.transposed)
        if not needed[0]:
            return None, g_b
        g_a = -(saved.x @ g_b.mH) if saved.transposed else -(g_b @ saved.x.mH)
        return symmetrize(g_a) if saved.pivots is None else g_a, g_b

    @staticmethod
    def tangent(saved: _Solution, da: Tensor | None, db: Tensor | None, *_: None) -> Tensor:
        right = torch.zeros_like(saved.x) if db is None else db
        if da is not None:
            right = right - (da.mH if saved.transposed else da) @ saved.x
        return saved.solve(right, saved.transposed)


class _Quotient(NamedTuple):
    p: Tensor
    out: Tensor
    axes: Tensor


class _RightSolve(Operation):
    @staticmethod
    def forward(p: Tensor, c: Tensor, axes: Tensor) -> Tensor:
        return (c @ axes) @ axes.mH

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _Quotient:
        return _Quotient(inputs[0], outputs, inputs[2])

    @staticmethod
    def adjoint(saved: _Quotient, needed: Sequence[bool], g: Tensor) -> Any:
        p, x, axes = saved
        y = right_solve(p, g, axes)
        return -symmetrize(x.mH @ y) if needed[0] else None, y

    @staticmethod
    def tangent(saved: _Quotient, dp: Tensor | None, dc: Tensor | None, *_: None) -> Tensor:
        p, x, axes = saved
        right = torch.zeros_like(x) if dc is None else dc
        return right_solve(p, right if dp is None else right - x @ dp, axes)


def right_solve(p: Tensor, c: Tensor, axes: Tensor) -> Tensor:
    """CP⁺ for a symmetric P, given A with P⁺ = AAᵀ as a constant, for variations of P that preserve its rank."""
    out: Tensor = apply(_RightSolve, p, c, axes)
    return out


def shapes_of(matrices: dict[str, Tensor]) -> str:
    return " and ".join(f"{name} {tuple(a.shape)}" for name, a in matrices.items())


def broadcast_batches(matrices: dict[str, Tensor]) -> torch.Size:
    try:
        return torch.broadcast_shapes(*(a.shape[:-2] for a in matrices.values()))
    except RuntimeError as error:
        raise ShapeError(
            f"The batches of {shapes_of(matrices)} do not broadcast. Give them the same leading dimensions."
        ) from error


def as_columns(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Broadcast A and b, and return whether b is a vector ``(m,)`` or a batch of vectors ``(*batch, m)``."""
    vector = b.ndim == 1 or b.shape == a.shape[:-1]
    columns = b.unsqueeze(-1) if vector else b
    if columns.ndim < 2 or columns.shape[-2] != a.shape[-2]:
        raise ShapeError(
            f"b must be (*batch, {a.shape[-2]}) or (*batch, {a.shape[-2]}, r) to fit a of shape {tuple(a.shape)}, "
            f"got {tuple(b.shape)}."
        )
    batch = broadcast_batches({"a": a, "b": columns})
    return a.expand(*batch, *a.shape[-2:]), columns.expand(*batch, *columns.shape[-2:]), vector


def _one_at(index: Tensor, size: Tensor, dtype: torch.dtype) -> Tensor:
    """Columns ``(*batch, n, 1)`` with one nonzero entry, that of ``size`` ``(*batch, n)`` at an index."""
    return torch.zeros_like(size).scatter(-1, index, size.gather(-1, index)).unsqueeze(-1).to(dtype)


def definite_factor(b: Tensor, dtype: torch.dtype | None = None, check_values: bool = False, name: str = "b") -> Tensor:
    """Return L with B = LLᵀ; ``dtype`` is that of the data, or None if B is definite by construction.

    B counts as singular if, scaled to a unit diagonal, its smallest eigenvalue is small. One step of inverse iteration
    estimates it. Pivots alone do not suffice: those of a singular matrix may be larger.
    """
    with without_magma(b):
        lower, info = torch.linalg.cholesky_ex(b)
        bad = info != 0
        if dtype is not None and b.shape[-1]:
            tol = zero_tolerance(dtype, b.dtype, b.shape[-1])
            unit, pivots = b.diagonal(dim1=-2, dim2=-1).real.sqrt(), lower.diagonal(dim1=-2, dim2=-1).real
            worst = (pivots / unit).argmin(-1, keepdim=True)
            x = unit * torch.cholesky_solve(_one_at(worst, unit, b.dtype), lower).squeeze(-1)
            bad = bad | ~(x.gather(-1, worst).squeeze(-1).real > tol * inner(x, x, (-1,)))
    fault = f"{name} are not positive definite. Add a multiple of the identity."
    return raise_or_nan(bad, lower, check_values, DomainError, fault)


def _lu_factor(a: Tensor, dtype: torch.dtype, check_values: bool) -> tuple[Tensor, Tensor]:
    """Return LU factors and pivots.

    A counts as singular if, after scaling columns to a largest entry of 1, its smallest singular value is small. One
    step of inverse iteration estimates it.
    """
    with without_magma(a):
        factor, pivots, info = torch.linalg.lu_factor_ex(a)
        if a.shape[-1] == 0:
            return factor, pivots
        bad, tol, unit = info != 0, zero_tolerance(dtype, a.dtype, a.shape[-1]), a.abs().amax(-2)
        worst = (factor.diagonal(dim1=-2, dim2=-1).abs() / unit).argmin(-1, keepdim=True)
        y = torch.linalg.lu_solve(factor, pivots, _one_at(worst, unit, a.dtype), adjoint=True)
        y = y / torch.linalg.vector_norm(y, dim=-2, keepdim=True)
        x = unit.unsqueeze(-1) * torch.linalg.lu_solve(factor, pivots, y)
        bad = bad | ~(torch.linalg.vector_norm(x, dim=(-2, -1)) * tol < 1)
    fault = "a are singular. Add a multiple of the identity."
    return raise_or_nan(bad, factor, check_values, DomainError, fault), pivots


def linear_solve(
    a: Tensor,
    b: Tensor,
    *,
    symmetric: bool = False,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Solution of :math:`Ax = b`, by LU, or by Cholesky for a symmetric positive definite A.

    Args:
        a: matrices ``(*batch, n, n)``, real or complex. For complex matrices, "symmetric" means Hermitian and ᵀ is the
            conjugate transpose.
        b: right-hand sides: ``(n,)``, ``(*batch, n)`` with the batch of A, or ``(*batch, n, r)`` with a batch that
            broadcasts.
        symmetric: whether A is symmetric positive definite. If True, use a Cholesky factor in both passes and return a
            symmetric gradient.
        check, precision: as in `matrix_function`.

    Returns:
        x with the shape of ``b``, after broadcasting the batch, in the dtype of ``b``.

    Raises:
        DomainError: A is singular to working precision (not positive definite, if ``symmetric=True``).

    Gradient:
        dx = A⁻¹(db − dA x). With λ = A⁻ᵀg, ∂L/∂b = λ and ∂L/∂A = −λxᵀ (its symmetric part if ``symmetric=True``).
        Supports all orders, forward mode and vmap.

    Example:
        >>> import torch, matbackprop
        >>> a = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> matbackprop.linear_solve(a, torch.tensor([3.0, 4.0]))
        tensor([1., 1.])
    """
    check_floating(b, "b", or_complex=True)
    ready = prepare(a, "a", check, precision, sizes="sums", square=True, symmetric=symmetric, others=(b,))
    check_same_kind(a, b)
    if ready.check_values:
        check_finite(b, "b")
    with autocast_off(a.device.type):
        pivots: Tensor | None = None
        if symmetric:
            factor = definite_factor(ready.x.detach(), a.dtype, ready.check_values, "a")
        else:
            factor, pivots = _lu_factor(ready.x.detach(), a.dtype, ready.check_values)
        full, columns, vector = as_columns(ready.x, b)
        columns = narrowed(columns, full.dtype, "b", ready.check_values)
        factor = factor.expand(full.shape)
        pivots = None if pivots is None else pivots.expand(full.shape[:-1])
        out = apply(_Solve, full, columns, factor, pivots, False)
        if ready.bad is not None:
            out = nan_where(ready.bad.expand(out.shape[:-2]), out)
        return (out.squeeze(-1) if vector else out).to(b.dtype)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return inner(x, y, (-1,)).unsqueeze(-1)


class _System(NamedTuple):
    """Products with a positive definite A(θ), and when to stop."""

    matvec: Callable[..., Tensor]  # maps x (*batch, n) and θ to A(θ)x
    tolerance: float  # relative residual
    steps: int  # largest number of iterations

    def solve(self, b: Tensor, params: Sequence[Tensor]) -> Tensor:
        """Solve for each vector of the batch separately by conjugate gradients; converged ones do not change."""
        peak = b.abs().amax(-1, keepdim=True) if b.shape[-1] else b.sum(-1, keepdim=True)
        unit = torch.where(peak == 0, 1, peak)  # prevents overflow and underflow of ‖b‖²
        r = p = b / unit
        x, scale = torch.zeros_like(r), _dot(r, r)
        size, goal = scale, scale * self.tolerance**2
        for _ in range(self.steps):
            active = ~(size <= goal)
            if not bool(active.any()):
                break
            q = self.matvec(p, *params)
            curvature = _dot(p, q)
            if bool((active & ~((curvature > 0) & torch.isfinite(curvature))).any()):
                raise SolverError(
                    "Conjugate gradients found a direction of nonpositive curvature, or NaN: the matrix is not "
                    "positive definite. Add a multiple of the identity."
                )
            alpha = torch.where(active, size / torch.where(active, curvature, 1), 0)
            x, r = x + alpha * p, r - alpha * q
            new = torch.where(active, _dot(r, r), size)
            p = r + torch.where(active, new / torch.where(active, size, 1), 0) * p
            size = new
        if bool((size > goal).any()):
            worst = float((size / torch.where(scale > 0, scale, 1)).max().sqrt())
            raise SolverError(
                f"Conjugate gradients stopped after {self.steps} iterations at a relative residual of {worst:.3g}, "
                f"above the tolerance {self.tolerance:.3g}. Raise the tolerance or the number of iterations."
            )
        return x * unit


def _products_of(matvec: Callable[..., Tensor], x: Tensor, params: Sequence[Tensor], moving: list[int]) -> Any:
    """A(θ)x and its vector-Jacobian product in some parameters, with x as a constant."""

    def product(*moved: Tensor) -> Tensor:
        full = list(params)
        for i, value in zip(moving, moved, strict=True):
            full[i] = value
        return matvec(x, *full)

    return torch.func.vjp(product, *(params[i] for i in moving))


def pull_back(
    matvec: Callable[..., Tensor], x: Tensor, params: Sequence[Tensor], needed: Sequence[bool], g: Tensor
) -> list[Tensor | None]:
    """The gradients of ⟨G, A(θ)x⟩ in the parameters that need one."""
    indices = [i for i, need in enumerate(needed) if need]
    out: list[Tensor | None] = [None] * len(params)
    if indices:
        _, pull = _products_of(matvec, x, params, indices)
        for i, value in zip(indices, pull(g), strict=True):
            out[i] = value
    return out


def push_forward(
    matvec: Callable[..., Tensor], x: Tensor, params: Sequence[Tensor], directions: Sequence[Tensor | None]
) -> Tensor:
    """dA(θ)x in directions of the parameters."""
    moving = [i for i, d in enumerate(directions) if d is not None]
    if not moving:
        return torch.zeros_like(x)
    # A Jacobian-vector product as the transpose of the vector-Jacobian product, which is linear.
    value, pull = _products_of(matvec, x, params, moving)
    push: Any = torch.func.vjp(pull, torch.zeros_like(value))[1]
    return push(tuple(directions[i] for i in moving))[0]


class _SystemSolution(NamedTuple):
    system: _System
    x: Tensor
    params: tuple[Tensor, ...]


class _ConjugateGradients(Operation):
    """x(θ, b) with A(θ)x = b; backward solves another system and takes the vector-Jacobian product of θ ↦ A(θ)x."""

    forward_twice = "conjugate gradients"
    widen = False  # the products may capture tensors

    @staticmethod
    def forward(matvec: Any, tolerance: float, steps: int, b: Tensor, *params: Tensor) -> Tensor:
        return _System(matvec, tolerance, steps).solve(b, params)

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _SystemSolution:
        return _SystemSolution(_System(*inputs[:3]), outputs, inputs[4:])

    @staticmethod
    def adjoint(saved: _SystemSolution, needed: Sequence[bool], g: Tensor) -> tuple[Tensor | None, ...]:
        system, x, params = saved
        lam = apply(_ConjugateGradients, *system, g, *params)
        return None, None, None, lam, *pull_back(system.matvec, x, params, needed[4:], -lam)

    @staticmethod
    def tangent(saved: _SystemSolution, *directions: Tensor | None) -> Tensor:
        system, x, params = saved
        right = -push_forward(system.matvec, x, params, directions[4:])
        right = right if directions[3] is None else right + directions[3]
        return apply(_ConjugateGradients, *system, right, *params)


def solve_by_products(
    matvec: Callable[..., Tensor], b: Tensor, params: Sequence[Tensor], tolerance: float, max_iterations: int
) -> Tensor:
    """x ``(*batch, n)`` with A(θ)x = b by conjugate gradients, for a positive definite A given by its products.

    ``matvec(x, *params)`` must be linear in x and symmetric. All derivatives are implicit.
    """
    if torch.compiler.is_compiling() or is_batched(b):
        raise SolverError(
            "Conjugate gradients depend on values, which torch.compile and vmap cannot trace. Pass a batch as leading "
            "dimensions, and keep this call and its derivatives out of torch.compile, vmap and jacrev."
        )
    with autocast_off(b.device.type):
        return apply(_ConjugateGradients, matvec, tolerance, max_iterations, b, *params)
