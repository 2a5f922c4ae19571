"""Objectives that align the span of the features with a segmentation, in O(md²) and without an m×m matrix.

All three measure ½‖Π − Π_E‖² between the projector on a span of the features and the projector on the span of a given
segmentation E: :func:`normalized_cut_j1` in the space of the normalized affinity M = D^{−1/2}WD^{−1/2},
:func:`normalized_cut_j2` in that of W = FFᵀ itself, :func:`normalized_cut_soft` with a soft projector whose rank has a
gradient. ``tests/helpers/cuts.py`` holds the definitions, layer by layer as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from matbackprop._torch import is_differentiated
from matbackprop.checks import check_finite, into_range, nan_where, values_checkable
from matbackprop.cuda import cuts as cut_kernels
from matbackprop.errors import DomainError, ShapeError
from matbackprop.functional._affinity import check_lambda
from matbackprop.functional._function import product
from matbackprop.functional._labels import LabeledImages, LabeledRows, indicators, labeled_images, region_sums
from matbackprop.functional._spans import (
    RowWeights,
    align,
    degree_weights,
    soft_alignment,
    span_of_affinity,
    thin_soft_alignment,
)
from matbackprop.numerics import autocast_off, gram_tolerance


def _degrees(rows: LabeledRows, lam: Tensor | None, check_values: bool) -> tuple[Tensor, Tensor | None]:
    """Degrees FΛFᵀw ``(*b, m)``, and which images have a negative one ``(*b,)``; if checked, raise instead."""
    total = product(rows.f.mT, rows.weight.unsqueeze(-1))
    degree = product(rows.f, total if lam is None else product(lam, total)).squeeze(-1)
    negative = (degree < 0) & (rows.weight > 0)
    if not check_values:
        return degree, negative.any(-1)
    if bool(negative.any()):
        raise DomainError(
            f"{int(negative.sum())} of {negative.numel()} rows have a negative degree, down to "
            f"{float(degree.detach().min()):.3g}, so D^(−1/2) is not real. End the features with a ReLU and keep Λ "
            f"positive, or use normalized_cut_j2, which has no degrees."
        )
    return degree, None


def _lambda_per_image(images: LabeledImages, lam: Tensor) -> Tensor:
    """Λ in the dtype of the computation, one per labeling."""
    check_lambda(lam, images.f.shape[-1])
    if images.checked:
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
    precision: torch.dtype | None = None,
    check: bool | None = None,
) -> Tensor:
    r"""Alignment of the normalized affinity with a segmentation, :math:`J_1 = \tfrac12\|\Pi_M - \Pi_\Omega\|^2`.

    .. math::
        W = F\Lambda F^\top,\quad D = [W\mathbf 1],\quad M = D^{-1/2}WD^{-1/2},\quad \Omega = D^{1/2}EE^\top D^{1/2}

        J_1 = \tfrac12(r + k) - \operatorname{tr}(B^+SK^{-1}S^\top),\quad B = F^\top D^{-1}F,\; S = F^\top E,\; K =
        [E^\top D\mathbf 1]

    with r the rank of M and k the number of regions.

    Args:
        f: features ``(*b, m, d)``, or ``(total, d)`` with ``offsets``. The degrees FΛFᵀ1 must be non-negative, as
            they are after a ReLU. Rows of degree zero are ignored.
        labels: region numbers ``(*b, m)``, −1 for ignored rows. ``(*b, a, m)`` holds the labels
            of ``a`` annotators of the same image: the result is the mean over those with labels.
        lam: Λ ``(d, d)`` or ``(*b, d, d)``; the identity if None. It need not be symmetric and may be trainable.
        weight: how often each row counts ``(*b, m)``, for example the area of a superpixel; the objective is the same
            as with the row repeated. May be trainable.
        offsets: n+1 integers, the first row of each image in a packed batch of images of different sizes; a list or a
            CPU tensor. The result is then ``(n,)``. Memory grows with n times the longest image.
        num_labels: a bound of the number of regions. By default the largest label is read, which synchronizes a GPU
            once; required under ``torch.compile`` and ``vmap``. Larger labels are ignored if values are not checked.
        rank_tol: singular values of D^{−1/2}F, and of D^{−1/2}FΛ, below this fraction of the largest count as zero.
            By default it follows the dtype of ``f``; or the dtype whose precision the data have (``torch.float32`` for
            a float32 map that was cast to float64). float64 features resolve about 3e-7, float32 ones 8e-6.
        precision: dtype of the computation; float64 by default.
        check: whether values are checked (finite features, labels in range, degrees), as in `matrix_function`. If not,
            the result of an image with a negative degree is NaN, and that of one without labeled rows is 0 with a zero
            gradient.

    Returns:
        The objective of each image ``(*b,)`` in the dtype of ``f``, between \|r − k\|/2 and (r + k)/2.

    Raises:
        LabelError: labels of the wrong shape, dtype, device or range, or an image without any.
        DtypeError: features, weights or Λ that are not floating point.
        ShapeError: shapes that do not fit.
        NonFiniteError: NaN or Inf in the features, the weights or Λ.
        DomainError: a negative degree or weight, or a tolerance out of range.

    Gradient:
        With A = K⁻¹SᵀB⁺, Y = B⁺SA and gᵢ = FᵢYFᵢᵀ/dᵢ² − S_jᵀB⁺S_j/K_j², j the region of row i,
        ∂J₁/∂F = 2D⁻¹FY − 2A[labels] − g(Λs)ᵀ − 1(gᵀFΛ), s = Fᵀ1, and ∂J₁/∂Λ = −(Fᵀg)sᵀ if Λ is invertible. All
        orders, forward mode and vmap, for variations that keep the rank; r and k have no gradient. At a singular Λ the
        gradient is that of variations that keep the rank of Λ. It is finite at rows of degree zero.

    Example:
        >>> import torch
        >>> from matbackprop import normalized_cut_j1
        >>> labels = torch.tensor([0, 0, 1, 1, 1])
        >>> perfect = torch.nn.functional.one_hot(labels).double()
        >>> bool(normalized_cut_j1(perfect, labels).abs() < 1e-12)
        True
        >>> _ = torch.manual_seed(0)
        >>> float(normalized_cut_j1(torch.rand(5, 2).double(), labels)) > 0.1
        True

    Reference:
        Ionescu, Vantzos, Sminchisescu, Training Deep Networks with Structured Layers by Matrix Backpropagation, §5,
        eq. J₁ and the proposition on dM, dΩ.
    """
    images = labeled_images(
        f, labels, weight=weight, offsets=offsets, num_labels=num_labels, precision=precision, check=check
    )
    tol = gram_tolerance(f.dtype, images.dtype, f.shape[-1], rank_tol)
    lam = None if lam is None else _lambda_per_image(images, lam)
    with autocast_off(f.device.type):
        images = images.in_range()
        plain = lam is None and images.weight is None and not images.annotators
        if plain and images.dtype == torch.float64 and cut_kernels.applies(images.f, images.labels, None):
            _, bad = _degrees(images.rows(), None, images.checked)
            k = images.num_labels
            value = cut_kernels.degree_objective(
                images.f,
                images.labels,
                k,
                tol,
                lambda x, regions: _j1(LabeledImages(x, regions, None, k, images.dtype), None, tol),
            )
            return nan_where(bad, value)
        return images.average(_j1(images, lam, tol))


def _j1(images: LabeledImages, lam: Tensor | None, tol: float) -> Tensor:
    rows = images.rows()
    degree, bad = _degrees(rows, lam, images.checked)
    weights = degree_weights(rows.weight, degree)
    x = rows.f if lam is None else span_of_affinity(rows.f, weights, lam, tol)
    return nan_where(bad, align(x, weights, rows.region, rows.num_labels, tol).distance)


def normalized_cut_j2(
    f: Tensor,
    labels: Tensor,
    *,
    weight: Tensor | None = None,
    offsets: Tensor | Sequence[int] | None = None,
    num_labels: int | None = None,
    rank_tol: float | torch.dtype | None = None,
    precision: torch.dtype | None = None,
    check: bool | None = None,
) -> Tensor:
    r"""Alignment of the span of the features with a segmentation, :math:`J_2 = \tfrac12\|\Pi_W - \Pi_\Psi\|^2`.

    .. math::
        W = FF^\top,\quad \Psi = E(E^\top E)^{-1}E^\top

        J_2 = \tfrac12(r + k) - \operatorname{tr}(C^+SN^{-1}S^\top),\quad C = F^\top F,\; S = F^\top E,\; N = E^\top E

    with r the rank of F and k the number of regions. It does not depend on Λ in W = FΛFᵀ.

    Args:
        f: features ``(*b, m, d)``, or ``(total, d)`` with ``offsets``, of any sign.
        labels, weight, offsets, num_labels, rank_tol: as in :func:`normalized_cut_j1`, of F itself.
        check, precision: as in `matrix_function`.

    Returns:
        The objective of each image ``(*b,)`` in the dtype of ``f``, between \|r − k\|/2 and (r + k)/2. Below 1/2 the
        ranks are equal.

    Raises:
        The errors of :func:`normalized_cut_j1`, except for degrees and Λ.

    Gradient:
        With A = N⁻¹SᵀC⁺, ∂J₂/∂F = −2(A[labels] − F C⁺SA). All orders, forward mode and vmap, for variations that keep
        the rank; r and k have no gradient, and neither has F = 0.

    Example:
        >>> import torch
        >>> from matbackprop import normalized_cut_j2
        >>> _ = torch.manual_seed(0)
        >>> labels = torch.tensor([0, 0, 1, 1, 1, 2, 2, -1])
        >>> f = torch.rand(8, 3, dtype=torch.float64, requires_grad=True)
        >>> value = normalized_cut_j2(f, labels)
        >>> (gradient,) = torch.autograd.grad(value, f)
        >>> bool(value < 3), bool((gradient[-1] == 0).all())  # the last row is ignored
        (True, True)

    Reference:
        Ionescu, Vantzos, Sminchisescu, Training Deep Networks with Structured Layers by Matrix Backpropagation, §5,
        eq. J₂ and the proposition after it.
    """
    images = labeled_images(
        f, labels, weight=weight, offsets=offsets, num_labels=num_labels, precision=precision, check=check
    )
    tol = gram_tolerance(f.dtype, images.dtype, f.shape[-1], rank_tol)
    return _evaluate(images, partial(_j2, tol=tol), tol=tol)


def _j2(rows: LabeledRows, tol: float) -> Tensor:
    return align(rows.f, RowWeights(rows.weight, rows.weight, rows.weight), rows.region, rows.num_labels, tol).distance


def _counted(rows: LabeledRows) -> LabeledRows:
    """Remove rows without weight if fewer rows than features remain.

    The thin form of the remaining rows is accurate for a small ridge. Rows are kept if values cannot be read, or if
    weights are trainable.
    """
    f, w, region, k = rows
    if not (f.is_cpu and values_checkable(f)) or is_differentiated(w) or w.numel() == 0:
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


def _soft(rows: LabeledRows, ridge: float) -> Tensor:
    f, w, region, k = _counted(rows)
    if f.shape[-2] < f.shape[-1]:
        n = region_sums(w.unsqueeze(-1), region, k).squeeze(-1)
        value = thin_soft_alignment(f, w, indicators(region, k, f.dtype), n, ridge)
    else:
        value, n = soft_alignment(f, w, region, k, ridge)
    return value + 0.5 * (n > 0).sum(-1)


def _evaluate(
    images: LabeledImages, objective: Callable[[LabeledRows], Tensor], *, ridge: float = 0.0, tol: float = 0.0
) -> Tensor:
    """Evaluate J₂, or with a ridge the soft objective, by CUDA kernels if they apply, otherwise on the rows."""
    images = images.in_range()
    f, labels, weight, k = images.f, images.labels, images.weight, images.num_labels

    def general(x: Tensor, regions: Tensor, mass: Tensor | None) -> Tensor:
        flat = LabeledImages(x, regions.unflatten(0, (len(x), -1)), mass, k, images.dtype)
        with autocast_off(x.device.type):
            return objective(flat.rows()).flatten().to(x.dtype)

    thin = ridge > 0 and f.shape[-2] < f.shape[-1]  # the kernels are inaccurate for a small ridge
    with autocast_off(f.device.type):
        if images.dtype == torch.float64 and not thin and cut_kernels.applies(f, labels, weight):
            return images.average(cut_kernels.objective(f, labels, weight, k, ridge, tol, general))
        return images.average(objective(images.rows()))


def check_ridge(ridge: float) -> None:
    """Raise unless the ridge is finite and above rounding."""
    if not torch.finfo(torch.float64).eps <= ridge < math.inf:
        raise DomainError(
            f"ridge must be finite and at least 2.3e-16, the rounding of the features, got {ridge}. Use "
            f"normalized_cut_j2 for the objective without a ridge."
        )


def normalized_cut_soft(
    f: Tensor,
    labels: Tensor,
    *,
    ridge: float = 0.3,
    weight: Tensor | None = None,
    offsets: Tensor | Sequence[int] | None = None,
    num_labels: int | None = None,
    precision: torch.dtype | None = None,
    check: bool | None = None,
) -> Tensor:
    r"""Alignment of a soft projector on the features with a segmentation, :math:`\tfrac12\|\Pi_\lambda - \Pi_\Psi\|^2`.

    With F scaled to unit trace, tr FᵀF = 1, and λ the ridge,

    .. math::
        \Pi_\lambda = F(F^\top F + \tfrac{\lambda}{d}I)^{-1}F^\top.

    Unlike J₂ it is smooth: the rank term has a gradient, and directions that no region needs shrink. Cluster the
    rows of F(FᵀF + (λ/d)I)^(−½), without degrees and without normalizing rows.

    Args:
        f: features ``(*b, m, d)``, or ``(total, d)`` with ``offsets``, of any sign and scale.
        ridge: λ ≥ 2.3e-16; values from 0.3 to 1 give similar results.
        labels, weight, offsets, num_labels: as in :func:`normalized_cut_j1`.
        check, precision: as in `matrix_function`.

    Returns:
        The objective of each image ``(*b,)`` in the dtype of ``f``; it does not depend on the scale of the features.

    Raises:
        DomainError: a ridge that is not positive or less than rounding; the other errors are those of
            :func:`normalized_cut_j1`, except for degrees and Λ.

    Gradient:
        With C = FᵀF, μ = λ tr(C)/d, P = (C + μI)⁻¹ and T = SN⁻¹Sᵀ: Z = −P(CPC − T)P,
        ∂J/∂F = 2F(PCP + Z + (λ/d) tr(Z) I) − 2(N⁻¹SᵀP)[labels]. Smooth, all orders; zero at F = 0, where the objective
        is discontinuous. For fewer rows than features it is computed from FFᵀ, which is accurate for a small ridge;
        rows without weight count only if weights are trainable.

    Example:
        >>> import torch
        >>> from matbackprop import normalized_cut_soft
        >>> labels = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, -1]])
        >>> _ = torch.manual_seed(0)
        >>> f = torch.rand(2, 6, 4, dtype=torch.float64)
        >>> torch.allclose(normalized_cut_soft(f, labels), normalized_cut_soft(10 * f, labels))
        True
    """
    check_ridge(ridge)
    images = labeled_images(
        f, labels, weight=weight, offsets=offsets, num_labels=num_labels, precision=precision, check=check
    )
    return _evaluate(images, partial(_soft, ridge=float(ridge)), ridge=float(ridge))
