"""Alignment of the span of labeled rows with the span of their regions, from sums over rows.

Every normalized-cut objective is a function of a Gram matrix C = Fᵀ diag(a) F, the region sums S, one row per region,
and the region masses N. Only the sums have m rows to process: backward is one product with F and one gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import is_differentiated
from matbackprop.checks import values_checkable
from matbackprop.functional._function import Operation, apply, product
from matbackprop.functional._labels import gather_rows, region_sums, tall_product
from matbackprop.functional._polar import RightSolve
from matbackprop.numerics import symmetrize
from matbackprop.refinement import ALIGNED_TOL, SPREAD, ill_determined, noise_floor, refinement_needed
from matbackprop.solvers import batched_eigh, batched_svd


def _inverse_or_zero(x: Tensor) -> Tensor:
    positive = x > 0
    return torch.where(positive, x, 1).reciprocal() * positive


def _scaled(w: Tensor, x: Tensor) -> Tensor:
    return w.unsqueeze(-1) * x


class RowWeights(NamedTuple):
    """Weights ``(*b, m)`` of the rows in the Gram matrix, the region sums and the region masses."""

    gram: Tensor
    sums: Tensor
    mass: Tensor


def degree_weights(w: Tensor, degree: Tensor) -> RowWeights:
    """Weights for D^(−½)F and D^½E. Rows of degree zero have weight zero, as by the pseudoinverse of D."""
    kept = w * (degree > 0)
    return RowWeights(kept * _inverse_or_zero(degree), kept, kept * degree)


class RowSums(NamedTuple):
    """Gram matrix ``(*b, d, d)``, region sums ``(*b, k, d)`` and region masses ``(*b, k)``."""

    gram: Tensor
    sums: Tensor
    mass: Tensor


class _WeightedRows(NamedTuple):
    f: Tensor
    weight: Tensor


class _Gram(Operation):
    """Fᵀ diag(a) F."""

    forward_twice = "normalized_cut"

    @staticmethod
    def forward(f: Tensor, a: Tensor) -> Tensor:
        return tall_product(_scaled(a, f), f)

    @staticmethod
    def save(inputs: tuple[Tensor, Tensor], outputs: Tensor) -> _WeightedRows:
        return _WeightedRows(*inputs)

    @staticmethod
    def adjoint(rows: _WeightedRows, needed: Sequence[bool], g: Tensor) -> tuple[Tensor, Tensor | None]:
        half = rows.f @ symmetrize(g)
        return _scaled(rows.weight, 2 * half), (rows.f * half).sum(-1) if needed[1] else None

    @staticmethod
    def tangent(rows: _WeightedRows, df: Tensor | None, da: Tensor | None) -> Tensor:
        f, a = rows
        out = f.new_zeros(()) if df is None else 2 * symmetrize(tall_product(_scaled(a, df), f))
        return out if da is None else out + tall_product(_scaled(da, f), f)


class _Regions(NamedTuple):
    region: Tensor
    k: int


class _RegionSums(Operation):
    """Eᵀx; the gradient is a gather, which saves no indicators."""

    @staticmethod
    def forward(x: Tensor, index: Tensor, k: int) -> Tensor:
        return region_sums(x, index, k)

    @staticmethod
    def save(inputs: tuple[Tensor, Tensor, int], outputs: Tensor) -> _Regions:
        return _Regions(*inputs[1:])

    @staticmethod
    def adjoint(regions: _Regions, needed: Sequence[bool], g: Tensor) -> Tensor:
        return gather_rows(g, regions.region)

    @staticmethod
    def tangent(regions: _Regions, dx: Tensor, *_: None) -> Tensor:
        return apply(_RegionSums, dx, *regions)


def row_sums(f: Tensor, weights: RowWeights, index: Tensor, k: int) -> RowSums:
    """Sums over the rows of F ``(*b, m, d)`` with regions ``index`` ``(*b, m)`` in 0 … k − 1."""
    sums = apply(_RegionSums, _scaled(weights.sums, f), index, k)
    mass = apply(_RegionSums, weights.mass.unsqueeze(-1), index, k).squeeze(-1)
    return RowSums(apply(_Gram, f, weights.gram), sums, mass)


class Alignment(NamedTuple):
    """Comparison of the span of features with the span of regions, ``(*b,)`` each.

    Attributes:
        trace: tr(Π_F Π_E).
        rank: rank of the features.
        regions: number of regions of positive mass.
    """

    trace: Tensor
    rank: Tensor
    regions: Tensor

    @property
    def distance(self) -> Tensor:
        """½‖Π_F − Π_E‖²."""
        return 0.5 * (self.rank + self.regions) - self.trace


def _align(sums: RowSums, tol: float) -> tuple[Alignment, Tensor]:
    """tr(C⁺SᵀN⁻¹S) and the ranks; also whether C is too inaccurate for a direction.

    For variations of F that keep its rank, FPFᵀ stays the projector on its span if P = C⁺ varies as −P dC P (the
    inverse on a fixed complement of the null space). Derivatives of every order need no null-space term.
    """
    c, s, n = sums
    values, vectors = batched_eigh(c.detach())
    kept = (values > tol * values[..., -1:]) & (values > 0)
    solution = apply(RightSolve, c, s, torch.where(kept, values, torch.inf), vectors)
    trace = ((solution * s).sum(-1) * _inverse_or_zero(n)).sum(-1)
    return Alignment(trace, kept.sum(-1), (n > 0).sum(-1)), ill_determined(values, tol=tol)


def align(f: Tensor, weights: RowWeights, index: Tensor, k: int, tol: float) -> Alignment:
    """Compare the span of diag(a)^½ F with the regions; a is the weight of the Gram matrix.

    The relative error of a direction with singular value σ is u(σ_max/σ)² in a Gram matrix and u σ_max/σ in singular
    vectors. If that matters, F is multiplied by constants that make its columns orthonormal (or zero).
    """
    alignment, lost = _align(row_sums(f, weights, index, k), tol)
    if not refinement_needed(lost):
        return alignment
    sigma, axes, kept = _singular_vectors(f, weights.gram, tol)
    axes = axes * (torch.where(kept, sigma, 1).reciprocal() * kept).unsqueeze(-2)
    return _align(row_sums(product(f, axes), weights, index, k), ALIGNED_TOL)[0]


def _singular_vectors(f: Tensor, a: Tensor, tol: float) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values of diag(a)^½ F and right singular vectors as constants, and which are above the tolerance."""
    _, sigma, vh = batched_svd(_scaled(a.detach().sqrt(), f.detach()))
    return sigma, vh.mT, sigma > tol**0.5 * sigma[..., :1]


def span_of_affinity(f: Tensor, weights: RowWeights, lam: Tensor, tol: float) -> Tensor:
    """FΠΛΠ with Π the projector on the rows of F: it has the span of FΛFᵀ, also if Λ or F is singular."""
    _, axes, kept = _singular_vectors(f, weights.gram, tol)
    rows = (axes * kept.unsqueeze(-2)) @ axes.mT
    return product(f, product(rows, product(lam, rows)))


# --- the soft projector -----------------------------------------------------------------------------------------------


class _Inverse(Operation):
    """A⁻¹, whose derivatives ignore autocast, unlike those of torch.linalg.inv."""

    @staticmethod
    def forward(a: Tensor) -> Tensor:
        return torch.linalg.inv_ex(a)[0]

    @staticmethod
    def save(inputs: tuple[Tensor], outputs: Tensor) -> tuple[Tensor]:
        return (outputs,)

    @staticmethod
    def adjoint(saved: tuple[Tensor], needed: Sequence[bool], g: Tensor) -> Tensor:
        return -product(product(saved[0].mT, g), saved[0].mT)

    @staticmethod
    def tangent(saved: tuple[Tensor], da: Tensor) -> Tensor:
        return -product(product(saved[0], da), saved[0])


def _inverse(gram: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """(G + μI)⁻¹ and μ ``(*b, 1, 1)``, the ridge times the trace; μ = 1 for G = 0."""
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    mu = (ridge * trace + (trace <= 0))[..., None, None]
    return apply(_Inverse, gram + mu * _eye_like(gram)), mu


def _eye_like(a: Tensor) -> Tensor:
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)


def _spreads(gram: Tensor, inverse: Tensor) -> bool:
    """Return whether a Gram matrix is inaccurate in small directions, given its shifted inverse."""
    if gram.numel() == 0:
        return False
    largest = [a.detach().diagonal(dim1=-2, dim2=-1).amax(-1) for a in (gram, inverse)]
    return refinement_needed(largest[0] * largest[1] > SPREAD[True])


def _along_axes(x: Tensor, axes: Tensor) -> Tensor:
    """X in the basis of its singular vectors: its columns are nearly orthogonal, so that their Gram matrix is accurate.

    Columns at the level of rounding are set to zero; their derivatives are kept.
    """
    y = product(x, axes)
    sizes = y.detach().square().sum(-2, keepdim=True)
    return y - y.detach() * (sizes <= noise_floor(x.shape, x.dtype) ** 2 * sizes.amax(-1, keepdim=True))


def soft_alignment(f: Tensor, w: Tensor, index: Tensor, k: int, ridge: float) -> tuple[Tensor, Tensor]:
    """½tr(Π_λ²) − tr(Π_λ Π_E) ``(*b,)`` for the soft projector Π_λ = F(C + μI)⁻¹Fᵀ, and the region masses."""
    weights = RowWeights(w, w, w)
    sums = row_sums(f, weights, index, k)
    value, inverse = _soft_alignment(sums, ridge / f.shape[-1])
    if _spreads(sums.gram, inverse):
        axes = batched_eigh(sums.gram.detach())[1]
        value, _ = _soft_alignment(row_sums(_along_axes(f, axes), weights, index, k), ridge / f.shape[-1])
    return value, sums.mass


def _soft_alignment(sums: RowSums, ridge: float) -> tuple[Tensor, Tensor]:
    c, s, n = sums
    p, mu = _inverse(c, ridge)
    p, eye = symmetrize(p), _eye_like(c)
    cp = eye - mu * p  # C P and S P cancel by the condition number of C: one step of refinement
    sp = product(s, p)
    sp = sp + product(s - product(sp, c + mu * eye), p)
    trace = ((sp * s).sum(-1) * _inverse_or_zero(n)).sum(-1)
    return 0.5 * (cp * cp.mT).sum((-2, -1)) - trace, p


def thin_soft_alignment(f: Tensor, w: Tensor, e: Tensor, n: Tensor, ridge: float) -> Tensor:
    """:func:`soft_alignment` for fewer rows than features, where FᵀF + μI is nearly singular for a small ridge.

    With P = (FFᵀ diag(w) + μI)⁻¹ (m×m) the soft projector is I − μP. Its distance from the identity, and with it the
    gradient, vanishes with μ, so cancellation must be avoided: ½tr(Π_λ²) = ½(m − 2μ tr P + μ² tr P²) and
    tr(Π_λ Π_E) = (number of regions) − μ tr(N⁻¹ Eᵀ diag(w) P E).
    """
    value, gram, p = _thin_soft_alignment(f, w, e, n, ridge)
    if not _spreads(gram, p):
        return value
    if is_differentiated(w) and not (values_checkable(w) and bool((w > 0).all())):
        return value  # √w has no derivative at zero
    root = torch.where(w > 0, w, 1).sqrt() * (w > 0)
    rows, ones = _scaled(root, f), torch.ones_like(w)
    axes = batched_eigh((rows @ rows.mT).detach())[1]
    return _thin_soft_alignment(_along_axes(rows.mT, axes).mT, ones, product(axes.mT, _scaled(root, e)), n, ridge)[0]


def _thin_soft_alignment(f: Tensor, w: Tensor, e: Tensor, n: Tensor, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
    """The value, FFᵀ diag(w) and P."""
    gram = product(f, f.mT) * w.unsqueeze(-2)
    p, mu = _inverse(gram, ridge / f.shape[-1])
    mu = mu[..., 0, 0]
    inside = (product(p, e) * _scaled(w, e)).sum(-2)
    across = (inside * _inverse_or_zero(n)).sum(-1)
    square = (
        0.5 * f.shape[-2] - mu * p.diagonal(dim1=-2, dim2=-1).sum(-1) + 0.5 * mu.square() * (p * p.mT).sum((-2, -1))
    )
    return square - (n > 0).sum(-1) + mu * across, gram, p
