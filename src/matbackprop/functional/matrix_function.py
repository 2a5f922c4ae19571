"""Functions of symmetric matrices with fused derivatives: log, sqrt, inverse sqrt, exp, inverse, powers and one's own.

With A = U diag(λ) Uᵀ the first derivative in a direction E is U(Γ∘(UᵀEU))Uᵀ with Γᵢⱼ = g[λᵢ, λⱼ] (Daleckii–Krein),
and the second in E and H is U(Σₖ g[λᵢ, λₖ, λⱼ] (ẼᵢₖH̃ₖⱼ + H̃ᵢₖẼₖⱼ))Uᵀ. Neither sees the choice of U inside a repeated
eigenvalue, so neither divides by a gap. Three autograd Functions, one an order, call each other; each takes A itself
as the differentiable input and the eigendecomposition as constants, which is why derivatives stay right at ties. A
decomposition may leave out a large eigenspace (the complement of the span of the features in second-order pooling);
its part of the sums over k then is a matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from matbackprop.divided_differences import (
    SpectralFunction,
    infinite_derivative,
    refuse_captured_parameters,
    resolve_function,
)
from matbackprop.errors import DomainError, OrderError, ShapeError
from matbackprop.numerics import (
    apply,
    autocast_off,
    check_finite,
    check_matrix,
    check_symmetric,
    compute_dtype,
    data_rounding,
    differentiated_again,
    symmetrize,
    wants_check,
)
from matbackprop.solvers import batched_eigh

__all__ = [
    "matrix_exp",
    "matrix_function",
    "matrix_inv_sqrt",
    "matrix_inverse",
    "matrix_log",
    "matrix_power",
    "matrix_sqrt",
]

FunctionLike = str | SpectralFunction | tuple[Callable[..., Tensor], Callable[..., Tensor]]

_CONTRACTION_ENTRIES = 2**22  # entries of the table g[λᵢ, λₖ, λⱼ] held at one time


def _column(p: Any, extra: int) -> Any:
    """Give a value per matrix, or None, ``extra`` trailing dimensions so that it broadcasts over a table."""
    return None if p is None else p.reshape(p.shape + (1,) * extra)


def _contract(e: Tensor, h: Tensor, p: Tensor | None, lam: Tensor, function: SpectralFunction) -> Tensor:
    """Σₖ g[λᵢ, λₖ, λⱼ] (Eᵢₖ Hₖⱼ + Hᵢₖ Eₖⱼ), a slice of k at a time."""
    n = lam.shape[-1]
    exponent = _column(p, 3)
    rows, columns = lam[..., :, None, None], lam[..., None, None, :]
    total = torch.zeros_like(e)
    step = max(1, min(n, _CONTRACTION_ENTRIES // max(1, lam.numel() * n)))
    for start in range(0, n, step):
        k = slice(start, start + step)
        table = function.second(rows, lam[..., None, k, None], columns, exponent)
        products = e[..., :, k, None] * h[..., None, k, :] + h[..., :, k, None] * e[..., None, k, :]
        total = total + (table * products).sum(-2)
    return total


def _rotate(u: Tensor, e: Tensor) -> Tensor:
    return u.mT @ e @ u


def _split(e: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The blocks of E inside the span of the columns of u, out of it, back into it, and inside its complement.

    What leaves the span is cleared of it twice: the rounding of E would otherwise meet g''(ε), however small the block.
    """
    left, right = u.mT @ e, e @ u
    inside = left @ u
    out, back = left - inside @ u.mT, right - u @ inside
    rest = e - u @ out - right @ u.mT
    rest = rest - u @ (u.mT @ rest)
    return inside, out - (out @ u) @ u.mT, back - u @ (u.mT @ back), rest - (rest @ u) @ u.mT


def _value_of(p: Tensor | None, lam: Tensor, u: Tensor, null: Tensor | None, function: SpectralFunction) -> Tensor:
    values = function.value(lam, _column(p, 1))
    if null is None:
        return symmetrize((u * values.unsqueeze(-2)) @ u.mT)
    rest = function.value(null, p).unsqueeze(-1)
    identity = torch.diag_embed(rest.expand(*rest.shape[:-1], u.shape[-2]))
    return symmetrize((u * (values - rest).unsqueeze(-2)) @ u.mT) + identity


def _first_of(
    e: Tensor, p: Tensor | None, lam: Tensor, u: Tensor, null: Tensor | None, function: SpectralFunction
) -> Tensor:
    gamma = function.first(lam.unsqueeze(-1), lam.unsqueeze(-2), _column(p, 2))
    if null is None:
        return u @ (gamma * _rotate(u, e)) @ u.mT
    inside, out, back, rest = _split(e, u)
    slope = function.first(lam, null.unsqueeze(-1), _column(p, 1))
    spread = u @ (gamma * inside @ u.mT + slope.unsqueeze(-1) * out) + back * slope.unsqueeze(-2) @ u.mT
    return spread + _column(function.first(null, null, p), 2) * rest


def _second_of(
    e: Tensor, h: Tensor, p: Tensor | None, lam: Tensor, u: Tensor, null: Tensor | None, function: SpectralFunction
) -> Tensor:
    if null is None:
        return u @ _contract(_rotate(u, e), _rotate(u, h), p, lam, function) @ u.mT
    (e, e_out, e_back, e_rest), (h, h_out, h_back, h_rest) = _split(e, u), _split(h, u)
    pair = function.second(lam.unsqueeze(-1), lam.unsqueeze(-2), _column(null, 2), _column(p, 2))
    single = function.second(lam, null.unsqueeze(-1), null.unsqueeze(-1), _column(p, 1))
    row, column = single.unsqueeze(-1), single.unsqueeze(-2)
    inside = _contract(e, h, p, lam, function) + pair * (e_out @ h_back + h_out @ e_back)
    out = (pair * e) @ h_out + (pair * h) @ e_out + row * (e_out @ h_rest + h_out @ e_rest)
    back = e_back @ (pair * h) + h_back @ (pair * e) + (e_rest @ h_back + h_rest @ e_back) * column
    rest = (e_back * column) @ h_out + (h_back * column) @ e_out
    rest = rest + _column(function.second(null, null, null, p), 2) * (e_rest @ h_rest + h_rest @ e_rest)
    return u @ (inside @ u.mT + out) + back @ u.mT + rest


class _Spectral(Function):
    """g(A) from A and its decomposition; the derivative in A is `_Frechet`, in p the function ∂g/∂p of A."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        a: Tensor, p: Tensor | None, lam: Tensor, u: Tensor, null: Tensor | None, function: SpectralFunction
    ) -> Tensor:
        return _value_of(p, lam, u, null, function)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.function = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 6
        a, p, lam, u, null = ctx.saved_tensors
        grad_a = frechet(a, g, p, None, lam, u, null, ctx.function) if ctx.needs_input_grad[0] else None
        grad_p = None
        if p is not None and ctx.needs_input_grad[1]:
            grad_p = (g * spectral(a, p, lam, u, null, ctx.function.in_parameter())).sum((-2, -1))
        return grad_a, grad_p, None, None, None, None


class _SpectralForwardAD(_Spectral):
    """With forward mode; a jvp in the base class would break fullgraph compilation.

    torch does not differentiate plain operations inside a jvp a second time, so the variation is one call of a
    Function.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Spectral.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:-1])

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, dp: Tensor | None, *_: Any) -> Tensor:
        a, p, lam, u, null = ctx.saved_tensors
        return frechet(a, torch.zeros_like(a) if da is None else da, p, dp, lam, u, null, ctx.function)


class _Frechet(Function):
    """The variation of g(A) in the directions E of A and q of p: U(Γ∘(UᵀEU))Uᵀ + q ∂g/∂p(A); self-adjoint in E."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        a: Tensor,
        e: Tensor,
        p: Tensor | None,
        q: Tensor | None,
        lam: Tensor,
        u: Tensor,
        null: Tensor | None,
        function: SpectralFunction,
    ) -> Tensor:
        out = _first_of(e, p, lam, u, null, function)
        return out if q is None else out + _column(q, 2) * _value_of(p, lam, u, null, function.in_parameter())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.function = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 8
        a, e, p, q, lam, u, null = ctx.saved_tensors
        function, need = ctx.function, ctx.needs_input_grad
        grad_a = grad_e = grad_p = grad_q = None
        if need[0]:
            grad_a = second_frechet(a, e.mT, g, p, lam, u, null, function)
            if q is not None:
                grad_a = grad_a + _column(q, 2) * frechet(a, g, p, None, lam, u, null, function.in_parameter())
        if need[1]:
            grad_e = frechet(a, g, p, None, lam, u, null, function)
        if p is not None and need[2]:
            grad_p = (g * frechet(a, e, p, q, lam, u, null, function.in_parameter())).sum((-2, -1))
        if q is not None and need[3]:
            grad_q = (g * spectral(a, p, lam, u, null, function.in_parameter())).sum((-2, -1))
        return grad_a, grad_e, grad_p, grad_q, None, None, None, None


class _FrechetForwardAD(_Frechet):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Frechet.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:-1])

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, de: Tensor | None, dp: Tensor | None, dq: Tensor | None, *_: Any) -> Tensor:
        a, e, p, q, lam, u, null = ctx.saved_tensors
        function = ctx.function
        out = frechet(a, torch.zeros_like(e) if de is None else de, p, dq, lam, u, null, function)
        if da is not None:
            out = out + second_frechet(a, e, da, p, lam, u, null, function)
            if q is not None:
                out = out + _column(q, 2) * frechet(a, da, p, None, lam, u, null, function.in_parameter())
        if dp is not None:
            out = out + _column(dp, 2) * frechet(a, e, p, q, lam, u, null, function.in_parameter())
        return out


class _SecondFrechet(Function):
    """The second derivative of g at A in the directions E and H; its trilinear form is symmetric."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        a: Tensor,
        e: Tensor,
        h: Tensor,
        p: Tensor | None,
        lam: Tensor,
        u: Tensor,
        null: Tensor | None,
        function: SpectralFunction,
    ) -> Tensor:
        return _second_of(e, h, p, lam, u, null, function)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.function = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 8
        _refuse_third_order(ctx.needs_input_grad[0] or ctx.needs_input_grad[3])
        a, e, h, p, lam, u, null = ctx.saved_tensors
        grad_e = second_frechet(a, h.mT, g, p, lam, u, null, ctx.function) if ctx.needs_input_grad[1] else None
        grad_h = second_frechet(a, e.mT, g, p, lam, u, null, ctx.function) if ctx.needs_input_grad[2] else None
        return None, grad_e, grad_h, *(None,) * 5


class _SecondFrechetForwardAD(_SecondFrechet):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _SecondFrechet.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:-1])

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, de: Tensor | None, dh: Tensor | None, dp: Tensor | None, *_: Any) -> Tensor:
        _refuse_third_order(da is not None or dp is not None)
        a, e, h, p, lam, u, null = ctx.saved_tensors
        out = torch.zeros_like(e)
        if de is not None:
            out = out + second_frechet(a, de, h, p, lam, u, null, ctx.function)
        if dh is not None:
            out = out + second_frechet(a, e, dh, p, lam, u, null, ctx.function)
        return out


def _refuse_third_order(asked: bool) -> None:
    if asked:
        raise OrderError(
            "a third derivative of a matrix function was asked for; first and second derivatives are provided. "
            "Detach the matrix before the third differentiation, or take finite differences of the second derivative."
        )


def spectral(
    a: Tensor, p: Tensor | None, lam: Tensor, u: Tensor, null: Tensor | None, function: SpectralFunction
) -> Tensor:
    """g(A) given the eigendecomposition of A, which is treated as a constant; differentiable in A and p.

    Either ``u`` holds all eigenvectors in columns and ``null`` is None, or ``u`` holds some of them, orthonormal or
    zero, and A acts as ``null`` on their complement.
    """
    kind = _Spectral if torch.compiler.is_compiling() else _SpectralForwardAD
    return apply(kind, a, p, lam, u, null, function)


def frechet(
    a: Tensor,
    e: Tensor,
    p: Tensor | None,
    q: Tensor | None,
    lam: Tensor,
    u: Tensor,
    null: Tensor | None,
    function: SpectralFunction,
) -> Tensor:
    """The variation of g(A) in the directions E of A and q of p; differentiable in A, E, p and q."""
    if not differentiated_again():
        return _Frechet.forward(a, e, p, q, lam, u, null, function)
    return apply(_FrechetForwardAD, a, e, p, q, lam, u, null, function)


def second_frechet(
    a: Tensor,
    e: Tensor,
    h: Tensor,
    p: Tensor | None,
    lam: Tensor,
    u: Tensor,
    null: Tensor | None,
    function: SpectralFunction,
) -> Tensor:
    """The second derivative of g at A in the directions E and H; differentiable in E and H."""
    if not differentiated_again():
        return _second_of(e, h, p, lam, u, null, function)
    return apply(_SecondFrechetForwardAD, a, e, h, p, lam, u, null, function)


def check_domain(lam: Tensor, function: SpectralFunction, what: str, remedy: str) -> None:
    """Raise when an eigenvalue lies outside the domain of g."""
    if lam.numel() == 0 or function.domain == "real":
        return
    if function.domain == "nonzero":
        worst = lam.flatten()[lam.abs().argmin()]
        outside, wanted = worst == 0, "nonzero"
    else:
        worst = lam.min()
        outside = worst < 0 if function.domain == "nonnegative" else worst <= 0
        wanted = function.domain
    if bool(outside):
        raise DomainError(
            f"{function.name} needs {wanted} eigenvalues; the smallest of {what} is {float(worst):.3g} and the largest "
            f"{float(lam.max()):.3g}. {remedy}"
        )


def round_to_domain(lam: Tensor, function: SpectralFunction, dtype: torch.dtype) -> Tensor:
    """Set eigenvalues that are negative by rounding alone to zero, for a function that is defined there.

    ``dtype`` is what the matrices came in: their eigenvalues carry its rounding.
    """
    if function.domain != "nonnegative" or lam.shape[-1] == 0:
        return lam
    share = max(data_rounding(dtype, lam.dtype), 4 * lam.shape[-1] * torch.finfo(lam.dtype).eps)
    return torch.where((lam < 0) & (lam >= -share * lam.abs().amax(-1, keepdim=True)), 0, lam)


def parameter_tensor(p: float | Tensor | None, name: str, batch: torch.Size, like: Tensor) -> Tensor | None:
    """Make a number or a tensor one value per matrix, (*batch,), without waiting for the device."""
    if p is None:
        return None
    if not isinstance(p, Tensor):
        value = torch.scalar_tensor(p, dtype=like.dtype, device=like.device)
        return value.expand(batch) if batch else value
    p = p.to(dtype=like.dtype, device=like.device)
    extra = p.ndim - len(batch)
    try:
        # One value may come with more dimensions than the batch has, as a parameter of shape (1,) does.
        return (p.reshape(p.shape[extra:]) if extra > 0 and p.shape[:extra].numel() == 1 else p).expand(batch)
    except RuntimeError as error:
        raise ShapeError(
            f"{name} must broadcast to the batch shape {tuple(batch)}, one value per matrix; got shape "
            f"{tuple(p.shape)}."
        ) from error


def matrix_function(
    a: Tensor,
    function: FunctionLike,
    *,
    exponent: float | Tensor | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Apply a scalar function to the spectrum of symmetric matrices.

    .. math:: g(A) = U \operatorname{diag}(g(\lambda)) U^\top, \qquad A = U \operatorname{diag}(\lambda) U^\top

    Args:
        a: symmetric matrices ``(*batch, n, n)``; the symmetric part is used. float16 and bfloat16 are accepted.
        function: ``"log"``, ``"sqrt"``, ``"inv_sqrt"``, ``"exp"``, ``"inverse"``, ``"power"``, a pair ``(g,
            divided_difference)`` with two arguments in the second or ``(g, derivative)`` with one, or a
            `matbackprop.functional.SpectralFunction`.
        exponent: the exponent of ``"power"``; a tensor learns and may hold one value a matrix, shape broadcastable to
            ``batch``.
        check: whether values are checked (finite, symmetric, in the domain of g). None checks on the CPU only, so
            that no GPU is waited for; True checks everywhere; False never.
        precision: dtype to compute in, float64 unless given; the result has the dtype of ``a``.

    Returns:
        ``(*batch, n, n)``, symmetric.

    Raises:
        ShapeError, DtypeError: ``a`` is not a batch of square floating-point matrices.
        NonFiniteError, SymmetryError: ``a`` holds NaN or Inf, or is not symmetric.
        DomainError: an eigenvalue lies outside the domain of g, the result overflows, or the function is unknown.
        ConfigurationError: a function of one's own captures a tensor that requires a gradient.

    Gradient:
        First order U(Γ∘(UᵀGU))Uᵀ with Γᵢⱼ = g[λᵢ, λⱼ]; second order through g[λᵢ, λⱼ, λₖ]. Both are exact at repeated
        eigenvalues, where they equal the analytic limit g'(λ) and g''(λ)/2. Forward mode, vmap and fullgraph
        compilation are supported; a third order raises OrderError. Eigenvalues that are negative by rounding alone, of
        the dtype of ``a``, count as zero for sqrt, which has no finite derivative at zero: asking for it raises
        DomainError where values are checked and gives NaN where they are not. Tensors captured in a function of one's
        own receive no gradient; one that requires it is refused.

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
    check_matrix(a, "a", square=True)
    fn, p = resolve_function(function, exponent)
    with autocast_off(a.device.type):
        if looked_at := wants_check(check, a):
            check_finite(a, "a")
            check_symmetric(a, "a", unit=1.0 if fn.name == "exp" else 0.0)
            if isinstance(p, Tensor):
                check_finite(p, "exponent")
        x = symmetrize(a.to(compute_dtype(a.dtype, precision)))
        lam, u = batched_eigh(x.detach())
        lam = round_to_domain(lam, fn, a.dtype)
        if looked_at:
            check_domain(lam, fn, "a", "Add a multiple of the identity, or use second_order_pool with eps > 0.")
            if fn.name == "custom":
                refuse_captured_parameters(fn, lam)
            if fn.domain == "nonnegative" and bool((lam == 0).any()):
                fn = infinite_derivative(fn)
        out = spectral(x, parameter_tensor(p, "exponent", x.shape[:-2], x), lam, u, None, fn)
        if looked_at:
            _check_overflow(out, lam, fn)
        return out.to(a.dtype)


def _check_overflow(out: Tensor, lam: Tensor, function: SpectralFunction) -> None:
    """Raise where g(λ) is too large for the dtype of the computation."""
    if not math.isfinite(out.detach().sum()) and not bool(torch.isfinite(out).all()):
        raise DomainError(
            f"{function.name} overflows {out.dtype}: the eigenvalues of a lie between {float(lam.min()):.3g} and "
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
