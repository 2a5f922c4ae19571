"""Alignment of a soft projector on the features with a segmentation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from matbackprop._torch import is_differentiated, values_checkable
from matbackprop.cuda.cusolver import without_magma
from matbackprop.errors import DomainError
from matbackprop.functional._function import Operation, apply, product
from matbackprop.functional._labels import LabeledRows, indicators, labeled_images, region_sums
from matbackprop.functional._normalized_cut import RowSums, per_mass, row_sums, scaled
from matbackprop.numerics import autocast_off, eye_like, symmetrize
from matbackprop.refinement import SPREAD, noise_floor, refinement_needed
from matbackprop.solvers import batched_eigh


class _Inverse(Operation):
    """C⁻¹, given its value P."""

    @staticmethod
    def forward(c: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def save(inputs: tuple[Tensor, Tensor], outputs: Tensor) -> tuple[Tensor]:
        return (outputs,)

    @staticmethod
    def adjoint(saved: tuple[Tensor], needed: Sequence[bool], g: Tensor) -> Tensor:
        (p,) = saved
        return -product(product(p.mT, g), p.mT)

    @staticmethod
    def tangent(saved: tuple[Tensor], dc: Tensor, *_: None) -> Tensor:
        (p,) = saved
        return -product(product(p, dc), p)


def _inverse(gram: Tensor, ridge: float, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(G + μI)⁻¹, G + μI and μ ``(*batch, 1, 1)``, the ridge times the trace; μ = 1 for G = 0."""
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    mu = (ridge * trace + (trace <= 0))[..., None, None]
    shifted = gram + mu * eye_like(gram)
    with without_magma(gram):
        inverse = torch.linalg.inv_ex(shifted.detach())[0]
    return apply(_Inverse, shifted, symmetrize(inverse) if symmetric else inverse), shifted, mu


def _spreads(gram: Tensor, inverse: Tensor) -> bool:
    """Return whether a Gram matrix is inaccurate in small directions, given its shifted inverse."""
    if gram.numel() == 0:
        return False
    largest = [a.detach().diagonal(dim1=-2, dim2=-1).amax(-1) for a in (gram, inverse)]
    return refinement_needed(largest[0] * largest[1] > SPREAD[True])


def _along_axes(x: Tensor, axes: Tensor) -> Tensor:
    """Rotate X to its singular vectors; the Gram matrix of the nearly orthogonal columns is accurate.

    Columns at the level of rounding are set to zero; their derivatives are kept.
    """
    y = product(x, axes)
    sizes = y.detach().square().sum(-2, keepdim=True)
    return y - y.detach() * (sizes <= noise_floor(x.shape, x.dtype) ** 2 * sizes.amax(-1, keepdim=True))


def _tall_objective(rows: LabeledRows, ridge: float) -> Tensor:
    """½tr(Π_λ²) − tr(Π_λ Π_E) + ½ regions ``(*batch,)`` for the soft projector Π_λ = F(C + μI)⁻¹Fᵀ."""
    ridge = ridge / rows.f.shape[-1]
    sums = row_sums(rows)
    value, inverse = _tall_value(sums, ridge)
    if _spreads(sums.gram, inverse):
        axes = batched_eigh(sums.gram.detach())[1]
        value, _ = _tall_value(row_sums(rows._replace(f=_along_axes(rows.f, axes))), ridge)
    return value


def _tall_value(sums: RowSums, ridge: float) -> tuple[Tensor, Tensor]:
    c, s, n = sums
    p, shifted, mu = _inverse(c, ridge, symmetric=True)
    cp = eye_like(c) - mu * p  # C P and S P cancel by the condition number of C: one step of refinement
    sp = product(s, p)
    sp = sp + product(s - product(sp, shifted), p)
    trace = (sp * per_mass(s, n)).sum((-2, -1))
    return 0.5 * ((cp * cp.mT).sum((-2, -1)) + (n > 0).sum(-1)) - trace, p


def _thin_objective(rows: LabeledRows, ridge: float) -> Tensor:
    """`_tall_objective` for fewer rows than features, where FᵀF + μI is nearly singular for a small ridge.

    With P = (FFᵀ diag(w) + μI)⁻¹ (m×m) the soft projector is I − μP. Its distance from the identity, and with it the
    gradient, vanishes with μ, so cancellation must be avoided: ½tr(Π_λ²) = ½(m − 2μ tr P + μ² tr P²) and
    tr(Π_λ Π_E) = (number of regions) − μ tr(N⁻¹ Eᵀ diag(w) P E).
    """
    f, w, region, k = rows
    ridge = ridge / f.shape[-1]
    e, n = indicators(region, k, f.dtype), region_sums(w.unsqueeze(-1), region, k).squeeze(-1)
    value, gram, p = _thin_value(f, w, e, n, ridge)
    differentiable = not is_differentiated(w) or (values_checkable(w) and bool((w > 0).all()))  # √w is not at zero
    if differentiable and _spreads(gram, p):
        root = torch.where(w > 0, w, 1).sqrt() * (w > 0)
        weighted, ones = scaled(root, f), torch.ones_like(w)
        axes = batched_eigh((weighted @ weighted.mT).detach())[1]
        inside, e = _along_axes(weighted.mT, axes).mT, product(axes.mT, scaled(root, e))
        value, *_ = _thin_value(inside, ones, e, n, ridge)
    return value


def _thin_value(f: Tensor, w: Tensor, e: Tensor, n: Tensor, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
    """The value, FFᵀ diag(w) and P."""
    gram = product(f, f.mT) * w.unsqueeze(-2)
    p, _, mu = _inverse(gram, ridge, symmetric=False)
    mu = mu[..., 0, 0]
    across = (product(p, e).mT * per_mass(scaled(w, e).mT, n)).sum((-2, -1))
    trace, square = p.diagonal(dim1=-2, dim2=-1).sum(-1), (p * p.mT).sum((-2, -1))
    return 0.5 * (f.shape[-2] - (n > 0).sum(-1)) - mu * trace + 0.5 * mu.square() * square + mu * across, gram, p


def _counted(rows: LabeledRows) -> LabeledRows:
    """Remove rows without weight if fewer rows than features remain.

    The thin form of the remaining rows is accurate for a small ridge. Rows are kept if values cannot be read, or if
    weights are trainable.
    """
    f, w, region, k = rows
    if not (w.is_cpu and values_checkable(w)) or is_differentiated(w) or w.numel() == 0:
        return rows
    count = int((w > 0).sum(-1).max())
    if not 0 < count < min(f.shape[-2:]):
        return rows
    kept = (w > 0).int().argsort(dim=-1, descending=True, stable=True)[..., :count]
    return LabeledRows(
        f.gather(-2, kept.unsqueeze(-1).expand(*kept.shape, f.shape[-1])),
        w.gather(-1, kept),
        region.gather(-1, kept),
        k,
    )


def check_ridge(ridge: float) -> None:
    if not torch.finfo(torch.float64).eps <= ridge < math.inf:
        raise DomainError(
            f"ridge must be finite and at least 2.3e-16, got {ridge}. Use normalized_cut_j2 for the objective "
            f"without a ridge."
        )


def normalized_cut_soft(
    f: Tensor,
    labels: Tensor,
    *,
    ridge: float = 0.3,
    weight: Tensor | None = None,
    offsets: Tensor | Sequence[int] | None = None,
    num_labels: int | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Alignment of a soft projector on the features with a segmentation, :math:`\tfrac12\|\Pi_\lambda - \Pi_\Psi\|^2`.

    With F scaled such that tr FᵀF = 1, and λ the ridge,

    .. math::
        \Pi_\lambda = F(F^\top F + \tfrac{\lambda}{d}I)^{-1}F^\top.

    Unlike J₂ it is smooth. Its rank term has a gradient, which shrinks directions that do not separate regions. To
    segment an image, cluster the rows of F(FᵀF + (λ/d)I)^(−½) without normalizing them.

    Args:
        f: features ``(*batch, m, d)``, or ``(total, d)`` with ``offsets``, of any sign and scale.
        labels: as in :func:`normalized_cut_j1`.
        ridge: λ ≥ 2.3e-16; values from 0.3 to 1 give similar results.
        weight, offsets, num_labels: as in :func:`normalized_cut_j1`.
        check, precision: as in `matrix_function`.

    Returns:
        The objective of each image ``(*batch,)`` in the dtype of ``f``. It does not depend on the scale of ``f``.

    Raises:
        LabelError: an image has no labels.
        DomainError: a weight is negative, or the ridge is out of range.

    Gradient:
        With C = FᵀF, μ = λ tr(C)/d, P = (C + μI)⁻¹, T = SN⁻¹Sᵀ and Z = −P(CPC − T)P,
        ∂J/∂F = 2F(PCP + Z + (λ/d) tr(Z) I) − 2(N⁻¹SᵀP)[labels]. All orders. The gradient is zero at F = 0, where the
        objective is discontinuous. If there are fewer rows than features, the computation uses FFᵀ, which is accurate
        for a small ridge. Rows of zero weight are counted only if weights are trainable.

    Example:
        >>> import torch, matbackprop
        >>> labels = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, -1]])
        >>> f = torch.rand(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> value = matbackprop.normalized_cut_soft(f, labels)
        >>> torch.allclose(value, matbackprop.normalized_cut_soft(10 * f, labels))
        True
    """
    check_ridge(ridge)
    images = labeled_images(f, labels, weight, offsets, num_labels, precision, check)
    with autocast_off(f.device.type):
        rows = _counted(images.rows())
        objective = _thin_objective if rows.f.shape[-2] < rows.f.shape[-1] else _tall_objective
        return images.average(objective(rows, float(ridge)))
