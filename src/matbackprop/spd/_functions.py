"""Distances, geodesics and maps of positive definite matrices, and functions for layers of SPD networks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop import checks
from matbackprop.checks import (
    check_finite,
    check_floating,
    check_matrix,
    check_result,
    nan_where,
    out_of_range,
    wants_check,
)
from matbackprop.errors import DomainError, ShapeError
from matbackprop.functional._linear_solve import broadcast_batches, shapes_of
from matbackprop.functional._matrix_clamp import matrix_clamp
from matbackprop.functional._matrix_function import matrix_log, matrix_power
from matbackprop.functional._triangle import vectorize_symmetric
from matbackprop.numerics import autocast_off, compute_dtype, eye_like, real_dtype, symmetrize, zero_tolerance
from matbackprop.spd._frechet import squared_bures_distance
from matbackprop.spd._metrics import Metric, geometry, of_matrix

_WIDE = "The units of the two matrices differ by too many decades, or"


class DefiniteMatrices(NamedTuple):
    """Checked arguments."""

    matrices: list[Tensor]  # exactly symmetric, of one shape, in the compute dtype; the identity replaces invalid ones
    definite: Tensor  # whether all matrices of a batch element are positive definite
    mark: Tensor  # 1 for each batch element, or NaN if one of its matrices is invalid
    check_values: bool
    dtype: torch.dtype  # of the results: that of the first matrix, complex if any is

    def result(self, out: Tensor, name: str, fix: str) -> Tensor:
        """Set undefined results to NaN; raise if a result is not finite and values are checked."""
        out = (out * self.mark[..., None, None]).to(self.dtype)
        if self.check_values:
            check_result(out, name, fix)
        return out


def prepare_definite(
    matrices: dict[str, Tensor],
    check: bool | None,
    precision: torch.dtype | None,
    symmetric: Sequence[str] = (),
    semidefinite: bool = False,
    others: Sequence[object] = (),
) -> DefiniteMatrices:
    """Check and convert positive (semi)definite matrices; those named by ``symmetric`` need not be definite.

    ``others`` are further tensor arguments, as in `prepare`.
    """
    given = tuple(matrices.values())
    for name, a in matrices.items():
        check_matrix(a, name, square=True, or_complex=True)
    batch = broadcast_batches(matrices)
    if len({a.shape[-1] for a in given}) > 1:
        raise ShapeError(f"Matrices must have the same order, got {shapes_of(matrices)}.")
    has_complex = any(a.is_complex() for a in given)
    compute = compute_dtype(precision, torch.complex64 if has_complex else torch.float32)
    check_values = wants_check(check, *given, *others)
    converted, marks, definite = [], [], []
    for name, a in matrices.items():
        ready = checks.prepare(a, name, check_values, precision, sizes="products", symmetric=True)
        x = ready.x.to(compute)
        good = x.detach().isfinite().all(-1).all(-1)
        for bad in () if check_values else (ready.bad, out_of_range(a, compute, "products")):
            good = good if bad is None else good & ~bad
        if name not in symmetric:
            tolerance = a.shape[-1] * zero_tolerance(a.dtype, compute, 1)
            definite.append(_exceed(x.detach(), tolerance))
            regular = definite[-1] | _exceed(x.detach(), -tolerance) if semidefinite else definite[-1]
            if check_values and not bool(regular.all()):
                kind, bound = "definite", f"at most {tolerance:.1e}"
                if semidefinite:
                    kind, bound = "semidefinite", f"below −{tolerance:.1e}"
                raise DomainError(
                    f"{int((~regular).sum())} of {regular.numel()} matrices {name} are not positive {kind}: scaled to "
                    f"a unit diagonal, an eigenvalue is {bound}. Add a multiple of the identity."
                )
            good = good & regular
        marks.append(torch.where(good, 1.0, torch.nan).to(real_dtype(compute)))
        # The factor makes gradients of undefined matrices NaN.
        x = torch.where(good[..., None, None], x * marks[-1][..., None, None], eye_like(x))
        converted.append(x.expand(*batch, *x.shape[-2:]))
    dtype = torch.promote_types(given[0].dtype, torch.complex64) if has_complex else given[0].dtype
    every = functools.reduce(torch.logical_and, definite)
    return DefiniteMatrices(converted, every, functools.reduce(torch.mul, marks), check_values, dtype)


def _exceed(x: Tensor, tolerance: float) -> Tensor:
    """Return whether all eigenvalues exceed a tolerance after scaling to a unit diagonal.

    Rows of zeros exceed a negative tolerance.
    """
    shift = tolerance * x.diagonal(dim1=-2, dim2=-1)
    if tolerance < 0:
        shift = torch.where((x == 0).all(-1), -1, shift)
    lowered = x - torch.diag_embed(shift)
    return torch.linalg.cholesky_ex(lowered).info == 0


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
        out = (out * given.mark).to(real_dtype(a.dtype))
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

    Gradient:
        First and second order with respect to A, B and t, exact at repeated eigenvalues. For ``"log_euclidean"``,
        derivatives lose digits if the condition number exceeds about 1e9.

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
        if given.check_values:
            check_finite(t, "t")
        t = t.to(device=a.device, dtype=real_dtype(x.dtype))
    with autocast_off(a.device.type):
        return given.result(
            form.geodesic(x, y, t), f"{_WIDE} a point on the geodesic", "Use similar units, or reduce t."
        )


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


def bimap(x: Tensor, w: Tensor) -> Tensor:
    r"""Bilinear map of symmetric matrices, :math:`W^\top XW`.

    Args:
        x: symmetric matrices ``(*batch, n, n)``.
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


def re_eig(
    x: Tensor, threshold: float = 1e-4, *, check: bool | None = None, precision: torch.dtype | None = None
) -> Tensor:
    r"""Rectify eigenvalues, :math:`U\max(\Lambda, t)U^\top`; see `matrix_clamp`.

    If t is below the rounding error of the result, diagonal entries are multiplied by 1 + √n ε. This keeps the rounded
    matrix positive definite.

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
    rounding = y.shape[-1] ** 0.5 * torch.finfo(y.dtype).eps  # of entries: of eigenvalues relative to the largest
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

    Example:
        >>> import torch
        >>> from matbackprop import spd
        >>> spd.log_eig(torch.eye(2))
        tensor([0., 0., 0.])
    """
    if not vectorize:
        return matrix_log(x, check=check, precision=precision)
    ready = checks.prepare(x, "x", check, precision, sizes=None, symmetric=True)
    logarithm = matrix_log(ready.x, check=check, precision=precision)
    return ready.marked(vectorize_symmetric(logarithm).to(x.dtype))  # rounded once, after √2


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
        DomainError: ε is not positive, or a matrix is not positive definite.

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
    given = prepare_definite(matrices, check, precision)
    y, *rest = given.matrices
    inside = real_dtype(y.dtype)
    with autocast_off(x.device.type):
        root = of_matrix(rest[0], "inv_sqrt")
        y = symmetrize(root @ y @ root)
        if variance is not None:
            spread = variance if isinstance(variance, Tensor) else torch.scalar_tensor(variance, device=x.device)
            if given.check_values:
                check_finite(spread, "variance")
            power = scale * (spread.to(inside) + eps).rsqrt()
            power = nan_where(~spread.isfinite(), power)
            y = matrix_power(y, power, check=False, precision=inside)
        if bias is not None:
            back = of_matrix(rest[1], "sqrt")
            y = symmetrize(back @ y @ back)
        return given.result(y, "The normalized matrix", "Scale the matrices, or raise eps.")
