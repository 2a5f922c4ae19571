"""The small matrices of the normalized-cut objectives, with their adjoints.

Every objective is a function of a few sums over rows: the Gram matrix C = Fᵀ diag(w) F (or B = Fᵀ diag(w/d) F with
degrees d), the region sums S, one row per region, and the region masses N. There are two kinds of autograd
Functions: :func:`row_sums` and :func:`degree_row_sums` map rows to sums, :func:`span_trace` and :func:`soft_alignment`
map sums to the objective. Backward of the second kind needs only d×d matrices; backward of the first kind is one
product with F and one gather, so no m×m matrix is formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import is_differentiated
from matbackprop.checks import values_checkable
from matbackprop.functional._function import Operation, apply
from matbackprop.functional._labels import add_product, gather_rows, region_masses, region_sums, tall_product
from matbackprop.numerics import symmetrize
from matbackprop.refinement import ALIGNED_TOL, SPREAD, ill_determined, noise_floor, refinement_needed
from matbackprop.solvers import batched_eigh, batched_svd


def _inverse_or_zero(x: Tensor) -> Tensor:
    positive = x > 0
    return torch.where(positive, x, 1).reciprocal() * positive


def _scaled(w: Tensor | None, x: Tensor) -> Tensor:
    return x if w is None else w.unsqueeze(-1) * x


class _RowSums(Operation):
    forward_twice = "normalized_cut"

    @staticmethod
    def forward(f: Tensor, w: Tensor | None, index: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        wf = _scaled(w, f)
        return tall_product(wf, f), region_sums(wf, index, k), region_masses(w, index, k, f.dtype)

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        (f, w, index, _), (g_gram, g_sums, g_mass) = saved, gradients
        g_f = g_w = None
        moved = None if g_sums is None else gather_rows(g_sums, index)
        if needed[0]:
            row = torch.zeros_like(f) if moved is None else moved
            g_f = _scaled(w, row if g_gram is None else add_product(row, f, symmetrize(g_gram), 2))
        if needed[1]:
            row = torch.zeros_like(f) if moved is None else moved
            row = row if g_gram is None else add_product(row, f, symmetrize(g_gram))
            g_w = (f * row).sum(-1)
            if g_mass is not None:
                g_w = g_w + gather_rows(g_mass.unsqueeze(-1), index).squeeze(-1)
        return g_f, g_w

    @staticmethod
    def tangent(saved: Sequence[Any], df: Tensor | None, dw: Tensor | None, *_: None) -> tuple[Tensor, Tensor, Tensor]:
        f, w, index, k = saved
        wdf = torch.zeros_like(f) if df is None else _scaled(w, df)
        dw = f.new_zeros(index.shape) if dw is None else dw
        dwf = dw.unsqueeze(-1) * f
        gram = 2 * symmetrize(tall_product(wdf, f)) + tall_product(dwf, f)
        return gram, region_sums(wdf + dwf, index, k), region_masses(dw, index, k, f.dtype)


def row_sums(f: Tensor, w: Tensor | None, index: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gram matrix Fᵀ diag(w) F ``(*b, d, d)``, region sums ``(*b, k, d)`` and region masses ``(*b, k)``."""
    return apply(_RowSums, f, w, index, k)


def degrees_of(f: Tensor, w: Tensor | None, lam: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Degrees δ = FΛFᵀw ``(*b, m)``, the feature sum Fᵀw and Λ Fᵀw ``(*b, d)``."""
    total = f.sum(-2) if w is None else (w.unsqueeze(-2) @ f).squeeze(-2)
    v = total if lam is None else (lam @ total.unsqueeze(-1)).squeeze(-1)
    return (f @ v.unsqueeze(-1)).squeeze(-1), total, v


class _DegreeRowSums(Operation):
    forward_twice = "normalized_cut_j1"

    @staticmethod
    def forward(
        f: Tensor, w: Tensor | None, lam: Tensor | None, index: Tensor, k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        degree, _, _ = degrees_of(f, w, lam)
        kept = (degree > 0).to(f.dtype) if w is None else w * (degree > 0)
        gram = tall_product((kept * _inverse_or_zero(degree)).unsqueeze(-1) * f, f)
        return gram, region_sums(_scaled(kept, f), index, k), region_masses(kept * degree, index, k, f.dtype)

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        (f, w, lam, index, _), (g_gram, g_sums, g_mass) = saved, gradients
        degree, total, v = degrees_of(f, w, lam)
        valid = (degree > 0).to(f.dtype)
        kept, inverse = valid if w is None else w * valid, _inverse_or_zero(degree)
        g_degree, per_weight, row = torch.zeros_like(degree), torch.zeros_like(degree), None
        if g_sums is not None:
            moved = gather_rows(g_sums, index)
            row = _scaled(kept, moved)
            if needed[1]:
                per_weight = per_weight + (f * moved).sum(-1)
        if g_gram is not None:
            half = f @ symmetrize(g_gram)
            energy = (f * half).sum(-1) * inverse
            g_degree = g_degree - kept * inverse * energy
            per_weight = per_weight + energy
            scale = (2 * kept * inverse).unsqueeze(-1)
            row = scale * half if row is None else torch.addcmul(row, scale, half)
        if g_mass is not None:
            mass = gather_rows(g_mass.unsqueeze(-1), index).squeeze(-1)
            g_degree = g_degree + kept * mass
            per_weight = per_weight + mass * degree
        back = (g_degree.unsqueeze(-2) @ f).squeeze(-2)  # Fᵀ g_degree
        turned = back if lam is None else (back.unsqueeze(-2) @ lam).squeeze(-2)
        g_f = g_w = g_lam = None
        if needed[0]:
            ones = torch.ones_like(degree) if w is None else w
            left, right = torch.stack([g_degree, ones], -1), torch.stack([v, turned], -2)
            g_f = left @ right if row is None else add_product(row, left, right)
        if needed[1]:
            g_w = valid * per_weight + (f @ turned.unsqueeze(-1)).squeeze(-1)
        if lam is not None and needed[2]:
            g_lam = back.unsqueeze(-1) * total.unsqueeze(-2)
        return g_f, g_w, g_lam

    @staticmethod
    def tangent(
        saved: Sequence[Any], df: Tensor | None, dw: Tensor | None, dlam: Tensor | None, *_: None
    ) -> tuple[Tensor, Tensor, Tensor]:
        f, w, lam, index, k = saved
        df = torch.zeros_like(f) if df is None else df
        dw = f.new_zeros(index.shape) if dw is None else dw
        degree, total, v = degrees_of(f, w, lam)
        valid = (degree > 0).to(f.dtype)
        kept, inverse = (valid if w is None else w * valid).unsqueeze(-1), _inverse_or_zero(degree).unsqueeze(-1)
        d_kept = (dw * valid).unsqueeze(-1)
        d_total = (df.sum(-2) if w is None else (w.unsqueeze(-2) @ df).squeeze(-2)) + (dw.unsqueeze(-2) @ f).squeeze(-2)
        d_v = d_total if lam is None else (lam @ d_total.unsqueeze(-1)).squeeze(-1)
        if dlam is not None:
            d_v = d_v + (dlam @ total.unsqueeze(-1)).squeeze(-1)
        d_degree = df @ v.unsqueeze(-1) + f @ d_v.unsqueeze(-1)
        gram = 2 * symmetrize(tall_product(kept * inverse * df, f))
        gram = gram + tall_product((d_kept - kept * inverse * d_degree) * inverse * f, f)
        sums = region_sums(kept * df + d_kept * f, index, k)
        mass = region_sums(kept * d_degree + d_kept * degree.unsqueeze(-1), index, k)
        return gram, sums, mass.squeeze(-1)


def _degree_weights(f: Tensor, w: Tensor | None, lam: Tensor | None) -> Tensor:
    """w/δ ``(*b, m)``, zero for rows of no positive degree."""
    degree, _, _ = degrees_of(f, w, lam)
    return _inverse_or_zero(degree) if w is None else w * _inverse_or_zero(degree)


def degree_row_sums(
    f: Tensor, w: Tensor | None, lam: Tensor | None, index: Tensor, k: int, axes: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """B = Fᵀ diag(w/d) F ``(*b, d, d)``, region sums of F ``(*b, k, d)`` and of the degrees ``(*b, k)``.

    Rows without positive degree are excluded from all three, as by the pseudoinverse of D. With ``axes``, B and the
    sums are those of F @ axes.
    """
    if axes is None:
        return apply(_DegreeRowSums, f, w, lam, index, k)
    degree, _, _ = degrees_of(f, w, lam)
    kept, x = (degree > 0).to(f.dtype) if w is None else w * (degree > 0), f @ axes
    gram = tall_product((kept * _inverse_or_zero(degree)).unsqueeze(-1) * x, x)
    return gram, region_sums(_scaled(kept, x), index, k), region_masses(kept * degree, index, k, f.dtype)


def _inverse_on_span(a: Tensor, tol: float) -> tuple[Tensor, Tensor, Tensor]:
    """A⁺ of a positive semidefinite A, with eigenvalues below ``tol`` times the largest set to zero, and the rank.

    Also return whether the Gram matrix A is too inaccurate for a nonzero eigenvalue.
    """
    values, vectors = batched_eigh(a)
    top = values[..., -1:]
    kept = (values > tol * top) & (values > 0)
    inverse = torch.where(kept, values, 1).reciprocal() * kept
    return (vectors * inverse.unsqueeze(-2)) @ vectors.mT, kept.sum(-1), ill_determined(values, tol=tol)


class _SpanTrace(Operation):
    """tr(P S N⁻¹ Sᵀ) with P = B⁺.

    For variations of F that keep its rank, F P Fᵀ stays the projector on its span when P varies as −P dB P (the inverse
    on a fixed complement of the null space), and the objectives depend only on it. Therefore the derivatives of
    every order follow from dP = −P dB P, without a null-space term.
    """

    forward_twice = "normalized_cut"

    @staticmethod
    def forward(b: Tensor, s: Tensor, n: Tensor, tol: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        p, rank, lost = _inverse_on_span(b, tol)
        return (((s @ p) * s).sum(-1) * _inverse_or_zero(n)).sum(-1), p, rank, lost

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> Sequence[Any]:
        return inputs[1], inputs[2], outputs[1]

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        (s, n, p), (g_trace, g_p, *_) = saved, gradients
        g_b = g_s = g_n = None
        if g_trace is not None:
            a, mass = s @ p, _inverse_or_zero(n)
            scaled = (g_trace.unsqueeze(-1) * mass).unsqueeze(-1) * a
            g_b = -(scaled.mT @ a)
            g_s = 2 * scaled
            g_n = -(scaled * s).sum(-1) * mass
        if g_p is not None:
            extra = -(p @ symmetrize(g_p) @ p)
            g_b = extra if g_b is None else g_b + extra
        return g_b, g_s, g_n

    @staticmethod
    def tangent(
        saved: Sequence[Any], db: Tensor | None, ds: Tensor | None, dn: Tensor | None, _: None
    ) -> tuple[Tensor, Tensor, None, None]:
        s, n, p = saved
        a, mass = s @ p, _inverse_or_zero(n).unsqueeze(-1)
        db = torch.zeros_like(p) if db is None else symmetrize(db)
        trace = -((a @ db) * a * mass).sum((-2, -1))  # SP is small if P is large: S(P dB P)Sᵀ would cancel
        if ds is not None:
            trace = trace + 2 * (a * ds * mass).sum((-2, -1))
        if dn is not None:
            trace = trace - (a * s * mass.square() * dn.unsqueeze(-1)).sum((-2, -1))
        return trace, -(p @ db @ p), None, None


class _SpanTraceLambda(Operation):
    """tr(P S N⁻¹ Sᵀ) with P = ΛHΛᵀ, H = (ΛᵀBΛ)⁺ on the row space of F: the projector on the span of FΛFᵀ is XPXᵀ.

    It equals B⁺ for a non-singular Λ, for which only the degrees depend on Λ. For a singular Λ of constant rank
    dP = −P dB P + 2((I − PB) dΛ H Λᵀ)_sym.
    """

    forward_twice = "normalized_cut_j1"

    @staticmethod
    def forward(b: Tensor, lam: Tensor, s: Tensor, n: Tensor, tol: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        onto = _inverse_on_span(b, tol)[0] @ b
        turned = lam @ onto
        h, rank, _ = _inverse_on_span(symmetrize(turned.mT @ b @ turned), tol)
        p = symmetrize(lam @ h @ lam.mT)
        return (((s @ p) * s).sum(-1) * _inverse_or_zero(n)).sum(-1), p, h, rank

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> Sequence[Any]:
        return *inputs[:4], outputs[1], outputs[2]

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        (b, lam, s, n, p, h), (g_trace, g_p, g_h, _) = saved, gradients
        g_s = g_n = None
        z = torch.zeros_like(p) if g_p is None else symmetrize(g_p)
        if g_trace is not None:
            a, mass = s @ p, _inverse_or_zero(n)
            scaled = (g_trace.unsqueeze(-1) * mass).unsqueeze(-1)
            z = z + (scaled * s).mT @ s
            g_s = 2 * scaled * a
            g_n = -g_trace.unsqueeze(-1) * mass.square() * (a * s).sum(-1)
        g_b = -(p @ z @ p)
        g_lam = 2 * (z - b @ (p @ z)) @ lam @ h
        if g_h is not None:
            inner_h = -(h @ symmetrize(g_h) @ h)
            g_b = g_b + lam @ inner_h @ lam.mT
            g_lam = g_lam + 2 * b @ lam @ inner_h
        return g_b, g_lam, g_s, g_n

    @staticmethod
    def tangent(
        saved: Sequence[Any], db: Tensor | None, dlam: Tensor | None, ds: Tensor | None, dn: Tensor | None, _: None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        b, lam, s, n, p, h = saved
        a, mass = s @ p, _inverse_or_zero(n).unsqueeze(-1)
        d_p, d_h, trace = torch.zeros_like(p), torch.zeros_like(h), s.new_zeros(())
        if db is not None:
            db = symmetrize(db)
            d_p, d_h = d_p - p @ db @ p, d_h - h @ (lam.mT @ db @ lam) @ h
            trace = trace - ((a @ db) * a * mass).sum((-2, -1))
        if dlam is not None:
            d_p = d_p + 2 * symmetrize((dlam - p @ (b @ dlam)) @ h @ lam.mT)
            d_h = d_h - h @ (2 * symmetrize(dlam.mT @ b @ lam)) @ h
            trace = trace + 2 * (((s - a @ b) @ dlam @ h) * (s @ lam) * mass).sum((-2, -1))
        if ds is not None:
            trace = trace + 2 * (a * ds * mass).sum((-2, -1))
        if dn is not None:
            trace = trace - (a * s * mass.square() * dn.unsqueeze(-1)).sum((-2, -1))
        return trace, d_p, d_h, None


class SpanTrace(NamedTuple):
    """Result of :func:`span_trace`.

    Attributes:
        trace: tr(Π_X Π_E) ``(*b,)``.
        rank: rank of the span ``(*b,)``.
        lost: whether B is too inaccurate for a direction of X ``(*b,)``; None with Λ.
    """

    trace: Tensor
    rank: Tensor
    lost: Tensor | None


def span_trace(b: Tensor, s: Tensor, n: Tensor, tol: float, lam: Tensor | None = None) -> SpanTrace:
    """tr(Π_X Π_E) from B = XᵀX, S = EᵀX and N = diag(EᵀE)."""
    lost = None
    if lam is None:
        trace, _, rank, lost = apply(_SpanTrace, b, s, n, tol)
    else:
        trace, _, _, rank = apply(_SpanTraceLambda, b, lam, s, n, tol)
    return SpanTrace(trace, rank.to(trace.dtype), lost)


def _separating_axes(f: Tensor, weight: Tensor | None, tol: float) -> Tensor:
    """T such that the columns of XT, X = √w F, are orthonormal, or zero for zero singular values.

    The relative error of a direction with singular value σ is u(σ_max/σ)² in a Gram matrix and u σ_max/σ in the
    singular vectors of X. The columns of XT have equal norms, so that their Gram matrix is accurate, and the span of X.
    """
    _, sigma, vh = batched_svd(_scaled(None if weight is None else weight.detach().sqrt(), f.detach()))
    kept = sigma > tol**0.5 * sigma[..., :1]
    return vh.mT * (torch.where(kept, sigma, 1).reciprocal() * kept).unsqueeze(-2)


def aligned_span(f: Tensor, w: Tensor | None, index: Tensor, k: int, tol: float) -> tuple[SpanTrace, Tensor]:
    """:func:`span_trace` of the span of √w F, and the region masses."""
    c, s, n = row_sums(f, w, index, k)
    span = span_trace(c, s, n, tol)
    if span.lost is not None and refinement_needed(span.lost):
        c, s, n = row_sums(f @ _separating_axes(f, w, tol), w, index, k)
        span = span_trace(c, s, n, ALIGNED_TOL)
    return span, n


def aligned_degree_span(
    f: Tensor, w: Tensor | None, lam: Tensor | None, index: Tensor, k: int, tol: float, turns: Tensor | None
) -> tuple[SpanTrace, Tensor]:
    """:func:`span_trace` of the span of D^(−½) √w F, and the region masses.

    ``turns`` is Λ if it may reduce the span, and None if it changes only the degrees.
    """
    b, s, n = degree_row_sums(f, w, lam, index, k)
    span = span_trace(b, s, n, tol, turns)
    if span.lost is not None and refinement_needed(span.lost):
        axes = _separating_axes(f, _degree_weights(f, w, lam), tol)
        b, s, n = degree_row_sums(f, w, lam, index, k, axes)
        span = span_trace(b, s, n, ALIGNED_TOL)
    return span, n


def _spreads(gram: Tensor, inverse: Tensor) -> bool:
    """Return whether a Gram matrix is inaccurate in small directions, given its shifted inverse."""
    if gram.numel() == 0:
        return False
    spread = gram.detach().diagonal(dim1=-2, dim2=-1).amax(-1) * inverse.detach().diagonal(dim1=-2, dim2=-1).amax(-1)
    return refinement_needed(spread > SPREAD[True])


def _ridge(c: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Return μ = ridge tr(C)/d, and C + μI, modified to be invertible if C is zero."""
    trace = c.diagonal(dim1=-2, dim2=-1).sum(-1)
    mu = trace * (ridge / c.shape[-1])
    return mu, mu + (trace <= 0)


class _SoftAlignment(Operation):
    """½tr((CP)²) − tr(P S N⁻¹ Sᵀ) with P = (C + μI)⁻¹, μ = ridge·tr(C)/d."""

    forward_twice = "normalized_cut_soft"

    @staticmethod
    def forward(c: Tensor, s: Tensor, n: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
        _, shift = _ridge(c, ridge)
        shift = shift[..., None, None]
        eye = torch.eye(c.shape[-1], dtype=c.dtype, device=c.device)
        shifted = c + shift * eye
        p, _ = torch.linalg.inv_ex(shifted)
        p = symmetrize(p)
        cp = eye - shift * p  # C P and S P cancel by the condition number of C: one step of refinement
        sp = s @ p
        sp = sp + (s - sp @ shifted) @ p
        trace = ((sp * s).sum(-1) * _inverse_or_zero(n)).sum(-1)
        return 0.5 * (cp * cp.mT).sum((-2, -1)) - trace, p

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> Sequence[Any]:
        return *inputs, outputs[1]

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        (c, s, n, ridge, p), (g_value, g_p) = saved, gradients
        g_s = g_n = None
        direct = torch.zeros_like(c)
        z = torch.zeros_like(p) if g_p is None else symmetrize(g_p)
        if g_value is not None:
            a, mass = s @ p, _inverse_or_zero(n)
            g = g_value[..., None, None]
            scaled = g * mass.unsqueeze(-1)
            direct = g * (p @ c @ p)
            z = z + g * (c @ p @ c) - (scaled * s).mT @ s
            g_s = -2 * scaled * a
            g_n = g_value.unsqueeze(-1) * mass.square() * (a * s).sum(-1)
        through = -(p @ z @ p)
        slope = ridge / c.shape[-1] * through.diagonal(dim1=-2, dim2=-1).sum(-1)
        g_c = direct + through + torch.diag_embed(slope.unsqueeze(-1).expand(c.shape[:-1]))
        return g_c, g_s, g_n

    @staticmethod
    def tangent(
        saved: Sequence[Any], dc: Tensor | None, ds: Tensor | None, dn: Tensor | None, _: None
    ) -> tuple[Tensor, Tensor]:
        c, s, n, ridge, p = saved
        a, mass = s @ p, _inverse_or_zero(n).unsqueeze(-1)
        dc = torch.zeros_like(c) if dc is None else symmetrize(dc)
        d_mu = _ridge(dc, ridge)[0]
        d_shifted = dc + torch.diag_embed(d_mu.unsqueeze(-1).expand(c.shape[:-1]))
        cp = c @ p
        value = ((p @ cp) * dc).sum((-2, -1)) - ((p @ cp @ cp) * d_shifted).sum((-2, -1))
        value = value + ((a @ d_shifted) * a * mass).sum((-2, -1))
        if ds is not None:
            value = value - 2 * (a * ds * mass).sum((-2, -1))
        if dn is not None:
            value = value + (a * s * mass.square() * dn.unsqueeze(-1)).sum((-2, -1))
        return value, -(p @ d_shifted @ p)


def soft_alignment(c: Tensor, s: Tensor, n: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """½tr(Π_λ²) − tr(Π_λ Π_E) ``(*b,)`` for the soft projector Π_λ = F(C + μI)⁻¹Fᵀ, and (C + μI)⁻¹."""
    return apply(_SoftAlignment, c, s, n, ridge)


def own_axes(gram: Tensor, inverse: Tensor) -> Tensor | None:
    """Eigenvectors of XᵀX if it is inaccurate in small directions of X; None otherwise."""
    return batched_eigh(gram.detach())[1] if _spreads(gram, inverse) else None


def along_axes(x: Tensor, axes: Tensor) -> Tensor:
    """X in the basis of its singular vectors: columns are nearly orthogonal, so that their Gram matrix is accurate.

    Columns at the level of rounding are set to zero; their derivatives are kept.
    """
    y = x @ axes
    sizes = y.detach().square().sum(-2, keepdim=True)
    return y - y.detach() * (sizes <= noise_floor(x.shape, x.dtype) ** 2 * sizes.amax(-1, keepdim=True))


def thin_soft_alignment(f: Tensor, w: Tensor | None, e: Tensor, n: Tensor, ridge: float) -> Tensor:
    """:func:`soft_alignment` for fewer rows than features, where FᵀF + μI is nearly singular for a small ridge.

    With P = (FFᵀ diag(w) + μI)⁻¹ (m×m) the soft projector is I − μP. Its distance from the identity, and with it the
    gradient, vanishes with μ, so cancellation must be avoided: ½tr(Π_λ²) = ½(m − 2μ tr P + μ² tr P²) and
    tr(Π_λ Π_E) = (number of regions) − μ tr(N⁻¹ Eᵀ diag(w) P E).
    """
    value, gram, p = _thin_soft_alignment(f, w, e, n, ridge)
    if not _spreads(gram, p):
        return value
    if w is not None and is_differentiated(w) and not (values_checkable(w) and bool((w > 0).all())):
        return value  # √w has no derivative at zero
    root = None if w is None else torch.where(w > 0, w, 1).sqrt() * (w > 0)
    rows = _scaled(root, f)
    axes = own_axes(rows @ rows.mT, p)
    if axes is None:
        return value
    return _thin_soft_alignment(along_axes(rows.mT, axes).mT, None, axes.mT @ _scaled(root, e), n, ridge)[0]


def _thin_soft_alignment(
    f: Tensor, w: Tensor | None, e: Tensor, n: Tensor, ridge: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The value, FFᵀ diag(w) and P."""
    gram = f @ f.mT
    m, d = f.shape[-2:]
    weighted = gram if w is None else gram * w.unsqueeze(-2)
    trace = weighted.diagonal(dim1=-2, dim2=-1).sum(-1)
    mu = trace * (ridge / d) + (trace <= 0)
    p, _ = torch.linalg.inv_ex(weighted + torch.diag_embed(mu.unsqueeze(-1).expand(f.shape[:-1])))
    inside = ((p @ e) * _scaled(w, e)).sum(-2)
    share = (inside * _inverse_or_zero(n)).sum(-1)
    own = 0.5 * m - mu * p.diagonal(dim1=-2, dim2=-1).sum(-1) + 0.5 * mu.square() * (p * p.mT).sum((-2, -1))
    return own - (n > 0).sum(-1) + mu * share, weighted, p
