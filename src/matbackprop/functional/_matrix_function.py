"""Functions of symmetric and Hermitian matrices: log, sqrt, inverse sqrt, exp, inverse, powers and one's own."""

from __future__ import annotations

import cmath
import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from matbackprop._torch import reverse_mode_only
from matbackprop.checks import (
    check_finite,
    check_matrix,
    check_result,
    check_symmetric,
    parameter_tensor,
    values_checkable,
    wants_check,
)
from matbackprop.cuda import matrix_function as kernels
from matbackprop.divided_differences import (
    BoundFunction,
    SpectralFunction,
    announcing_overflow,
    infinite_derivative,
    resolve_function,
)
from matbackprop.errors import DomainError
from matbackprop.functional._spectrum import Spectrum, attach_captured, of_symmetric_part
from matbackprop.numerics import autocast_off, compute_dtype, rounding_of_zero, symmetrize
from matbackprop.solvers import batched_eigh

__all__ = [
    "from_one_decomposition",
    "matrix_exp",
    "matrix_function",
    "matrix_functions",
    "matrix_inv_sqrt",
    "matrix_inverse",
    "matrix_log",
    "matrix_power",
    "matrix_sqrt",
]

FunctionLike = str | SpectralFunction | tuple[Callable[..., Tensor], Callable[..., Tensor]]


def check_domain(lam: Tensor, function: SpectralFunction, what: str, remedy: str) -> float:
    """Raise when an eigenvalue lies outside the domain of g; return the one nearest to its end."""
    domain = function.domain
    if lam.numel() == 0 or domain == "real":
        return math.inf
    worst = float(lam.flatten()[lam.abs().argmin()] if domain == "nonzero" else lam.min())
    if worst == 0 if domain == "nonzero" else worst < 0 or (worst == 0 and domain == "positive"):
        raise DomainError(
            f"{function.name} needs {domain} eigenvalues; the smallest of {what} is {worst:.3g} and the largest "
            f"{float(lam.max()):.3g}. {remedy}"
        )
    return worst


def _share_of_zero(function: SpectralFunction, dtype: torch.dtype, compute: torch.dtype, n: int) -> float:
    """Share of the largest of n eigenvalues by which one that counts as zero for g may be negative."""
    return rounding_of_zero(dtype, compute, n) if function.domain == "nonnegative" else 0.0


def round_to_domain(lam: Tensor, function: SpectralFunction, dtype: torch.dtype) -> Tensor:
    """Set eigenvalues that are negative by rounding alone to zero, for a function that is defined there.

    ``dtype`` is what the matrices came in: their eigenvalues carry its rounding.
    """
    if function.domain != "nonnegative" or lam.numel() == 0:
        return lam
    if lam.is_cpu and values_checkable(lam) and float(lam.min()) >= 0:
        return lam
    share = _share_of_zero(function, dtype, lam.dtype, lam.shape[-1])
    return torch.where((lam < 0) & (lam >= -share * lam.abs().amax(-1, keepdim=True)), 0, lam)


def matrix_function(
    a: Tensor,
    function: FunctionLike,
    *,
    exponent: float | Tensor | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Apply a scalar function to the spectrum of symmetric matrices, or Hermitian ones.

    .. math:: g(A) = U \operatorname{diag}(g(\lambda)) U^\top, \qquad A = U \operatorname{diag}(\lambda) U^\top

    For complex matrices ᵀ is the conjugate transpose here, and "symmetric" means Hermitian.

    Args:
        a: symmetric matrices ``(*batch, n, n)``; the symmetric part is used. Any floating-point dtype, complex64 or
            complex128.
        function: ``"log"``, ``"sqrt"``, ``"inv_sqrt"``, ``"exp"``, ``"inverse"``, ``"power"``, a pair ``(g,
            divided_difference)`` with two arguments in the second or ``(g, derivative)`` with one, or a
            `matbackprop.functional.SpectralFunction`.
        exponent: the exponent of ``"power"``; a tensor learns and may hold one value per matrix, shape broadcastable to
            ``batch``.
        check: whether values are checked (finite, symmetric, in the domain of g). None checks on the CPU only, so
            that no GPU is waited for; True checks everywhere; False never.
        precision: dtype to compute in, float64 unless given (complex128 for complex matrices); the result has the
            dtype of ``a``.

    Returns:
        ``(*batch, n, n)``, symmetric.

    Raises:
        ShapeError, DtypeError: ``a`` is not a batch of square floating-point matrices.
        NonFiniteError, SymmetryError: ``a`` holds NaN or Inf, or is not symmetric.
        DomainError: an eigenvalue lies outside the domain of g, the result overflows, or the function is unknown.

    Gradient:
        First order U(Γ∘(UᵀGU))Uᵀ with Γᵢⱼ = g[λᵢ, λⱼ]; second order through g[λᵢ, λⱼ, λₖ]. Both are exact at repeated
        eigenvalues, where they equal the analytic limit g'(λ) and g''(λ)/2. Forward mode, vmap and fullgraph
        compilation are supported; a third order raises OrderError. Complex gradients are torch's, ∂L/∂Re A + i ∂L/∂Im
        A. Eigenvalues that are negative by rounding alone, of the dtype of ``a``, count as zero for sqrt, which has no
        finite derivative at zero: asking for it raises DomainError where values are checked and gives NaN where they
        are not. Tensors that a function of one's own captures, as a closure or a module does, receive their gradient,
        to first order; a second order of such a function raises OrderError.

    Example:
        >>> import torch, matbackprop
        >>> a = torch.eye(3, dtype=torch.float64).mul(2).requires_grad_()
        >>> matbackprop.matrix_function(a, "log").trace().backward()
        >>> a.grad.diagonal()
        tensor([0.5000, 0.5000, 0.5000], dtype=torch.float64)

    Reference:
        Ionescu, Vantzos, Sminchisescu, "Matrix Backpropagation for Deep Networks with Structured Layers", Proposition
        "EIG matrix function"; Daleckii and Krein (1965) for the fused form.
    """
    fn, p = resolve_function(function, exponent)
    check_matrix(a, "a", square=True, or_complex=True)
    exact = precision in (None, torch.float64)
    if exact and not wants_check(check, a) and kernels.applies(a, fn):
        dtype, share = a.dtype, _share_of_zero(fn, a.dtype, torch.float64, a.shape[-1])

        def general(x: Tensor) -> Tensor:
            """The same in torch's operations; half precision comes here as float32."""
            return from_one_decomposition(x.to(dtype), [(fn, None)], False, None)[0].to(x.dtype)

        return kernels.matrix_function(a, fn.name, share, general, batched_eigh)
    return from_one_decomposition(a, [(fn, p)], check, precision)[0]


def matrix_functions(
    a: Tensor,
    functions: Sequence[FunctionLike | float | Tensor],
    *,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    r"""Several functions of symmetric matrices from one eigendecomposition.

    Args:
        a: symmetric matrices ``(*batch, n, n)``; the symmetric part is used.
        functions: what `matrix_function` takes for one, for example ``["sqrt", "inv_sqrt"]``; a number or a tensor
            stands for the power with that exponent.
        check, precision: as in `matrix_function`.

    Returns:
        One ``(*batch, n, n)`` for each function.

    Raises:
        The errors of `matrix_function`.

    Gradient:
        That of `matrix_function` for each.

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
    functions: Sequence[tuple[SpectralFunction, float | Tensor | None]],
    check: bool | None,
    precision: torch.dtype | None,
    known: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Functions of A, with their values of p, whose eigenvalues and eigenvectors may be known."""
    with autocast_off(a.device.type):
        symmetric = False
        if wanted := wants_check(check, a):
            check_finite(a, "a")
            symmetric = check_symmetric(a, "a", 1.0 if all(fn.name == "exp" for fn, _ in functions) else 0.0)
        alone = reverse_mode_only()  # A is one node's input then, and its symmetric part no node at all
        x = (a.detach() if alone else a).to(compute_dtype(precision, a.dtype))
        if not (alone and symmetric):
            x = symmetrize(x)
            if wanted:
                check_result(x, "the sum of a and its transpose", "Scale the matrices.")
        values, vectors = known or batched_eigh(x.detach())
        outs = []
        for given, p in functions:
            fn, lam = given, round_to_domain(values, given, a.dtype)
            if wanted:
                if isinstance(p, Tensor):
                    check_finite(p, "exponent")
                remedy = "Add a multiple of the identity, or use second_order_pool with eps > 0."
                at_zero = check_domain(lam, fn, "a", remedy) == 0
                fn = infinite_derivative(fn) if at_zero else announcing_overflow(fn)
            power = parameter_tensor(p, "exponent", x.shape[:-2], x)
            spectrum = Spectrum(lam, vectors)
            out = of_symmetric_part(a, x, spectrum, fn, power)
            out = attach_captured(out, given, lam, functools.partial(spectrum.value, BoundFunction(given)))
            if wanted:
                _check_overflow(out, lam, BoundFunction(fn, power))
            outs.append(out)
        return tuple(outs)


def _check_overflow(out: Tensor, lam: Tensor, g: BoundFunction) -> None:
    """Raise where g(λ) is too large for the dtype of the computation; what is too large for that of A is infinite."""
    check_result(lam, "an eigenvalue of a", "Scale the matrices.")  # as of the largest matrices
    if g.function.name in ("log", "sqrt"):  # they cannot
        return
    if not cmath.isfinite(out.detach().sum()) and not bool(torch.isfinite(g.value(lam)).all()):
        raise DomainError(
            f"{g.function.name} overflows {lam.dtype}: the eigenvalues of a lie between {float(lam.min()):.3g} and "
            f"{float(lam.max()):.3g}. Scale the matrices."
        )


def matrix_log(a: Tensor, *, check: bool | None = None, precision: torch.dtype | None = None) -> Tensor:
    r"""Logarithm of symmetric positive-definite matrices, :math:`U \operatorname{diag}(\log\lambda) U^\top`.

    Args:
        a: symmetric positive-definite matrices ``(*batch, n, n)``.
        check, precision: as in `matrix_function`.

    Returns:
        ``(*batch, n, n)``.

    Raises:
        DomainError: an eigenvalue is not positive; the other errors are those of `matrix_function`.

    Gradient:
        Γᵢⱼ = log(r)/((r − 1)λⱼ) with r = λᵢ/λⱼ, 1/λᵢ at a tie; two orders, exact at repeated eigenvalues.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.matrix_log(torch.eye(2) * 2).diagonal()
        tensor([0.6931, 0.6931])

    Reference:
        Ionescu et al., Corollary "DeepO2P".
    """
    return matrix_function(a, "log", check=check, precision=precision)


def matrix_sqrt(a: Tensor, *, check: bool | None = None, precision: torch.dtype | None = None) -> Tensor:
    r"""Square root of symmetric positive-semidefinite matrices, :math:`U \operatorname{diag}(\sqrt\lambda) U^\top`.

    Args:
        a: symmetric positive-semidefinite matrices ``(*batch, n, n)``.
        check, precision: as in `matrix_function`.

    Returns:
        ``(*batch, n, n)``, positive semidefinite.

    Raises:
        DomainError: an eigenvalue is negative beyond rounding; the other errors are those of `matrix_function`.

    Gradient:
        Γᵢⱼ = 1/(√λᵢ + √λⱼ); two orders, exact at repeated eigenvalues. At an eigenvalue of zero it is infinite, and
        asking for it raises DomainError.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.matrix_sqrt(torch.eye(2) * 9).diagonal()
        tensor([3., 3.])

    Reference:
        Ionescu et al., Proposition "EIG matrix function".
    """
    return matrix_function(a, "sqrt", check=check, precision=precision)


def matrix_inv_sqrt(a: Tensor, *, check: bool | None = None, precision: torch.dtype | None = None) -> Tensor:
    r"""Inverse square root of symmetric positive-definite matrices, :math:`A^{-1/2}` (whitening).

    Args:
        a: symmetric positive-definite matrices ``(*batch, n, n)``.
        check, precision: as in `matrix_function`.

    Returns:
        ``(*batch, n, n)``.

    Raises:
        DomainError: an eigenvalue is not positive; the other errors are those of `matrix_function`.

    Gradient:
        Γᵢⱼ = −1/(√λᵢ√λⱼ(√λᵢ + √λⱼ)); two orders, exact at repeated eigenvalues.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.matrix_inv_sqrt(torch.eye(2) * 4).diagonal()
        tensor([0.5000, 0.5000])

    Reference:
        Ionescu et al., Proposition "EIG matrix function".
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
        The errors of `matrix_function`.

    Gradient:
        Γᵢⱼ = e^max(λᵢ, λⱼ) (1 − e^−|λᵢ−λⱼ|)/|λᵢ−λⱼ|; two orders, exact at repeated eigenvalues.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.matrix_exp(torch.zeros(2, 2)).diagonal()
        tensor([1., 1.])

    Reference:
        Ionescu et al., Proposition "EIG matrix function".
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
        DomainError: an eigenvalue is zero; the other errors are those of `matrix_function`.

    Gradient:
        Γᵢⱼ = −1/(λᵢλⱼ); two orders, exact at repeated eigenvalues.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.matrix_inverse(torch.eye(2) * -4).diagonal()
        tensor([-0.2500, -0.2500])

    Reference:
        Ionescu et al., Proposition "EIG matrix function".
    """
    return matrix_function(a, "inverse", check=check, precision=precision)


def matrix_power(
    a: Tensor, p: float | Tensor, *, check: bool | None = None, precision: torch.dtype | None = None
) -> Tensor:
    r"""Power of symmetric matrices, :math:`U \operatorname{diag}(\lambda^p) U^\top`, with an exponent that may learn.

    Args:
        a: symmetric matrices ``(*batch, n, n)``: positive definite for a real exponent, any for a whole number ≥ 0,
            nonsingular for a negative whole number.
        p: a Python number, or a floating-point tensor broadcastable to ``batch`` that receives a gradient.
        check, precision: as in `matrix_function`.

    Returns:
        ``(*batch, n, n)``.

    Raises:
        DomainError: an eigenvalue lies outside the domain of λ^p; the other errors are those of `matrix_function`.
        ShapeError: ``p`` does not broadcast to ``batch``.

    Gradient:
        In A through Γᵢⱼ = λⱼ^(p−1) expm1(p log1p(x))/x, x = (λᵢ−λⱼ)/λⱼ; in p through U diag(λ^p log λ)Uᵀ; two orders in
        both and mixed, exact at repeated eigenvalues.

    Example:
        >>> import torch, matbackprop
        >>> p = torch.tensor(2.0, requires_grad=True)
        >>> matbackprop.matrix_power(torch.eye(2) * 3, p).trace().backward()
        >>> p.grad  # 2 · 3² · log 3
        tensor(19.7750)

    Reference:
        Ionescu et al., Proposition "EIG matrix function"; a learnable exponent for second-order pooling as in Li et
        al. (2017).
    """
    return matrix_function(a, "power", exponent=p, check=check, precision=precision)
