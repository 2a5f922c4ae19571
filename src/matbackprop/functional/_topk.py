"""Leading eigenpairs and eigenspaces of symmetric matrices and operators, differentiated implicitly.

With AV = VΛ and VᵀV = I, the variation of V is VΩ inside its span, Ωᵢⱼ = (VᵀdAV)ᵢⱼ/(λⱼ − λᵢ). Outside, column j is the
solution of (λⱼ − A)zⱼ = (I − VVᵀ)dA vⱼ. This matrix is positive definite on the complement of V, so conjugate gradients
apply and need only products with A. For the subspace alone, AV = VH with any basis, the equation is
ZH − AZ = (I − VVᵀ)dA V. It has no gaps between the k eigenvalues, and the variation of V inside its span is zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop.checks import check_matrix, nan_where, prepare, raise_or_nan, values_checkable
from matbackprop.errors import GaugeWarning, TieError
from matbackprop.functional._eigh import Eigenpairs, largest_positive
from matbackprop.functional._function import Operation, apply
from matbackprop.functional._linear_solve import pull_back, push_forward
from matbackprop.functional._symmetric_operator import Products, check_count, symmetric_operator
from matbackprop.functional._ties import (
    TiePolicy,
    Ties,
    exceeds_rounding,
    gaps_of,
    largest_entry,
    receives_gradient,
    tie_policy,
    tied_pairs,
)
from matbackprop.numerics import (
    autocast_off,
    compute_dtype,
    gap_tolerance,
    half_of_the_digits,
    inner,
    real_dtype,
    symmetrize,
)
from matbackprop.solvers import batched_eigh

_WHOLE = 512  # up to this order, or for more than an eighth of the pairs, a full decomposition is faster


class _Gaps(NamedTuple):
    """Differences between k eigenvalues, and to the others."""

    policy: TiePolicy
    others: Tensor  # eigenvalues (*batch, r) that may coincide with one of the k
    scale: Tensor  # the largest |λ| of the whole spectrum, broadcast against (*batch, k, k)

    def adjoint(self, lam: Tensor, v: Tensor, g_lam: Tensor | None, g_v: Tensor) -> Tensor:
        """V(K̃ᵀ∘(VᵀG))_sym, the gradient inside the span of V."""
        within = v.mH @ g_v
        visible = self.policy.visible(receives_gradient(g_v, g_lam), within - within.mH, largest_entry(g_v))
        behind = self._tied_with_others(lam) & receives_gradient(g_v, None).unsqueeze(-2)
        return self._enforce(lam, v @ symmetrize(self._inverse(lam) * within), visible, behind)

    def tangent(self, lam: Tensor, v: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        """dλ, and the part of dV inside the span of V, given dA V."""
        within = v.mH @ moved
        visible = exceeds_rounding(within, largest_entry(moved))
        rotation = self._enforce(lam, self._inverse(lam) * within, visible, self._tied_with_others(lam))
        return within.diagonal(dim1=-2, dim2=-1).real.clone(), v @ rotation

    def _inverse(self, lam: Tensor) -> Tensor:
        return self.policy.invert(gaps_of(lam), self.scale)

    def _tied_with_others(self, lam: Tensor) -> Tensor:
        """Return which of the k values are tied with others, ``(*batch, 1, k)``."""
        return self.policy.tied(lam.unsqueeze(-2) - self.others.unsqueeze(-1), self.scale).any(-2, keepdim=True)

    def _enforce(self, lam: Tensor, out: Tensor, visible: Tensor, behind: Tensor) -> Tensor:
        return self.policy.enforce(out, (tied_pairs(lam, self.policy, self.scale), visible), (behind, behind))


class _NoGaps(NamedTuple):
    """Replacement of `_Gaps` for losses of the subspace, where V does not vary inside its span."""

    check_values: bool

    def adjoint(self, lam: Tensor, v: Tensor, g_lam: Tensor | None, g_v: Tensor) -> Tensor:
        if self.check_values and values_checkable(g_v):
            within, size = v.detach().mH @ g_v.detach(), largest_entry(g_v.detach())
            if bool(((within - within.mH).abs() > half_of_the_digits(torch.float32) * size).any()):
                warnings.warn(
                    "The loss of topk_subspace depends on the choice of the basis, which is not unique. The "
                    "gradient is that of the subspace. Write the loss in terms of V @ V.mH, or use topk_eigh for "
                    "single vectors.",
                    GaugeWarning,
                    stacklevel=3,
                )
        return torch.zeros_like(v)

    def tangent(self, lam: Tensor, v: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(lam), torch.zeros_like(v)


class _OperatorPairs(NamedTuple):
    products: Products
    gaps: _Gaps | _NoGaps
    lam: Tensor
    v: Tensor
    params: tuple[Tensor, ...]

    def solve(self, b: Tensor) -> Tensor:
        """Columns zⱼ outside the span of V with (λⱼ − A)zⱼ = (I − VVᵀ)bⱼ."""
        return self.products.outside(b, self.v, self.params)


class _TopK(Operation):
    forward_twice = "topk_eigh and topk_subspace"
    widen = False  # the products may capture tensors

    @staticmethod
    def forward(
        products: Products, gaps: _Gaps | _NoGaps, values: Tensor, vectors: Tensor, *params: Tensor
    ) -> tuple[Tensor, Tensor]:
        return values.clone(), vectors.clone()

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> _OperatorPairs:
        return _OperatorPairs(inputs[0], inputs[1], *outputs, inputs[4:])

    @staticmethod
    def adjoint(
        pairs: _OperatorPairs, needed: Sequence[bool], g_lam: Tensor | None, g_v: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        weights = _weights(pairs, g_lam, g_v)
        pulled = pull_back(pairs.products.matvec, pairs.v, pairs.params, needed[4:], weights)
        return None, None, None, None, *pulled

    @staticmethod
    def tangent(pairs: _OperatorPairs, *directions: Tensor | None) -> tuple[Tensor, Tensor]:
        return _variations(pairs, push_forward(pairs.products.matvec, pairs.v, pairs.params, directions[4:]))


class _DensePairs(NamedTuple):
    """λ and V of k pairs of dense matrices, and all other pairs, which are constants."""

    a: Tensor
    lam: Tensor
    v: Tensor
    values: Tensor
    vectors: Tensor
    policy: TiePolicy

    @property
    def gaps(self) -> _Gaps:
        scale = largest_entry(torch.cat([self.lam, self.values], -1).unsqueeze(-1))
        return _Gaps(self.policy, self.values, scale)

    def solve(self, b: Tensor) -> Tensor:
        """Columns zⱼ outside the span of V with (λⱼ − A)zⱼ = (I − VVᵀ)bⱼ."""
        return apply(_OutsideSolve, b, *self)


class _OutsideSolution(NamedTuple):
    b: Tensor
    pairs: _DensePairs
    z: Tensor


class _OutsideSolve(Operation):
    """`_DensePairs.solve` with implicit derivatives, which do not depend on ties among the other eigenvalues."""

    @staticmethod
    def forward(
        b: Tensor, a: Tensor, lam: Tensor, v: Tensor, values: Tensor, vectors: Tensor, policy: TiePolicy
    ) -> Tensor:
        pairs = _DensePairs(a, lam, v, values, vectors, policy)
        gaps = pairs.lam.unsqueeze(-2) - pairs.values.unsqueeze(-1)
        return pairs.vectors @ ((pairs.vectors.mH @ b) * pairs.policy.invert(gaps, pairs.gaps.scale))

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _OutsideSolution:
        return _OutsideSolution(inputs[0], _DensePairs(*inputs[1:]), outputs)

    @staticmethod
    def adjoint(saved: _OutsideSolution, needed: Sequence[bool], g: Tensor) -> tuple[Tensor, ...]:
        b, pairs, z = saved
        y = pairs.solve(g)
        return y, symmetrize(y @ z.mH), -inner(y, z, (-2,)), -y @ (b.mH @ pairs.v) - z @ (g.mH @ pairs.v)

    @staticmethod
    def tangent(saved: _OutsideSolution, *directions: Tensor | None) -> Tensor:
        (b, pairs, z), (db, da, dlam, dv, *_) = saved, directions
        right = torch.zeros_like(b) if db is None else db
        if da is not None:
            right = right + symmetrize(da) @ z
        if dlam is not None:
            right = right - z * dlam.unsqueeze(-2)
        if dv is None:
            return pairs.solve(right)
        return pairs.solve(right - dv @ (pairs.v.mH @ b)) - pairs.v @ (dv.mH @ z)


class _Dense(Operation):
    forward_twice = "topk_eigh"

    @staticmethod
    def forward(
        a: Tensor, lam: Tensor, v: Tensor, values: Tensor, vectors: Tensor, policy: TiePolicy
    ) -> tuple[Tensor, Tensor]:
        return lam.clone(), v.clone()

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> _DensePairs:
        return _DensePairs(inputs[0], *outputs, *inputs[3:])

    @staticmethod
    def adjoint(pairs: _DensePairs, needed: Sequence[bool], g_lam: Tensor | None, g_v: Tensor | None) -> Tensor:
        return symmetrize(_weights(pairs, g_lam, g_v) @ pairs.v.mH)

    @staticmethod
    def tangent(pairs: _DensePairs, da: Tensor, *_: None) -> tuple[Tensor, Tensor]:
        return _variations(pairs, symmetrize(da) @ pairs.v)


def _weights(pairs: _OperatorPairs | _DensePairs, g_lam: Tensor | None, g_v: Tensor | None) -> Tensor:
    """X such that the gradient of A is the symmetric part of XVᵀ."""
    lam, v = pairs.lam, pairs.v
    out = torch.zeros_like(v) if g_lam is None else v * g_lam.unsqueeze(-2)
    return out if g_v is None else out + pairs.gaps.adjoint(lam, v, g_lam, g_v) + pairs.solve(g_v)


def _variations(pairs: _OperatorPairs | _DensePairs, moved: Tensor) -> tuple[Tensor, Tensor]:
    """dλ and dV, given dA V."""
    d_lam, inside = pairs.gaps.tangent(pairs.lam, pairs.v, moved)
    return d_lam, inside + pairs.solve(moved)


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
    tolerance: float | None = None,
    max_products: int = 100_000,
    generator: torch.Generator | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Eigenpairs:
    r"""Leading eigenpairs of a symmetric matrix or operator.

    .. math:: AV = V\operatorname{diag}(\lambda),\qquad V^\top V = I,\qquad \lambda_1 \ge \dots \ge \lambda_k >
        \lambda_{k+1}

    A is a dense matrix, a sparse matrix, or a function that computes products with A. For example,
    ``lambda x, f: f @ (f.mT @ x)`` with ``params=(f,)`` is the affinity :math:`FF^\top` of n points without its n²
    entries. For complex matrices, ᵀ is the conjugate transpose and "symmetric" means Hermitian.

    Args:
        a: symmetric matrices ``(*batch, n, n)``, one sparse matrix ``(n, n)`` (COO or CSR), or a function that maps
            columns ``(n, r)`` and the parameters to A(θ) times the columns. The function must be linear in the columns,
            symmetric, and composed of differentiable torch operations. Its columns are complex if a parameter is.
        k: number of eigenpairs.
        params: tensors θ passed to the function; they receive gradients.
        n: order of A; required for a function.
        largest: return the largest eigenvalues if True, otherwise the smallest in ascending order.
        ties, tie_tol, broadening: treatment of ties among the k eigenvalues in the gradient of V, as in `eigh`.
        tolerance: relative residual at which to stop, with respect to the largest |λ| (forward) and the right-hand side
            (backward). 1e-11 by default, 1e-5 for ``precision=torch.float32``. Small dense matrices are decomposed
            completely and do not use it.
        max_products: maximum number of products of A with one vector.
        generator: random generator of the initial vectors; a fixed seed by default.
        check: as in `eigh`.
        precision: compute dtype, float64 by default; floating-point parameters are cast to it.

    Returns:
        Named tuple of real λ ``(*batch, k)`` and V ``(*batch, n, k)``, with the largest entry of each column positive.
        The dtype is that of ``a``, or of the first complex, else floating-point, parameter.

    Raises:
        ShapeError, DtypeError, NonFiniteError, SymmetryError: an argument or product has an invalid shape, dtype or
            value.
        DomainError: ``k`` is out of range, or the entries are too large or too small for the compute dtype.
        TieError: a gradient reaches vectors at a tie among the k eigenvalues, or λ_k = λ_{k+1} (see ``ties``).
        SolverError: no convergence within ``max_products``.

    Gradient:
        The gradient of A is (V(diag(G_λ) + (K̃ᵀ∘(VᵀG_V))_sym) + Z)Vᵀ, symmetrized. Column zⱼ solves
        (λⱼ − A)zⱼ = (I − VVᵀ)gⱼ outside the span of V, by conjugate gradients, or from the other eigenpairs for small
        dense matrices. Gradients of ``params`` do not form an n×n matrix.

        Supports all orders and forward mode. As in torch, COO matrices have a first gradient only and CSR matrices have
        none; pass a function of the entries instead. For losses of VVᵀ use `topk_subspace`, which is exact at ties
        among the k eigenvalues.

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
    limits = (tolerance, max_products)
    operator = symmetric_operator(a, k, params, n, largest, limits, check, precision)
    like = operator.like
    shape = like.new_empty(operator.order, 0)
    policy = tie_policy("topk_eigh", ties, tie_tol, broadening, check, shape, operator.dtype)
    with autocast_off(like.device.type):
        pairs = operator.leading(k, generator)
        following = pairs.following.reshape(1) if k < operator.order else pairs.values.new_empty(0)
        gaps = _Gaps(policy, following, pairs.scale)
        lam, v = apply(_TopK, operator.products, gaps, pairs.values, pairs.vectors, *operator.params)
        lam, v = (nan_where(operator.bad, t) for t in (lam, largest_positive(v) if v.is_complex() else v))
        return Eigenpairs((lam if largest else -lam).to(real_dtype(like.dtype)), v.to(like.dtype))


def _dense(a: Tensor, k: int, largest: bool, policy: TiePolicy, dtype: torch.dtype) -> Eigenpairs:
    with autocast_off(a.device.type):
        ready = prepare(a, "a", policy.check, real_dtype(dtype), sizes="sums", symmetric=True)
        x = ready.x
        values, vectors = batched_eigh(x.detach())
        if largest:
            values, vectors = values.flip(-1), vectors.flip(-1)
        pairs = _DensePairs(x, values[..., :k], vectors[..., :k], values[..., k:], vectors[..., k:], policy)
        lam, v = (ready.marked(t) for t in apply(_Dense, *pairs))
        return Eigenpairs(lam.to(real_dtype(a.dtype)), largest_positive(v).to(a.dtype))


def topk_subspace(
    a: Tensor | Callable[..., Tensor],
    k: int,
    params: Sequence[Tensor] = (),
    *,
    n: int | None = None,
    largest: bool = True,
    tolerance: float | None = None,
    max_products: int = 100_000,
    generator: torch.Generator | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Orthonormal basis of the leading eigenspace, for losses of its projector.

    .. math:: \Pi = VV^\top,\qquad AV = VH,\quad V^\top V = I

    The basis is that of `topk_eigh`, but the gradient does not depend on individual vectors. Losses of :math:`VV^\top`,
    or of ``v @ (v.mH @ x)`` for large n, have exact gradients at ties among the k eigenvalues. For complex matrices, ᵀ
    is the conjugate transpose.

    Args:
        a, k, params, n, largest: as in `topk_eigh`, without batches.
        tolerance, max_products, generator, check, precision: as in `topk_eigh`.

    Returns:
        V ``(n, k)`` in the dtype of `topk_eigh`.

    Raises:
        TieError: λ_k = λ_{k+1}, and the eigenspace is not unique. For other errors see `topk_eigh`.

    Gradient:
        ZVᵀ, symmetrized, with Z outside the span of V and ZH − AZ = (I − VVᵀ)G, by conjugate gradients. Supports all
        orders and forward mode. A loss that depends on the choice of basis causes a GaugeWarning.

    Example:
        >>> import torch, matbackprop
        >>> v = matbackprop.topk_subspace(torch.diag(torch.tensor([2.0, 1.0, 2.0])), 2)
        >>> (v @ v.mT).diagonal().round(decimals=4)
        tensor([1., 0., 1.])
    """
    limits = (tolerance, max_products)
    operator = symmetric_operator(a, k, params, n, largest, limits, check, precision)
    check_values = operator.check_values
    with autocast_off(operator.like.device.type):
        pairs = operator.leading(k, generator)
        tied = pairs.values[-1] - pairs.following <= gap_tolerance(operator.dtype, operator.order) * pairs.scale
        _, v = apply(_TopK, operator.products, _NoGaps(check_values), *pairs[:2], *operator.params)
        fault = f"have equal eigenvalues on both sides of k = {k}. Choose another k."
        return nan_where(operator.bad, raise_or_nan(tied, v, check_values, TieError, fault)).to(operator.like.dtype)
