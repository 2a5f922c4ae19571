"""A symmetric matrix by its spectrum, and the functions of it with their derivatives, exact at repeated eigenvalues.

With A = U diag(λ) Uᵀ the first derivative of g(A) in a direction E is U(Γ∘(UᵀEU))Uᵀ with Γᵢⱼ = g[λᵢ, λⱼ]
(Daleckii–Krein), and the second in E and H is U(Σₖ g[λᵢ, λₖ, λⱼ] (ẼᵢₖH̃ₖⱼ + H̃ᵢₖẼₖⱼ))Uᵀ. Neither sees the choice of U
inside a repeated eigenvalue, so neither divides by a gap. Three operations, one per order, call each other; each takes
A itself as the differentiable input and the spectrum as a constant, which is why derivatives stay right at ties.
For a complex, Hermitian A, ᵀ is the conjugate transpose here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import differentiated_again, is_differentiated, reverse_mode_only
from matbackprop.divided_differences import BoundFunction, SpectralFunction, is_named
from matbackprop.errors import OrderError
from matbackprop.functional._function import Operation, apply
from matbackprop.numerics import inner, symmetrize

__all__ = ["Spectrum", "attach_captured", "derivative", "frechet", "of_symmetric_part", "second_frechet", "spectral"]

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

    What leaves the span is cleared of it twice: the rounding of E would otherwise meet g''(ε), however small the block.
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
        """g(A), symmetric to the bit."""
        u, values = self.vectors, g.value(self.values)
        if self.rest is None:  # halves first: the sum of two of the largest numbers leaves the range
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


class _Value(Operation):
    """g(A) from A and its spectrum; the derivative in A is `_First`, in p the function ∂g/∂p of A."""

    @staticmethod
    def forward(
        a: Tensor, p: Tensor | None, values: Tensor, vectors: Tensor, rest: Tensor | None, function: SpectralFunction
    ) -> Tensor:
        return Spectrum(values, vectors, rest).value(BoundFunction(function, p))

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        (a, p, *factors, function), (g,) = saved, gradients
        spectrum = Spectrum(*factors)
        grad_a = frechet(a, g, spectrum, function, p) if needed[0] else None
        grad_p = inner(g, spectral(a, spectrum, function.in_parameter(), p)) if needed[1] else None
        return grad_a, grad_p

    @staticmethod
    def tangent(saved: Sequence[Any], da: Tensor | None, dp: Tensor | None, *_: None) -> Tensor:
        # One call of an operation: torch does not differentiate plain operations inside a jvp a second time.
        a, p, *factors, function = saved
        return frechet(a, torch.zeros_like(a) if da is None else da, Spectrum(*factors), function, p, dp)


class _OfSymmetricPart(Operation):
    """g of the symmetric part of A, in the dtype of A: `_Value` and what surrounds it as one node of the graph.

    For small matrices the nodes of conversions and of the symmetric part cost as much as the decomposition. Forward
    mode has to see them, because it does not differentiate plain operations inside a jvp a second time.
    """

    @staticmethod
    def forward(a: Tensor, p: Tensor | None, values: Tensor, vectors: Tensor, function: SpectralFunction) -> Tensor:
        return Spectrum(values, vectors).value(BoundFunction(function, p)).to(a.dtype)

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        (a, p, values, vectors, function), (g,) = saved, gradients
        x = symmetrize(a.to(vectors.dtype)) if differentiated_again() else a
        grads = _Value.adjoint((x, p, values, vectors, None, function), needed, symmetrize(g.to(vectors.dtype)))
        return None if grads[0] is None else grads[0].to(a.dtype), grads[1]


class _Sum(Operation):
    """X + Y where it is made inside of a tangent, whose plain operations torch does not differentiate again."""

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


class _First(Operation):
    """The variation of g(A) in the directions E of A and q of p: U(Γ∘(UᵀEU))Uᵀ + q ∂g/∂p(A); self-adjoint in E."""

    @staticmethod
    def forward(
        a: Tensor,
        e: Tensor,
        p: Tensor | None,
        q: Tensor | None,
        values: Tensor,
        vectors: Tensor,
        rest: Tensor | None,
        function: SpectralFunction,
    ) -> Tensor:
        return _variation(e, q, Spectrum(values, vectors, rest), BoundFunction(function, p))

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        (a, e, p, q, *factors, function), (g,) = saved, gradients
        spectrum = Spectrum(*factors)
        grad_a = grad_e = grad_p = grad_q = None
        if needed[0]:
            grad_a = second_frechet(a, e.mH, g, spectrum, function, p)
            if q is not None:
                grad_a = grad_a + q[..., None, None] * frechet(a, g, spectrum, function.in_parameter(), p)
        if needed[1]:
            grad_e = frechet(a, g, spectrum, function, p)
        if needed[2]:
            grad_p = inner(g, frechet(a, e, spectrum, function.in_parameter(), p, q))
        if needed[3]:
            grad_q = inner(g, spectral(a, spectrum, function.in_parameter(), p))
        return grad_a, grad_e, grad_p, grad_q

    @staticmethod
    def tangent(
        saved: Sequence[Any], da: Tensor | None, de: Tensor | None, dp: Tensor | None, dq: Tensor | None, *_: None
    ) -> Tensor:
        a, e, p, q, *factors, function = saved
        spectrum = Spectrum(*factors)
        parts = [frechet(a, torch.zeros_like(e) if de is None else de, spectrum, function, p, dq)]
        if da is not None:
            parts.append(second_frechet(a, e, da, spectrum, function, p))
            if q is not None:
                parts.append(q[..., None, None] * frechet(a, da, spectrum, function.in_parameter(), p))
        if dp is not None:
            parts.append(dp[..., None, None] * frechet(a, e, spectrum, function.in_parameter(), p, q))
        return functools.reduce(functools.partial(apply, _Sum), parts)


class _Second(Operation):
    """The second derivative of g at A in the directions E and H; its trilinear form is symmetric."""

    @staticmethod
    def forward(
        a: Tensor,
        e: Tensor,
        h: Tensor,
        p: Tensor | None,
        values: Tensor,
        vectors: Tensor,
        rest: Tensor | None,
        function: SpectralFunction,
    ) -> Tensor:
        return Spectrum(values, vectors, rest).second(BoundFunction(function, p), e, h)

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        (a, e, h, p, *factors, function), (g,) = saved, gradients
        _refuse_third_order(needed[0] or needed[3])
        spectrum = Spectrum(*factors)
        grad_e = second_frechet(a, h.mH, g, spectrum, function, p) if needed[1] else None
        grad_h = second_frechet(a, e.mH, g, spectrum, function, p) if needed[2] else None
        return None, grad_e, grad_h

    @staticmethod
    def tangent(
        saved: Sequence[Any], da: Tensor | None, de: Tensor | None, dh: Tensor | None, dp: Tensor | None, *_: None
    ) -> Tensor:
        _refuse_third_order(da is not None or dp is not None)
        a, e, h, p, *factors, function = saved
        spectrum = Spectrum(*factors)
        pairs = [(de, h)] * (de is not None) + [(e, dh)] * (dh is not None)
        parts = [second_frechet(a, x, y, spectrum, function, p) for x, y in pairs]
        return functools.reduce(functools.partial(apply, _Sum), parts or [torch.zeros_like(e)])


def _refuse_third_order(asked: bool) -> None:
    if asked:
        raise OrderError(
            "a third derivative of a matrix function was asked for; first and second derivatives are provided. "
            "Detach the matrix before the third differentiation, or take finite differences of the second derivative."
        )


def _variation(e: Tensor, q: Tensor | None, spectrum: Spectrum, g: BoundFunction) -> Tensor:
    out = spectrum.first(g, e)
    return out if q is None else out + q[..., None, None] * spectrum.value(g.in_exponent())


class _OneOrder(Operation):
    """A gradient that must not be differentiated: how captured tensors and the matrix move it is not known here."""

    @staticmethod
    def forward(g: Tensor, *depends_on: Tensor) -> Tensor:
        return g.clone()

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        raise OrderError(
            "a second derivative was asked for of a function of one's own that captures tensors which learn; one "
            'order is provided. Detach them, or use function="power", whose exponent has two.'
        )

    tangent = adjoint


class _Attached(Operation):
    """The first input, with the derivatives of both: by the second, captured tensors receive theirs."""

    @staticmethod
    def forward(out: Tensor, moving: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        g = apply(_OneOrder, *gradients, *saved) if differentiated_again() else gradients[0]
        return g, g

    @staticmethod
    def tangent(saved: Sequence[Any], d_out: Tensor | None, d_moving: Tensor | None) -> Tensor:
        parts = [d for d in (d_out, d_moving) if d is not None]
        return sum(parts[1:], parts[0])


def attach_captured(out: Tensor, function: SpectralFunction, lam: Tensor, value: Callable[[], Tensor]) -> Tensor:
    """``out`` = g(A), where tensors that a function of one's own captures receive their gradient.

    ``value`` computes it from eigenvalues and eigenvectors, which are constants for it; it is called where λ shows that
    the function captures a tensor that learns.
    """
    if is_named(function) or not is_differentiated(function.value(lam.detach())):
        return out
    return apply(_Attached, out, value().to(out.dtype))


def spectral(a: Tensor, spectrum: Spectrum, function: SpectralFunction, p: Tensor | None = None) -> Tensor:
    """g(A) given the spectrum of A; differentiable in A and in the exponent p ``(*batch,)``."""
    return apply(_Value, a, p, *spectrum, function)


def of_symmetric_part(
    a: Tensor, x: Tensor, spectrum: Spectrum, function: SpectralFunction, p: Tensor | None = None
) -> Tensor:
    """g(X) in the dtype of A, given the spectrum of X, the symmetric part of A in the dtype of the computation."""
    if reverse_mode_only():
        return apply(_OfSymmetricPart, a, p, spectrum.values, spectrum.vectors, function)
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
    return apply(_First, a, e, p, q, *spectrum, function)


def derivative(a: Tensor, e: Tensor, spectrum: Spectrum, function: SpectralFunction) -> Tensor:
    """`frechet` as a value and not inside of a derivative: compiled graphs differentiate it, too."""
    return apply(_First, a, e, None, None, *spectrum, function)


def second_frechet(
    a: Tensor, e: Tensor, h: Tensor, spectrum: Spectrum, function: SpectralFunction, p: Tensor | None = None
) -> Tensor:
    """The second derivative of g at A in the directions E and H; differentiable in E and H."""
    if not differentiated_again():
        return spectrum.second(BoundFunction(function, p), e, h)
    return apply(_Second, a, e, h, p, *spectrum, function)
