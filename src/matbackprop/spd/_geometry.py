"""Distances, geodesics and maps of positive definite matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.checks import check_finite, check_floating, check_result, nan_where, parameter_tensor
from matbackprop.numerics import autocast_off, eye_like, real_dtype, zero_tolerance
from matbackprop.spd._definite import prepare_definite
from matbackprop.spd._frechet import squared_bures_distance
from matbackprop.spd._metrics import Metric, geometry

_WIDE = "The units of the two matrices differ by too many decades, or"


def distance(
    a: Tensor,
    b: Tensor,
    *,
    metric: Metric = "affine_invariant",
    squared: bool = False,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Distance between positive definite matrices.

    .. math::
        \|\log(A^{-1/2}BA^{-1/2})\|_F,\qquad \|\log A - \log B\|_F,\qquad
        \bigl(\operatorname{tr}(A + B - 2(A^{1/2}BA^{1/2})^{1/2})\bigr)^{1/2}

    for ``"affine_invariant"``, ``"log_euclidean"`` and ``"bures_wasserstein"``. To avoid cancellation, the last is
    computed as :math:`\min_U\|X - YU\|_F` with factors A = XXᵀ and B = YYᵀ. It also accepts singular matrices. For
    samples use `frechet_distance`.

    Args:
        a, b: symmetric or Hermitian positive definite matrices ``(*batch, n, n)`` whose batches broadcast.
        metric: name of the metric.
        squared: return the squared distance, which is smooth at A = B.
        check, precision: as in :func:`~matbackprop.matrix_function`.

    Returns:
        ``(*batch,)``, real, in the precision of ``a``; zero for equal matrices.

    Raises:
        DomainError: a matrix is not positive definite, or, for ``"affine_invariant"``, the eigenvalues of A⁻¹B span
            more than about 28 decades.

    Gradient:
        First and second order with respect to A and B, exact at repeated eigenvalues. The distance is not
        differentiable at A = B; its gradient there is zero.

        If A or B is singular, the gradient of the squared Bures–Wasserstein distance in A is
        :math:`I - Y((Y^\top AY)^{1/2})^+Y^\top`. It is the derivative if rank AB = rank B. If only rank AB = rank A, it
        is the derivative in directions that preserve the rank of A, such as all variations of the factor X; in others
        the slope is infinite. If neither holds, the distance has a kink, like \|t\| at 0, and the gradient is the mean
        of the two slopes. Second derivatives are NaN.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.distance(torch.eye(2), 4 * torch.eye(2), metric="bures_wasserstein")
        tensor(1.4142)

    Reference:
        Bhatia, Positive Definite Matrices (2007); Bhatia, Jain, Lim, On the Bures–Wasserstein distance, 2019.
    """
    form = geometry(metric)
    bures = metric == "bures_wasserstein"
    given = prepare_definite({"a": a, "b": b}, check, precision, semidefinite=bures)
    x, y = given.matrices
    with autocast_off(a.device.type):
        if bures and not (given.check_values and bool(given.definite.all())):
            singular = ~given.definite[..., None, None]
            eye = eye_like(x)
            regular = form.squared_distance(torch.where(singular, eye, x), torch.where(singular, eye, y))
            tolerance = x.shape[-1] * max(zero_tolerance(m.dtype, x.dtype, 1) for m in (a, b))
            # Each branch receives the identity for matrices of the other, because 0 · NaN would propagate.
            other = squared_bures_distance(torch.where(singular, x, eye), torch.where(singular, y, eye), tolerance)
            out = torch.where(given.definite, regular, other)
        else:
            out = form.squared_distance(x, y)
        if not squared:
            zero = (out == 0) | (x == y).all(-1).all(-1)
            out = torch.where(zero, 0, torch.where(zero, 1, out).sqrt())
        out = nan_where(given.bad, out).to(real_dtype(a.dtype))
        if given.check_values:
            check_result(out, f"{_WIDE} the distance", "Use similar units, or scale the matrices.")
        return out


def geodesic(
    a: Tensor,
    b: Tensor,
    t: float | Tensor,
    *,
    metric: Metric = "affine_invariant",
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Point at t on the geodesic from A to B.

    .. math::
        A^{1/2}(A^{-1/2}BA^{-1/2})^tA^{1/2},\qquad \exp((1-t)\log A + t\log B),\qquad
        ((1-t)I + tT)\,A\,((1-t)I + tT),\quad TAT = B

    Args:
        a, b: positive definite matrices ``(*batch, n, n)`` whose batches broadcast.
        t: a number, or a floating-point tensor that broadcasts to the batch and receives a gradient.
        metric: name of the metric.
        check, precision: as in `distance`.

    Returns:
        ``(*batch, n, n)`` in the dtype of ``a``, complex if A or B is. A at t = 0 and B at t = 1.

    Raises:
        DomainError: a matrix is not positive definite, or a Bures–Wasserstein geodesic leaves the positive definite
            matrices between [0, 1] and t.

    Gradient:
        First and second order with respect to A, B and t, exact at repeated eigenvalues. For ``"log_euclidean"``,
        derivatives lose digits if the condition number, after scaling to a unit diagonal, exceeds about 1e9.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.geodesic(torch.eye(2), 4 * torch.eye(2), 0.5).diagonal()
        tensor([2., 2.])
    """
    form = geometry(metric)
    given = prepare_definite({"a": a, "b": b}, check, precision)
    x, y = given.matrices
    if isinstance(t, Tensor):
        check_floating(t, "t")
        t = parameter_tensor(t, "t", x.shape[:-2], x)
    if given.check_values:
        check_finite(torch.as_tensor(t), "t")
    with autocast_off(a.device.type):
        what = f"{_WIDE} the geodesic leaves the positive definite matrices before t, or a point on it"
        return given.result(form.geodesic(x, y, t), what, "Use similar units, or a t in [0, 1].")


def exp_map(
    p: Tensor,
    v: Tensor,
    *,
    metric: Metric = "affine_invariant",
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Exponential map: the point at t = 1 on the geodesic from P with velocity V.

    .. math::
        P^{1/2}\exp(P^{-1/2}VP^{-1/2})P^{1/2},\qquad \exp(\log P + D\log(P)[V]),\qquad (I + X)P(I + X),\quad PX + XP = V

    Args:
        p: positive definite matrices ``(*batch, n, n)``.
        v: symmetric matrices ``(*batch, n, n)``. Batches broadcast.
        metric: name of the metric.
        check, precision: as in `distance`.

    Returns:
        Positive definite matrices ``(*batch, n, n)`` in the dtype of ``p``, complex if P or V is.

    Raises:
        DomainError: P is not positive definite, or the geodesic leaves the positive definite matrices before t = 1
            (an eigenvalue underflows, for ``"log_euclidean"``).

    Gradient:
        First and second order with respect to P and V, exact at repeated eigenvalues. For ``"log_euclidean"`` only
        the first order in P.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.exp_map(torch.eye(2), torch.zeros(2, 2)).diagonal()
        tensor([1., 1.])
    """
    form = geometry(metric)
    given = prepare_definite({"p": p, "v": v}, check, precision, symmetric=["v"])
    with autocast_off(p.device.type):
        out = form.exp_map(*given.matrices)
        return given.result(out, "A geodesic leaves the positive definite matrices before t = 1, or", "Scale v down.")


def log_map(
    p: Tensor,
    q: Tensor,
    *,
    metric: Metric = "affine_invariant",
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Logarithmic map: the velocity at P of the geodesic to Q; the inverse of `exp_map`.

    .. math::
        P^{1/2}\log(P^{-1/2}QP^{-1/2})P^{1/2},\qquad D\exp(\log P)[\log Q - \log P],\qquad TP + PT - 2P,\quad TPT = Q

    Args:
        p, q: positive definite matrices ``(*batch, n, n)`` whose batches broadcast.
        metric: name of the metric.
        check, precision: as in `distance`.

    Returns:
        Symmetric matrices ``(*batch, n, n)`` in the dtype of ``p``, complex if P or Q is.

    Gradient:
        First and second order with respect to P and Q, exact at repeated eigenvalues. First order only for
        ``"log_euclidean"``.

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.log_map(torch.eye(2), torch.eye(2) * torch.e).diagonal().round(decimals=4)
        tensor([1., 1.])
    """
    form = geometry(metric)
    given = prepare_definite({"p": p, "q": q}, check, precision)
    with autocast_off(p.device.type):
        return given.result(form.log_map(*given.matrices), f"{_WIDE} the velocity", "Use similar units, or scale them.")
