"""Generalized eigenvalues, eigenvectors and functions of symmetric matrix pencils."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop.checks import Prepared, check_result, check_same_kind, nan_where, prepare, wants_check
from matbackprop.divided_differences import FunctionLike, Given, SpectralFunction, resolve_function
from matbackprop.errors import ShapeError
from matbackprop.functional._eigh import Eigenpairs
from matbackprop.functional._function import Operation, apply
from matbackprop.functional._linear_solve import definite_factor
from matbackprop.functional._matrix_function import of_known_spectrum
from matbackprop.functional._spectrum import Spectrum
from matbackprop.functional._ties import TiePolicy, Ties, largest_entry, tie_policy
from matbackprop.numerics import autocast_off, eye_like, real_dtype, symmetrize
from matbackprop.refinement import ill_determined, refinement_needed
from matbackprop.solvers import batched_eigh, batched_svd
from matbackprop.solvers.gram import largest_overlap, newton_step, squared_norms


def _has_nan(lower: Tensor) -> Tensor:
    """Return which results of `definite_factor` are NaN, ``(*batch,)``."""
    return lower.diagonal(dim1=-2, dim2=-1).real.isnan().any(-1)


def congruent(lower: Tensor, a: Tensor) -> Tensor:
    """L⁻¹AL⁻ᵀ, which has the eigenvalues of the pencil (A, LLᵀ)."""
    half = torch.linalg.solve_triangular(lower, a, upper=False)
    return symmetrize(torch.linalg.solve_triangular(lower, half.mH, upper=False))


def descending(a: Tensor, unit: Tensor | None = None) -> Tensor:
    """The order ``(*batch, n)`` in which the diagonal of A, divided by that of the unit, descends.

    In this order Cholesky factors of channels in different units are graded, and their small entries stay accurate.
    """
    sizes = a.detach().diagonal(dim1=-2, dim2=-1).real
    if unit is not None:
        sizes = sizes / unit.detach().diagonal(dim1=-2, dim2=-1).real
    return sizes.argsort(-1, descending=True)


def permuted(a: Tensor, order: Tensor) -> Tensor:
    """The rows and columns of A in an order."""
    index = a.shape[-1] * order.unsqueeze(-1) + order.unsqueeze(-2)
    return a.flatten(-2).gather(-1, index.flatten(-2)).reshape(a.shape)


def with_rows(a: Tensor, order: Tensor) -> Tensor:
    return a.gather(-2, order.unsqueeze(-1).expand(a.shape))


def spectrum_of_pencil(a: Tensor, lower: Tensor | None = None, inverse: bool = False) -> tuple[Tensor, Tensor]:
    """Return ascending eigenvalues and eigenvectors U of L⁻¹AL⁻ᵀ, or descending ones of LᵀAL if ``inverse``.

    In this order, terms with the derivative of a Cholesky factor do not cancel in functions of `Reduced` pencils. The
    error of eigenvalues is relative to the largest. If A is positive definite and the spectrum is too wide, it is
    recomputed from the Cholesky factor of A (`_graded_spectrum`). Without L, the matrix is A. NaN if L is.
    """

    def carry(x: Tensor, inverse: bool = inverse) -> Tensor:
        if lower is None:
            return x
        return lower.mH @ x if inverse else torch.linalg.solve_triangular(lower, x, upper=False)

    values, vectors = batched_eigh(a if lower is None else symmetrize(carry(carry(a).mH)))
    if values.numel() and refinement_needed(ill_determined(values)):
        root, eye = definite_factor(a, a.dtype), eye_like(a)
        definite = ~_has_nan(root) & values.isfinite().all(-1)
        root = torch.where(definite[..., None, None], root, eye)
        dual = torch.linalg.solve_triangular(root, eye, upper=False).mH
        exact, u, unresolved = _graded_spectrum(carry(root), carry(dual, not inverse))
        values = torch.where(definite.unsqueeze(-1), nan_where(unresolved, exact), values)
        vectors = torch.where(definite[..., None, None], nan_where(unresolved, u), vectors)
    return (values.flip(-1), vectors.flip(-1)) if inverse else (values, vectors)


def _graded_spectrum(r: Tensor, dual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ascending eigenvalues σ² and eigenvectors U of RRᵀ, and whether they are unresolved, given R and R⁻ᵀ.

    Every entry of U is accurate relative to its size min(σ/g, g/σ) if rows of R have very different norms g: it is an
    entry of RV = UΣ or of R⁻ᵀV = UΣ⁻¹. Newton steps rotate the right singular vectors V until the columns of RV are
    orthogonal relative to their norms, which fails if σ_max/σ_min is near 1/u.
    """
    *_, vh = batched_svd(r)
    y, z = vh @ r.mH, dual @ vh.mH
    for _ in range(2):
        z, y = newton_step(squared_norms(y), z, y)
    sigma, order = squared_norms(y).sqrt().sort(-1)
    y = y.gather(-2, order.unsqueeze(-1).expand(y.shape))
    z = z.gather(-1, order.unsqueeze(-2).expand(z.shape))
    row, column = squared_norms(r).sqrt().unsqueeze(-1), sigma.unsqueeze(-2)
    u = torch.where(row <= column, y.mH / column, z * column)
    unresolved = largest_overlap(y, torch.zeros_like(sigma[..., 0])) > 1e4 * torch.finfo(sigma.dtype).eps
    return sigma.square(), u, unresolved


def _moving(value: Tensor, x: Tensor) -> Tensor:
    """diag(value) with the derivatives of X."""
    return torch.diag_embed(value).to(x.dtype) + (x - x.detach())


def diagonal_spectrum(values: Tensor, like: Tensor) -> Spectrum:
    return Spectrum(values, eye_like(like).expand_as(like))


class Reduced(NamedTuple):
    """A pencil in the coordinates of its eigenvectors, in which VᵀAV = Λ and VᵀBV = I exactly.

    V is a constant, and these products are linear in A and B. Functions of them and their derivatives do not depend on
    the condition number of B. For the pencil of A and B⁻¹, VᵀBV = I and WᵀAW = Λ.
    """

    a: Tensor  # Λ, as a function of A
    lower: Tensor  # the Cholesky factor of I, as a function of B
    values: Tensor  # λ
    v: Tensor
    w: Tensor  # V⁻ᵀ
    inverse: bool  # whether the pencil is that of A and B⁻¹

    @classmethod
    def of(cls, a: Tensor, b: Tensor, order: Tensor, inverse: bool = False) -> Reduced:
        """Reduce the pencil of A and B, or of A and B⁻¹, with a Cholesky factor of B in an `descending` order."""
        factor = definite_factor(permuted(b.detach(), order))
        values, u = spectrum_of_pencil(permuted(a.detach(), order), factor, inverse)
        back = order.argsort(-1)
        v, w = (with_rows(t, back) for t in (torch.linalg.solve_triangular(factor.mH, u, upper=True), factor @ u))
        return cls.at(a, symmetrize(v.mH @ b @ v), values, v, w, inverse)

    @classmethod
    def at(cls, a: Tensor, b: Tensor, values: Tensor, v: Tensor, w: Tensor, inverse: bool = False) -> Reduced:
        """Reduce a pencil with known λ, V and W, given A and VᵀBV."""
        onto = w if inverse else v
        inside = _moving(values, symmetrize(onto.mH @ a @ onto))
        return cls(inside, definite_factor(_moving(torch.ones_like(values), b)), values, v, w, inverse)

    def function(self, given: tuple[SpectralFunction, Given], check_values: bool = False) -> Tensor:
        """g(L⁻¹AL⁻ᵀ), or g(LᵀAL), in these coordinates."""
        if self.inverse:
            inside = symmetrize(self.lower.mH @ self.a @ self.lower)
        else:
            inside = congruent(self.lower, self.a)
        return of_known_spectrum(inside, diagonal_spectrum(self.values, inside), given, check_values)

    def transformed(self, given: tuple[SpectralFunction, Given], check_values: bool = False) -> Tensor:
        """L g(L⁻¹AL⁻ᵀ) Lᵀ with B = LLᵀ."""
        value = self.lower @ self.function(given, check_values) @ self.lower.mH
        return symmetrize(self.w @ value @ self.w.mH)


def _prepare(a: Tensor, b: Tensor, check: bool | None, precision: torch.dtype | None) -> tuple[Prepared, Prepared]:
    x = prepare(a, "a", check, precision, sizes="products", symmetric=True, others=(b,))
    y = prepare(b, "b", check, precision, sizes="products", symmetric=True, others=(a,))
    check_same_kind(a, b)
    if a.shape != b.shape:
        raise ShapeError(f"a and b must have the same shape, got {tuple(a.shape)} and {tuple(b.shape)}.")
    return x, y


class _Saved(NamedTuple):
    lam: Tensor
    v: Tensor
    policy: TiePolicy


class _GeneralizedEigh(Operation):
    """With S = VᵀdAV and T = VᵀdBV: dλ = diag(S − TΛ), VᵀBdV = K̃ᵀ∘(S − TΛ) − diag(T)/2."""

    forward_twice = "generalized_eigh"

    @staticmethod
    def forward(a: Tensor, b: Tensor, factor: Tensor, policy: TiePolicy) -> tuple[Tensor, Tensor]:
        lam, u = spectrum_of_pencil(a, factor)
        return lam.clone(), torch.linalg.solve_triangular(factor.mH, u, upper=True)

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> _Saved:
        return _Saved(*outputs, inputs[3])

    @staticmethod
    def adjoint(saved: _Saved, needed: Sequence[bool], g_lam: Tensor | None, g_v: Tensor | None) -> Any:
        lam, v, policy = saved
        on_s = torch.zeros_like(v) if g_lam is None else torch.diag_embed(g_lam).to(v.dtype)
        on_norms = torch.zeros_like(lam)
        if g_v is not None:
            within = v.mH @ g_v
            on_s = on_s + policy.over_gaps(lam, within, within, g_lam)
            on_norms = 0.5 * within.diagonal(dim1=-2, dim2=-1).real
        on_t = -on_s * lam.unsqueeze(-2) - torch.diag_embed(on_norms)
        return v @ symmetrize(on_s) @ v.mH, v @ symmetrize(on_t) @ v.mH

    @staticmethod
    def tangent(saved: _Saved, da: Tensor | None, db: Tensor | None, *_: None) -> tuple[Tensor, Tensor]:
        lam, v, policy = saved
        s = torch.zeros_like(v) if da is None else v.mH @ symmetrize(da) @ v
        t = torch.zeros_like(v) if db is None else v.mH @ symmetrize(db) @ v
        moved = s - t * lam.unsqueeze(-2)
        rotation = policy.rotation(lam, moved, largest_entry(moved))
        rotation = rotation - 0.5 * torch.diag_embed(t.diagonal(dim1=-2, dim2=-1).real)
        return moved.diagonal(dim1=-2, dim2=-1).real.clone(), v @ rotation


def generalized_eigh(
    a: Tensor,
    b: Tensor,
    *,
    ties: Ties = "raise",
    tie_tol: float | None = None,
    broadening: float = 1e-6,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Eigenpairs:
    r"""Eigendecomposition of a symmetric pencil, :math:`AV = BV\operatorname{diag}(\lambda)`.

    .. math:: V^\top A V = \operatorname{diag}(\lambda),\qquad V^\top B V = I

    For complex matrices, ᵀ is the conjugate transpose and "symmetric" means Hermitian.

    Args:
        a: symmetric matrices ``(*batch, n, n)``; the symmetric part is used.
        b: symmetric positive definite matrices of the same shape.
        ties, tie_tol, broadening: treatment of repeated eigenvalues in the gradient of V, as in `eigh`.
        check, precision: as in `eigh`. B is also checked to be positive definite.

    Returns:
        Named tuple of ascending eigenvalues ``(*batch, n)`` and eigenvectors ``(*batch, n, n)`` in columns. The vectors
        are orthonormal in the inner product of B and unique up to sign or phase. Their rounding error grows with the
        square root of the condition number of B.

    Raises:
        DomainError: B is not positive definite to working precision.
        TieError: see `eigh`.

    Gradient:
        With S = VᵀdAV and T = VᵀdBV, dλ = diag(S − TΛ) and dV = V(K̃ᵀ∘(S − TΛ) − diag(T)/2). Higher orders are correct
        if no pair is tied.

    Example:
        >>> import torch, matbackprop
        >>> a, b = torch.diag(torch.tensor([1.0, 6.0])), torch.diag(torch.tensor([1.0, 2.0])).requires_grad_()
        >>> values, vectors = matbackprop.generalized_eigh(a, b)
        >>> values.detach()
        tensor([1., 3.])
        >>> values.sum().backward()
        >>> b.grad.diagonal()
        tensor([-1.0000, -1.5000])

    Reference:
        Giles, An extended collection of matrix derivative results (2008), for B = I.
    """
    x, y = _prepare(a, b, check, precision)
    policy = tie_policy("generalized_eigh", ties, tie_tol, broadening, check, a, x.x.dtype)
    with autocast_off(a.device.type):
        factor = definite_factor(y.x.detach(), b.dtype, y.check_values)
        lam, v = (x.marked(y.marked(t)) for t in apply(_GeneralizedEigh, x.x, y.x, factor, policy))
        if x.check_values:
            check_result(v, "The range of eigenvalues is too wide, or an eigenvector", "Use similar units for a and b.")
        return Eigenpairs(lam.to(real_dtype(a.dtype)), v.to(a.dtype))


def generalized_matrix_function(
    a: Tensor,
    b: Tensor,
    function: FunctionLike,
    *,
    exponent: float | Tensor | None = None,
    params: Sequence[Tensor] = (),
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Apply a scalar function to the spectrum of a symmetric pencil, :math:`AV = BV\operatorname{diag}(\lambda)`.

    .. math:: BV \operatorname{diag}(g(\lambda)) V^\top B = B^{1/2}\,g(B^{-1/2}AB^{-1/2})\,B^{1/2}, \qquad V^\top BV = I

    The result is A for g(x) = x and B for g(x) = 1. It transforms like A and B under a change of basis. ``"power"``
    computes the weighted geometric mean of B and A. ``"log"`` computes the velocity from B to A in the affine-invariant
    geometry of positive definite matrices. For complex matrices, ᵀ is the conjugate transpose.

    Args:
        a: symmetric matrices ``(*batch, n, n)``; the symmetric part is used.
        b: symmetric positive definite matrices of the same shape.
        function, exponent, params: g, as in `matrix_function`.
        check, precision: as in `matrix_function`. B is also checked.

    Returns:
        Symmetric matrices ``(*batch, n, n)`` in the dtype of ``a``.

    Raises:
        DomainError: a generalized eigenvalue is outside the domain of g.

    Gradient:
        First and second order with respect to A, B and the parameters of g, exact at repeated eigenvalues and accurate
        for an ill-conditioned B.

    Example:
        >>> import torch, matbackprop
        >>> a, b = torch.diag(torch.tensor([1.0, 8.0])), torch.diag(torch.tensor([1.0, 2.0]))
        >>> matbackprop.generalized_matrix_function(a, b, "sqrt").diagonal()  # the geometric mean
        tensor([1., 4.])

    Reference:
        Kubo and Ando, Means of positive linear operators (1980).
    """
    given = resolve_function(function, exponent, params)
    x, y = _prepare(a, b, check, precision)
    with autocast_off(a.device.type):
        bad = _not_definite(y, b.dtype, "b")
        out = Reduced.of(x.x, y.x, descending(y.x)).transformed(given, wants_check(x.check_values, x.x, *given[1]))
        if given[0].domain == "positive":  # rounding may hide a zero eigenvalue
            bad = bad | _not_definite(x, a.dtype, "a")
        return x.marked(y.marked(nan_where(bad, out))).to(a.dtype)


def _not_definite(ready: Prepared, dtype: torch.dtype, name: str) -> Tensor:
    """Return which matrices ``(*batch,)`` are not positive definite, or raise if values are checked."""
    return _has_nan(definite_factor(ready.x.detach(), dtype, ready.check_values, name))
