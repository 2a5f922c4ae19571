"""Whitening of samples."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from matbackprop.checks import (
    check_finite,
    check_floating,
    check_matrix,
    check_option,
    check_weight,
    check_weight_totals,
    prepare,
    raise_or_nan,
)
from matbackprop.errors import DomainError, ShapeError
from matbackprop.functional._eigh import eigh, positive_phase
from matbackprop.functional._function import product
from matbackprop.functional._inverse_root import check_positive, prepared_inverse_root
from matbackprop.functional._matrix_function import without_rounding
from matbackprop.functional._row_eigh import row_eigh
from matbackprop.functional._second_order_pool import second_order_pool
from matbackprop.functional._ties import Ties
from matbackprop.numerics import autocast_off, is_double, real_dtype, symmetrize
from matbackprop.refinement import ill_determined

Method = Literal["zca", "pca"]


def check_method(method: Method, eps: float) -> None:
    check_option(method, get_args(Method), "method")
    if not 0 < eps < math.inf:
        raise DomainError(f"eps must be positive and finite, got {eps}.")


def normalized_weights(x: Tensor, weight: Tensor | None) -> Tensor:
    """Return row weights ``(*batch, m)`` that sum to 1."""
    if weight is None:
        return x.real.new_full(x.shape[:-1], 1 / max(x.shape[-2], 1))
    weight = weight.to(real_dtype(x.dtype))
    return weight / weight.sum(-1, keepdim=True)


def covariance_of(x: Tensor, fraction: Tensor, mean: Tensor) -> Tensor:
    """Σ ``(*batch, d, d)`` of weighted rows about a mean ``(*batch, d)``."""
    centered = x - mean.unsqueeze(-2)
    return symmetrize(product((fraction.unsqueeze(-1) * centered).mH, centered))


def _resolved_variances(values: Tensor, eps: float, check: bool, data: torch.dtype) -> Tensor:
    """Raise, or return NaN, if variances are negative, or ε is below the rounding error of variances of zero."""
    variances = without_rounding(values.detach(), data)
    if not values.numel():
        return values
    if check:
        check_positive(variances + eps, eps, "covariance")
    least, most = variances.amin(-1), variances.amax(-1)
    bad = ~((least + eps > 0) & (least.clamp_min(0) + eps >= 1e3 * torch.finfo(values.dtype).eps * most))
    fault = (
        f"covariance need a larger eps: {eps} is below the rounding error of variances. Raise eps, scale the samples "
        f"down, or drop channels without variance."
    )
    return raise_or_nan(bad, values, check, DomainError, fault)


def whiten(
    x: Tensor,
    *,
    method: Method = "zca",
    eps: float = 1e-5,
    weight: Tensor | None = None,
    mean: Tensor | None = None,
    covariance: Tensor | None = None,
    ties: Ties = "raise",
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Whiten samples: subtract their mean and transform their covariance to the identity.

    .. math:: Y = (X - \mathbf 1\mu^\top)\,T, \qquad \Sigma = U \operatorname{diag}(\lambda) U^\top

    ``"zca"`` uses :math:`T = (\Sigma + \varepsilon I)^{-1/2}`, which gives the whitened samples nearest to X. ``"pca"``
    uses :math:`T = U \operatorname{diag}(\lambda + \varepsilon)^{-1/2}`; the columns of Y are the principal components.
    For complex samples, ᵀ is the conjugate transpose, and :math:`\Sigma` is the covariance of their conjugates.

    Args:
        x: samples ``(*batch, m, d)``, one per row, real or complex. Each batch element has separate statistics.
        method: ``"zca"`` or ``"pca"``. Principal components are sorted by descending variance; the largest entry of
            each axis is positive.
        eps: ε > 0, added to the variances. Some variances are zero if m ≤ d or a channel is constant.
        weight: nonnegative weights of the samples in μ and Σ, boolean or floating point, ``(*batch, m)``.
        mean: μ to use instead of the mean of the samples; must broadcast to ``(*batch, d)``.
        covariance: Σ to use; must broadcast to ``(*batch, d, d)``. Pass both ``mean`` and ``covariance``, or neither.
        ties: treatment of equal variances in the gradient of ``"pca"``, as in `eigh`.
        check, precision: as in `matrix_function`.

    Returns:
        Y ``(*batch, m, d)`` in the dtype of ``x``.

    Raises:
        DomainError: ε is not positive or is below the rounding error of the samples, a weight is negative, all weights
            are zero, or a covariance has an eigenvalue below −ε.
        TieError: the loss uses principal axes of equal variance.

    Gradient:
        With respect to samples, weights and given statistics. ``"zca"`` is a matrix function: first and second order,
        exact at equal and zero variances. ``"pca"`` divides by differences of variances. At equal variances, such as
        the zero variances for m < d, its axes and gradient are not determined, and ``ties`` applies.

    Example:
        >>> import torch, matbackprop
        >>> x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0)) @ torch.tensor([[2.0, 1.0], [0.0, 3.0]])
        >>> y = matbackprop.whiten(x)
        >>> torch.allclose(y.mT @ y / 100, torch.eye(2), atol=1e-4)
        True

    Reference:
        Kessy, Lewin, Strimmer, Optimal whitening and decorrelation, The American Statistician 72 (2018); Huang, Yang,
        Lang, Deng, Decorrelated batch normalization, CVPR 2018.
    """
    check_matrix(x, "x", or_complex=True)
    check_method(method, eps)
    if weight is not None:
        check_weight(weight, x)
    _check_statistics(x, weight, mean, covariance)
    with autocast_off(x.device.type):
        others = weight, mean, covariance
        rows, check_values, *_ = prepare(x, "x", check, precision, sizes="large", others=others)
        if check_values:
            for name, tensor in (("mean", mean), ("covariance", covariance)):
                if tensor is not None:
                    check_finite(tensor, name)
            if weight is not None:
                check_weight_totals(weight)
        if mean is None or covariance is None:
            y = _by_samples(rows, weight, method, eps, ties, check_values, is_double(x.dtype))
        else:
            y = _by_statistics(rows, mean, covariance, method, eps, ties, check_values)
        return y.to(x.dtype)


def _by_samples(
    rows: Tensor, weight: Tensor | None, method: Method, eps: float, ties: Ties, check: bool, fine: bool
) -> Tensor:
    fraction = normalized_weights(rows, weight)
    centered = rows - product(fraction.unsqueeze(-2).to(rows.dtype), rows)
    if method == "pca":
        lost = partial(ill_determined, fine=fine, shift=eps)
        values, axes, rotated = row_eigh(centered, fraction, lost, ties=ties, check=check)
        gain, y = (values.clamp_min(0) + eps).rsqrt(), _components(values, axes, rotated, eps)
    else:  # on the smaller side of the samples
        inside = real_dtype(rows.dtype)
        root = second_order_pool(
            rows, eps=eps, function="inv_sqrt", weight=fraction, center=True, check=False, precision=inside
        )
        gain, y = torch.linalg.matrix_norm(root.detach()).unsqueeze(-1), product(centered, root)
    return _resolved(y, rows, eps, gain, check)


def _by_statistics(
    rows: Tensor, mean: Tensor, covariance: Tensor, method: Method, eps: float, ties: Ties, check: bool
) -> Tensor:
    centered, inside = rows - mean.to(rows.dtype).unsqueeze(-2), real_dtype(rows.dtype)
    square = (*rows.shape[:-2], rows.shape[-1], rows.shape[-1])
    if method == "zca":
        ready = prepare(covariance, "covariance", check, inside, sizes="sums", symmetric=True)
        root = prepared_inverse_root(ready, covariance.dtype, 2, eps, name="covariance")
        return product(centered, root.expand(square))
    values, axes = eigh(covariance.to(rows.dtype), ties=ties, check=check, precision=inside)
    values = _resolved_variances(values, eps, check, covariance.dtype)
    return _components(values, axes, product(centered, axes.expand(square)), eps)


def _components(values: Tensor, axes: Tensor, rotated: Tensor, eps: float) -> Tensor:
    """Principal components of unit variance: the largest first, the largest entry of each axis positive."""
    y = rotated * (positive_phase(axes) * (values.clamp_min(0) + eps).rsqrt().unsqueeze(-2))
    return y.flip(-1)


def _resolved(y: Tensor, rows: Tensor, eps: float, gain: Tensor, check: bool) -> Tensor:
    """Raise, or return NaN, if the rounding error of samples times the largest gain 1/√(λ + ε) is too large."""
    if rows.numel() == 0:
        return y
    size, rounding = rows.detach().abs().amax((-2, -1)), torch.finfo(rows.dtype).eps
    bad = ~(size * rounding * gain.detach().amax(-1) <= 1e-3) | (eps < 1e-90)
    fault = f"x need a larger eps: {eps} is below the rounding error of samples. Raise eps, or scale the samples down."
    return raise_or_nan(bad, y, check, DomainError, fault)


def _check_statistics(x: Tensor, weight: Tensor | None, mean: Tensor | None, covariance: Tensor | None) -> None:
    if (mean is None) != (covariance is None):
        raise ShapeError("Only one statistic is given. Pass both mean and covariance, or neither.")
    if mean is None or covariance is None:
        return
    if weight is not None:
        raise ShapeError("weight has no effect if mean and covariance are given. Remove it.")
    check_floating(mean, "mean", or_complex=x.is_complex())
    check_matrix(covariance, "covariance", square=True, or_complex=x.is_complex())
    shapes = (*x.shape[:-2], x.shape[-1]), (*x.shape[:-2], x.shape[-1], x.shape[-1])
    try:
        mean.expand(shapes[0]), covariance.expand(shapes[1])
    except RuntimeError as error:
        raise ShapeError(
            f"mean and covariance must broadcast to {shapes[0]} and {shapes[1]} for samples of shape {tuple(x.shape)}, "
            f"got {tuple(mean.shape)} and {tuple(covariance.shape)}."
        ) from error
