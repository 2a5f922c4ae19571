"""Functions of a symmetric matrix given its spectrum, with derivatives that are exact at repeated eigenvalues.

With A = U diag(λ) Uᵀ the first derivative of g(A) in a direction E is U(Γ∘(UᵀEU))Uᵀ with Γᵢⱼ = g[λᵢ, λⱼ]
(Daleckii–Krein), and the second in E and H is U(Σₖ g[λᵢ, λₖ, λⱼ] (ẼᵢₖH̃ₖⱼ + H̃ᵢₖẼₖⱼ))Uᵀ. `_Derivative` has all
orders, with A as the differentiable input and the spectrum as a constant. ᵀ is the conjugate transpose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from matbackprop._torch import differentiated_again, is_differentiated, reverse_mode_only
from matbackprop.divided_differences import THIRD_ORDER, BoundFunction, SpectralFunction, in_parameter
from matbackprop.errors import ConfigurationError, OrderError
from matbackprop.functional._function import Operation, apply
from matbackprop.numerics import inner, symmetrize

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
    """The blocks of E inside the span of the columns of u, out of it, back into it, and inside its complement."""
    # Orthogonalized twice, because g''(ε) amplifies rounding errors.
    left, right = u.mH @ e, e @ u
    inside = left @ u
    out, back = left - inside @ u.mH, right - u @ inside
    rest = e - u @ out - right @ u.mH
    rest = rest - u @ (u.mH @ rest)
    return inside, out - (out @ u) @ u.mH, back - u @ (u.mH @ back), rest - (rest @ u) @ u.mH


class Spectrum(NamedTuple):
    """Eigenvalues and eigenvectors of a symmetric matrix, as constants.

    ``vectors`` has all eigenvectors in columns, or some of them, orthonormal or zero, if the matrix acts as the number
    ``rest`` on their complement, as the covariance of few features does.
    """

    values: Tensor  # (*batch, k)
    vectors: Tensor  # (*batch, n, k)
    rest: Tensor | None = None  # (*batch,)

    def value(self, g: BoundFunction) -> Tensor:
        u, values = self.vectors, g.value(self.values)
        if self.rest is None:  # halved first, because the sum of two large numbers may overflow
            half = (u * (0.5 * values).unsqueeze(-2)) @ u.mH
            return half + half.mH
        rest = g.value(self.rest).unsqueeze(-1)
        out = symmetrize((u * (values - rest).unsqueeze(-2)) @ u.mH)
        return out + torch.diag_embed(rest.expand(*rest.shape[:-1], u.shape[-2]))

    def first(self, g: BoundFunction, e: Tensor) -> Tensor:
        lam, u, null = self
        gamma = g.first(lam.unsqueeze(-1), lam.unsqueeze(-2))
        if null is None:
            return u @ (gamma * (u.mH @ e @ u)) @ u.mH
        inside, out, back, rest = _blocks(e, u)
        slope = g.first(lam, null.unsqueeze(-1))
        spread = u @ (gamma * inside @ u.mH + slope.unsqueeze(-1) * out) + back * slope.unsqueeze(-2) @ u.mH
        return spread + g.first(null, null)[..., None, None] * rest

    def second(self, g: BoundFunction, e: Tensor, h: Tensor) -> Tensor:
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

    def derivative(self, g: BoundFunction, *directions: Tensor) -> Tensor:
        """The derivative of g at A in up to two directions; g(A) without any."""
        if len(directions) > 2:
            raise OrderError(THIRD_ORDER)
        return (self.value, self.first, self.second)[len(directions)](g, *directions)


class Point(NamedTuple):
    """A function g(·; p) at a matrix A with a known spectrum: differentiable in A and p."""

    a: Tensor
    spectrum: Spectrum
    function: SpectralFunction
    p: Tensor | None = None

    def derivative(self, *directions: Tensor) -> Tensor:
        """Dᵏg(A)[E₁, …, E_k] for use inside a derivative: an operation only if it is differentiated again."""
        if not differentiated_again():
            return self.spectrum.derivative(BoundFunction(self.function, self.p), *directions)
        return apply(_Derivative, *self.inputs(*directions))

    def inputs(self, *directions: Tensor) -> tuple[Any, ...]:
        """The inputs of the operations below, always two directions, because torch.compile counts the arguments."""
        if len(directions) > 2:
            raise OrderError(THIRD_ORDER)
        return self.a, self.p, self.function, *self.spectrum, *(*directions, None, None)[:2]

    def in_parameter(self) -> Point:
        return self._replace(function=in_parameter(self.function))

    def parameter_gradient(self, g: Tensor, *directions: Tensor) -> Tensor:
        """The gradient of ⟨G, Dᵏg(A; p)[E₁, …, E_k]⟩ in p."""
        if self.function.builtin:
            return inner(g, self.in_parameter().derivative(*directions))
        return apply(_ParameterGradient, *self.inputs(g, *directions))


class _Saved(NamedTuple):
    point: Point
    directions: tuple[Tensor, ...]


def _saved(inputs: tuple[Any, ...], outputs: Tensor | None) -> _Saved:
    a, p, function, values, vectors, rest, *directions = inputs
    given = tuple(e for e in directions if e is not None)
    return _Saved(Point(a, Spectrum(values, vectors, rest), function, p), given)


class _Derivative(Operation):
    """Dᵏg(A; p)[E₁, …, E_k] for k = 0, 1, 2: symmetric in the directions and self-adjoint in each."""

    save = staticmethod(_saved)

    @staticmethod
    def forward(
        a: Tensor,
        p: Tensor | None,
        function: SpectralFunction,
        values: Tensor,
        vectors: Tensor,
        rest: Tensor | None,
        e: Tensor | None,
        h: Tensor | None,
    ) -> Tensor:
        directions = [x for x in (e, h) if x is not None]
        return Spectrum(values, vectors, rest).derivative(BoundFunction(function, p), *directions)

    @staticmethod
    def adjoint(saved: _Saved, needed: Sequence[bool], g: Tensor) -> Any:
        point, directions = saved
        adjoints = [e.mH for e in directions]
        grad_a = point.derivative(*adjoints, g) if needed[0] else None
        grad_p = point.parameter_gradient(g, *directions) if needed[1] else None
        grads: list[Tensor | None] = [None, None]
        for i in range(len(adjoints)):
            if needed[6 + i]:
                grads[i] = point.derivative(*adjoints[:i], *adjoints[i + 1 :], g)
        return grad_a, grad_p, None, None, None, None, *grads

    @staticmethod
    def tangent(
        saved: _Saved,
        da: Tensor | None,
        dp: Tensor | None,
        _function: None,
        _values: None,
        _vectors: None,
        _rest: None,
        *changes: Tensor | None,
    ) -> Tensor:
        # Operations only, because torch does not differentiate plain ones inside a jvp a second time.
        point, directions = saved
        terms = []
        if da is not None:
            terms.append(point.derivative(*directions, da))
        for i, change in enumerate(changes):
            if change is not None:
                terms.append(point.derivative(*directions[:i], change, *directions[i + 1 :]))
        if dp is not None and point.function.builtin:
            terms.append(apply(_Scaled, dp, point.in_parameter().derivative(*directions)))
        elif dp is not None:
            if directions:
                _unsupported_order()
            terms.append(apply(_ParameterTangent, *point.inputs(dp)))
        return _total(terms)


class _OfSymmetricPart(Operation):
    """g of the symmetric part of A, in the dtype of A: `_Derivative` and its conversions as one node of the graph.

    For small matrices these nodes take a sixth of the time. Forward mode needs them, because it does not differentiate
    plain operations inside a jvp a second time.
    """

    @staticmethod
    def forward(a: Tensor, values: Tensor, vectors: Tensor, function: SpectralFunction, p: Tensor | None) -> Tensor:
        return Spectrum(values, vectors).value(BoundFunction(function, p)).to(a.dtype)

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> Point:
        a, values, vectors, function, p = inputs
        return Point(a, Spectrum(values, vectors), function, p)

    @staticmethod
    def adjoint(point: Point, needed: Sequence[bool], g: Tensor) -> Any:
        a, dtype = point.a, point.spectrum.vectors.dtype
        if differentiated_again():
            point = point._replace(a=symmetrize(a.to(dtype)))
        g = symmetrize(g.to(dtype))
        grad_a = point.derivative(g).to(a.dtype) if needed[0] else None
        return grad_a, None, None, None, point.parameter_gradient(g) if needed[4] else None


class _Sum(Operation):
    """X + Y inside a tangent."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def adjoint(saved: Sequence[Tensor], needed: Sequence[bool], g: Tensor) -> tuple[Tensor, Tensor]:
        return g, g

    @staticmethod
    def tangent(saved: Sequence[Tensor], *directions: Tensor | None) -> Tensor:
        return _total([d for d in directions if d is not None])


def _total(terms: Sequence[Tensor]) -> Tensor:
    return functools.reduce(functools.partial(apply, _Sum), terms)


class _Scaled(Operation):
    """qX inside a tangent, with one number q per matrix."""

    @staticmethod
    def forward(q: Tensor, x: Tensor) -> Tensor:
        return q[..., None, None] * x

    @staticmethod
    def adjoint(saved: tuple[Tensor, Tensor], needed: Sequence[bool], g: Tensor) -> tuple[Tensor, Tensor]:
        q, x = saved
        return inner(x, g), q[..., None, None] * g

    @staticmethod
    def tangent(saved: tuple[Tensor, Tensor], dq: Tensor | None, dx: Tensor | None) -> Tensor:
        q, x = saved
        return _total([apply(_Scaled, *factors) for factors in ((dq, x), (q, dx)) if None not in factors])


def _unsupported_order(*_: Any) -> Any:
    raise OrderError(
        "A derivative in the parameters of a user-defined function was requested that is not provided: third orders, "
        "and second orders by torch.func. Differentiate twice with torch.autograd.grad, or detach the parameters."
    )


def _pull(function: Callable[[Tensor], Tensor], p: Tensor, g: Tensor) -> Tensor:
    pull: Any = torch.func.vjp(function, p)[1]
    return pull(g)[0]


def _push(function: Callable[[Tensor], Tensor], p: Tensor, dp: Tensor) -> Tensor:
    """A Jacobian-vector product, as the transpose of the vector-Jacobian product, which is linear."""
    pulled: Any = torch.func.vjp(function, p)
    value, pull = pulled
    push: Any = torch.func.vjp(lambda g: pull(g)[0], torch.zeros_like(value))[1]
    return push(dp)[0]


def _in_params(point: Point, *directions: Tensor) -> Callable[[Tensor], Tensor]:
    """θ ↦ g(A; θ), or its derivative in a direction."""
    return lambda p: point.spectrum.derivative(BoundFunction(point.function, p), *directions)


class _ParameterGradient(Operation):
    """The gradient in θ of ⟨G, g(A; θ)⟩, or of ⟨G, the derivative of g in a direction⟩."""

    save = staticmethod(_saved)
    tangent = staticmethod(_unsupported_order)

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        point, (g, *directions) = _saved(inputs, None)
        return _pull(_in_params(point, *directions), cast(Tensor, point.p), g)

    @staticmethod
    def adjoint(saved: _Saved, needed: Sequence[bool], dp: Tensor) -> Any:
        point, (g, *directions) = saved
        if directions or differentiated_again():
            _unsupported_order()
        p, value = cast(Tensor, point.p), _in_params(point)
        grad_a = _push(_in_params(point, g), p, dp) if needed[0] else None
        grad_p = _pull(lambda p: inner(g, _push(value, p, dp)), p, torch.ones_like(inner(g, g)))
        return grad_a, grad_p, None, None, None, None, _push(value, p, dp) if needed[6] else None


class _ParameterTangent(Operation):
    """The variation of g(A; θ) with θ."""

    save = staticmethod(_saved)
    adjoint = staticmethod(_unsupported_order)
    tangent = staticmethod(_unsupported_order)

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        point, (dp,) = _saved(inputs, None)
        return _push(_in_params(point), cast(Tensor, point.p), dp)


def check_captured(g: BoundFunction, values: Tensor) -> None:
    """Raise if a user-defined function depends on tensors with a gradient that are not among its parameters."""
    if g.function.builtin or values.numel() == 0 or not torch.is_grad_enabled():
        return
    fixed = BoundFunction(g.function, None if g.p is None else g.p.detach())
    if is_differentiated(fixed.value(values.detach())):
        raise ConfigurationError(
            f"The function {g.function.name!r} captures a tensor that requires a gradient, which it would not receive. "
            "Pass the tensor in params= and write the function as g(x, *params)."
        )


def spectral(
    a: Tensor, spectrum: Spectrum, function: SpectralFunction, p: Tensor | None = None, *directions: Tensor
) -> Tensor:
    """g(A; p), or its derivative in up to two directions, given the spectrum of A; differentiable in all of them."""
    return apply(_Derivative, *Point(a, spectrum, function, p).inputs(*directions))


def of_symmetric_part(a: Tensor, x: Tensor, spectrum: Spectrum, g: BoundFunction) -> Tensor:
    """g(X) in the dtype of A, given the spectrum of X, the symmetric part of A in the dtype of the computation."""
    if reverse_mode_only():
        return apply(_OfSymmetricPart, a, spectrum.values, spectrum.vectors, g.function, g.p)
    return spectral(x, spectrum, g.function, g.p).to(a.dtype)
