"""Functions of a symmetric matrix given its spectrum, with derivatives that are exact at repeated eigenvalues.

With A = U diag(λ) Uᵀ the first derivative of g(A) in a direction E is U(Γ∘(UᵀEU))Uᵀ with Γᵢⱼ = g[λᵢ, λⱼ]
(Daleckii–Krein), and the second in E and H is U(Σₖ g[λᵢ, λₖ, λⱼ] (ẼᵢₖH̃ₖⱼ + H̃ᵢₖẼₖⱼ))Uᵀ. Neither depends on the
choice of U inside a repeated eigenvalue, so neither divides by a gap. Three operations, one per order, call each
other; each takes A as the differentiable input and the spectrum as a constant, so derivatives are exact at ties.
For a complex, Hermitian A, ᵀ is the conjugate transpose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import differentiated_again, is_differentiated, reverse_mode_only
from matbackprop.divided_differences import BoundFunction, SpectralFunction, in_parameter
from matbackprop.errors import ConfigurationError, OrderError
from matbackprop.functional._function import Operation, apply
from matbackprop.numerics import inner, symmetrize

__all__ = ["Spectrum", "derivative", "frechet", "of_symmetric_part", "refuse_captured", "second_frechet", "spectral"]

_CONTRACTION_ENTRIES = 2**22  # entries of the table g[λᵢ, λₖ, λⱼ] held at one time


def _contract(e: Tensor, h: Tensor, lam: Tensor, g: BoundFunction) -> Tensor:
    """Σₖ g[λᵢ, λₖ, λⱼ] (Eᵢₖ Hₖⱼ + Hᵢₖ Eₖⱼ), a slice of k at a time."""
    n = lam.shape[-1]
    rows, columns = lam[..., :, None, None], lam[..., None, None, :]
    total = torch.zeros_like(e)
    step = max(1, min(n, _CONTRACTION_ENTRIES // max(1, lam.numel() * n)))
    for start in range(0, n, step):
        k = slice(start, start + step)
        products = e[..., :, k, None] * h[..., None, k, :] + h[..., :, k, None] * e[..., None, k, :]
        total = total + (g.second(rows, lam[..., None, k, None], columns) * products).sum(-2)
    return total


def _blocks(e: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The blocks of E inside the span of the columns of u, out of it, back into it, and inside its complement.

    The block outside the span is orthogonalized twice; otherwise g''(ε) would amplify the rounding errors of E.
    """
    left, right = u.mH @ e, e @ u
    inside = left @ u
    out, back = left - inside @ u.mH, right - u @ inside
    rest = e - u @ out - right @ u.mH
    rest = rest - u @ (u.mH @ rest)
    return inside, out - (out @ u) @ u.mH, back - u @ (u.mH @ back), rest - (rest @ u) @ u.mH


class Spectrum(NamedTuple):
    """Eigenvalues and eigenvectors of a symmetric matrix, as constants.

    ``vectors`` holds all eigenvectors in columns and ``rest`` is None; or it holds some of them, orthonormal or zero,
    and the matrix acts as the number ``rest`` on their complement, as the covariance of few features does.

    Args:
        values: λ ``(*batch, k)``.
        vectors: ``(*batch, n, k)``.
        rest: ``(*batch,)`` or None.
    """

    values: Tensor
    vectors: Tensor
    rest: Tensor | None = None

    def value(self, g: BoundFunction) -> Tensor:
        """g(A), bitwise symmetric."""
        u, values = self.vectors, g.value(self.values)
        if self.rest is None:  # halved first, because the sum of two large numbers may overflow
            half = (u * (0.5 * values).unsqueeze(-2)) @ u.mH
            return half + half.mH
        rest = g.value(self.rest).unsqueeze(-1)
        out = symmetrize((u * (values - rest).unsqueeze(-2)) @ u.mH)
        return out + torch.diag_embed(rest.expand(*rest.shape[:-1], u.shape[-2]))

    def first(self, g: BoundFunction, e: Tensor) -> Tensor:
        """The derivative of g at A in the direction E."""
        lam, u, null = self
        gamma = g.first(lam.unsqueeze(-1), lam.unsqueeze(-2))
        if null is None:
            return u @ (gamma * (u.mH @ e @ u)) @ u.mH
        inside, out, back, rest = _blocks(e, u)
        slope = g.first(lam, null.unsqueeze(-1))
        spread = u @ (gamma * inside @ u.mH + slope.unsqueeze(-1) * out) + back * slope.unsqueeze(-2) @ u.mH
        return spread + g.first(null, null)[..., None, None] * rest

    def second(self, g: BoundFunction, e: Tensor, h: Tensor) -> Tensor:
        """The second derivative of g at A in the directions E and H."""
        lam, u, null = self
        if null is None:
            return u @ _contract(u.mH @ e @ u, u.mH @ h @ u, lam, g) @ u.mH
        (e, e_out, e_back, e_rest), (h, h_out, h_back, h_rest) = _blocks(e, u), _blocks(h, u)
        pair = g.second(lam.unsqueeze(-1), lam.unsqueeze(-2), null[..., None, None])
        single = g.second(lam, null.unsqueeze(-1), null.unsqueeze(-1))
        row, column = single.unsqueeze(-1), single.unsqueeze(-2)
        inside = _contract(e, h, lam, g) + pair * (e_out @ h_back + h_out @ e_back)
        out = (pair * e) @ h_out + (pair * h) @ e_out + row * (e_out @ h_rest + h_out @ e_rest)
        back = e_back @ (pair * h) + h_back @ (pair * e) + (e_rest @ h_back + h_rest @ e_back) * column
        rest = (e_back * column) @ h_out + (h_back * column) @ e_out
        rest = rest + g.second(null, null, null)[..., None, None] * (e_rest @ h_rest + h_rest @ e_rest)
        return u @ (inside @ u.mH + out) + back @ u.mH + rest


class _OfValue(NamedTuple):
    a: Tensor
    spectrum: Spectrum
    function: SpectralFunction
    p: Tensor | None


class _OfFirst(NamedTuple):
    a: Tensor
    e: Tensor
    q: Tensor | None
    spectrum: Spectrum
    function: SpectralFunction
    p: Tensor | None


class _OfSecond(NamedTuple):
    a: Tensor
    e: Tensor
    h: Tensor
    spectrum: Spectrum
    function: SpectralFunction
    p: Tensor | None


class _Value(Operation):
    """g(A; θ); the derivative in A is `_First`, in θ that of g on the spectrum."""

    @staticmethod
    def forward(
        a: Tensor, values: Tensor, vectors: Tensor, rest: Tensor | None, function: SpectralFunction, p: Tensor | None
    ) -> Tensor:
        return Spectrum(values, vectors, rest).value(BoundFunction(function, p))

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _OfValue:
        a, values, vectors, rest, function, p = inputs
        return _OfValue(a, Spectrum(values, vectors, rest), function, p)

    @staticmethod
    def adjoint(saved: _OfValue, needed: Sequence[bool], *gradients: Any) -> Any:
        (a, spectrum, function, p), (g,) = saved, gradients
        grad_a = frechet(a, g, spectrum, function, p) if needed[0] else None
        if not needed[5]:
            return grad_a
        if function.builtin:
            grad_p = inner(g, spectral(a, spectrum, in_parameter(function), p))
        else:
            grad_p = apply(_ParameterGradient, a, g, None, *spectrum, function, p)
        return grad_a, None, None, None, None, grad_p

    @staticmethod
    def tangent(saved: _OfValue, *directions: Tensor | None) -> Tensor:
        # One operation, because torch does not differentiate plain operations inside a jvp a second time.
        (a, spectrum, function, p), da, dp = saved, directions[0], directions[5]
        da = torch.zeros_like(a) if da is None else da
        if function.builtin:
            return frechet(a, da, spectrum, function, p, dp)
        out = frechet(a, da, spectrum, function, p)
        return out if dp is None else apply(_Sum, out, apply(_ParameterTangent, a, *spectrum, function, p, dp))


class _OfSymmetricPart(Operation):
    """g of the symmetric part of A, in the dtype of A: `_Value` and its conversions as one node of the graph.

    For small matrices the nodes of conversions and of the symmetric part cost as much as the decomposition. Forward
    mode needs them, because it does not differentiate plain operations inside a jvp a second time.
    """

    @staticmethod
    def forward(a: Tensor, values: Tensor, vectors: Tensor, function: SpectralFunction, p: Tensor | None) -> Tensor:
        return Spectrum(values, vectors).value(BoundFunction(function, p)).to(a.dtype)

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        (a, values, vectors, function, p), (g,) = saved, gradients
        x = symmetrize(a.to(vectors.dtype)) if differentiated_again() else a
        inside = _OfValue(x, Spectrum(values, vectors), function, p)
        flags = (needed[0], False, False, False, False, needed[4])
        grads = _Value.adjoint(inside, flags, symmetrize(g.to(vectors.dtype)))
        grad_a, grad_p = (grads[0], grads[5]) if needed[4] else (grads, None)
        return None if grad_a is None else grad_a.to(a.dtype), None, None, None, grad_p


class _Sum(Operation):
    """X + Y inside a tangent, whose plain operations torch does not differentiate again."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        return gradients[0], gradients[0]

    @staticmethod
    def tangent(saved: Sequence[Any], *directions: Tensor | None) -> Tensor:
        given = [d for d in directions if d is not None]
        return functools.reduce(functools.partial(apply, _Sum), given)


def _refuse_order(*_: Any) -> Any:
    raise OrderError(
        "A derivative in the parameters of a user-defined function was requested that is not provided: third orders, "
        "and second orders by torch.func. Differentiate twice with torch.autograd.grad, or detach the parameters."
    )


def _in_params(spectrum: Spectrum, function: SpectralFunction, e: Tensor | None) -> Callable[[Tensor], Tensor]:
    """θ ↦ g(A; θ), or its derivative in the direction E."""
    if e is None:
        return lambda p: spectrum.value(BoundFunction(function, p))
    return lambda p: spectrum.first(BoundFunction(function, p), e)


def _pull(function: Callable[[Tensor], Tensor], p: Tensor, g: Tensor) -> Tensor:
    """A vector-Jacobian product."""
    pull: Any = torch.func.vjp(function, p)[1]
    return pull(g)[0]


def _push(function: Callable[[Tensor], Tensor], p: Tensor, dp: Tensor) -> Tensor:
    """A Jacobian-vector product, as the transpose of the vector-Jacobian product, which is linear."""
    pulled: Any = torch.func.vjp(function, p)
    value, pull = pulled
    push: Any = torch.func.vjp(lambda g: pull(g)[0], torch.zeros_like(value))[1]
    return push(dp)[0]


class _OfParameters(NamedTuple):
    g: Tensor
    e: Tensor | None
    spectrum: Spectrum
    function: SpectralFunction
    p: Tensor


class _ParameterGradient(Operation):
    """Gradient in θ of ⟨G, g(A; θ)⟩, or of ⟨G, its derivative in the direction E⟩, by autograd through g."""

    @staticmethod
    def forward(
        a: Tensor,
        g: Tensor,
        e: Tensor | None,
        values: Tensor,
        vectors: Tensor,
        rest: Tensor | None,
        function: SpectralFunction,
        p: Tensor,
    ) -> Tensor:
        return _pull(_in_params(Spectrum(values, vectors, rest), function, e), p, g)

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _OfParameters:
        _, g, e, values, vectors, rest, function, p = inputs
        return _OfParameters(g, e, Spectrum(values, vectors, rest), function, p)

    @staticmethod
    def adjoint(saved: _OfParameters, needed: Sequence[bool], *gradients: Any) -> Any:
        (g, e, spectrum, function, p), (dp,) = saved, gradients
        if e is not None or differentiated_again():
            _refuse_order()
        value = _in_params(spectrum, function, None)
        grad_a = _push(_in_params(spectrum, function, g), p, dp) if needed[0] else None
        grad_g = _push(value, p, dp) if needed[1] else None
        pairing = inner(g, g)
        grad_p = _pull(lambda p: inner(g, _push(value, p, dp)), p, torch.ones_like(pairing))
        return grad_a, grad_g, None, None, None, None, None, grad_p

    tangent = staticmethod(_refuse_order)


class _ParameterTangent(Operation):
    """The variation of g(A; θ) with θ."""

    @staticmethod
    def forward(
        a: Tensor,
        values: Tensor,
        vectors: Tensor,
        rest: Tensor | None,
        function: SpectralFunction,
        p: Tensor,
        dp: Tensor,
    ) -> Tensor:
        return _push(_in_params(Spectrum(values, vectors, rest), function, None), p, dp)

    adjoint = staticmethod(_refuse_order)
    tangent = staticmethod(_refuse_order)


class _First(Operation):
    """The variation of g(A) in the directions E of A and q of p: U(Γ∘(UᵀEU))Uᵀ + q ∂g/∂p(A); self-adjoint in E."""

    @staticmethod
    def forward(
        a: Tensor,
        e: Tensor,
        q: Tensor | None,
        values: Tensor,
        vectors: Tensor,
        rest: Tensor | None,
        function: SpectralFunction,
        p: Tensor | None,
    ) -> Tensor:
        return _variation(e, q, Spectrum(values, vectors, rest), BoundFunction(function, p))

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _OfFirst:
        a, e, q, values, vectors, rest, function, p = inputs
        return _OfFirst(a, e, q, Spectrum(values, vectors, rest), function, p)

    @staticmethod
    def adjoint(saved: _OfFirst, needed: Sequence[bool], *gradients: Any) -> Any:
        (a, e, q, spectrum, function, p), (g,) = saved, gradients
        grad_a = grad_e = grad_p = grad_q = None
        if needed[0]:
            grad_a = second_frechet(a, e.mH, g, spectrum, function, p)
            if q is not None:
                grad_a = grad_a + q[..., None, None] * frechet(a, g, spectrum, in_parameter(function), p)
        if needed[1]:
            grad_e = frechet(a, g, spectrum, function, p)
        if needed[2]:
            grad_q = inner(g, spectral(a, spectrum, in_parameter(function), p))
        if needed[7]:
            if function.builtin:
                grad_p = inner(g, frechet(a, e, spectrum, in_parameter(function), p, q))
            else:
                grad_p = apply(_ParameterGradient, a, g, e, *spectrum, function, p)
        return grad_a, grad_e, grad_q, None, None, None, None, grad_p

    @staticmethod
    def tangent(saved: _OfFirst, *directions: Tensor | None) -> Tensor:
        a, e, q, spectrum, function, p = saved
        (da, de, dq), dp = directions[:3], directions[7]
        parts = [frechet(a, torch.zeros_like(e) if de is None else de, spectrum, function, p, dq)]
        if da is not None:
            parts.append(second_frechet(a, e, da, spectrum, function, p))
            if q is not None:
                parts.append(q[..., None, None] * frechet(a, da, spectrum, in_parameter(function), p))
        if dp is not None:
            if not function.builtin:
                _refuse_order()
            parts.append(dp[..., None, None] * frechet(a, e, spectrum, in_parameter(function), p, q))
        return functools.reduce(functools.partial(apply, _Sum), parts)


class _Second(Operation):
    """The second derivative of g at A in the directions E and H; its trilinear form is symmetric."""

    @staticmethod
    def forward(
        a: Tensor,
        e: Tensor,
        h: Tensor,
        values: Tensor,
        vectors: Tensor,
        rest: Tensor | None,
        function: SpectralFunction,
        p: Tensor | None,
    ) -> Tensor:
        return Spectrum(values, vectors, rest).second(BoundFunction(function, p), e, h)

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> _OfSecond:
        a, e, h, values, vectors, rest, function, p = inputs
        return _OfSecond(a, e, h, Spectrum(values, vectors, rest), function, p)

    @staticmethod
    def adjoint(saved: _OfSecond, needed: Sequence[bool], *gradients: Any) -> Any:
        (a, e, h, spectrum, function, p), (g,) = saved, gradients
        _refuse_third_order(needed[0] or needed[7])
        grad_e = second_frechet(a, h.mH, g, spectrum, function, p) if needed[1] else None
        grad_h = second_frechet(a, e.mH, g, spectrum, function, p) if needed[2] else None
        return None, grad_e, grad_h

    @staticmethod
    def tangent(saved: _OfSecond, *directions: Tensor | None) -> Tensor:
        a, e, h, spectrum, function, p = saved
        (da, de, dh), dp = directions[:3], directions[7]
        _refuse_third_order(da is not None or dp is not None)
        pairs = [(x, y) for x, y in ((de, h), (e, dh)) if x is not None and y is not None]
        parts = [second_frechet(a, x, y, spectrum, function, p) for x, y in pairs]
        return functools.reduce(functools.partial(apply, _Sum), parts or [torch.zeros_like(e)])


def _refuse_third_order(requested: bool) -> None:
    if requested:
        raise OrderError(
            "A third derivative of a matrix function was requested. Two orders are provided: detach the matrix before "
            "the third differentiation, or take finite differences of the second derivative."
        )


def _variation(e: Tensor, q: Tensor | None, spectrum: Spectrum, g: BoundFunction) -> Tensor:
    out = spectrum.first(g, e)
    return out if q is None else out + q[..., None, None] * spectrum.value(g.in_parameter())


def refuse_captured(function: SpectralFunction, values: Tensor, p: Tensor | None) -> None:
    """Raise if a user-defined function depends on tensors with a gradient that are not among its parameters."""
    if function.builtin or values.numel() == 0 or not torch.is_grad_enabled():
        return
    fixed = BoundFunction(function, None if p is None else p.detach())
    if is_differentiated(fixed.value(values.detach())):
        raise ConfigurationError(
            f"The function {function.name!r} captures a tensor that requires a gradient, which it would not receive. "
            "Pass the tensor in params= and write the function as g(x, *params)."
        )


def spectral(a: Tensor, spectrum: Spectrum, function: SpectralFunction, p: Tensor | None = None) -> Tensor:
    """g(A; θ) given the spectrum of A; differentiable in A and θ."""
    return apply(_Value, a, *spectrum, function, p)


def of_symmetric_part(
    a: Tensor, x: Tensor, spectrum: Spectrum, function: SpectralFunction, p: Tensor | None = None
) -> Tensor:
    """g(X) in the dtype of A, given the spectrum of X, the symmetric part of A in the dtype of the computation."""
    if reverse_mode_only():
        return apply(_OfSymmetricPart, a, spectrum.values, spectrum.vectors, function, p)
    return spectral(x, spectrum, function, p).to(a.dtype)


def frechet(
    a: Tensor,
    e: Tensor,
    spectrum: Spectrum,
    function: SpectralFunction,
    p: Tensor | None = None,
    q: Tensor | None = None,
) -> Tensor:
    """The variation of g(A) in the directions E of A and q of p; differentiable in A, E, p and q."""
    if not differentiated_again():
        return _variation(e, q, spectrum, BoundFunction(function, p))
    return apply(_First, a, e, q, *spectrum, function, p)


def derivative(a: Tensor, e: Tensor, spectrum: Spectrum, function: SpectralFunction) -> Tensor:
    """`frechet` as a value and not inside a derivative: compiled graphs differentiate it, too."""
    return apply(_First, a, e, None, *spectrum, function, None)


def second_frechet(
    a: Tensor, e: Tensor, h: Tensor, spectrum: Spectrum, function: SpectralFunction, p: Tensor | None = None
) -> Tensor:
    """The second derivative of g at A in the directions E and H; differentiable in E and H."""
    if not differentiated_again():
        return spectrum.second(BoundFunction(function, p), e, h)
    return apply(_Second, a, e, h, *spectrum, function, p)
