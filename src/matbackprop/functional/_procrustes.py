"""The nearest rotation, and the rotation that aligns two sets of points."""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.checks import check_matrix, check_weight, into_range, nan_where, out_of_range, prepare, valid_weight
from matbackprop.errors import DtypeError, ShapeError
from matbackprop.functional._function import product
from matbackprop.functional._polar import polar_factors
from matbackprop.numerics import autocast_off, real_dtype


def project_rotation(a: Tensor, *, check: bool | None = None, precision: torch.dtype | None = None) -> Tensor:
    r"""Rotation nearest to a square matrix, :math:`R = W \operatorname{diag}(1, \ldots, 1, \det WV^\top) V^\top`.

    .. math:: R = \operatorname*{argmin}_{R \in SO(n)} \|A - R\|_F

    Args:
        a: square matrices ``(*batch, n, n)``, for example orientations predicted by a network.
        check, precision: as in `matrix_function`.

    Returns:
        R ``(*batch, n, n)`` with determinant 1, in the dtype of ``a``.

    Raises:
        ShapeError, DtypeError, NonFiniteError: as in `matrix_function`.
        DomainError: R is not unique: two singular values are zero, or the determinant is negative and the two smallest
            singular values are equal.

    Gradient:
        Same as `polar`, with a negative last singular value if the determinant is negative. Exact at repeated singular
        values and at matrices of rank n − 1. Supports all orders, forward mode and vmap.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.project_rotation(torch.diag(torch.tensor([3.0, 2.0, -1.0]))).diagonal()
        tensor([1., 1., 1.])

    Reference:
        Levinson et al., An analysis of SVD for deep rotation estimation, NeurIPS 2020.
    """
    x, check_values, *_ = prepare(a, "a", check, precision, sizes="rescale", square=True, or_complex=False)
    with autocast_off(a.device.type):
        return polar_factors(x, True, a.dtype, check_values, "nearest rotation")[0].to(a.dtype)


def procrustes(
    x: Tensor,
    y: Tensor,
    *,
    weight: Tensor | None = None,
    reflection: bool = False,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Rotation that aligns the rows of X with the rows of Y, :math:`R = \operatorname*{argmin} \|XR - Y\|_F`.

    For a rigid motion, subtract the means of the points first.

    Args:
        x: points ``(*batch, m, d)``, one per row.
        y: target points of the same shape.
        weight: nonnegative weights of the points ``(*batch, m)``, boolean or floating point. May be trainable.
        reflection: allow any orthogonal R instead of rotations only. Points may then be complex, with a unitary R.
        check, precision: as in `matrix_function`.

    Returns:
        R ``(*batch, d, d)`` in the dtype of ``x``; the aligned points are ``x @ R``.

    Raises:
        ShapeError, DtypeError, NonFiniteError: ``x``, ``y`` or ``weight`` has an invalid shape, dtype or value.
        DomainError: a weight is negative, or the points do not determine R: fewer than d − 1 of them are linearly
            independent (d with ``reflection``), or they are symmetric mirror images.

    Gradient:
        Through XᵀY and `project_rotation` (`polar` with ``reflection``). Supports all orders, forward mode and vmap.

    Example:
        >>> import torch, matbackprop
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> rotation = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
        >>> matbackprop.procrustes(x, x @ rotation)
        tensor([[ 0.,  1.],
                [-1.,  0.]])

    Reference:
        Schönemann (1966); Kabsch (1976) for rotations.
    """
    check_matrix(x, "x", or_complex=reflection)
    check_matrix(y, "y", or_complex=reflection)
    if x.is_complex() != y.is_complex():
        raise DtypeError(f"x and y must both be real or both complex, got {x.dtype} and {y.dtype}.")
    if x.shape != y.shape:
        raise ShapeError(
            f"x and y must have the same shape, one row per point, got {tuple(x.shape)} and {tuple(y.shape)}."
        )
    if weight is not None:
        check_weight(weight, x)
    carried, all_given = x.dtype, [t for t in (x, y, weight) if t is not None]
    with autocast_off(x.device.type):
        x, check_values, *_ = prepare(x, "x", check, precision, sizes="rescale", others=all_given)
        y = prepare(y, "y", check, precision, sizes="rescale", others=all_given).x
        if weight is not None:
            weight = valid_weight(weight, real_dtype(x.dtype), check_values)
            weight = into_range(weight.unsqueeze(-2), x.dtype).squeeze(-2) if check_values else weight
            y = weight.unsqueeze(-1) * y
        moments = product(x.mH, y)
        if not check_values:
            moments = nan_where(out_of_range(moments, moments.dtype, "sums"), moments)
        what = "orthogonal matrix" if reflection else "rotation"
        q, _ = polar_factors(moments, not reflection, carried, check_values, f"{what} between the points")
        return q.to(carried)
