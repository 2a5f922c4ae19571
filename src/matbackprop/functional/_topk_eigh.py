"""The leading eigenpairs of a symmetric matrix or operator, differentiated through what they satisfy.

With AV = VΛ, VᵀV = I the variation of V is VΩ inside the span, Ωᵢⱼ = (VᵀdAV)ᵢⱼ/(λⱼ − λᵢ), and outside of it, column by
column, the solution of (λⱼ − A)zⱼ = (I − VVᵀ)dA vⱼ. That matrix is positive definite on the complement of V, so that
conjugate gradients solve it with products only, and a gap matters only behind λ_k. None of the other eigenpairs is
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import is_differentiated
from matbackprop.checks import (
    check_finite,
    check_matrix,
    check_range,
    check_symmetric,
    is_plain,
    values_checkable,
    wants_check,
)
from matbackprop.functional._eigh import (
    Eigenpairs,
    _Eigh,
    gaps_of,
    largest_entry,
    largest_positive,
    receives_gradient,
    tied_pairs,
)
from matbackprop.functional._function import Operation, apply
from matbackprop.functional._leading import check_count, find_leading, refuse_tie, symmetric_operator
from matbackprop.functional._linear_solve import conjugate_gradient_solve, products_of
from matbackprop.functional._ties import TiePolicy, Ties, tie_policy
from matbackprop.numerics import autocast_off, compute_dtype, gap_tolerance, real_dtype, symmetrize
from matbackprop.solvers import leading_eigh

__all__ = ["topk_eigh"]

_WHOLE = 512  # up to this order, or where more than an eighth is wanted, all eigenpairs of a dense matrix cost less


class _Settings(NamedTuple):
    policy: TiePolicy
    tolerance: float
    max_products: int


def _outside(matvec: Callable[..., Tensor], x: Tensor, lam: Tensor, v: Tensor, *params: Tensor) -> Tensor:
    """(λⱼ − A)xⱼ for rows xⱼ ``(k, n)``, made the largest |λ| on the span of V, where it would be indefinite."""
    size = lam.detach().abs().amax()
    size = torch.where(size == 0, 1, size)
    inside = x @ v.conj()
    lift = size - (lam.unsqueeze(-1) - lam.unsqueeze(-2))
    return lam.unsqueeze(-1) * x - matvec(x.mT, *params).mT + (inside * lift) @ v.mT


class _TopK(Operation):
    """λ and V of the k leading pairs; ``matvec`` maps columns and parameters to A(θ) times the columns."""

    forward_twice = "topk_eigh"
    widen = False  # the products may hold tensors of their own

    @staticmethod
    def forward(
        matvec: Any, settings: _Settings, values: Tensor, vectors: Tensor, *params: Tensor
    ) -> tuple[Tensor, Tensor]:
        return values.clone(), vectors.clone()

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> Sequence[Any]:
        matvec, settings, _, _, *params = inputs
        return matvec, settings, *outputs, *params

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        (matvec, settings, lam, v, *params), (g_lam, g_v) = saved, gradients
        policy = settings.policy
        inner = torch.zeros(len(lam), len(lam), dtype=v.dtype, device=v.device)
        if g_lam is not None:
            inner = inner + torch.diag_embed(g_lam)
        weights = v @ inner
        if g_v is not None:
            seen = v.mH @ g_v
            visible = policy.visible(receives_gradient(g_v, g_lam), seen - seen.mH, largest_entry(g_v))
            policy.report((tied_pairs(lam, policy), visible))
            turn = policy.invert(gaps_of(lam), largest_entry(lam.unsqueeze(-1))) * seen
            weights = weights + v @ symmetrize(turn) + _solve(matvec, settings, lam, v, params, g_v)
        wanted = [i for i, wants in enumerate(needed[4:]) if wants]
        out: list[Tensor | None] = [None] * len(params)
        if wanted:
            _, pull = products_of(matvec, v, params, wanted)
            for i, value in zip(wanted, pull(weights), strict=True):
                out[i] = value
        return None, None, None, None, *out

    @staticmethod
    def tangent(saved: Sequence[Any], *directions: Tensor | None) -> tuple[Tensor, Tensor]:
        matvec, settings, lam, v, *params = saved
        policy, d_params = settings.policy, directions[4:]
        moving = [i for i, d in enumerate(d_params) if d is not None]
        value, pull = products_of(matvec, v, params, moving)
        push: Any = torch.func.vjp(pull, torch.zeros_like(value))[1]
        moved = push(tuple(d_params[i] for i in moving))[0]  # dA V
        inside = v.mH @ moved
        policy.report((tied_pairs(lam, policy), inside.abs() > policy.tolerance * largest_entry(moved)))
        turn = policy.invert(gaps_of(lam), largest_entry(lam.unsqueeze(-1))) * inside
        d_v = v @ turn + _solve(matvec, settings, lam, v, params, moved)
        return inside.diagonal().real.clone(), d_v


def _solve(matvec: Any, settings: _Settings, lam: Tensor, v: Tensor, params: Sequence[Tensor], b: Tensor) -> Tensor:
    """Columns zⱼ outside of the span of V with (λⱼ − A)zⱼ = (I − VVᵀ)bⱼ."""
    n, k = v.shape
    if k == n:
        return torch.zeros_like(v)
    right = (b - v @ (v.mH @ b)).mT
    z = conjugate_gradient_solve(
        lambda x, *more: _outside(matvec, x, *more),
        right,
        (lam, v, *params),
        tolerance=settings.tolerance,
        max_iterations=settings.max_products,
        precision=real_dtype(v.dtype),
        check=False,
    )
    return (z - (z @ v.conj()) @ v.mT).mT


def topk_eigh(
    a: Tensor | Callable[..., Tensor],
    k: int,
    params: Sequence[Tensor] = (),
    *,
    n: int | None = None,
    largest: bool = True,
    ties: Ties = "raise",
    tie_tol: float | None = None,
    broadening: float = 1e-6,
    tolerance: float = 1e-11,
    max_products: int = 100_000,
    generator: torch.Generator | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Eigenpairs:
    r"""The k leading eigenpairs of a symmetric matrix or operator, with gradients that need no other pair.

    .. math:: AV = V\operatorname{diag}(\lambda),\qquad V^\top V = I,\qquad \lambda_1 \ge \dots \ge \lambda_k >
        \lambda_{k+1}

    A is a dense matrix, a sparse one, or known by its products only: ``lambda x, f: f @ (f.mT @ x)`` with
    ``params=(f,)`` is the affinity :math:`FF^\top` of n points without its n² entries. The projector on the leading
    eigenspace is :math:`VV^\top`; for losses of it see `topk_subspace`. For complex matrices ᵀ is the conjugate
    transpose here, and "symmetric" means Hermitian.

    Args:
        a: symmetric matrices ``(*batch, n, n)``, one sparse matrix ``(n, n)`` (COO or CSR), or a function that maps
            columns ``(n, r)`` and the parameters to A(θ) times the columns. The function must be linear in the columns,
            symmetric, and made of differentiable torch operations; its columns are complex where a parameter is.
        k: how many pairs.
        params: the tensors θ that a function takes, which receive gradients.
        n: the order, for a function.
        largest: the largest eigenvalues; otherwise the smallest, in ascending order.
        ties, tie_tol, broadening: what the gradient of V does where eigenvalues inside the k coincide, as in `eigh`.
        tolerance: residuals to stop at, as a share of the largest |λ| seen (forward) and of the right-hand side
            (backward). Dense matrices of small order are decomposed as a whole and need none.
        max_products: products with A, one vector each, before giving up.
        generator: for the random vectors to start from; a fixed seed by default.
        check: look at values (finite, symmetric, a gap behind λ_k): ``None`` on the CPU only, ``True`` always,
            ``False`` never.
        precision: dtype of the computation, to which floating-point parameters are cast; float64 by default.

    Returns:
        λ ``(*batch, k)``, real, and V ``(*batch, n, k)``, the largest entry of each column positive, named fields, in
        the dtype of ``a`` or of the first complex, else floating-point, parameter.

    Raises:
        ShapeError, DtypeError: an argument or a product does not fit.
        NonFiniteError, SymmetryError: values of ``a``.
        DomainError: k out of range, or a dense matrix whose largest entry is near the ends of floating point.
        TieError: λ_k = λ_{k+1}, so that the eigenspace is not determined; and see ``ties``.
        SolverError: products were not enough to converge.

    Gradient:
        With zⱼ the solution of (λⱼ − A)zⱼ = (I − VVᵀ)gⱼ outside of the span of V, found by conjugate gradients, the
        gradient of A is (V(diag(G_λ) + (K̃ᵀ∘(VᵀG_V))_sym) + Z)Vᵀ, symmetrised: a product for each parameter, never an
        n×n matrix unless A is one. All orders and forward mode; of a sparse matrix the first order, which is all that
        torch's constructors of COO carry (none for CSR): for more give a function of its entries. Losses of VVᵀ do not
        see ties inside the k: use `topk_subspace`.

    Example:
        >>> import torch, matbackprop
        >>> f = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], requires_grad=True)
        >>> values, vectors = matbackprop.topk_eigh(lambda x, f: f @ (f.mT @ x), 1, (f,), n=3)
        >>> values.sum().backward()
        >>> round(values.item(), 4), [abs(round(x, 4)) for x in f.grad[:, 0].tolist()]
        (5.0, [2.0, 4.0, 0.0])

    Reference:
        Xie, Liu, Wang, Automatic differentiation of dominant eigensolver and its applications in quantum physics,
        Phys. Rev. B 101 (2020); Wu and Simon, Thick-restart Lanczos method, SIAM J. Matrix Anal. Appl. 22 (2000).
    """
    if isinstance(a, Tensor) and a.layout == torch.strided:
        check_matrix(a, "a", square=True, or_complex=True)
        check_count(k, a.shape[-1])
        if a.ndim > 2 or a.shape[-1] <= max(_WHOLE, 8 * k) or not values_checkable(a):
            dtype = compute_dtype(precision, a.dtype)
            policy = tie_policy("topk_eigh", ties, tie_tol, broadening, check, a, dtype)
            return _dense(a, k, largest, policy, dtype)
    operator = symmetric_operator(a, k, params, n, largest, check, precision)
    like, dtype = operator.like, operator.dtype
    policy = tie_policy("topk_eigh", ties, tie_tol, broadening, check, like.new_empty(operator.order, 0), dtype)
    with autocast_off(like.device.type):
        pairs = find_leading(operator, k, tolerance, max_products, generator)
        settings = _Settings(policy, tolerance, max_products)
        lam, v = apply(_TopK, operator.matvec, settings, pairs.values, pairs.vectors, *operator.params)
        v = largest_positive(v) if v.is_complex() else v
        return Eigenpairs((lam if largest else -lam).to(real_dtype(like.dtype)), v.to(like.dtype))


def _dense(a: Tensor, k: int, largest: bool, policy: TiePolicy, dtype: torch.dtype) -> Eigenpairs:
    """All eigenpairs of dense matrices, of which k are returned."""
    wanted, n = wants_check(policy.check, a), a.shape[-1]
    if wanted:
        check_finite(a, "a")
        check_range(a, dtype, "a")
        check_symmetric(a, "a")
    with autocast_off(a.device.type):
        x = symmetrize(a.to(dtype))
        if is_plain(a) and not is_differentiated(a):  # no derivative needs the others, but for the gap
            values, vectors = leading_eigh(x if largest else -x, min(k + 1, n))
            values, vectors = (values if largest else -values).flip(-1), vectors.flip(-1)
            size = torch.linalg.matrix_norm(x)
        else:
            values, vectors = apply(_Eigh, x, policy)
            if largest:
                values, vectors = values.flip(-1), vectors.flip(-1)
            size = values.detach().abs().amax(-1)
        if wanted and k < n and values.numel():
            gap = (values[..., k - 1] - values[..., k]).detach().abs()
            refuse_tie(gap, gap <= gap_tolerance(dtype, n) * size, k)
        values, vectors = values[..., :k], largest_positive(vectors[..., :k])
        return Eigenpairs(values.to(real_dtype(a.dtype)), vectors.to(a.dtype))
