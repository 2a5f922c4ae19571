"""Second-order pooling C = g(Fᵀ diag(w) F + εI).

For complex F, ᵀ is the conjugate transpose. A = FᵀF + εI is factored on the smaller side of F.

For m < d the thin form uses FFᵀ = U diag(s) Uᵀ: with Y = UᵀF and λ = s + ε,

    g(A) = g(ε)I + Yᵀ diag(g[λᵢ, ε]) Y,    F·L = U(diag(g[λᵢ, ε]) Y G + (g[λᵢ, λⱼ, ε] ∘ (Y G Yᵀ)) Y),

where L is the derivative of g at A in the direction G. Otherwise the primal form uses FᵀF = V diag(s) Vᵀ with
Z = FV: g(A) = V diag(g(λ)) Vᵀ and F·L = Z(Γ∘(VᵀGV))Vᵀ. In both, s is recomputed as the squared norms of the rows of Y
(columns of Z), because a small eigenvalue of a Gram matrix has the rounding error of the largest. If none is small, Z
is not computed and F·L is a separate product. If the spectrum is wide, the vectors are also refined (`gram_eigh`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from matbackprop._torch import differentiated_again, forward_mode_differentiated, is_plain
from matbackprop.checks import (
    check_finite,
    check_matrix,
    check_option,
    check_result,
    check_size,
    check_weight,
    check_weight_values,
    nan_where,
    parameter_tensor,
    prepare,
)
from matbackprop.cuda import pool as pool_kernels
from matbackprop.divided_differences import (
    BoundFunction,
    FunctionLike,
    Given,
    SpectralFunction,
    bind_params,
    resolve_function,
)
from matbackprop.errors import DomainError, NumericalWarning
from matbackprop.functional._eigh import eigh
from matbackprop.functional._function import Operation, apply, product, with_derivatives_of
from matbackprop.functional._matrix_function import check_domain
from matbackprop.functional._spectrum import Point, Spectrum, check_captured, spectral
from matbackprop.functional._svd import svd
from matbackprop.numerics import autocast_off, eye_like, inner, is_double, real_dtype, symmetrize
from matbackprop.solvers.gram import gram_eigh

Method = Literal["fused", "svd", "eig"]


def _table(lam: Tensor, g: BoundFunction) -> Tensor:
    """Γ, g[λᵢ, λⱼ]."""
    return g.first(lam.unsqueeze(-1), lam.unsqueeze(-2))


def _forms(rows: Tensor, g: Tensor) -> Tensor:
    """yᵢ G yᵢᵀ for each row, the real part."""
    return inner(rows, rows @ g, (-1,))


class Thin(NamedTuple):
    """The factors for fewer rows than columns."""

    s: Tensor  # squared singular values of F (*batch, m), zero for rounding errors
    basis: Tensor  # U (*batch, m, m)
    y: Tensor  # UᵀF (*batch, m, d)
    eps: Tensor  # (*batch,)

    def _slope(self, g: BoundFunction) -> Tensor:
        """g[λᵢ, ε], zero for zero singular values."""
        shift = self.eps.unsqueeze(-1)
        return torch.where(self.s > 0, g.first(self.s + shift, shift), 0)

    def value(self, g: BoundFunction) -> Tensor:
        """g(A)."""
        half = (self.y * (0.5 * self._slope(g)).unsqueeze(-1)).mH @ self.y
        c = half + half.mH
        c.diagonal(dim1=-2, dim2=-1).add_(g.value(self.eps).unsqueeze(-1))
        return c

    def feature_gradient(self, g: BoundFunction, e: Tensor, f: Tensor) -> Tensor:
        """2 F·L for the symmetric part of G, whose factor ½ cancels against the 2."""
        ye = self.y @ (e + e.mH)
        return self.basis @ self._through_slopes(g, ye)

    def _through_slopes(self, g: BoundFunction, k: Tensor) -> Tensor:
        """diag(g[λᵢ, ε])K + (g[λᵢ, λⱼ, ε] ∘ (KYᵀ))Y, the second difference as a quotient over max(sᵢ, sⱼ).

        It cancels if both are far below ε, but is multiplied by √(sᵢsⱼ) in KYᵀ; its rounding error is at most
        that of the first term. Y and s are scaled by the largest, because s may be too small to divide by.
        """
        slope = self._slope(g)
        top = self.s.amax(-1, keepdim=True) if self.s.shape[-1] else self.s
        top = torch.where(top > 0, top, 1)
        scaled, y = self.s / top, self.y / top.sqrt().unsqueeze(-1)
        rows, columns = scaled.unsqueeze(-1), scaled.unsqueeze(-2)
        nearer = torch.where(rows < columns, slope.unsqueeze(-1), slope.unsqueeze(-2))
        widest = torch.maximum(rows, columns)
        table = _table(self.s + self.eps.unsqueeze(-1), g)
        second = torch.where(widest > 0, (table - nearer) / widest, 0)
        return slope.unsqueeze(-1) * k + (second * (k @ y.mH)) @ y

    def weight_gradient(self, g: BoundFunction, e: Tensor, f: Tensor, w: Tensor) -> Tensor:
        """fᵢ L fᵢᵀ for each row of the unweighted F, also for rows of zero weight outside the span of the others."""
        v, shift = self._right_vectors(), self.eps.unsqueeze(-1)  # A is ε on their complement
        lam = self.s + shift
        inside = f @ v.mH
        outside = (f - inside @ v) * (w == 0).unsqueeze(-1)  # a weighted row is in the span up to rounding
        ve = 0.5 * (v @ e + v @ e.mH)
        total = inner(inside, inside @ (_table(lam, g) * (ve @ v.mH)), (-1,))
        total = total + 2 * inner(inside, g.first(lam, shift).unsqueeze(-2) * (outside @ ve.mH), (-1,))
        return total + g.first(shift, shift) * _forms(outside, e)

    def tangent(self, g: BoundFunction, df: Tensor, f: Tensor) -> Tensor:
        """The variation of g(A) in the direction of F: the transpose of `feature_gradient`."""
        half = self.y.mH @ self._through_slopes(g, self.basis.mH @ df)
        return half + half.mH

    def derivative(self, g: BoundFunction) -> Tensor:
        """g'(A), the variation of g(A) with ε."""
        lam, at_eps = self.s + self.eps.unsqueeze(-1), g.first(self.eps, self.eps).unsqueeze(-1)
        v = self._unit_rows()
        c = (v * (g.first(lam, lam) - at_eps).unsqueeze(-1)).mH @ v
        return c + torch.diag_embed(at_eps.expand(*at_eps.shape[:-1], self.y.shape[-1]))

    def _unit_rows(self) -> Tensor:
        return self.y * torch.where(self.s > 0, self.s, torch.inf).rsqrt().unsqueeze(-1)

    def _right_vectors(self) -> Tensor:
        """Orthonormal rows of Y, each orthogonalized against larger ones, whose rounding errors may have its size.

        Rows are zero if s is zero.
        """
        v = torch.linalg.qr(self.y.mH.flip(-1)).Q.flip(-1).mH  # s is ascending
        return v * (self.s > 0).unsqueeze(-1)

    def spectrum(self) -> Spectrum:
        return Spectrum(self.s + self.eps.unsqueeze(-1), self._right_vectors().mH, self.eps)


class Primal(NamedTuple):
    """The factors for at least as many rows as columns, with the methods of `Thin`."""

    s: Tensor  # squared singular values of F (*batch, d), zero for rounding errors
    basis: Tensor  # V (*batch, d, d)
    y: Tensor  # (FV)ᵀ (*batch, d, m), or empty if F is used instead
    eps: Tensor  # (*batch,)

    def _lam(self) -> Tensor:
        return self.s + self.eps.unsqueeze(-1)

    def value(self, g: BoundFunction) -> Tensor:
        half = (self.basis * (0.5 * g.value(self._lam())).unsqueeze(-2)) @ self.basis.mH
        return half + half.mH

    def feature_gradient(self, g: BoundFunction, e: Tensor, f: Tensor) -> Tensor:
        h = self.basis.mH @ (e + e.mH) @ self.basis
        if self.y.numel() == 0:
            return f @ (self.basis @ (_table(self._lam(), g) * h) @ self.basis.mH)
        return self.y.mH @ ((self._table_of_nonzero(g) * h) @ self.basis.mH)

    def _table_of_nonzero(self, g: BoundFunction) -> Tensor:
        """Γ with zero rows for zero singular values."""
        return _table(self._lam(), g).masked_fill((self.s == 0).unsqueeze(-1), 0)

    def tangent(self, g: BoundFunction, df: Tensor, f: Tensor) -> Tensor:
        rows = self.y if self.y.numel() else (f @ self.basis).mH
        inside = self._table_of_nonzero(g) * (rows @ df @ self.basis)
        return self.basis @ (inside + inside.mH) @ self.basis.mH

    def derivative(self, g: BoundFunction) -> Tensor:
        return (self.basis * g.first(self._lam(), self._lam()).unsqueeze(-2)) @ self.basis.mH

    def weight_gradient(self, g: BoundFunction, e: Tensor, f: Tensor, w: Tensor) -> Tensor:
        """fᵢ L fᵢᵀ for each row of the unweighted F; only rows of zero weight are outside the span."""
        rows = (f @ self.basis) * ((self.s != 0).unsqueeze(-2) | (w == 0).unsqueeze(-1))
        return _forms(rows, _table(self._lam(), g) * (self.basis.mH @ e @ self.basis))

    def spectrum(self) -> Spectrum:
        return Spectrum(self._lam(), self.basis)


Moments = Thin | Primal


def factor(f: Tensor, eps: Tensor, fine: bool) -> Moments:
    """Factor A for F ``(*batch, m, d)``; ``fine`` requests float64 accuracy."""
    if f.shape[-2] < f.shape[-1]:
        return Thin(*gram_eigh(f, eps, fine), eps)
    return Primal(*gram_eigh(f.mH, eps, fine, products=False), eps)


def _weighted(f: Tensor, w: Tensor | None) -> Tensor:
    return f if w is None else f * w.unsqueeze(-1)


def _root_weighted(f: Tensor, w: Tensor | None) -> Tensor:
    return f if w is None else _weighted(f, w.sqrt())


class _Problem(NamedTuple):
    """The arguments of C = g(A), A = Fᵀ diag(w) F + εI, in the dtype of the computation."""

    f: Tensor  # (*batch, m, d)
    w: Tensor | None  # (*batch, m)
    eps: Tensor  # (*batch,)
    p: Tensor | None  # parameters of g
    function: SpectralFunction
    fine: bool  # whether float64 accuracy is required

    @property
    def g(self) -> BoundFunction:
        return BoundFunction(self.function, self.p)

    def rows(self) -> Tensor:
        """√w F."""
        return _root_weighted(self.f, self.w)

    def matrix(self) -> Tensor:
        """A, differentiable in all arguments."""
        gram = symmetrize(product(self.f.mH, _weighted(self.f, self.w)))
        return gram + self.eps[..., None, None] * eye_like(gram)

    def point(self) -> Point:
        """g at A with its spectrum as a constant."""
        rows = _root_weighted(self.f.detach(), None if self.w is None else self.w.detach())
        spectrum = factor(rows, self.eps.detach(), self.fine).spectrum()
        return Point(self.matrix(), spectrum, _with_digits(self.function), self.p)


class _Saved(NamedTuple):
    problem: _Problem
    moments: Moments


class _Pool(Operation):
    """C and the factors for its gradient; derivatives are in F, w, ε and p, not in the factors."""

    @staticmethod
    def forward(
        f: Tensor, w: Tensor | None, eps: Tensor, p: Tensor | None, function: SpectralFunction, fine: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        moments = factor(_root_weighted(f, w), eps, fine)
        return moments.value(BoundFunction(function, p)), moments.s, moments.basis, moments.y

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> _Saved:
        problem, (_, s, basis, y) = _Problem(*inputs), outputs
        kind = Thin if problem.f.shape[-2] < problem.f.shape[-1] else Primal
        return _Saved(problem, kind(s, basis, y, problem.eps))

    @staticmethod
    def adjoint(saved: _Saved, needed: Sequence[bool], g: Tensor, *_: None) -> Any:
        with torch.no_grad():
            grads = _gradients(saved, needed, g)
        if not differentiated_again():
            return grads
        # These values, which are the more accurate ones, with the derivatives of the general formulas.
        pairs = zip(grads, _differentiable_gradients(saved.problem, needed, g), strict=True)
        return tuple(None if x is None or y is None else with_derivatives_of(y, x) for x, y in pairs)

    @staticmethod
    def tangent(
        saved: _Saved, df: Tensor | None, dw: Tensor | None, deps: Tensor | None, dp: Tensor | None, *_: None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        problem, moments = saved
        f, w, g = problem.f, cast(Tensor, problem.w), problem.g
        moved = torch.zeros_like(f) if df is None else _root_weighted(df, w)
        out = f.new_zeros(())
        if dw is not None:  # differentiate through the square root of the weight, unless it is zero
            moved = moved + _weighted(f, 0.5 * dw * torch.where(w > 0, w, torch.inf).rsqrt())
            new = f * (dw * (w == 0)).unsqueeze(-1)
            out = out + moments.spectrum().first(g, symmetrize(f.mH @ new))
        out = out + moments.tangent(g, moved, problem.rows())
        if deps is not None:
            out = out + deps[..., None, None] * moments.derivative(g)
        if dp is not None:
            out = out + dp[..., None, None] * moments.value(g.in_parameter())
        s, basis, y = map(torch.zeros_like, moments[:3])  # nothing uses the tangents of the factors
        return out, s, basis, y


def _gradients(saved: _Saved, needed: Sequence[bool], e: Tensor) -> tuple[Tensor | None, ...]:
    """Return the required gradients of F, w, ε and p, given that of C."""
    problem, moments = saved
    w, g = problem.w, problem.g
    return (
        _root_weighted(moments.feature_gradient(g, e, problem.rows()), w) if needed[0] else None,
        moments.weight_gradient(g, e, problem.f, cast(Tensor, w)) if needed[1] else None,
        inner(e, moments.derivative(g)) if needed[2] else None,
        inner(e, moments.value(g.in_parameter())) if needed[3] else None,
    )


def _differentiable_gradients(problem: _Problem, needed: Sequence[bool], e: Tensor) -> tuple[Tensor | None, ...]:
    """The same by the derivative L of g at the d×d matrix A in the direction G, which can be differentiated again.

    They are 2 diag(w) F L, the rows' fᵢLfᵢᵀ, tr L and ⟨G, ∂g/∂p(A)⟩.
    """
    e, point = symmetrize(e), problem.point()
    moved = point.derivative(e)
    rows = problem.f @ moved
    return (
        2 * _weighted(rows, problem.w) if needed[0] else None,
        inner(problem.f, rows, (-1,)) if needed[1] else None,
        moved.diagonal(dim1=-2, dim2=-1).real.sum(-1) if needed[2] else None,
        point.parameter_gradient(e) if needed[3] else None,
    )


def _with_digits(function: SpectralFunction) -> SpectralFunction:
    """Set second differences to NaN if second derivatives of pooling lose all but about three digits."""

    def second(*x: Tensor) -> Tensor:
        arguments = x[:3]
        spread = functools.reduce(torch.maximum, arguments) / functools.reduce(torch.minimum, arguments)
        return torch.where(spread * torch.finfo(spread.dtype).eps > 1e-2, torch.nan, function.second(*x))

    return dataclasses.replace(function, second=second)


def _prepare_weight(weight: Tensor | None, f: Tensor) -> tuple[Tensor, Tensor | None]:
    """Add the weight's region dimension to F, and convert the weight to the dtype of the computation."""
    if weight is None:
        return f, None
    if weight.ndim == f.ndim:
        f = f.unsqueeze(-3).expand(*weight.shape, f.shape[-1])
    return f, weight.to(real_dtype(f.dtype))


def _center(f: Tensor, w: Tensor | None) -> Tensor:
    """F minus its (weighted) mean row; a region without weight has mean 0."""
    if f.shape[-2] == 0:
        return f
    if w is None:
        return f - f.mean(-2, keepdim=True)
    total = w.sum(-1, keepdim=True)
    fraction = w / torch.where(total == 0, 1, total)
    return f - (fraction.unsqueeze(-1) * f).sum(-2, keepdim=True)


def second_order_pool(
    f: Tensor,
    *,
    eps: float | Tensor = 1e-3,
    function: FunctionLike = "log",
    exponent: float | Tensor | None = None,
    params: Sequence[Tensor] = (),
    weight: Tensor | None = None,
    center: bool = False,
    method: Method = "fused",
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Pool the rows of a feature map into a function of their second moments.

    .. math:: C = g(F^\top \operatorname{diag}(w) F + \varepsilon I)

    Args:
        f: features ``(*batch, m, d)``, one row per location, real or complex (ᵀ is then the conjugate transpose).
        eps: ε > 0, a number, or a tensor that broadcasts to the batch (and regions) and receives a gradient.
        function, exponent, params: g, as in `matrix_function`.
        weight: nonnegative weights, boolean or floating point, ``(*batch, m)``, or ``(*batch, r, m)`` for r regions
            that share one feature map. They are not normalized.
        center: subtract the (weighted) mean row first, which replaces second moments by the covariance.
        method: ``"fused"`` uses divided differences. ``"svd"`` and ``"eig"`` are DeepO2P-SVD and DeepO2P-EIG of the
            paper, for comparison; they drop tied pairs from the gradient.
        check, precision: as in `matrix_function`.

    Returns:
        Symmetric (Hermitian) matrices ``(*batch, d, d)``, or ``(*batch, r, d, d)`` with regions.

    Raises:
        DomainError: ε is negative or not finite, a weight is negative, or an eigenvalue is outside the domain of
            g (for example ε = 0 with log).

    Gradient:
        First and second order with respect to F, weights, ε, the exponent and ``params``. The first order in F is
        2 diag(w) F L(G) with L the derivative of g. It is exact for repeated eigenvalues, dead channels, duplicate rows
        and zero weights, and zero at F = 0. Singular values σ ≤ max(m, d) u σ_max count as zero, with u the unit
        roundoff.

        Second derivatives are also exact at ties. If F has rank less than d, their terms cancel by a factor of up to
        λ_max/ε; above 4.5e13, DomainError is raised, or they are NaN if values are not checked. Supports forward mode,
        vmap and fullgraph compilation.

    Example:
        >>> import torch, matbackprop
        >>> f = torch.rand(2, 36, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
        >>> c = matbackprop.second_order_pool(f)
        >>> c.shape
        torch.Size([2, 64, 64])
        >>> c.square().mean().backward()
        >>> bool(f.grad.isfinite().all())
        True

    Reference:
        Ionescu et al. (2015), section 4 and Corollary "DeepO2P".
    """
    check_matrix(f, "f", or_complex=True)
    check_option(method, get_args(Method), "method")
    _warn_of_feature_maps(f)
    fn, given = resolve_function(function, exponent, params)
    if not isinstance(eps, Tensor) and (not 0 <= eps < math.inf or (eps == 0 and fn.domain in ("positive", "nonzero"))):
        sign = ">=" if fn.domain in ("nonnegative", "real") else ">"
        raise DomainError(f"{fn.name} needs eps {sign} 0 and finite, got {eps}.")
    if weight is not None:
        check_weight(weight, f, regions=True)
    with autocast_off(f.device.type):
        x, check_values, *_ = prepare(f, "f", check, precision, sizes="large", others=(weight, eps, *given))
        if check_values:
            _check_values(weight, eps, fn)
        elif isinstance(eps, Tensor):
            eps = torch.where((eps >= 0) & eps.isfinite(), eps, torch.nan)
        double = is_double(x.dtype)
        if method == "fused" and double and _kernels_take(f, weight, eps, fn):
            out = _pool_by_kernels(f, weight, center, eps, fn)
        else:
            fine = double and is_double(f.dtype)
            out = _pool(x, weight, eps, fn, given, center, method, fine, check_values).to(f.dtype)
        if check_values:
            check_result(out, f"{fn.name} of the moments", "Scale the features or the weights, or change eps.")
        return out


def _warn_of_feature_maps(f: Tensor) -> None:
    if f.ndim == 4 and f.shape[-1] == f.shape[-2] < f.shape[-3]:
        warnings.warn(
            f"Features of shape {tuple(f.shape)} look like maps (batch, channels, height, width), but the last "
            f"dimension is pooled as channels. Pass f.flatten(2).mT, or use nn.SecondOrderPool2d.",
            NumericalWarning,
            stacklevel=3,
        )


def _pool(
    x: Tensor,
    weight: Tensor | None,
    eps: float | Tensor,
    function: SpectralFunction,
    given: Given,
    center: bool,
    method: Method,
    fine: bool,
    check_values: bool,
) -> Tensor:
    """C in the dtype of X, in torch operations."""
    x, w = _prepare_weight(weight, x)
    shift = parameter_tensor(eps, "eps", x.shape[:-2], x)
    g = bind_params(function, given, x.shape[:-2], x)
    function, p = g.function, g.p
    if check_values:
        if w is not None:
            check_size(_root_weighted(x, w), x.dtype, "f, times the roots of the weights,", "large")
        g.check_params()
        if bool((shift > 0).all()):  # at ε = 0 some derivatives are infinite but unused
            function = function.checked
    else:
        x = nan_where(g.bad_params(), x)
    problem = _Problem(_center(x, w) if center else x, w, shift, p, function, fine)
    if method != "fused":
        return _reference_pool(problem, method, check_values)
    if forward_mode_differentiated(problem.f, w, shift, p) or (p is not None and not function.builtin):
        point = problem.point()  # g of the d×d matrix A, whose derivatives have all orders and modes
        check_captured(g, point.spectrum.values)
        return spectral(*point)
    c, s, *_ = apply(_Pool, *problem)
    if not function.builtin:
        check_captured(g, s + shift.detach().unsqueeze(-1))
    return c


def _kernels_take(f: Tensor, weight: Tensor | None, eps: float | Tensor, function: SpectralFunction) -> bool:
    return f.is_cuda and _fixed(weight) and pool_kernels.takes(f, eps, function)


def _fixed(weight: Tensor | None) -> bool:
    """Return whether weights may be multiplied into F: they require no gradient, because √w has none at zero."""
    return weight is None or (is_plain(weight) and weight.numel() > 0 and not weight.requires_grad)


def _pool_by_kernels(
    f: Tensor, weight: Tensor | None, center: bool, eps: float | Tensor, function: SpectralFunction
) -> Tensor:
    if isinstance(eps, Tensor):  # a number is passed by value, because a tensor would cost a launch
        batch = f.shape[:-2] if weight is None else weight.shape[:-1]
        eps = parameter_tensor(eps, "eps", batch, torch.empty((), dtype=torch.float64, device=f.device))
    return pool_kernels.pool(f, weight, eps, function, center, _pool_in_general)


def _pool_in_general(
    f: Tensor, weight: Tensor | None, eps: float | Tensor, function: SpectralFunction, center: bool
) -> Tensor:
    with autocast_off(f.device.type):
        fine = f.dtype == torch.float64
        return _pool(f.double(), weight, eps, function, (), center, "fused", fine, False).to(f.dtype)


def _check_values(weight: Tensor | None, eps: float | Tensor, function: SpectralFunction) -> None:
    if weight is not None:
        check_weight_values(weight)
    if isinstance(eps, Tensor):
        check_finite(eps, "eps")
        if bool((eps < 0).any()):
            raise DomainError(f"eps must not be negative, got {float(eps.min()):.3g}.")
        check_domain(eps.detach(), function, "eps", "Pass eps > 0.")


def _reference_pool(problem: _Problem, method: Method, check_values: bool) -> Tensor:
    """The paper's two methods, differentiated through a decomposition layer that drops tied pairs.

    In the SVD method a weight of zero receives a zero gradient, because √w has none there.
    """
    f, w, eps, *_ = problem
    d, precision = f.shape[-1], real_dtype(f.dtype)
    if method == "eig":
        q, v = eigh(problem.matrix(), ties="drop", check=False, precision=precision)
    else:
        if w is not None:
            root = w.clamp_min(torch.finfo(w.dtype).tiny).sqrt()
            f = _weighted(f, torch.where(w > 0, root, torch.where(w == 0, 0, torch.nan)))
        _, sigma, vh = svd(f, full_matrices=f.shape[-2] < d, ties="drop", check=False, precision=precision)
        q = torch.nn.functional.pad(sigma.square(), (0, d - sigma.shape[-1])) + eps.unsqueeze(-1)
        v = vh.mH
    if check_values:  # eigenvalues of a Gram matrix have the rounding error of the largest, which may exceed eps
        check_domain(q.detach(), problem.function, "the moments", "Raise eps, or use the fused method.")
    return symmetrize(product(v * problem.g.value(q).unsqueeze(-2), v.mH))
