"""Functions of symmetric and Hermitian matrices: built-in and user-defined."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from matbackprop._torch import reverse_mode_only, values_checkable
from matbackprop.checks import (
    Prepared,
    all_finite,
    check_matrix,
    check_result,
    nan_where,
    prepare,
)
from matbackprop.cuda import matrix_function as kernels
from matbackprop.cuda.fallback import call_kernels
from matbackprop.divided_differences import (
    BoundFunction,
    Domain,
    FunctionLike,
    Given,
    SpectralFunction,
    bind_params,
    resolve_function,
    without_derivatives,
)
from matbackprop.errors import DomainError
from matbackprop.functional._spectrum import Spectrum, check_captured, of_symmetric_part
from matbackprop.numerics import autocast_off, rank_tolerance, zero_tolerance
from matbackprop.solvers import batched_eigh

_REMEDY = "Add a multiple of the identity, or use second_order_pool with eps > 0."


def outside_domain(lam: Tensor, function: SpectralFunction) -> Tensor:
    if function.domain == "nonzero":
        return lam == 0
    if function.domain == "real":
        return torch.zeros_like(lam, dtype=torch.bool)
    return lam < 0 if function.domain == "nonnegative" else lam <= 0


def check_domain(lam: Tensor, function: SpectralFunction, what: str, fix: str) -> None:
    if lam.numel() == 0 or function.domain == "real":
        return
    nearest = (lam.abs() if function.domain == "nonzero" else lam).min()
    if bool(outside_domain(nearest, function)):
        raise DomainError(
            f"{function.name} needs {function.domain} eigenvalues; the smallest of {what} is {float(nearest):.3g} and "
            f"the largest {float(lam.max()):.3g}. {fix}"
        )


def zero_interval(data: torch.dtype, compute: torch.dtype, n: int, domain: Domain) -> tuple[float, float]:
    """Return by how much zero eigenvalues may be negative and positive, as fractions of the largest of n.

    For the domain ``"nonnegative"``, negative eigenvalues are compared with the rounding error of the data, and
    positive ones, which have roots, only with that of the decomposition.
    """
    if domain == "nonnegative":
        positive = zero_tolerance(compute, compute, n)
        return max(rank_tolerance(data, compute), positive), positive
    return (zero_tolerance(data, compute, n),) * 2


def without_rounding(lam: Tensor, dtype: torch.dtype, domain: Domain = "nonnegative") -> Tensor:
    """Set ascending eigenvalues to zero that are within rounding error of it; ``dtype`` is that of the data."""
    if lam.numel() == 0 or domain == "real":
        return lam
    negative, positive = zero_interval(dtype, lam.dtype, lam.shape[-1], domain)
    if lam.is_cpu and values_checkable(lam):  # the usual case, in a third of the time
        least, most = map(float, lam.aminmax())
        if least > positive * most:
            return lam
    largest = lam.abs().amax(-1, keepdim=True)
    small = (lam >= -negative * largest) & (lam <= positive * largest)
    return torch.where(small & (largest < torch.inf), 0, lam)


def matrix_function(
    a: Tensor,
    function: FunctionLike,
    *,
    exponent: float | Tensor | None = None,
    params: Sequence[Tensor] = (),
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Apply a scalar function to the spectrum of symmetric or Hermitian matrices.

    .. math:: g(A) = U \operatorname{diag}(g(\lambda)) U^\top, \qquad A = U \operatorname{diag}(\lambda) U^\top

    For complex matrices, ᵀ is the conjugate transpose and "symmetric" means Hermitian.

    Args:
        a: symmetric matrices ``(*batch, n, n)`` of any floating-point dtype, complex64 or complex128.
        function: ``"log"``, ``"sqrt"``, ``"inv_sqrt"``, ``"exp"``, ``"inverse"``, ``"power"``, a
            `matbackprop.functional.SpectralFunction`, or a pair of callables ``(g, derivative)``. The callables are
            ``g(x, *params)`` and its derivative in x, applied elementwise to tensors x of any shape.
        exponent: exponent of ``"power"``. A tensor receives a gradient and must broadcast to ``batch``.
        params: further arguments of a user-defined function. They are cast to the compute dtype and receive gradients.
            The function must not capture tensors that require a gradient.
        check: whether to check values (finite, symmetric, in the domain of g): None on the CPU only, which avoids
            synchronization with a GPU, True on every device, False never. Without checks, invalid results are NaN.
        precision: compute dtype, float64 by default (complex128 for complex matrices).

    Returns:
        Symmetric matrices ``(*batch, n, n)`` in the dtype of ``a``.

    Raises:
        DomainError: an eigenvalue is outside the domain of g, the result overflows, or the function is unknown.
        ConfigurationError: the function captures tensors that require a gradient.

    Gradient:
        First order U(Γ∘(UᵀGU))Uᵀ with Γᵢⱼ = g[λᵢ, λⱼ], listed on the stability page; second order through
        g[λᵢ, λⱼ, λₖ]. At repeated eigenvalues both equal the analytic limits g'(λ) and g''(λ)/2. For user-defined
        functions g'' is computed by autograd. A third order raises OrderError. Supports forward mode, vmap and
        fullgraph compilation; second orders that involve ``params`` require torch.autograd instead of torch.func.
        Complex gradients follow the convention of torch.

        Eigenvalues within rounding error of zero count as zero (see "Rank-deficient matrices" on the stability page).
        They are outside the domain of log, inverse and inverse powers. The derivative of sqrt at zero is infinite: it
        raises DomainError if values are checked, and is otherwise infinite, NaN, or large without correct digits.

    Example:
        >>> import torch, matbackprop
        >>> a = torch.eye(3, dtype=torch.float64).mul(2).requires_grad_()
        >>> matbackprop.matrix_function(a, "log").trace().backward()
        >>> a.grad.diagonal()
        tensor([0.5000, 0.5000, 0.5000], dtype=torch.float64)
        >>> t = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        >>> pair = (lambda x, t: (1 + t * x).log(), lambda x, t: t / (1 + t * x))
        >>> matbackprop.matrix_function(a.detach(), pair, params=(t,)).trace().backward()
        >>> t.grad  # 3 · 2 / (1 + 2t)
        tensor(3., dtype=torch.float64)

    Reference:
        Ionescu et al. (2015), Proposition "EIG matrix function"; Daleckii and Krein (1965).
    """
    fn, given = resolve_function(function, exponent, params)
    check_matrix(a, "a", square=True, or_complex=True)
    if precision in (None, torch.float64) and _kernels_take(a, fn):
        return _by_kernels(a, fn, check)
    return from_one_decomposition(a, [(fn, given)], check, precision)[0]


def _kernels_take(a: Tensor, function: SpectralFunction) -> bool:
    return a.is_cuda and kernels.takes(a, function)


def _in_general(x: Tensor, function: SpectralFunction, data: torch.dtype) -> Tensor:
    """`_by_kernels` in torch operations, for matrices of dtype ``data``. Half precision arrives as float32."""
    return from_one_decomposition(x.to(data), [(function, ())], False, None)[0].to(x.dtype)


def _by_kernels(a: Tensor, function: SpectralFunction, check: bool | None) -> Tensor:
    ready = prepare(a.detach(), "a", check, None, sizes=None, symmetric=True)
    rounding, _ = zero_interval(a.dtype, torch.float64, a.shape[-1], function.domain)
    general = functools.partial(_in_general, function=function, data=a.dtype)
    out = call_kernels(a, kernels.MatrixFunction(function.name, rounding, general)).to(a.dtype)
    if ready.check_values:
        singular = function.domain == "nonnegative" and _has_zero(batched_eigh(ready.x)[0], a.dtype)
        if singular or not all_finite(out):
            return from_one_decomposition(a, [(function, ())], check, None)[0]  # errors, also of derivatives
    return ready.marked(out)


def matrix_functions(
    a: Tensor,
    functions: Sequence[FunctionLike | float | Tensor],
    *,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    r"""Apply several functions to symmetric matrices with one eigendecomposition.

    Args:
        a: symmetric matrices ``(*batch, n, n)``; the symmetric part is used.
        functions: functions without parameters, as in `matrix_function`, for example ``["sqrt", "inv_sqrt"]``. Numbers
            and tensors are exponents of powers.
        check, precision: as in `matrix_function`.

    Returns:
        Tuple of symmetric matrices ``(*batch, n, n)``, one for each function.

    Raises:
        DomainError: an eigenvalue is outside the domain of a function, or a result overflows.

    Gradient:
        As in `matrix_function`, for each result.

    Example:
        >>> import torch, matbackprop
        >>> root, inverse = matbackprop.matrix_functions(torch.eye(2) * 4, ["sqrt", "inv_sqrt"])
        >>> root.diagonal(), inverse.diagonal()
        (tensor([2., 2.]), tensor([0.5000, 0.5000]))
    """
    check_matrix(a, "a", square=True, or_complex=True)
    resolved = [
        resolve_function("power", f) if isinstance(f, (int, float, Tensor)) else resolve_function(f) for f in functions
    ]
    return from_one_decomposition(a, resolved, check, precision)


def from_one_decomposition(
    a: Tensor,
    functions: Sequence[tuple[SpectralFunction, Given]],
    check: bool | None,
    precision: torch.dtype | None,
) -> tuple[Tensor, ...]:
    """Functions of A with their parameters."""
    given = [p for _, params in functions for p in params]
    x = a.detach() if reverse_mode_only() else a  # if detached, the graph has no node for the symmetric part
    unit = 1.0 if all(fn.name == "exp" for fn, _ in functions) else 0.0
    ready = prepare(x, "a", check, precision, sizes=None, symmetric=True, unit=unit, others=given)
    with autocast_off(a.device.type):
        values, vectors = batched_eigh(ready.x.detach())
        spectra = (Spectrum(without_rounding(values, a.dtype, fn.domain), vectors) for fn, _ in functions)
        return tuple(
            _function_of(a, ready, at, fn, params) for at, (fn, params) in zip(spectra, functions, strict=True)
        )


def of_known_spectrum(
    a: Tensor, spectrum: Spectrum, given: tuple[SpectralFunction, Given], check_values: bool = False
) -> Tensor:
    """g(A) of exactly symmetric matrices in the dtype of the computation; the eigenvalues have no rounding errors."""
    return _function_of(a, Prepared(a, check_values), spectrum, *given)


def _function_of(a: Tensor, ready: Prepared, spectrum: Spectrum, function: SpectralFunction, given: Given) -> Tensor:
    x, lam = ready.x, spectrum.values
    g = bind_params(function, given, x.shape[:-2], x)
    check_captured(g, lam)
    if not ready.check_values:
        lam = nan_where(g.bad_params(), lam.masked_fill(outside_domain(lam, function), torch.nan))
        return ready.marked(of_symmetric_part(a, x, Spectrum(lam, spectrum.vectors), g))
    g.check_params()
    check_domain(lam, function, "a", _REMEDY)
    out = of_symmetric_part(a, x, spectrum, _watched(g, lam, a.dtype))
    _check_overflow(out, lam, g)
    return out


def _has_zero(lam: Tensor, dtype: torch.dtype) -> bool:
    return bool((lam <= zero_tolerance(dtype, lam.dtype, lam.shape[-1]) * lam[..., -1:]).any())


def _watched(g: BoundFunction, lam: Tensor, dtype: torch.dtype) -> BoundFunction:
    """Return g with derivatives that raise if they are infinite or overflow."""
    function = g.function
    if function.builtin and function.domain == "nonnegative" and lam.numel() and _has_zero(lam, dtype):
        zero = torch.zeros_like(lam[..., 0])
        if not all_finite(g.first(zero, zero)):
            fault = f"{function.name} has an infinite derivative at a matrix with an eigenvalue of zero. {_REMEDY}"
            return BoundFunction(without_derivatives(function, fault), g.p)
    return BoundFunction(function.checked, g.p)


def _check_overflow(out: Tensor, lam: Tensor, g: BoundFunction) -> None:
    """Raise if g(λ) overflows the dtype of the computation; an overflow of the dtype of A is infinite."""
    check_result(lam, "An eigenvalue of a", "Scale the matrices.")
    if g.function.name not in ("log", "sqrt") and not all_finite(out) and not all_finite(g.value(lam)):
        raise DomainError(
            f"{g.function.name} overflows {lam.dtype}: the eigenvalues of a are between {float(lam.min()):.3g} and "
            f"{float(lam.max()):.3g}. Scale the matrices."
        )


def matrix_log(a: Tensor, *, check: bool | None = None, precision: torch.dtype | None = None) -> Tensor:
    r"""Logarithm of symmetric positive definite matrices, :math:`U \operatorname{diag}(\log\lambda) U^\top`.

    Args:
        a: symmetric positive definite matrices ``(*batch, n, n)``.
        check, precision: as in `matrix_function`.

    Returns:
        ``(*batch, n, n)``.

    Raises:
        DomainError: an eigenvalue is not positive.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.matrix_log(torch.eye(2) * 2).diagonal()
        tensor([0.6931, 0.6931])
    """
    return matrix_function(a, "log", check=check, precision=precision)


def matrix_sqrt(a: Tensor, *, check: bool | None = None, precision: torch.dtype | None = None) -> Tensor:
    r"""Square root of symmetric positive semidefinite matrices, :math:`U \operatorname{diag}(\sqrt\lambda) U^\top`.

    Args:
        a: symmetric positive semidefinite matrices ``(*batch, n, n)``.
        check, precision: as in `matrix_function`.

    Returns:
        ``(*batch, n, n)``, positive semidefinite.

    Raises:
        DomainError: an eigenvalue is negative.

    Gradient:
        As in `matrix_function`. Infinite at an eigenvalue of zero, where backward raises DomainError.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.matrix_sqrt(torch.eye(2) * 9).diagonal()
        tensor([3., 3.])
    """
    return matrix_function(a, "sqrt", check=check, precision=precision)


def matrix_inv_sqrt(a: Tensor, *, check: bool | None = None, precision: torch.dtype | None = None) -> Tensor:
    r"""Inverse square root of symmetric positive definite matrices, :math:`A^{-1/2}`.

    Args:
        a: symmetric positive definite matrices ``(*batch, n, n)``.
        check, precision: as in `matrix_function`.

    Returns:
        ``(*batch, n, n)``.

    Raises:
        DomainError: an eigenvalue is not positive.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.matrix_inv_sqrt(torch.eye(2) * 4).diagonal()
        tensor([0.5000, 0.5000])
    """
    return matrix_function(a, "inv_sqrt", check=check, precision=precision)


def matrix_exp(a: Tensor, *, check: bool | None = None, precision: torch.dtype | None = None) -> Tensor:
    r"""Exponential of symmetric matrices, :math:`U \operatorname{diag}(e^\lambda) U^\top`.

    Args:
        a: symmetric matrices ``(*batch, n, n)``.
        check, precision: as in `matrix_function`.

    Returns:
        ``(*batch, n, n)``, positive definite.

    Raises:
        DomainError: the result overflows.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.matrix_exp(torch.zeros(2, 2)).diagonal()
        tensor([1., 1.])
    """
    return matrix_function(a, "exp", check=check, precision=precision)


def matrix_inverse(a: Tensor, *, check: bool | None = None, precision: torch.dtype | None = None) -> Tensor:
    r"""Inverse of symmetric matrices through their spectrum, :math:`U \operatorname{diag}(1/\lambda) U^\top`.

    Args:
        a: symmetric nonsingular matrices ``(*batch, n, n)``, definite or not.
        check, precision: as in `matrix_function`.

    Returns:
        ``(*batch, n, n)``.

    Raises:
        DomainError: an eigenvalue is zero.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.matrix_inverse(torch.eye(2) * -4).diagonal()
        tensor([-0.2500, -0.2500])
    """
    return matrix_function(a, "inverse", check=check, precision=precision)


def matrix_power(
    a: Tensor, p: float | Tensor, *, check: bool | None = None, precision: torch.dtype | None = None
) -> Tensor:
    r"""Power of symmetric matrices, :math:`U \operatorname{diag}(\lambda^p) U^\top`.

    Args:
        a: symmetric matrices ``(*batch, n, n)``: arbitrary for an integer p ≥ 0, nonsingular for a negative integer,
            positive semidefinite for a non-integer p > 0, positive definite for a non-integer p < 0 and for a tensor p.
        p: a number, or a floating-point tensor that broadcasts to ``batch`` and receives a gradient.
        check, precision: as in `matrix_function`.

    Returns:
        ``(*batch, n, n)``.

    Raises:
        DomainError: an eigenvalue is outside the domain, or the result overflows.

    Gradient:
        With respect to A by Γᵢⱼ = λⱼ^(p−1) expm1(p log1p(x))/x with x = (λᵢ−λⱼ)/λⱼ, and to p by U diag(λ^p log λ)Uᵀ.
        First, second and mixed order, exact at repeated eigenvalues. At a singular matrix the first derivative exists
        for p > 1 and the second for p > 2; others raise DomainError.

    Example:
        >>> import torch, matbackprop
        >>> p = torch.tensor(2.0, requires_grad=True)
        >>> matbackprop.matrix_power(torch.eye(2) * 3, p).trace().backward()
        >>> p.grad  # 2 · 3² · log 3
        tensor(19.7750)

    Reference:
        Ionescu et al. (2015), Proposition "EIG matrix function"; Li et al. (2017) for trainable exponents.
    """
    return matrix_function(a, "power", exponent=p, check=check, precision=precision)
