"""Affinity W = FΛFᵀ, normalized affinity M, its target Ω, and the normalized cut of a segmentation."""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop._torch import values_checkable
from matbackprop.checks import (
    Prepared,
    check_finite,
    check_floating,
    check_matrix,
    check_result,
    nan_where,
    prepare,
)
from matbackprop.errors import DomainError, LabelError, ShapeError
from matbackprop.functional._function import product
from matbackprop.functional._labels import check_label_values, check_labels, count_labels, indicators, out_of_labels
from matbackprop.numerics import autocast_off


def check_lambda(lam: Tensor, d: int) -> None:
    """Raise unless ``lam`` is a floating-point ``(*batch, d, d)``."""
    check_floating(lam, "lam")
    if lam.ndim < 2 or lam.shape[-2:] != (d, d):
        raise ShapeError(f"lam must be (*batch, {d}, {d}) for features with {d} columns, got {tuple(lam.shape)}.")


def affinity(
    f: Tensor, lam: Tensor | None = None, *, check: bool | None = None, precision: torch.dtype | None = None
) -> Tensor:
    r"""Affinity between all pairs of rows, :math:`W = F\Lambda F^\top`.

    Args:
        f: features ``(*batch, m, d)``. W is nonnegative, as normalized cuts require, if F and Λ are.
        lam: Λ ``(*batch, d, d)`` or ``(d, d)``; the identity if None. W is symmetric if Λ is.
        check, precision: as in `matrix_function`.

    Returns:
        W ``(*batch, m, m)`` in the dtype of ``f``.

    Raises:
        DomainError: the result overflows.

    Gradient:
        ∂L/∂F = G F Λᵀ + Gᵀ F Λ and ∂L/∂Λ = Fᵀ G F for any Λ and G. The paper's 2G_sym F Λᵀ requires a symmetric Λ.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.affinity(torch.tensor([[1.0, 0.0], [1.0, 2.0]]))
        tensor([[1., 1.],
                [1., 5.]])

    Reference:
        Ionescu et al. (2015), section 5.
    """
    check_matrix(f, "f")
    if lam is not None:
        check_lambda(lam, f.shape[-1])
    with autocast_off(f.device.type):
        x, check_values, *_ = prepare(f, "f", check, precision, sizes=None, or_complex=False, others=(lam,))
        if check_values and lam is not None:
            check_finite(lam, "lam")
        out = ((x if lam is None else x @ lam.to(x.dtype)) @ x.mT).to(f.dtype)
        if check_values:
            check_result(out, "The affinity", "Scale the features.")
        return out


def degrees(f: Tensor, weight: Tensor, lam: Tensor | None = None) -> Tensor:
    """The degrees FΛFᵀw ``(*batch, m)``; products with single vectors are slower than sums."""
    total = (weight.unsqueeze(-1) * f).sum(-2, keepdim=True)
    return (f * (total if lam is None else product(total, lam.mT))).sum(-1)


def negative_degrees(degree: Tensor, check_values: bool, weight: Tensor | None = None) -> Tensor | None:
    """Return which graphs ``(*batch,)`` have a negative degree at a row of positive weight; raise if checked."""
    negative = degree < 0 if weight is None else (degree < 0) & (weight > 0)
    if not (check_values and values_checkable(negative)):
        return negative.any(-1)
    if bool(negative.any()):
        raise DomainError(
            f"{int(negative.sum())} of {negative.numel()} rows have a negative degree, down to "
            f"{float(degree.detach().min()):.3g}, and D^(1/2) is not real. Make the affinities non-negative (end the "
            f"features with a ReLU), or use normalized_cut_j2, which has no degrees."
        )
    return None


def _degrees(w: Tensor, check_values: bool) -> Tensor:
    """Return row sums ``(*batch, m)``; raise, or return NaN if values are not checked, for negative ones."""
    degree = w.sum(-1)
    return nan_where(negative_degrees(degree, check_values), degree)


def _region_count(w: Tensor, labels: Tensor, num_labels: int | None, check_values: bool) -> int:
    check_labels(labels, w)
    if labels.ndim == w.ndim:
        raise LabelError(
            f"labels must have shape {tuple(w.shape[:-1])}, one per row of the affinity, got {tuple(labels.shape)}. "
            f"Pass one annotator at a time."
        )
    k = count_labels(labels, num_labels)
    if check_values:
        check_label_values(labels, None, k, False)
    return k


def _indicators(labels: Tensor, k: int, ready: Prepared) -> Tensor:
    """E ``(*batch, m, k)``; NaN if a label is out of range and values are not checked."""
    e = indicators(labels, k, ready.x.dtype)
    return e if ready.check_values else nan_where(out_of_labels(labels, k), e)


def normalized_affinity(
    w: Tensor,
    labels: Tensor | None = None,
    *,
    num_labels: int | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Normalized affinity M and, if labels are given, its target Ω.

    .. math::
        D = [W\mathbf 1],\quad M = D^{-1/2}WD^{-1/2},\quad \Omega = D^{1/2}EE^\top D^{1/2}

    Args:
        w: affinities ``(*batch, m, m)`` with nonnegative row sums. Rows of degree zero are zero in M and Ω.
        labels: region numbers ``(*batch, m)``. Rows of E with label −1 are zero.
        num_labels: upper bound on the number of regions. Required under ``torch.compile`` and ``vmap``.
        check, precision: as in `matrix_function`.

    Returns:
        M ``(*batch, m, m)``, or the pair (M, Ω), in the dtype of ``w``.

    Raises:
        DomainError: a degree is negative.

    Gradient:
        ∂L/∂W = D^{−1/2}G_M D^{−1/2} + diag(D⁻¹Ω(G_Ω)_sym − D⁻¹M(G_M)_sym)1ᵀ for a symmetric W. Zero for rows of
        degree zero. Supports all orders, forward mode and vmap.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.normalized_affinity(torch.tensor([[1.0, 1.0], [1.0, 7.0]]))
        tensor([[0.5000, 0.2500],
                [0.2500, 0.8750]])

    Reference:
        Ionescu et al. (2015), section 5, proposition on dM and dΩ.
    """
    ready = prepare(w, "w", check, precision, sizes="sums", square=True, or_complex=False, others=(labels,))
    with autocast_off(w.device.type):
        x, k = ready.x, 0 if labels is None else _region_count(w, labels, num_labels, ready.check_values)
        degree = _degrees(x, ready.check_values)
        positive = ~(degree <= 0)
        root = torch.where(positive, degree, 1).sqrt()
        down = root.reciprocal() * positive
        m = (down.unsqueeze(-1) * x * down.unsqueeze(-2)).to(w.dtype)
        if labels is None:
            return m
        e = (root * positive).unsqueeze(-1) * _indicators(labels, k, ready)
        return m, (e @ e.mT).to(w.dtype)


def normalized_cut_value(
    w: Tensor,
    labels: Tensor,
    *,
    num_labels: int | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Normalized cut of a segmentation, :math:`C(W,E) = \operatorname{tr}(E^\top(D-W)E(E^\top DE)^{-1})`.

    For each region, the affinity to other regions is divided by the total affinity; the cut is the sum of these ratios.
    It equals k − tr(ZᵀMZ) with Z = D^{1/2}E(EᵀDE)^{−1/2}.

    Args:
        w: symmetric affinities ``(*batch, m, m)`` with nonnegative row sums.
        labels: region numbers ``(*batch, m)``. Rows and columns with label −1 are ignored.
        num_labels: upper bound on the number of regions. Required under ``torch.compile`` and ``vmap``.
        check, precision: as in `matrix_function`.

    Returns:
        The cut ``(*batch,)`` in the dtype of ``w``. It is between 0 and k for nonnegative affinities. Regions without
        affinity contribute 0.

    Raises:
        DomainError: a degree is negative.

    Gradient:
        A rational function of W. Supports all orders, forward mode and vmap.

    Example:
        >>> import torch, matbackprop
        >>> w = torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 1.0], [0.0, 1.0, 3.0]])
        >>> matbackprop.normalized_cut_value(w, torch.tensor([0, 0, 1]))  # 1/7 + 1/4
        tensor(0.3929)

    Reference:
        Ionescu et al. (2015), section 5, which has the misprint W for D − W.
    """
    ready = prepare(w, "w", check, precision, sizes="rescale", symmetric=True, or_complex=False, others=(labels,))
    with autocast_off(w.device.type):
        k = _region_count(w, labels, num_labels, ready.check_values)
        e = _indicators(labels, k, ready)
        labeled = e.sum(-1)
        x = ready.x * (labeled.unsqueeze(-1) * labeled.unsqueeze(-2))
        volume = (_degrees(x, ready.check_values).unsqueeze(-2) @ e).squeeze(-2)
        inside = (e * (x @ e)).sum(-2)
        positive = ~(volume <= 0)
        cut = ((volume - inside) / torch.where(positive, volume, 1) * positive).sum(-1)
        return ready.marked(cut).to(w.dtype)
