"""Linear systems A(θ)x = b with implicit differentiation at the solution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import is_batched
from matbackprop.checks import (
    check_finite,
    check_floating,
    check_matrix,
    nan_where,
    prepare,
    values_checkable,
    wants_check,
)
from matbackprop.cuda.cusolver import without_magma
from matbackprop.errors import DomainError, DtypeError, NumericalError, ShapeError, SolverError
from matbackprop.functional._function import Operation, apply
from matbackprop.numerics import (
    autocast_off,
    compute_dtype,
    in_precision,
    inner,
    real_dtype,
    symmetrize,
    zero_tolerance,
)


class _Solution(NamedTuple):
    a: Tensor
    x: Tensor
    factor: Tensor
    pivots: Tensor | None
    transposed: bool

    def solve(self, b: Tensor, transposed: bool) -> Tensor:
        return apply(_Solve, self.a, b, self.factor, self.pivots, transposed)


class _Solve(Operation):
    """A⁻¹b for b ``(*batch, n, r)``. The factors of A are constants and are also used by the adjoint."""

    forward_twice = "linear_solve"

    @staticmethod
    def forward(a: Tensor, b: Tensor, factor: Tensor, pivots: Tensor | None, transposed: bool) -> Tensor:
        with without_magma(factor):
            if pivots is None:
                return torch.cholesky_solve(b, factor)
            return torch.linalg.lu_solve(factor, pivots, b, adjoint=transposed)

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _Solution:
        return _Solution(inputs[0], outputs, *inputs[2:])

    @staticmethod
    def adjoint(saved: _Solution, needed: Sequence[bool], g: Tensor) -> tuple[Tensor | None, Tensor]:
        g_b = saved.solve(g, not saved.transposed)
        if not needed[0]:
            return None, g_b
        g_a = -(saved.x @ g_b.mH) if saved.transposed else -(g_b @ saved.x.mH)
        return symmetrize(g_a) if saved.pivots is None else g_a, g_b

    @staticmethod
    def tangent(saved: _Solution, da: Tensor | None, db: Tensor | None, *_: None) -> Tensor:
        right = torch.zeros_like(saved.x) if db is None else db
        if da is not None:
            right = right - (da.mH if saved.transposed else da) @ saved.x
        return saved.solve(right, saved.transposed)


def shapes_of(matrices: dict[str, Tensor]) -> str:
    return " and ".join(f"{name} {tuple(a.shape)}" for name, a in matrices.items())


def broadcast_batches(matrices: dict[str, Tensor]) -> torch.Size:
    """Return the common batch shape of matrices ``(*batch, m, n)``."""
    try:
        return torch.broadcast_shapes(*(a.shape[:-2] for a in matrices.values()))
    except RuntimeError as error:
        raise ShapeError(
            f"The batches of {shapes_of(matrices)} do not broadcast. Give them the same leading dimensions."
        ) from error


def as_columns(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Broadcast A and b, and return whether b is a vector ``(m,)`` or a batch of vectors ``(*batch, m)``."""
    vector = b.ndim == 1 or b.shape == a.shape[:-1]
    columns = b.unsqueeze(-1) if vector else b
    if columns.ndim < 2 or columns.shape[-2] != a.shape[-2]:
        raise ShapeError(
            f"b must be (*batch, {a.shape[-2]}) or (*batch, {a.shape[-2]}, r) to fit a of shape {tuple(a.shape)}, "
            f"got {tuple(b.shape)}."
        )
    batch = broadcast_batches({"a": a, "b": columns})
    return a.expand(*batch, *a.shape[-2:]), columns.expand(*batch, *columns.shape[-2:]), vector


def _usable(factor: Tensor, bad: Tensor, check_values: bool, fault: str) -> Tensor:
    """Return the factor. For bad matrices, raise an error, or return NaN if values are not checked."""
    if not (check_values and values_checkable(bad)):
        return torch.where(bad[..., None, None], torch.nan, factor)
    if bool(bad.any()):
        count = f"{int(bad.sum())} of {max(bad.numel(), 1)} matrices"
        raise DomainError(f"{count} {fault}. Add a multiple of the identity.")
    return factor


def definite_factor(b: Tensor, check_values: bool, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Return L with B = LLᵀ. A squared pivot within `zero_tolerance` of its diagonal entry counts as zero.

    ``dtype`` is that of the data, if not that of B.
    """
    with without_magma(b):
        lower, info = torch.linalg.cholesky_ex(b)
    pivots, diagonal = (t.diagonal(dim1=-2, dim2=-1).real for t in (lower, b))
    tol = zero_tolerance(dtype or b.dtype, b.dtype, b.shape[-1])
    bad = (info != 0) | ~(pivots.square() > tol * diagonal).all(-1)
    return _usable(lower, bad, check_values, f"{name} are not positive definite")


def _lu_factor(a: Tensor, dtype: torch.dtype, check_values: bool) -> tuple[Tensor, Tensor]:
    """Return LU factors and pivots. Pivots within `zero_tolerance` of the largest entry of a column count as zero."""
    with without_magma(a):
        factor, pivots, info = torch.linalg.lu_factor_ex(a)
    if a.shape[-1] == 0:
        return factor, pivots
    tol = zero_tolerance(dtype, a.dtype, a.shape[-1])
    least = factor.diagonal(dim1=-2, dim2=-1).abs()
    bad = (info != 0) | ~(least > tol * a.abs().amax(-2)).all(-1)
    return _usable(factor, bad, check_values, "a are singular"), pivots


def linear_solve(
    a: Tensor,
    b: Tensor,
    *,
    symmetric: bool = False,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Solution of :math:`Ax = b`, by LU, or by Cholesky for a symmetric positive definite A.

    Args:
        a: matrices ``(*batch, n, n)``, real or complex. For complex matrices, "symmetric" means Hermitian and ᵀ is the
            conjugate transpose.
        b: right-hand sides: ``(n,)``, ``(*batch, n)`` with the batch of A, or ``(*batch, n, r)`` with a batch that
            broadcasts.
        symmetric: whether A is symmetric positive definite. If True, use a Cholesky factor in both passes and return a
            symmetric gradient.
        check, precision: as in `matrix_function`.

    Returns:
        x with the shape of ``b``, after broadcasting the batch, in the dtype of ``b``.

    Raises:
        ShapeError, DtypeError, NonFiniteError, SymmetryError: ``a`` or ``b`` has an invalid shape, dtype or value.
        DomainError: A is singular to working precision (not positive definite, if ``symmetric=True``), or its entries
            are too large or too small for the compute dtype.

    Gradient:
        dx = A⁻¹(db − dA x). With λ = A⁻ᵀg, ∂L/∂b = λ and ∂L/∂A = −λxᵀ (its symmetric part if ``symmetric=True``).
        Supports all orders, forward mode and vmap.

    Example:
        >>> import torch, matbackprop
        >>> a = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> matbackprop.linear_solve(a, torch.tensor([3.0, 4.0]))
        tensor([1., 1.])
    """
    check_matrix(a, "a", square=True, or_complex=True)
    check_floating(b, "b", or_complex=True)
    if a.is_complex() != b.is_complex():
        raise DtypeError(f"a and b must both be real or both complex, got {a.dtype} and {b.dtype}.")
    with autocast_off(a.device.type):
        ready = prepare(a, "a", check, precision, sizes="sums", square=True, symmetric=symmetric, others=(b,))
        if ready.check_values:
            check_finite(b, "b")
        pivots: Tensor | None = None
        if symmetric:
            factor = definite_factor(ready.x.detach(), ready.check_values, "a", a.dtype)
        else:
            factor, pivots = _lu_factor(ready.x.detach(), a.dtype, ready.check_values)
        full, columns, vector = as_columns(ready.x, b.to(ready.x.dtype))
        factor = factor.expand(full.shape)
        pivots = None if pivots is None else pivots.expand(full.shape[:-1])
        out = apply(_Solve, full, columns, factor, pivots, False)
        if ready.bad is not None:
            out = nan_where(ready.bad.expand(out.shape[:-2]), out)
        return (out.squeeze(-1) if vector else out).to(b.dtype)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return inner(x, y, (-1,)).unsqueeze(-1)


class _System(NamedTuple):
    """Products with A(θ), and how to iterate.

    Attributes:
        matvec: maps x ``(*batch, n)`` and θ to A(θ)x.
        preconditioner: approximate inverse of the diagonal ``(*batch, n)``, or None.
        tolerance: relative residual to stop at; None to run all steps without reading values.
        steps: largest number of iterations.
    """

    matvec: Callable[..., Tensor]
    preconditioner: Tensor | None
    tolerance: float | None
    steps: int

    def solve(self, b: Tensor, params: Sequence[Tensor]) -> Tensor:
        """Solve for each vector of the batch separately by conjugate gradients; converged ones do not change.

        Without a tolerance a vector becomes NaN if A or the preconditioner is not positive definite.
        """
        tolerance = self.tolerance
        peak = b.abs().amax(-1, keepdim=True) if b.shape[-1] else b.sum(-1, keepdim=True)
        unit = torch.where(peak == 0, 1, peak)  # prevents overflow and underflow of ‖b‖²
        r = b / unit
        scale = _dot(r, r)
        # Without a tolerance a residual far below rounding counts as none, before its square underflows.
        goal = scale * (1e-3 * torch.finfo(b.dtype).eps if tolerance is None else tolerance) ** 2
        x, p = torch.zeros_like(r), self._precondition(r)
        rz, size = _dot(r, p), scale
        failed = torch.zeros_like(size, dtype=torch.bool)
        for _ in range(self.steps):
            active = ~(size <= goal)
            if tolerance is not None and not bool(active.any()):
                break
            q = self.matvec(p, *params)
            pq = _dot(p, q)
            failed = failed | (active & ~((rz > 0) & (pq > 0) & torch.isfinite(rz) & torch.isfinite(pq)))
            if tolerance is not None and bool(failed.any()):
                raise SolverError(
                    "Conjugate gradients found a direction of nonpositive curvature, or NaN: A or the preconditioner "
                    "is not positive definite. Add a multiple of the identity, or use linear_solve with the matrix."
                )
            active = active & ~failed
            alpha = torch.where(active, rz / torch.where(active, pq, 1), 0)
            x, r = x + alpha * p, r - alpha * q
            z = self._precondition(r)
            new = _dot(r, z)
            p = z + torch.where(active, new / torch.where(active, rz, 1), 0) * p
            rz, size = torch.where(active, new, rz), torch.where(active, _dot(r, r), size)
        if tolerance is not None and bool((size > goal).any()):
            worst = float((size / torch.where(scale > 0, scale, 1)).max().sqrt())
            raise SolverError(
                f"Conjugate gradients stopped after {self.steps} iterations at a relative residual of {worst:.3g}, "
                f"above the tolerance {tolerance:.3g}. Raise max_iterations or tolerance, or pass a preconditioner."
            )
        return torch.where(failed, torch.nan, x * unit)

    def _precondition(self, r: Tensor) -> Tensor:
        return r if self.preconditioner is None else r * self.preconditioner


def _products_of(matvec: Callable[..., Tensor], x: Tensor, params: Sequence[Tensor], moving: list[int]) -> Any:
    """A(θ)x and its vector-Jacobian product in some parameters, with x as a constant."""

    def product(*moved: Tensor) -> Tensor:
        full = list(params)
        for i, value in zip(moving, moved, strict=True):
            full[i] = value
        return matvec(x, *full)

    return torch.func.vjp(product, *(params[i] for i in moving))


def pull_back(
    matvec: Callable[..., Tensor], x: Tensor, params: Sequence[Tensor], needed: Sequence[bool], g: Tensor
) -> list[Tensor | None]:
    """The gradients of ⟨G, A(θ)x⟩ in the parameters that need one."""
    indices = [i for i, need in enumerate(needed) if need]
    out: list[Tensor | None] = [None] * len(params)
    if indices:
        _, pull = _products_of(matvec, x, params, indices)
        for i, value in zip(indices, pull(g), strict=True):
            out[i] = value
    return out


def push_forward(
    matvec: Callable[..., Tensor], x: Tensor, params: Sequence[Tensor], directions: Sequence[Tensor | None]
) -> Tensor:
    """dA(θ)x in directions of the parameters."""
    moving = [i for i, d in enumerate(directions) if d is not None]
    if not moving:
        return torch.zeros_like(x)
    # A Jacobian-vector product as the transpose of the vector-Jacobian product, which is linear.
    value, pull = _products_of(matvec, x, params, moving)
    push: Any = torch.func.vjp(pull, torch.zeros_like(value))[1]
    return push(tuple(directions[i] for i in moving))[0]


class _SystemSolution(NamedTuple):
    system: _System
    x: Tensor
    params: tuple[Tensor, ...]


class _ConjugateGradients(Operation):
    """x(θ, b) with A(θ)x = b; backward solves another system and takes the vector-Jacobian product of θ ↦ A(θ)x."""

    forward_twice = "conjugate_gradient_solve"
    widen = False  # the products may capture tensors

    @staticmethod
    def forward(
        matvec: Any, preconditioner: Tensor | None, tolerance: float | None, steps: int, b: Tensor, *params: Tensor
    ) -> Tensor:
        return _System(matvec, preconditioner, tolerance, steps).solve(b, params)

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _SystemSolution:
        return _SystemSolution(_System(*inputs[:4]), outputs, inputs[5:])

    @staticmethod
    def adjoint(saved: _SystemSolution, needed: Sequence[bool], g: Tensor) -> tuple[Tensor | None, ...]:
        system, x, params = saved
        lam = apply(_ConjugateGradients, *system, g, *params)
        return None, None, None, None, lam, *pull_back(system.matvec, x, params, needed[5:], -lam)

    @staticmethod
    def tangent(saved: _SystemSolution, *directions: Tensor | None) -> Tensor:
        system, x, params = saved
        right = -push_forward(system.matvec, x, params, directions[5:])
        right = right if directions[4] is None else right + directions[4]
        return apply(_ConjugateGradients, *system, right, *params)


def check_iterations(tolerance: float | None, max_iterations: int | None) -> None:
    if tolerance is not None and not 0 < tolerance < 1:
        raise DomainError(f"tolerance must be in (0, 1) or be None, got {tolerance}.")
    if max_iterations is not None and max_iterations < 0:
        raise DomainError(f"max_iterations must not be negative, got {max_iterations}.")


def conjugate_gradient_solve(
    matvec: Callable[..., Tensor],
    b: Tensor,
    params: Sequence[Tensor] = (),
    *,
    preconditioner: Tensor | None = None,
    tolerance: float | None = 1e-10,
    max_iterations: int | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Solution of :math:`A(\theta)x = b` for a symmetric positive definite A given by its matrix-vector product.

    Args:
        matvec: function ``matvec(x, *params)`` that returns A(θ)x for x ``(*batch, n)``. It must be linear in x,
            symmetric, and composed of differentiable torch operations. Tensors that require a gradient must be passed
            through ``params``.
        b: right-hand sides ``(*batch, n)``, real, or complex for a Hermitian A. Each is solved separately.
        params: the tensors θ.
        preconditioner: approximate inverse of the diagonal of A ``(*batch, n)`` (Jacobi); treated as a constant.
        tolerance: relative residual at which to stop. The test synchronizes with the device once per iteration. None
            runs exactly ``max_iterations`` steps without synchronization.
        max_iterations: maximum number of iterations; 10 n by default.
        check: whether to check ``b`` for NaN and Inf, as in `matrix_function`.
        precision: compute dtype, float64 by default. Casts ``b``, ``preconditioner`` and floating-point ``params``;
            tensors captured by ``matvec`` must already have this dtype.

    Returns:
        x ``(*batch, n)`` in the dtype of ``b``.

    Raises:
        SolverError: no convergence, or A or the preconditioner is not positive definite. With ``tolerance=None`` the
            solution is NaN instead.
        ShapeError, DtypeError, NonFiniteError: ``b`` or ``params`` has an invalid shape, dtype or value.
        DomainError: ``tolerance`` or ``max_iterations`` is out of range.

    Gradient:
        With λ = A⁻¹g by conjugate gradients, ∂L/∂b = λ and ∂L/∂θ = −λᵀ(∂A/∂θ)x. Memory does not grow with the number of
        iterations. Supports double backward and forward mode, and vmap if ``tolerance=None``.

    Example:
        >>> import torch, matbackprop
        >>> theta = torch.tensor([2.0, 4.0], dtype=torch.float64, requires_grad=True)
        >>> b = torch.ones(2, dtype=torch.float64)
        >>> matbackprop.conjugate_gradient_solve(lambda x, t: t * x, b, (theta,)).sum().backward()
        >>> theta.grad
        tensor([-0.2500, -0.0625], dtype=torch.float64)

    Reference:
        Ionescu et al. (2015), section 2.
    """
    check_floating(b, "b", or_complex=True)
    if b.ndim < 1:
        raise ShapeError("b must have at least one dimension (*batch, n), got a scalar.")
    check_iterations(tolerance, max_iterations)
    steps = 10 * b.shape[-1] if max_iterations is None else max_iterations
    if any(not isinstance(p, Tensor) for p in params):
        raise DtypeError("params must be tensors. Bind other arguments into matvec.")
    if wants_check(check, b):
        check_finite(b, "b")
    if torch.compiler.is_compiling() or (tolerance is not None and is_batched(b)):
        raise SolverError(
            "Conjugate gradients depend on values, which torch.compile and vmap cannot trace. Pass a batch as "
            "leading dimensions, keep this call out of the compiled region, pass tolerance=None under vmap, or use "
            "linear_solve with the matrix."
        )
    if b.device.type == "meta":  # shapes only: one step without a test
        tolerance, steps = None, min(steps, 1)
    dtype = compute_dtype(precision, b.dtype)
    with autocast_off(b.device.type):
        cast = [in_precision(p, dtype) for p in params]
        inverse = None if preconditioner is None else preconditioner.detach().to(real_dtype(dtype))
        system = _System(matvec, inverse, tolerance, steps)
        return apply(_ConjugateGradients, *system, b.to(dtype), *cast).to(b.dtype)


def _field_product(x: Tensor, confidence: Tensor, features: Tensor) -> Tensor:
    """(diag(c) + D − FFᵀ)x, D the degrees of FFᵀ; the mean of x is subtracted, because D − FFᵀ would cancel it."""
    total = features.sum(-2)
    degree = (features @ total.unsqueeze(-1)).squeeze(-1)
    rest = x - x.mean(-1, keepdim=True) if x.shape[-1] else x
    pulled = (features @ (features.mT @ rest.unsqueeze(-1))).squeeze(-1)
    return confidence * x + (degree * rest - pulled)


def _check_confidence(confidence: Tensor, degree: Tensor) -> None:
    """Raise if the confidence, which makes the system definite, is below the rounding error of the degrees."""
    if confidence.numel() == 0:
        return
    least, most = confidence.detach().amin(-1), degree.detach().amax(-1)
    if bool((least < 1e3 * torch.finfo(degree.dtype).eps * most).any()):
        raise NumericalError(
            f"A confidence of {float(least.min()):.3g} is below the rounding of degrees of {float(most.max()):.3g}. "
            f"Scale the affinities (features) down, or raise the confidence."
        )


def gaussian_crf(
    mean: Tensor,
    confidence: Tensor,
    *,
    affinity: Tensor | None = None,
    features: Tensor | None = None,
    tolerance: float = 1e-10,
    max_iterations: int | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Mode of a Gaussian conditional random field.

    .. math::
        x = \operatorname*{argmin}_x \sum_i c_i(x_i - y_i)^2 + \tfrac12\sum_{ij}W_{ij}(x_i - x_j)^2,\qquad
        ([c] + D - W)\,x = [c]\,y,\quad D = [W\mathbf 1]

    Args:
        mean: unary predictions y ``(*batch, m)`` or ``(*batch, m, r)``.
        confidence: c > 0 ``(*batch, m)``.
        affinity: symmetric W ≥ 0 ``(*batch, m, m)``; solved by Cholesky. Pass either this or ``features``.
        features: F ≥ 0 ``(*batch, m, d)`` with W = FFᵀ; solved by preconditioned conjugate gradients without forming W.
        tolerance: relative residual of conjugate gradients.
        max_iterations: maximum number of conjugate gradient iterations; 10 m by default.
        check, precision: as in `matrix_function`.

    Returns:
        x with the shape and dtype of ``mean``.

    Raises:
        DomainError: ``affinity`` and ``features`` are both given or both None, or a confidence is not positive.
        ShapeError, DtypeError, NonFiniteError, SymmetryError: an argument has an invalid shape, dtype or value.
        NumericalError, SolverError: the system is not positive definite, or conjugate gradients did not converge.

    Gradient:
        With respect to y, c, W and F, by solving a second system with the same matrix. Supports double backward and
        forward mode; with ``affinity`` also vmap and compilation.

    Example:
        >>> import torch, matbackprop
        >>> y = torch.tensor([0.0, 0.0, 1.0])
        >>> w = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 3.0], [0.0, 3.0, 0.0]])
        >>> matbackprop.gaussian_crf(y, torch.ones(3), affinity=w)  # the strong link averages the last two
        tensor([0.0000, 0.4286, 0.5714])

    Reference:
        Tappen, Liu, Adelson, Freeman, Learning Gaussian conditional random fields for low-level vision, CVPR 2007.
    """
    check_floating(mean, "mean")
    check_floating(confidence, "confidence")
    if (affinity is None) == (features is None):
        raise DomainError("gaussian_crf needs either affinity or features. Pass a matrix W, or F for W = FFᵀ.")
    vector = mean.shape == confidence.shape
    if not vector and mean.shape[:-1] != confidence.shape:
        raise ShapeError(
            f"mean must be (*batch, m) or (*batch, m, r) with confidence (*batch, m), got {tuple(mean.shape)} and "
            f"{tuple(confidence.shape)}."
        )
    check_values = wants_check(check, mean)
    if check_values:
        check_finite(mean, "mean")
        check_finite(confidence, "confidence")
        if bool((confidence <= 0).any()):
            raise DomainError(f"confidence must be positive, got {float(confidence.min()):.3g}. Use softplus or exp.")
    dtype = compute_dtype(precision)
    with autocast_off(mean.device.type):
        y, c = mean.to(dtype), confidence.to(dtype)
        right = c * y if vector else c.unsqueeze(-1) * y
        if affinity is not None:
            ready = prepare(affinity, "affinity", check, precision, sizes=None, symmetric=True, or_complex=False)
            degree = ready.x.sum(-1)
            if degree.shape != c.shape:
                raise ShapeError(f"affinity must be {(*c.shape, c.shape[-1])}, got {tuple(affinity.shape)}.")
            if check_values:
                _check_confidence(c, degree)
            others = ready.x - torch.diag_embed(ready.x.diagonal(dim1=-2, dim2=-1))  # the diagonal cancels
            field = torch.diag_embed(c + others.sum(-1)) - others
            return ready.marked(linear_solve(field, right, symmetric=True, precision=dtype, check=check)).to(mean.dtype)
        assert features is not None
        f = prepare(features, "features", check, precision, sizes="products", or_complex=False).x
        if f.shape[:-1] != c.shape:
            sizes = ", ".join(map(str, c.shape))
            raise ShapeError(f"features must be ({sizes}, d), got {tuple(features.shape)}.")
        total = f.sum(-2, keepdim=True)
        if check_values:
            _check_confidence(c, (f * total).sum(-1))
        inverse = (c + (f * (total - f)).sum(-1)).reciprocal()  # of the diagonal
        if not vector:  # the columns become a batch
            right, c, f, inverse = right.mT, c.unsqueeze(-2), f.unsqueeze(-3), inverse.unsqueeze(-2)
        x = conjugate_gradient_solve(
            _field_product,
            right,
            (c, f),
            preconditioner=inverse,
            tolerance=tolerance,
            max_iterations=max_iterations,
            precision=dtype,
            check=False,
        )
        return (x if vector else x.mT).to(mean.dtype)
