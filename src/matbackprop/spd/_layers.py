"""Functions for layers of SPD networks."""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.checks import check_finite, check_matrix, check_weight_values, nan_where, prepare, raise_or_nan
from matbackprop.errors import DomainError, ShapeError
from matbackprop.functional._matrix_clamp import matrix_clamp
from matbackprop.functional._matrix_function import matrix_log, matrix_power
from matbackprop.functional._triangle import vectorize_symmetric
from matbackprop.numerics import autocast_off, compute_dtype, real_dtype, symmetrize, zero_tolerance
from matbackprop.spd._definite import exceed, prepare_definite
from matbackprop.spd._metrics import of_matrix, spectrum_of


def bimap(x: Tensor, w: Tensor) -> Tensor:
    r"""Bilinear map of symmetric matrices, :math:`W^\top XW`.

    Args:
        x: symmetric matrices ``(*batch, n, n)``; the symmetric part is used.
        w: matrices ``(*batch, n, k)``. Batches broadcast. The result is positive definite if X is positive definite and
            W has full column rank.

    Returns:
        Exactly symmetric matrices ``(*batch, k, k)`` in the promoted dtype of X and W.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.bimap(torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.eye(3, 2)).diagonal()
        tensor([1., 2.])

    Reference:
        Huang and Van Gool, A Riemannian network for SPD matrix learning, AAAI 2017.
    """
    check_matrix(x, "x", square=True, or_complex=True)
    check_matrix(w, "w", or_complex=True)
    if w.shape[-2] != x.shape[-1]:
        raise ShapeError(f"w must have {x.shape[-1]} rows for x of shape {tuple(x.shape)}, got {tuple(w.shape)}.")
    dtype = torch.promote_types(x.dtype, w.dtype)
    x, w = x.to(dtype), w.to(dtype)
    half = w.mH @ x @ (0.5 * w)  # halved first: the sum of two large numbers may overflow
    return half + half.mH


def check_threshold(threshold: float) -> None:
    if not threshold > 0:
        raise DomainError(f"threshold must be positive, got {threshold}.")


def _definite_tolerance(data: torch.dtype, precision: torch.dtype | None) -> float:
    return zero_tolerance(data, compute_dtype(precision, data), 1)


def re_eig(
    x: Tensor, threshold: float = 1e-4, *, check: bool | None = None, precision: torch.dtype | None = None
) -> Tensor:
    r"""Rectify eigenvalues, :math:`U\max(\Lambda, t)U^\top`; see `matrix_clamp`.

    If t is below the rounding error of the result, diagonal entries are multiplied by 1 + √n ε + τ, with ε of the
    dtype of ``x`` and τ the tolerance of `log_eig`, which therefore accepts the rounded matrix.

    Args:
        x: symmetric matrices ``(*batch, n, n)``.
        threshold: t > 0.
        check, precision: as in `distance`.

    Returns:
        Positive definite matrices ``(*batch, n, n)``.

    Raises:
        DomainError: ``threshold`` is not positive.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.re_eig(torch.diag(torch.tensor([0.0, 2.0])), 0.5).diagonal()
        tensor([0.5000, 2.0000])
    """
    check_threshold(threshold)
    y = matrix_clamp(x, threshold, check=check, precision=precision)
    if y.shape[-1] == 0:
        return y
    diagonal = y.diagonal(dim1=-2, dim2=-1)
    rounding = y.shape[-1] ** 0.5 * torch.finfo(y.dtype).eps + _definite_tolerance(y.dtype, precision)
    fine = threshold >= rounding * diagonal.detach().real.amax(-1, keepdim=True)
    return y + torch.diag_embed(torch.where(fine, 0, rounding * diagonal))


def log_eig(
    x: Tensor, *, vectorize: bool = True, check: bool | None = None, precision: torch.dtype | None = None
) -> Tensor:
    r"""Logarithm of positive definite matrices, vectorized for a linear layer.

    Args:
        x: positive definite matrices ``(*batch, n, n)``.
        vectorize: whether to return vectors, as in `vectorize_symmetric`.
        check, precision: as in `distance`.

    Returns:
        ``(*batch, n(n+1)/2)``, or ``(*batch, n, n)``.

    Raises:
        DomainError: scaled to a unit diagonal, a matrix has an eigenvalue of at most τ = 4ε. 16-bit dtypes use the ε
            of float32.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.log_eig(torch.eye(2))
        tensor([0., 0., 0.])
    """
    ready = prepare(x, "x", check, precision, sizes=None, symmetric=True)
    with autocast_off(x.device.type):
        out = matrix_log(ready.x, check=check, precision=precision)
        out = vectorize_symmetric(out) if vectorize else out
        definite = exceed(ready.x.detach(), _definite_tolerance(x.dtype, precision))
        fault = "x are not positive definite to the precision of their dtype. Pass them through re_eig first."
        out = raise_or_nan(~definite, out, ready.check_values, DomainError, fault)
        return ready.marked(out).to(x.dtype)  # rounded once, after √2


def check_eps(eps: float) -> None:
    if not eps > 0:
        raise DomainError(f"eps must be positive, got {eps}.")


def batch_norm(
    x: Tensor,
    mean: Tensor,
    *,
    variance: float | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | Tensor = 1.0,
    eps: float = 1e-5,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Transform the mean and variance of positive definite matrices.

    .. math:: B^{1/2}\bigl(M^{-1/2}XM^{-1/2}\bigr)^{s/\sqrt{v+\varepsilon}}B^{1/2}

    Args:
        x: positive definite matrices ``(*batch, n, n)``.
        mean: their mean M ``(n, n)``, or a batch that broadcasts.
        variance: v, the mean squared affine-invariant distance to M. If None, the variance is not changed.
        bias: B, the mean of the result; the identity if None.
        scale: s, the standard deviation of the result if ``variance`` is given.
        eps: ε > 0, added to the variance.
        check, precision: as in `distance`.

    Returns:
        ``(*batch, n, n)`` in the dtype of ``x``, complex if any matrix is.

    Raises:
        DomainError: ε is not positive, the variance is negative, or a matrix is not positive definite.

    Gradient:
        First and second order with respect to all tensors, exact at repeated eigenvalues.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.batch_norm(4 * torch.eye(2), 2 * torch.eye(2)).diagonal()
        tensor([2., 2.])

    Reference:
        Brooks, Schwander, Barbaresco, Schneider, Cord, Riemannian batch normalization for SPD neural networks, NeurIPS
        2019; Kobler, Hirayama, Zhao, Kawanabe, SPD domain-specific batch normalization, NeurIPS 2022.
    """
    check_eps(eps)
    matrices = {"x": x, "mean": mean} | ({} if bias is None else {"bias": bias})
    given = prepare_definite(matrices, check, precision, others=(variance, scale))
    y, *rest = given.matrices
    inside = real_dtype(y.dtype)
    with autocast_off(x.device.type):
        root = of_matrix(rest[0], "inv_sqrt", spectrum_of(rest[0]))
        y = symmetrize(root @ y @ root)
        if variance is not None:
            spread = variance if isinstance(variance, Tensor) else torch.scalar_tensor(variance, device=x.device)
            if given.check_values:
                check_weight_values(spread, "variance")
                check_finite(torch.as_tensor(scale), "scale")
            power = scale * (spread.to(inside) + eps).rsqrt()
            power = nan_where(~spread.isfinite(), power)
            y = matrix_power(y, power, check=False, precision=inside)
        if bias is not None:
            back = of_matrix(rest[1], "sqrt", spectrum_of(rest[1]))
            y = symmetrize(back @ y @ back)
        return given.result(y, "The normalized matrix", "Scale the matrices, or raise eps.")
