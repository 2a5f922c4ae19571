"""Distances, geodesics and maps of positive definite matrices, and the functions of network layers on them."""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.checks import (
    check_finite,
    check_floating,
    check_matrix,
    check_scale,
    check_symmetric,
    wants_check,
)
from matbackprop.errors import DomainError, ShapeError
from matbackprop.functional._matrix_clamp import matrix_clamp
from matbackprop.functional._matrix_function import matrix_functions, matrix_log, matrix_power, matrix_sqrt
from matbackprop.functional._triangle import vectorize_symmetric
from matbackprop.numerics import autocast_off, compute_dtype, real_dtype, symmetrize
from matbackprop.spd._metrics import Metric, check_metric

__all__ = [
    "batch_norm",
    "bimap",
    "distance",
    "exp_map",
    "geodesic",
    "log_eig",
    "log_map",
    "prepare",
    "re_eig",
]


def prepare(check: bool | None, precision: torch.dtype | None, **matrices: Tensor) -> tuple[list[Tensor], bool]:
    """Symmetric parts in the dtype of the computation, of one batch shape, and whether values are checked."""
    first = next(iter(matrices.values()))
    for name, a in matrices.items():
        check_matrix(a, name, square=True, or_complex=True)
    wanted = wants_check(check, first)
    if wanted:
        for name, a in matrices.items():
            check_finite(a, name)
            check_scale(a, compute_dtype(precision, a.dtype), name)
            check_symmetric(a, name)
    if len({a.shape[-1] for a in matrices.values()}) > 1:
        shapes = " and ".join(f"{name} {tuple(a.shape)}" for name, a in matrices.items())
        raise ShapeError(f"matrices must have one order, got {shapes}.")
    try:
        shape = torch.broadcast_shapes(*(a.shape for a in matrices.values()))
    except RuntimeError as error:
        shapes = " and ".join(f"{name} {tuple(a.shape)}" for name, a in matrices.items())
        raise ShapeError(f"the batches of {shapes} do not broadcast.") from error
    kind = torch.complex64 if any(a.is_complex() for a in matrices.values()) else torch.float32
    dtype = compute_dtype(precision, kind)
    return [symmetrize(a.to(dtype)).expand(shape) for a in matrices.values()], wanted


def distance(
    a: Tensor,
    b: Tensor,
    *,
    metric: Metric = "affine_invariant",
    squared: bool = False,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Distance of positive definite matrices.

    .. math::
        \|\log(A^{-1/2}BA^{-1/2})\|_F,\qquad \|\log A - \log B\|_F,\qquad
        \bigl(\operatorname{tr}(A + B - 2(A^{1/2}BA^{1/2})^{1/2})\bigr)^{1/2}

    for ``"affine_invariant"``, ``"log_euclidean"`` and ``"bures_wasserstein"``. The last is computed as
    :math:`\min_U\|L_A - L_BU\|_F` with Cholesky factors, where nothing cancels.

    Args:
        a, b: symmetric or Hermitian positive definite matrices ``(*batch, n, n)`` whose batches broadcast.
        metric: which distance.
        squared: return the square, which is smooth at A = B.
        check: look at values (finite, symmetric, positive definite): ``None`` on the CPU only, ``True`` always,
            ``False`` never.
        precision: dtype of the computation; float64 by default, which autocast leaves alone.

    Returns:
        ``(*batch,)``, real, in the precision of ``a``.

    Raises:
        ShapeError, DtypeError: the matrices do not fit.
        NonFiniteError, SymmetryError, NumericalError: their values do not.
        DomainError: products of their entries leave the range of floating point.

    Gradient:
        In both, two orders, exact where eigenvalues coincide. At A = B the distance has a kink and its gradient is
        returned as zero; that of the square is zero and exact.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.distance(torch.eye(2), 4 * torch.eye(2), metric="bures_wasserstein")
        tensor(1.4142)

    Reference:
        Bhatia, Positive Definite Matrices (2007); Bhatia, Jain, Lim, On the Bures–Wasserstein distance, 2019.
    """
    geometry = check_metric(metric)
    (x, y), wanted = prepare(check, precision, a=a, b=b)
    with autocast_off(a.device.type):
        square = geometry.squared_distance(x, y, wanted)
        if not squared:
            apart = square > 0
            square = torch.where(apart, torch.where(apart, square, 1).sqrt(), 0)
        return square.to(real_dtype(a.dtype))


def geodesic(
    a: Tensor,
    b: Tensor,
    t: float | Tensor,
    *,
    metric: Metric = "affine_invariant",
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""The point at t on the shortest way from A to B.

    .. math::
        A^{1/2}(A^{-1/2}BA^{-1/2})^tA^{1/2},\qquad \exp((1-t)\log A + t\log B),\qquad
        ((1-t)I + tT)\,A\,((1-t)I + tT),\quad TAT = B

    Args:
        a, b: positive definite matrices ``(*batch, n, n)`` whose batches broadcast.
        t: a number, or a floating-point tensor that broadcasts to the batch and receives a gradient.
        metric: of what length the way is the shortest.
        check, precision: as in `distance`.

    Returns:
        ``(*batch, n, n)`` in the dtype of ``a``: A at t = 0, B at t = 1.

    Raises:
        The errors of `distance`.

    Gradient:
        In A, B and t, two orders, exact where eigenvalues coincide.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.geodesic(torch.eye(2), 4 * torch.eye(2), 0.5).diagonal()
        tensor([2., 2.])
    """
    geometry = check_metric(metric)
    (x, y), wanted = prepare(check, precision, a=a, b=b)
    if isinstance(t, Tensor):
        check_floating(t, "t")
        if wanted:
            check_finite(t, "t")
        t = t.to(device=a.device, dtype=real_dtype(x.dtype))
    with autocast_off(a.device.type):
        return geometry.geodesic(x, y, t, wanted).to(a.dtype)


def exp_map(
    p: Tensor,
    v: Tensor,
    *,
    metric: Metric = "affine_invariant",
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Where the geodesic from P with the velocity V arrives at time 1.

    .. math::
        P^{1/2}\exp(P^{-1/2}VP^{-1/2})P^{1/2},\qquad \exp(\log P + D\log(P)[V]),\qquad (I + X)P(I + X),\quad PX + XP = V

    Args:
        p: positive definite matrices ``(*batch, n, n)``.
        v: symmetric matrices of a batch that broadcasts.
        metric: of the geodesic.
        check, precision: as in `distance`.

    Returns:
        ``(*batch, n, n)``, positive definite, in the dtype of ``p``.

    Raises:
        NumericalError: P is not positive definite, or V leads out of the positive definite matrices, with
            ``"log_euclidean"`` to an eigenvalue that is zero in floating point; the other errors are those of
            `distance`.

    Gradient:
        In P and V, two orders, exact where eigenvalues coincide; for ``"log_euclidean"`` the first order in P.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.exp_map(torch.eye(2), torch.zeros(2, 2)).diagonal()
        tensor([1., 1.])
    """
    geometry = check_metric(metric)
    (x, y), wanted = prepare(check, precision, p=p, v=v)
    with autocast_off(p.device.type):
        return geometry.exp_map(x, y, wanted).to(p.dtype)


def log_map(
    p: Tensor,
    q: Tensor,
    *,
    metric: Metric = "affine_invariant",
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""The velocity at P of the geodesic that arrives at Q at time 1, the inverse of `exp_map`.

    .. math::
        P^{1/2}\log(P^{-1/2}QP^{-1/2})P^{1/2},\qquad D\exp(\log P)[\log Q - \log P],\qquad TP + PT - 2P,\quad TPT = Q

    Args:
        p, q: positive definite matrices ``(*batch, n, n)`` whose batches broadcast.
        metric: of the geodesic.
        check, precision: as in `distance`.

    Returns:
        Symmetric matrices ``(*batch, n, n)`` in the dtype of ``p``.

    Raises:
        The errors of `distance`.

    Gradient:
        In P and Q, two orders, exact where eigenvalues coincide; for ``"log_euclidean"`` the first order.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.log_map(torch.eye(2), torch.eye(2) * torch.e).diagonal().round(decimals=4)
        tensor([1., 1.])
    """
    geometry = check_metric(metric)
    (x, y), wanted = prepare(check, precision, p=p, q=q)
    with autocast_off(p.device.type):
        return geometry.log_map(x, y, wanted).to(p.dtype)


def bimap(x: Tensor, w: Tensor) -> Tensor:
    r"""Bilinear map of symmetric matrices, :math:`W^\top XW`.

    Args:
        x: ``(*batch, n, n)``.
        w: ``(*batch, n, k)`` with a batch that broadcasts; of full column rank where X is positive definite and the
            result is to be.

    Returns:
        ``(*batch, k, k)``, symmetric to the bit.

    Raises:
        ShapeError, DtypeError: they do not fit.

    Gradient:
        Of a product; all orders.

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
    half = w.mH @ x @ (0.5 * w)  # the sum of two large numbers may leave the range
    return half + half.mH


def check_threshold(threshold: float) -> None:
    """Raise unless eigenvalues can be raised to ``threshold``."""
    if not threshold > 0:
        raise DomainError(f"threshold must be positive, got {threshold}.")


def re_eig(
    x: Tensor, threshold: float = 1e-4, *, check: bool | None = None, precision: torch.dtype | None = None
) -> Tensor:
    r"""Rectified eigenvalues, :math:`U\max(\Lambda, t)U^\top`: `matrix_clamp` as SPD networks call it.

    Args:
        x: symmetric matrices ``(*batch, n, n)``.
        threshold: t > 0.
        check, precision: as in `distance`.

    Returns:
        ``(*batch, n, n)``, positive definite.

    Raises:
        DomainError: the threshold is not positive; the other errors are those of `matrix_clamp`.

    Gradient:
        That of `matrix_clamp`.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.re_eig(torch.diag(torch.tensor([0.0, 2.0])), 0.5).diagonal()
        tensor([0.5000, 2.0000])
    """
    check_threshold(threshold)
    return matrix_clamp(x, threshold, check=check, precision=precision)


def log_eig(
    x: Tensor, *, vectorize: bool = True, check: bool | None = None, precision: torch.dtype | None = None
) -> Tensor:
    r"""Logarithm of positive definite matrices, as the vectors that a linear layer takes.

    Args:
        x: positive definite matrices ``(*batch, n, n)``.
        vectorize: return the upper triangle with √2 on what lies off the diagonal (`vectorize_symmetric`).
        check, precision: as in `distance`.

    Returns:
        ``(*batch, n(n+1)/2)``, or ``(*batch, n, n)``.

    Raises:
        The errors of `matrix_log`.

    Gradient:
        That of `matrix_log`.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.log_eig(torch.eye(2))
        tensor([0., 0., 0.])
    """
    if not vectorize:
        return matrix_log(x, check=check, precision=precision)
    check_matrix(x, "x", square=True, or_complex=True)
    inside = x.to(compute_dtype(precision, x.dtype))  # rounded once, behind √2
    return vectorize_symmetric(matrix_log(inside, check=check, precision=precision)).to(x.dtype)


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
    r"""Positive definite matrices moved to another mean and spread.

    .. math:: B^{1/2}\bigl(M^{-1/2}XM^{-1/2}\bigr)^{s/\sqrt{v+\varepsilon}}B^{1/2}

    Args:
        x: positive definite matrices ``(*batch, n, n)``.
        mean: M ``(n, n)``, or a batch that broadcasts: their `mean`.
        variance: v, the mean squared affine-invariant distance to M; None leaves the spread as it is.
        bias: B, the mean that the result is to have; the identity if None.
        scale: s, the spread that it is to have, where ``variance`` is given.
        eps: ε > 0.
        check, precision: as in `distance`.

    Returns:
        ``(*batch, n, n)`` in the dtype of ``x``.

    Raises:
        DomainError: ε is not positive, or a matrix is not positive definite; the other errors are those of `distance`.

    Gradient:
        In all tensors, two orders, exact where eigenvalues coincide.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.batch_norm(4 * torch.eye(2), 2 * torch.eye(2)).diagonal()
        tensor([2., 2.])

    Reference:
        Brooks, Schwander, Barbaresco, Schneider, Cord, Riemannian batch normalization for SPD neural networks, NeurIPS
        2019; Kobler, Hirayama, Zhao, Kawanabe, SPD domain-specific batch normalization, NeurIPS 2022.
    """
    if not eps > 0:
        raise DomainError(f"eps must be positive, got {eps}.")
    matrices = {"x": x, "mean": mean} | ({} if bias is None else {"bias": bias})
    (y, *rest), wanted = prepare(check, precision, **matrices)
    inside = real_dtype(y.dtype)
    with autocast_off(x.device.type):
        (root,) = matrix_functions(rest[0], ["inv_sqrt"], check=wanted, precision=inside)
        y = symmetrize(root @ y @ root)
        if variance is not None:
            spread = variance if isinstance(variance, Tensor) else torch.scalar_tensor(variance, device=x.device)
            power = scale * (spread.to(inside) + eps).rsqrt()
            y = matrix_power(y, power, check=wanted, precision=inside)
        if bias is not None:
            back = matrix_sqrt(rest[1], check=wanted, precision=inside)
            y = symmetrize(back @ y @ back)
        return y.to(x.dtype)
