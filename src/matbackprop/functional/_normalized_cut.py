"""Objectives that align the span of the features with a segmentation, in O(md²) and without an m×m matrix.

Both objectives are functions of a Gram matrix C = Fᵀ diag(a) F, region sums S and region masses N. Their backward pass
over the m rows is one product with F and one gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import values_checkable
from matbackprop.checks import check_finite, into_range, nan_where
from matbackprop.errors import ShapeError
from matbackprop.functional._affinity import check_lambda, degrees, negative_degrees
from matbackprop.functional._function import Operation, apply, product
from matbackprop.functional._labels import (
    LabeledImages,
    LabeledRows,
    gather_rows,
    labeled_images,
    region_sums,
    tall_product,
)
from matbackprop.functional._linear_solve import right_solve
from matbackprop.numerics import autocast_off, gram_tolerance, symmetrize
from matbackprop.refinement import ALIGNED_TOL, ill_determined, refinement_needed
from matbackprop.solvers import batched_eigh, batched_svd
from matbackprop.solvers.gram import gram_eigh


def per_mass(sums: Tensor, mass: Tensor) -> Tensor:
    """Sums over regions ``(*batch, k, d)`` divided by the masses; regions of mass 0 have sums of 0."""
    return sums / torch.where(mass > 0, mass, 1).unsqueeze(-1)  # derivatives of 1/mass would overflow


def inverse_or_zero(x: Tensor) -> Tensor:
    positive = x > 0
    return torch.where(positive, x, 1).reciprocal() * positive


def scaled(w: Tensor, x: Tensor) -> Tensor:
    return w.unsqueeze(-1) * x


class RowSums(NamedTuple):
    """Gram matrix ``(*batch, d, d)``, region sums ``(*batch, k, d)`` and region masses ``(*batch, k)``."""

    gram: Tensor
    sums: Tensor
    mass: Tensor


class _Saved(NamedTuple):
    f: Tensor
    weights: Tensor
    region: Tensor
    k: int


class _RowSums(Operation):
    """Fᵀ diag(a) F and Eᵀ diag(b) F for weights [a, b], or [a] for both. The gradient is a product and a gather."""

    forward_twice = "normalized_cut"

    @staticmethod
    def forward(f: Tensor, weights: Tensor, region: Tensor, k: int) -> tuple[Tensor, Tensor]:
        parts = [w * f for w in weights.split(1, -1)]
        return tall_product(parts[0], f), region_sums(parts[-1], region, k)

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> _Saved:
        return _Saved(*inputs)

    @staticmethod
    def adjoint(saved: _Saved, needed: Sequence[bool], g_gram: Tensor | None, g_sums: Tensor | None) -> Any:
        f, weights, region, k = saved
        parts = weights.split(1, -1)
        g_gram = f.new_zeros(*f.shape[:-2], f.shape[-1], f.shape[-1]) if g_gram is None else g_gram
        g_sums = f.new_zeros(*f.shape[:-2], k, f.shape[-1]) if g_sums is None else g_sums
        half, pulled = f @ symmetrize(g_gram), gather_rows(g_sums, region)
        g_f = torch.addcmul(parts[-1] * pulled, parts[0], half, value=2)
        if not needed[1]:
            return g_f
        forms = [(f * x).sum(-1, keepdim=True) for x in (half, pulled)]
        return g_f, torch.cat(forms, -1) if len(parts) > 1 else forms[0] + forms[1]

    @staticmethod
    def tangent(saved: _Saved, df: Tensor | None, dw: Tensor | None, *_: None) -> tuple[Tensor, Tensor]:
        f, weights, region, k = saved
        gram, rows = f.new_zeros(()), torch.zeros_like(f)
        if df is not None:
            parts = [w * df for w in weights.split(1, -1)]
            gram, rows = 2 * symmetrize(tall_product(parts[0], f)), parts[-1]
        if dw is not None:
            parts = [w * f for w in dw.split(1, -1)]
            gram, rows = gram + tall_product(parts[0], f), rows + parts[-1]
        return gram, region_sums(rows, region, k)


def row_sums(rows: LabeledRows, weights: Tensor | None = None) -> RowSums:
    """Sums over rows, with weights ``(*batch, m, 3)`` of each row in the Gram matrix, the region sums and the masses.

    By default all three are the weights of the rows.
    """
    weights = rows.weight.unsqueeze(-1) if weights is None else weights
    gram, sums = apply(_RowSums, rows.f, weights[..., :2], rows.region, rows.num_labels)
    return RowSums(gram, sums, region_sums(weights[..., -1:], rows.region, rows.num_labels).squeeze(-1))


class Alignment(NamedTuple):
    """Comparison of the span of features with the span of regions, ``(*batch,)`` each."""

    trace: Tensor  # tr(Π_F Π_E)
    rank: Tensor  # of the features
    regions: Tensor  # number of regions of positive mass

    @property
    def distance(self) -> Tensor:
        """½‖Π_F − Π_E‖²."""
        return 0.5 * (self.rank + self.regions) - self.trace


def _axes(values: Tensor, vectors: Tensor, tol: float) -> tuple[Tensor, Tensor]:
    """Return eigenvectors divided by the roots of eigenvalues, zero below a tolerance, and which are nonzero."""
    kept = (values > tol * values.amax(-1, keepdim=True)) & (values > 0)
    return vectors * torch.where(kept, values, torch.inf).rsqrt().unsqueeze(-2), kept


def align(rows: LabeledRows, tol: float, weights: Tensor | None = None) -> Alignment:
    """Compare the span of diag(a)^½ F with the regions, for weights as in `row_sums`.

    The relative error of a direction with singular value σ is u(σ_max/σ)² in a Gram matrix C and u σ_max/σ in singular
    vectors. If that matters, F is multiplied by constants that make its columns orthonormal (or zero).

    For variations of F that keep its rank, FPFᵀ stays the projector on its span if P = C⁺ varies as −P dC P (the
    inverse on a fixed complement of the null space). Derivatives of every order need no null-space term.
    """
    c, s, n = row_sums(rows, weights)
    values, vectors = batched_eigh(c.detach())
    if refinement_needed(ill_determined(values, tol=tol)):
        a = rows.weight if weights is None else weights[..., 0]
        x = scaled(a.detach().sqrt(), rows.f.detach()).mT
        axes, _ = _axes(*gram_eigh(x, values.new_zeros(values.shape[:-1]), True)[:2], tol)
        c, s, n = row_sums(rows._replace(f=product(rows.f, axes)), weights)
        values, vectors = batched_eigh(c.detach())
        tol = ALIGNED_TOL
    axes, kept = _axes(values, vectors, tol)
    trace = (right_solve(c, s, axes) * per_mass(s, n)).sum((-2, -1))
    return Alignment(trace, kept.sum(-1), (n > 0).sum(-1))


def _span_of_affinity(f: Tensor, a: Tensor, lam: Tensor, tol: float) -> Tensor:
    """Return FΠΛΠ with Π the projector on the rows of diag(a)^½ F. It has the span of FΛFᵀ, also if singular."""
    _, sigma, vh = batched_svd(scaled(a.detach().sqrt(), f.detach()))
    rows = (vh.mT * (sigma > tol**0.5 * sigma[..., :1]).unsqueeze(-2)) @ vh
    return product(f, product(rows, product(lam, rows)))


def _lambda_per_image(images: LabeledImages, lam: Tensor) -> Tensor:
    """Λ in the dtype of the computation, one per labeling."""
    check_lambda(lam, images.f.shape[-1])
    if images.checked and values_checkable(lam):
        check_finite(lam, "lam")
        lam = into_range(lam, images.dtype)
    if lam.ndim > 2 and lam.shape[:-2] != images.f.shape[:-2]:
        raise ShapeError(
            f"lam must be one matrix (d, d) or one per image (*batch, d, d), got shape {tuple(lam.shape)} for features "
            f"of shape {tuple(images.f.shape)}."
        )
    lam = lam.unsqueeze(-3) if images.annotators and lam.ndim > 2 else lam
    return lam.to(images.dtype).expand(*images.labels.shape[:-1], *lam.shape[-2:])


def normalized_cut_j1(
    f: Tensor,
    labels: Tensor,
    *,
    lam: Tensor | None = None,
    weight: Tensor | None = None,
    offsets: Tensor | Sequence[int] | None = None,
    num_labels: int | None = None,
    rank_tol: float | torch.dtype | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Alignment of the normalized affinity with a segmentation, :math:`J_1 = \tfrac12\|\Pi_M - \Pi_\Omega\|^2`.

    .. math::
        W = F\Lambda F^\top,\quad D = [W\mathbf 1],\quad M = D^{-1/2}WD^{-1/2},\quad \Omega = D^{1/2}EE^\top D^{1/2}

        J_1 = \tfrac12(r + k) - \operatorname{tr}(B^+SK^{-1}S^\top),\quad B = F^\top D^{-1}F,\; S = F^\top E,\; K =
        [E^\top D\mathbf 1]

    with r the rank of M and k the number of regions.

    Args:
        f: features ``(*batch, m, d)``, or ``(total, d)`` with ``offsets``. The degrees FΛFᵀ1 must be nonnegative, for
            example after a ReLU. Rows of degree zero are ignored.
        labels: region numbers ``(*batch, m)``. Rows with label −1 are ignored. Several annotations of an image have
            shape ``(*batch, a, m)``; the result is the mean over annotations that have labels.
        lam: Λ ``(d, d)`` or ``(*batch, d, d)``; the identity if None. It may be asymmetric and trainable.
        weight: multiplicity of each row ``(*batch, m)``, such as the area of a superpixel, or ``(*batch, a, m)`` for
            each annotation. A weight of 2 is equivalent to repeating the row. May be trainable.
        offsets: n + 1 row indices, the start of each image in a packed batch of images of different sizes, as a list or
            CPU tensor. The result has shape ``(n,)``. Memory grows with n times the size of the largest image.
        num_labels: upper bound on the number of regions. By default it is the largest label plus one, and reading it
            synchronizes a GPU once. Required under ``torch.compile`` and ``vmap``.
        rank_tol: singular values of D^{−1/2}F and D^{−1/2}FΛ below this fraction of the largest count as zero. By
            default it depends on the dtype of ``f``: about 3e-7 for float64 and 8e-6 for float32. Pass a dtype if the
            data have a lower precision, such as ``torch.float32`` for a float32 map cast to float64.
        check: whether to check values (finite features, labels in range, degrees), as in `matrix_function`. Without
            checks, images with a negative degree or a label out of range are NaN, and images without labels are 0 with
            a zero gradient.
        precision: as in `matrix_function`.

    Returns:
        The objective of each image ``(*batch,)`` in the dtype of ``f``, between \|r − k\|/2 and (r + k)/2.

    Raises:
        LabelError: an image has no labels.
        DomainError: a degree or weight is negative, or ``rank_tol`` is out of range.

    Gradient:
        With A = K⁻¹SᵀB⁺, Y = B⁺SA, s = Fᵀ1, j the region of row i and gᵢ = FᵢYFᵢᵀ/dᵢ² − S_jᵀB⁺S_j/K_j²,
        ∂J₁/∂F = 2D⁻¹FY − 2A[labels] − g(Λs)ᵀ − 1(gᵀFΛ), and ∂J₁/∂Λ = −(Fᵀg)sᵀ if Λ is invertible. r and k have no
        gradient. The gradient is that of variations that preserve the rank of F and Λ, and is finite at rows of degree
        zero. Supports all orders, forward mode and vmap.

    Example:
        >>> import torch, matbackprop
        >>> labels = torch.tensor([0, 0, 1, 1, 1])
        >>> perfect = torch.nn.functional.one_hot(labels).double()
        >>> bool(matbackprop.normalized_cut_j1(perfect, labels).abs() < 1e-12)
        True
        >>> _ = torch.manual_seed(0)
        >>> float(matbackprop.normalized_cut_j1(torch.rand(5, 2).double(), labels)) > 0.1
        True

    Reference:
        Ionescu et al. (2015), section 5, equation J₁ and the proposition on dM and dΩ.
    """
    images = labeled_images(f, labels, weight, offsets, num_labels, precision, check)
    tol = gram_tolerance(f.dtype, images.dtype, f.shape[-1], rank_tol)
    lam = None if lam is None else _lambda_per_image(images, lam)
    with autocast_off(f.device.type):
        rows = images.rows()
        degree = degrees(rows.f, rows.weight, lam)
        bad = negative_degrees(degree, images.checked, rows.weight)
        kept = rows.weight * (degree > 0)  # equivalent to the pseudoinverse of D
        weights = torch.stack([kept * inverse_or_zero(degree), kept, kept * degree], -1)  # of D^(−½)F and D^½E
        if lam is not None:
            rows = rows._replace(f=_span_of_affinity(rows.f, weights[..., 0], lam, tol))
        return images.average(nan_where(bad, align(rows, tol, weights).distance))


def normalized_cut_j2(
    f: Tensor,
    labels: Tensor,
    *,
    weight: Tensor | None = None,
    offsets: Tensor | Sequence[int] | None = None,
    num_labels: int | None = None,
    rank_tol: float | torch.dtype | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Alignment of the span of the features with a segmentation, :math:`J_2 = \tfrac12\|\Pi_W - \Pi_\Psi\|^2`.

    .. math::
        W = FF^\top,\quad \Psi = E(E^\top E)^{-1}E^\top

        J_2 = \tfrac12(r + k) - \operatorname{tr}(C^+SN^{-1}S^\top),\quad C = F^\top F,\; S = F^\top E,\; N = E^\top E

    with r the rank of F and k the number of regions. It is the same for W = FΛFᵀ with any invertible Λ.

    Args:
        f: features ``(*batch, m, d)``, or ``(total, d)`` with ``offsets``, of any sign.
        labels, weight, offsets, num_labels: as in :func:`normalized_cut_j1`.
        rank_tol: as in :func:`normalized_cut_j1`, applied to the singular values of F.
        check, precision: as in `matrix_function`.

    Returns:
        The objective of each image ``(*batch,)`` in the dtype of ``f``, between \|r − k\|/2 and (r + k)/2. A value
        below 1/2 implies r = k.

    Raises:
        LabelError: an image has no labels.
        DomainError: a weight is negative, or ``rank_tol`` is out of range.

    Gradient:
        With A = N⁻¹SᵀC⁺, ∂J₂/∂F = −2(A[labels] − F C⁺SA) for variations that preserve the rank. r and k have no
        gradient. The gradient is zero at F = 0. Supports all orders, forward mode and vmap.

    Example:
        >>> import torch, matbackprop
        >>> _ = torch.manual_seed(0)
        >>> labels = torch.tensor([0, 0, 1, 1, 1, 2, 2, -1])
        >>> f = torch.rand(8, 3, dtype=torch.float64, requires_grad=True)
        >>> value = matbackprop.normalized_cut_j2(f, labels)
        >>> (gradient,) = torch.autograd.grad(value, f)
        >>> bool(value < 3), bool((gradient[-1] == 0).all())  # the last row is ignored
        (True, True)

    Reference:
        Ionescu et al. (2015), section 5, equation J₂ and the proposition that follows it.
    """
    images = labeled_images(f, labels, weight, offsets, num_labels, precision, check)
    tol = gram_tolerance(f.dtype, images.dtype, f.shape[-1], rank_tol)
    with autocast_off(f.device.type):
        return images.average(align(images.rows(), tol).distance)
