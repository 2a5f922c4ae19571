"""The matrix A = FᵀF + εI of second-order pooling, factored on the smaller side of F.

For complex F, ᵀ is the conjugate transpose here.

For m < d the thin form works on FFᵀ = U diag(s) Uᵀ: with Y = UᵀF and λ = s + ε,

    g(A) = g(ε)I + Yᵀ diag(g[λᵢ, ε]) Y,    F·L = U(diag(g[λᵢ, ε]) Y G + (g[λᵢ, λⱼ, ε] ∘ (Y G Yᵀ)) Y),

where L is the derivative of g at A in the direction G. Otherwise the primal form works on FᵀF = V diag(s) Vᵀ with
Z = FV: g(A) = V diag(g(λ)) Vᵀ and F·L = Z(Γ∘(VᵀGV))Vᵀ. In both, s is taken again as the squared norms of the rows of Y
(columns of Z): a small eigenvalue of a Gram matrix is only known to rounding of the largest, its squared norm far
better. Where none is small, Z is not made and F·L is a product of its own; where the spectrum is wide the vectors are
refined too (`gram_eigh`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop.divided_differences import BoundFunction
from matbackprop.functional._spectrum import Spectrum
from matbackprop.numerics import inner
from matbackprop.solvers.gram import gram_eigh

__all__ = ["Moments", "Primal", "Thin", "factor"]


def _table(lam: Tensor, g: BoundFunction) -> Tensor:
    """Γ, g[λᵢ, λⱼ]."""
    return g.first(lam.unsqueeze(-1), lam.unsqueeze(-2))


def _forms(rows: Tensor, g: Tensor) -> Tensor:
    """yᵢ G yᵢᵀ for each row, the real part."""
    return inner(rows, rows @ g, (-1,))


def _trace(a: Tensor) -> Tensor:
    return a.diagonal(dim1=-2, dim2=-1).real.sum(-1)


class Thin(NamedTuple):
    """The factors for fewer rows than columns.

    Attributes:
        s: squared singular values of F ``(*batch, m)``, zero where they are rounding.
        basis: U ``(*batch, m, m)``.
        y: UᵀF ``(*batch, m, d)``.
        eps: ε ``(*batch,)``.
    """

    s: Tensor
    basis: Tensor
    y: Tensor
    eps: Tensor

    def _slope(self, g: BoundFunction) -> Tensor:
        """g[λᵢ, ε], zero for a direction that F does not have."""
        shift = self.eps.unsqueeze(-1)
        return torch.where(self.s > 0, g.first(self.s + shift, shift), 0)

    def value(self, g: BoundFunction) -> Tensor:
        """g(A)."""
        c = (self.y * self._slope(g).unsqueeze(-1)).mH @ self.y
        c.diagonal(dim1=-2, dim2=-1).add_(g.value(self.eps).unsqueeze(-1))
        return c

    def feature_gradient(self, g: BoundFunction, e: Tensor, f: Tensor) -> Tensor:
        """2 F·L for the symmetric part of G, whose factor ½ cancels against the 2."""
        ye = self.y @ e + self.y @ e.mH
        return self.basis @ self._through_slopes(g, ye)

    def _through_slopes(self, g: BoundFunction, k: Tensor) -> Tensor:
        """diag(g[λᵢ, ε])K + (g[λᵢ, λⱼ, ε] ∘ (KYᵀ))Y, the second difference as a quotient over max(sᵢ, sⱼ).

        What cancels in it when both are far below ε is multiplied by √(sᵢsⱼ) in KYᵀ, so that its rounding error stays
        that of the first term. Y and s count in units of the largest: s itself may be too small to divide by.
        """
        slope = self._slope(g)
        top = self.s.amax(-1, keepdim=True) if self.s.shape[-1] else self.s
        top = torch.where(top > 0, top, 1)
        share, y = self.s / top, self.y / top.sqrt().unsqueeze(-1)
        rows, columns = share.unsqueeze(-1), share.unsqueeze(-2)
        nearer = torch.where(rows < columns, slope.unsqueeze(-1), slope.unsqueeze(-2))
        widest = torch.maximum(rows, columns)
        table = _table(self.s + self.eps.unsqueeze(-1), g)
        second = torch.where(widest > 0, (table - nearer) / widest, 0)
        return slope.unsqueeze(-1) * k + (second * (k @ y.mH)) @ y

    def weight_gradient(self, g: BoundFunction, e: Tensor, f: Tensor, w: Tensor) -> Tensor:
        """fᵢ L fᵢᵀ for each row of the unweighted F, also where the weight is zero and fᵢ leaves the others' span."""
        v, shift = self._right_vectors(), self.eps.unsqueeze(-1)  # on their complement A acts as ε
        lam = self.s + shift
        inside = f @ v.mH
        outside = (f - inside @ v) * (w == 0).unsqueeze(-1)  # a row that counts lies in the span, but for rounding
        ve = 0.5 * (v @ e + v @ e.mH)
        total = inner(inside, inside @ (_table(lam, g) * (ve @ v.mH)), (-1,))
        total = total + 2 * inner(inside, g.first(lam, shift).unsqueeze(-2) * (outside @ ve.mH), (-1,))
        return total + g.first(shift, shift) * _forms(outside, e)

    def eps_gradient(self, g: BoundFunction, e: Tensor) -> Tensor:
        """tr L = ⟨G, g'(A)⟩."""
        lam, at_eps = self.s + self.eps.unsqueeze(-1), g.first(self.eps, self.eps)
        return at_eps * _trace(e) + ((g.first(lam, lam) - at_eps.unsqueeze(-1)) * _forms(self._unit_rows(), e)).sum(-1)

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

    def pairing(self, g: BoundFunction, e: Tensor) -> Tensor:
        """⟨G, g(A)⟩; with ∂g/∂p for g the gradient of the exponent."""
        inside = (self._slope(g) * _forms(self.y, e)).sum(-1)
        return g.value(self.eps) * _trace(e) + inside

    def _unit_rows(self) -> Tensor:
        """Rows of Y over their norms, zero where s is zero."""
        return self.y * torch.where(self.s > 0, self.s, torch.inf).rsqrt().unsqueeze(-1)

    def _right_vectors(self) -> Tensor:
        """`_unit_rows`, each cleared of what rounding left of larger ones."""
        v = self._unit_rows()
        return v - ((v @ v.mH) * (self.s.unsqueeze(-1) < self.s.unsqueeze(-2))) @ v

    def spectrum(self) -> Spectrum:
        """The spectrum of A."""
        return Spectrum(self.s + self.eps.unsqueeze(-1), self._right_vectors().mH, self.eps)


class Primal(NamedTuple):
    """The factors for at least as many rows as columns.

    Attributes:
        s: squared singular values of F ``(*batch, d)``, zero where they are rounding.
        basis: V ``(*batch, d, d)``.
        y: (FV)ᵀ ``(*batch, d, m)``, or empty where F itself serves as well.
        eps: ε ``(*batch,)``.
    """

    s: Tensor
    basis: Tensor
    y: Tensor
    eps: Tensor

    def _lam(self) -> Tensor:
        return self.s + self.eps.unsqueeze(-1)

    def value(self, g: BoundFunction) -> Tensor:
        """g(A)."""
        return (self.basis * g.value(self._lam()).unsqueeze(-2)) @ self.basis.mH

    def feature_gradient(self, g: BoundFunction, e: Tensor, f: Tensor) -> Tensor:
        """2 F·L for the symmetric part of G, whose factor ½ cancels against the 2."""
        h = self.basis.mH @ (e + e.mH) @ self.basis
        if self.y.numel() == 0:
            return f @ (self.basis @ (_table(self._lam(), g) * h) @ self.basis.mH)
        return self.y.mH @ ((self._seen_table(g) * h) @ self.basis.mH)

    def _seen_table(self, g: BoundFunction) -> Tensor:
        """Γ without the rows of directions that F does not have."""
        return _table(self._lam(), g).masked_fill((self.s == 0).unsqueeze(-1), 0)

    def tangent(self, g: BoundFunction, df: Tensor, f: Tensor) -> Tensor:
        """The variation of g(A) in the direction of F: the transpose of `feature_gradient`."""
        rows = self.y if self.y.numel() else (f @ self.basis).mH
        inside = self._seen_table(g) * (rows @ df @ self.basis)
        return self.basis @ (inside + inside.mH) @ self.basis.mH

    def derivative(self, g: BoundFunction) -> Tensor:
        """g'(A), the variation of g(A) with ε."""
        return (self.basis * g.first(self._lam(), self._lam()).unsqueeze(-2)) @ self.basis.mH

    def weight_gradient(self, g: BoundFunction, e: Tensor, f: Tensor, w: Tensor) -> Tensor:
        """fᵢ L fᵢᵀ for each row of the unweighted F; only a row without weight has directions that the others lack."""
        rows = (f @ self.basis) * ((self.s != 0).unsqueeze(-2) | (w == 0).unsqueeze(-1))
        return _forms(rows, _table(self._lam(), g) * (self.basis.mH @ e @ self.basis))

    def eps_gradient(self, g: BoundFunction, e: Tensor) -> Tensor:
        """tr L = ⟨G, g'(A)⟩."""
        return (g.first(self._lam(), self._lam()) * _forms(self.basis.mH, e)).sum(-1)

    def pairing(self, g: BoundFunction, e: Tensor) -> Tensor:
        """⟨G, g(A)⟩; with ∂g/∂p for g the gradient of the exponent."""
        return (g.value(self._lam()) * _forms(self.basis.mH, e)).sum(-1)

    def spectrum(self) -> Spectrum:
        """The spectrum of A."""
        return Spectrum(self._lam(), self.basis)


Moments = Thin | Primal


def factor(f: Tensor, eps: Tensor, fine: bool) -> Moments:
    """Factor A for F ``(*batch, m, d)``; ``fine`` asks for the digits of float64 features."""
    if f.shape[-2] < f.shape[-1]:
        return Thin(*gram_eigh(f, eps, fine), eps)
    return Primal(*gram_eigh(f.mH, eps, fine, products=False), eps)
