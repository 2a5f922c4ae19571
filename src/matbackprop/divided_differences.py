"""Scalar functions g with accurate first and second divided differences.

The derivatives of a matrix function use g[a, b] = (g(a) − g(b))/(a − b), g[a, a] = g'(a), and
g[a, b, c] = (g[b, c] − g[a, b])/(c − a). These quotients lose all digits as the arguments approach each other. The
formulas below are accurate for any gap. First differences are computed in place, which is several times faster on the
CPU. Parameters of g follow the arguments: ``value(x, *params)``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from matbackprop.checks import check_finite, check_result, parameter_tensor
from matbackprop.errors import DomainError, DtypeError, OrderError
from matbackprop.numerics import real_dtype

__all__ = [
    "CLAMP",
    "KEEP_LARGE",
    "STEP",
    "BoundFunction",
    "SpectralFunction",
    "named_function",
    "power_function",
    "resolve_function",
]

Domain = Literal["positive", "nonnegative", "nonzero", "real"]
Given = tuple[float | Tensor, ...]

_SMALLEST_GAP = 1e-30  # relative gap at and below which log1p(x)/x and expm1(x)/x are exactly 1


def _ordered(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    return torch.minimum(low, c), torch.maximum(low, torch.minimum(high, c)), torch.maximum(high, c)


def _positive_gap(low: Tensor, high: Tensor) -> Tensor:
    """high − low, bounded away from zero, to divide a numerator that vanishes with it."""
    gap = high - low
    return gap.clamp_min(torch.finfo(gap.dtype).tiny)


def _homogeneous(degree: int, *x: Tensor) -> Iterator[Tensor]:
    """The complete homogeneous symmetric polynomials h₀, …, h_degree of broadcastable tensors."""
    sums = [torch.ones_like(sum(x[1:i], x[0])) for i in range(1, len(x) + 1)]
    yield sums[-1]
    for _ in range(degree):
        sums[0] = sums[0] * x[0]
        for i in range(1, len(x)):
            sums[i] = sums[i - 1] + x[i] * sums[i]
        yield sums[-1]


def _log_first(a: Tensor, b: Tensor) -> Tensor:
    # log(r)/(r − 1) is smooth in r, and r − 1 is exact near 1: the rounding of r = a/b costs at most
    # half a unit in the last place.
    r = a / b
    r.masked_fill_(r == 1, 1 + torch.finfo(r.dtype).eps)
    return r.log().div_(r.sub_(1)).div_(b)


def _log_tail(low: Tensor, high: Tensor) -> Tensor:
    """atanh(r)/r − 1 with r = (high − low)/(high + low): the relative excess of log[low, high] over 2/(low + high)."""
    x = ((high - low) / low).clamp_min(_SMALLEST_GAP)
    r = x / (2 + x)
    q = r * r
    series = torch.zeros_like(q)
    for k in range(12, 0, -1):
        series = q * (series + 1 / (2 * k + 1))
    return torch.where(q < 0.02, series, 0.5 * x.log1p() / r - 1)


def _log_second(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a, b, c = _ordered(a, b, c)
    left, right = 2 / (a + b), 2 / (b + c)
    return (right * _log_tail(b, c) - left * _log_tail(a, b)) / _positive_gap(a, c) - 0.5 * left * right


def _sqrt_first(a: Tensor, b: Tensor) -> Tensor:
    return (a.sqrt() + b.sqrt()).reciprocal_()


def _sqrt_second(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a, b, c = a.sqrt(), b.sqrt(), c.sqrt()
    return -1 / ((a + b) * (b + c) * (c + a))


def _inv_sqrt_first(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.sqrt(), b.sqrt()
    return (a + b).mul_(a).mul_(b).reciprocal_().neg_()


def _inv_sqrt_second(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a, b, c = a.sqrt(), b.sqrt(), c.sqrt()
    return (a + b + c) / (a * b * c * ((a + b) * (b + c) * (c + a)))


def _inverse_first(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).reciprocal_().neg_()


def _inverse_second(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return 1 / (a * b * c)


def _expm1(x: Tensor) -> Tensor:
    """eˣ − 1, accurate near zero also in compiled graphs, which replace torch.expm1 by the plain difference.

    Compiled graphs use Kahan's method: the rounding of u = eˣ cancels in (u − 1)/log u.
    """
    if not torch.compiler.is_compiling():
        return torch.expm1(x)
    u = x.exp()
    u = u.masked_fill(u == 1, 1 + torch.finfo(u.dtype).eps)
    return (u - 1) * torch.where(x.abs() < 1, x / u.log(), 1)


def _exp_first(a: Tensor, b: Tensor) -> Tensor:
    gap = (a - b).abs_().clamp_min_(_SMALLEST_GAP).neg_()
    return torch.maximum(a, b).exp_().mul_(_expm1(gap)).div_(gap)


def _exp_second(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a, b, c = _ordered(a, b, c)
    x, y = c - b, a - b
    # exp[a, b, c] = e^b Σ_k h_k(x, y) / (k + 2)!, h_k the complete homogeneous polynomials; used for |x|, |y| ≤ 1.
    near = x - y < 1
    u, v = torch.where(near, x, 0), torch.where(near, y, 0)
    series = sum(h / math.factorial(k + 2) for k, h in enumerate(_homogeneous(17, u, v)))
    far = (_exp_first(b, c) - _exp_first(a, b)) / _positive_gap(a, c)
    return torch.where(near, b.exp() * series, far)


def _log_ratio(gap: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """log(high/low), nonzero at a tie, also if the ratio overflows."""
    x = (gap / low).clamp_min_(_SMALLEST_GAP)
    return torch.where(x.isinf(), high.log() - low.log(), x.log1p())


def _power_first(a: Tensor, b: Tensor, p: Tensor) -> Tensor:
    # Expanded at the argument with the larger λ^p; only negligible terms underflow.
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    end = torch.where(p > 0, high, low)
    gap = (a - b).abs_()
    shrunk = _expm1(-p.abs() * _log_ratio(gap, low, high))
    out = end ** (p - 1) * (shrunk / (gap / end).clamp_min_(_SMALLEST_GAP) * torch.where(p > 0, -1, 1))
    return torch.where(high == 0, torch.where(p > 1, 0.0, torch.inf), out)


def _power_second(a: Tensor, b: Tensor, c: Tensor, p: Tensor) -> Tensor:
    a, b, c = _ordered(a, b, c)
    x, y = (c - b) / b, (a - b) / b
    # The binomial series around the middle argument if all three are close, else the quotient over the widest gap.
    near = (x - y) * p.abs().clamp_min(1) < 0.1
    u, v = torch.where(near, x, 0), torch.where(near, y, 0)
    binomial, series = 0.5 * p * (p - 1), torch.zeros_like(b)
    for k, h in enumerate(_homogeneous(15, u, v)):
        series = series + binomial * h
        binomial = binomial * (p - (k + 2)) / (k + 3)
    far = (_power_first(b, c, p) - _power_first(a, b, p)) / _positive_gap(a, c)
    out = torch.where(near, b ** (p - 2) * series, far)
    at_zero = torch.where(c == 0, torch.where(p > 2, 0.0, torch.inf), torch.where(p > 1, c ** (p - 2), torch.inf))
    return torch.where(b == 0, at_zero, out)


def _power_log_first(a: Tensor, b: Tensor, p: Tensor) -> Tensor:
    """Divided difference of λ^p log λ, the derivative of λ^p in p."""
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    gap = (a - b).abs()
    t = _log_ratio(gap, low, high)
    shrunk = _expm1(-p.abs() * t)
    by_high = high ** (p - 1) * ((t - low.log() * shrunk) / (gap / high).clamp_min(_SMALLEST_GAP))
    by_low = low ** (p - 1) * ((low.log() * shrunk + t * (1 + shrunk)) / (gap / low).clamp_min(_SMALLEST_GAP))
    return torch.where(p > 0, by_high, by_low)


def _integer_power(n: int) -> SpectralFunction:
    """λⁿ, whose divided differences are complete homogeneous polynomials, of the reciprocals for negative n."""

    def complete(degree: int, *x: Tensor) -> Tensor:
        *_, last = _homogeneous(max(degree, 0), *x)
        return last if degree >= 0 else torch.zeros_like(last)

    def difference(*x: Tensor) -> Tensor:
        if n >= 0:
            return complete(n + 1 - len(x), *x)
        x = tuple(1 / part for part in x)
        return (-1) ** (len(x) - 1) * functools.reduce(torch.mul, x) * complete(-n - 1, *x)

    domain: Domain = "real" if n >= 0 else "nonzero"
    return SpectralFunction(f"power {n}", lambda x: x**n, difference, difference, domain, builtin=True)


# --- user-defined functions ------------------------------------------------------------------------

# Gauss–Legendre rules on [0, 1]: nodes and weights.
_GAUSS_8 = tuple(
    (0.5 * (1 + sign * node), 0.5 * weight)
    for node, weight in (
        (0.1834346424956498, 0.3626837833783620),
        (0.5255324099163290, 0.3137066458778873),
        (0.7966664774136267, 0.2223810344533745),
        (0.9602898564975363, 0.1012285362903763),
    )
    for sign in (-1, 1)
)
_GAUSS_5 = (
    (0.5, 0.28444444444444444),
    *(
        (0.5 * (1 + sign * node), 0.5 * weight)
        for node, weight in ((0.5384693101056831, 0.4786286704993665), (0.9061798459386640, 0.2369268850561891))
        for sign in (-1, 1)
    ),
)
_FIRST_ROUNDING = 8.0  # units of rounding in a quotient of first order
_SECOND_ROUNDING = 64.0  # and in one of second order, whose terms carry more


def _integral_or_quotient(integral: Tensor, one: Tensor, other: Tensor, gap: Tensor, units: float) -> Tensor:
    """Return the integral, or the quotient if they differ by more than rounding because the gap is too wide."""
    closed = gap == 0
    quotient = (one - other) / torch.where(closed, 1, gap)
    rounding = units * torch.finfo(gap.dtype).eps * torch.maximum(one.abs(), other.abs()) / gap.abs()
    return torch.where(closed | ((integral - quotient).abs() <= rounding), integral, quotient)


def _first_from_derivative(g: Callable[..., Tensor], derivative: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """g[a, b] as ∫₀¹ g'(a + t(b − a)) dt if the gap is small, and as the quotient otherwise."""

    def first(a: Tensor, b: Tensor, *params: Tensor) -> Tensor:
        gap = b - a
        mean = torch.zeros_like(gap)
        for node, weight in _GAUSS_8:
            mean = mean + weight * derivative(a + node * gap, *params)
        return _integral_or_quotient(mean, g(b, *params), g(a, *params), gap, _FIRST_ROUNDING)

    return first


def _second_from_derivative(first: Callable[..., Tensor], derivative: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """g[a, b, c] as ∫₀¹∫₀¹ s g''(a + s(b − a) + st(c − b)) dt ds if the gaps are small, else as the quotient."""

    def curvature(x: Tensor, *params: Tensor) -> Tensor:
        pull: Any = torch.func.vjp(lambda y: derivative(y, *params), x)[1]
        return pull(torch.ones_like(x))[0]

    def second(a: Tensor, b: Tensor, c: Tensor, *params: Tensor) -> Tensor:
        a, b, c = (x.contiguous() for x in torch.broadcast_tensors(*_ordered(a, b, c)))
        mean = torch.zeros_like(a)
        for s, outer in _GAUSS_5:
            for t, inner in _GAUSS_5:
                mean = mean + s * outer * inner * curvature(a + s * (b - a) + s * t * (c - b), *params)
        return _integral_or_quotient(mean, first(b, c, *params), first(a, b, *params), c - a, _SECOND_ROUNDING)

    return second


THIRD_ORDER = (
    "A third derivative of a matrix function was requested, but only two orders are supported. Detach the matrix "
    "before the third differentiation, or use finite differences of the second derivative."
)


def _no_third_order(*_: Any) -> NoReturn:
    raise OrderError(THIRD_ORDER)


@dataclass(frozen=True)
class SpectralFunction:
    """A scalar function with its divided differences.

    Args:
        name: name in error messages.
        value: g(x, \\*params).
        first: g[a, b], symmetric, with g'(a) at a = b.
        second: g[a, b, c], symmetric, with g''(a)/2 if all three coincide.
        domain: domain of g: ``"positive"``, ``"nonnegative"``, ``"nonzero"`` or ``"real"``.
        in_parameter: returns ∂g/∂p, for a function of one parameter with one value per matrix, such as a power.
        builtin: whether the function is part of the package and has kernels under its name.
        check_overflow: whether overflow of a divided difference raises DomainError.
        shapes: shapes of the parameters of a user-defined function.

    Example:
        >>> import torch
        >>> tanh = SpectralFunction.from_derivative(torch.tanh, lambda x: 1 - torch.tanh(x) ** 2)
        >>> x = torch.tensor(0.5, dtype=torch.float64)
        >>> bool((tanh.first(x, x) - (1 - x.tanh() ** 2)).abs() < 1e-15)
        True
    """

    name: str
    value: Callable[..., Tensor]
    first: Callable[..., Tensor]
    second: Callable[..., Tensor]
    domain: Domain = "real"
    in_parameter: Callable[[], SpectralFunction] | None = None
    builtin: bool = False
    check_overflow: bool = False
    shapes: tuple[tuple[int, ...], ...] | None = None

    @functools.cached_property
    def checked(self) -> SpectralFunction:
        """This function with `check_overflow`."""
        return dataclasses.replace(self, check_overflow=True)

    @classmethod
    def from_derivative(
        cls,
        g: Callable[..., Tensor],
        derivative: Callable[..., Tensor],
        *,
        domain: Domain = "real",
        name: str = "custom",
    ) -> SpectralFunction:
        """Create a function from g(x, \\*params) and g'(x, \\*params), elementwise for tensors of any shape.

        Divided differences of close arguments are integrals of g' (8 Gauss points) and of g'' by autograd (5 × 5
        points). Those of distant arguments are quotients.
        """
        first = _first_from_derivative(g, derivative)
        return cls(name, g, first, _second_from_derivative(first, derivative), domain)


@dataclass(frozen=True)
class BoundFunction:
    """A function with its parameters: one value per matrix ``(*batch,)`` if built in, otherwise one vector of all."""

    function: SpectralFunction
    p: Tensor | None = None

    def _params(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        p, shapes = self.p, self.function.shapes
        if p is None:
            return ()
        if shapes is None:
            return (p.reshape(p.shape + (1,) * (max(x.ndim for x in arguments) - p.ndim)),)
        parts = p.split([math.prod(shape) for shape in shapes])
        return tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))

    def _difference(self, difference: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
        out = difference(*arguments, *self._params(*arguments))
        if self.function.check_overflow:
            what = f"A derivative of {self.function.name} at these eigenvalues has too few correct digits, or"
            check_result(out, what, "Scale the matrices, or raise eps.")
        return out

    def value(self, x: Tensor) -> Tensor:
        return self.function.value(x, *self._params(x))

    def first(self, a: Tensor, b: Tensor) -> Tensor:
        return self._difference(self.function.first, a, b)

    def second(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return self._difference(self.function.second, a, b, c)

    def in_parameter(self) -> BoundFunction:
        return BoundFunction(in_parameter(self.function), self.p)

    def check_params(self) -> None:
        if self.p is not None:
            check_finite(self.p, "exponent" if self.function.builtin else "params")

    def bad_params(self) -> Tensor | None:
        """Return which matrices have parameters that are not finite ``(*batch,)``, or one flag for all."""
        bad = None if self.p is None else ~self.p.isfinite()
        return bad if bad is None or self.function.builtin else bad.any()


def in_parameter(function: SpectralFunction) -> SpectralFunction:
    """∂g/∂p for a built-in function with a parameter."""
    if function.in_parameter is None:
        raise OrderError(f"{function.name} has no derivative with respect to a parameter. Detach the parameter.")
    return dataclasses.replace(function.in_parameter(), check_overflow=function.check_overflow)


_builtin = functools.partial(SpectralFunction, builtin=True)
_POWER_LOG2 = _builtin(
    "power·log²", lambda x, p: x**p * x.log() ** 2, _no_third_order, _no_third_order, "positive", _no_third_order
)
_POWER_LOG = _builtin(
    "power·log", lambda x, p: x**p * x.log(), _power_log_first, _no_third_order, "positive", lambda: _POWER_LOG2
)
_POWER = _builtin("power", lambda x, p: x**p, _power_first, _power_second, "positive", lambda: _POWER_LOG)
_POSITIVE_POWER = dataclasses.replace(_POWER, domain="nonnegative")

_NAMED = {
    "log": _builtin("log", lambda x: x.log(), _log_first, _log_second, "positive"),
    "sqrt": _builtin("sqrt", lambda x: x.sqrt(), _sqrt_first, _sqrt_second, "nonnegative"),
    "inv_sqrt": _builtin("inv_sqrt", lambda x: x.rsqrt(), _inv_sqrt_first, _inv_sqrt_second, "positive"),
    "exp": _builtin("exp", lambda x: x.exp(), _exp_first, _exp_second, "real"),
    "inverse": _builtin("inverse", lambda x: x.reciprocal(), _inverse_first, _inverse_second, "nonzero"),
}


def _two_pieces(
    name: str,
    upper: Callable[[Tensor, Tensor], Tensor],
    excess: Callable[[Tensor, Tensor], Tensor],
    *,
    slope: float,
    lower: Callable[[Tensor], Tensor | float] = lambda p: 0.0,
) -> SpectralFunction:
    """A constant piece, and one with slope 0 or 1 above a threshold, which is the parameter.

    ``upper`` selects the upper piece, and ``excess`` is e(λ), the difference of the pieces, which avoids cancellation:
    for two arguments on one piece and x on the other, g[x, y, z] is ±e(x)/((x − y)(x − z)).
    """

    def value(lam: Tensor, p: Tensor) -> Tensor:
        return lower(p) + upper(lam, p) * excess(lam, p)

    def first(a: Tensor, b: Tensor, p: Tensor) -> Tensor:
        in_a, in_b = upper(a, p), upper(b, p)
        apart = (a - b).abs() > 4 * torch.finfo(a.dtype).eps * torch.maximum(a.abs(), b.abs())
        x, y = torch.where(in_a, a, b), torch.where(in_a, b, a)
        mixed = excess(x, p) / torch.where(apart, x - y, torch.inf)
        return torch.where(in_a == in_b, slope * in_a, mixed)

    def second(a: Tensor, b: Tensor, c: Tensor, p: Tensor) -> Tensor:
        in_a, in_b, in_c = upper(a, p), upper(b, p), upper(c, p)
        x = torch.where(in_b == in_c, a, torch.where(in_a == in_c, b, c))  # the argument on the other piece
        y = torch.where(in_b == in_c, b, a)
        z = torch.where((in_b == in_c) | (in_a == in_c), c, b)
        none = ((in_a == in_b) & (in_b == in_c)) | (x == y) | (x == z)
        e = excess(x, p)
        quotient = torch.where(upper(x, p), e, -e) / torch.where(none, 1, x - y) / torch.where(none, 1, x - z)
        return torch.where(none, 0, quotient)

    return _builtin(name, value, first, second)


STEP = _two_pieces("step", torch.gt, lambda lam, p: torch.ones_like(lam - p), slope=0)
"""1 above a threshold, 0 otherwise."""

KEEP_LARGE = _two_pieces("keep large", lambda lam, p: lam.abs() > p, lambda lam, p: lam + 0 * p, slope=1)
"""λ if |λ| exceeds a threshold, 0 otherwise."""

CLAMP = _two_pieces("clamp", torch.gt, lambda lam, p: lam - p, slope=1, lower=lambda p: p)
"""The maximum of λ and a threshold."""


FunctionLike = str | SpectralFunction | tuple[Callable[..., Tensor], Callable[..., Tensor]]


def named_function(name: str) -> SpectralFunction:
    """Return log, sqrt, inv_sqrt, exp or inverse."""
    try:
        return _NAMED[name]
    except KeyError:
        known = ", ".join([*_NAMED, "power"])
        raise DomainError(
            f"Unknown matrix function {name!r}. Choose one of {known}, or pass a pair of callables."
        ) from None


def power_function(exponent: float | Tensor) -> tuple[SpectralFunction, Given]:
    """Return x^p and its parameters: none if p is a fixed number with a closed form."""
    if isinstance(exponent, Tensor):
        if not exponent.dtype.is_floating_point:
            raise DtypeError(
                f"A tensor exponent must be floating point, got {exponent.dtype}. Pass a Python int instead."
            )
        return _POWER, (exponent,)
    if isinstance(exponent, bool) or not isinstance(exponent, (int, float)):
        raise DtypeError(f"exponent must be a number or a tensor, got {type(exponent).__name__}.")
    if not math.isfinite(exponent):
        raise DomainError(f"exponent must be finite, got {exponent}.")
    if float(exponent).is_integer():
        return _integer_power(int(exponent)), ()
    if exponent in (0.5, -0.5):
        return _NAMED["sqrt" if exponent > 0 else "inv_sqrt"], ()
    return _POWER if exponent < 0 else _POSITIVE_POWER, (float(exponent),)


def without_derivatives(function: SpectralFunction, message: str) -> SpectralFunction:
    """Return the function with divided differences that raise a DomainError."""

    def refuse(*_: Tensor) -> NoReturn:
        raise DomainError(message)

    return dataclasses.replace(function, first=refuse, second=refuse)


def resolve_function(
    function: FunctionLike, exponent: float | Tensor | None = None, params: Sequence[Tensor] = ()
) -> tuple[SpectralFunction, Given]:
    """Return the `SpectralFunction` and the parameters for an operator's arguments."""
    if exponent is not None and function != "power":
        raise DomainError(f'exponent= needs function="power", got function={function!r}.')
    if params and isinstance(function, str):
        raise DomainError(f"params= needs a user-defined function, got function={function!r}.")
    if any(not isinstance(p, Tensor) or not p.dtype.is_floating_point for p in params):
        raise DtypeError("params must be real floating-point tensors. Bind other arguments into the function.")
    if function == "power":
        if exponent is None:
            raise DomainError('function="power" needs exponent=, a number or a tensor.')
        return power_function(exponent)
    if isinstance(function, SpectralFunction):
        return function, tuple(params)
    if isinstance(function, str):
        return named_function(function), ()
    if isinstance(function, tuple) and len(function) == 2 and all(callable(part) for part in function):
        return SpectralFunction.from_derivative(*function), tuple(params)
    raise DtypeError(
        f"function must be a name, a pair of callables (g, derivative) or a SpectralFunction, got "
        f"{type(function).__name__}."
    )


def bind_params(function: SpectralFunction, given: Given, batch: torch.Size, like: Tensor) -> BoundFunction:
    """The function with its parameters as one tensor of the precision of ``like``."""
    if not given:
        return BoundFunction(function)
    if function.builtin:
        return BoundFunction(function, parameter_tensor(given[0], "exponent", batch, like))
    tensors = [p for p in given if isinstance(p, Tensor)]
    theta = torch.cat([p.to(like.device, real_dtype(like.dtype)).reshape(-1) for p in tensors])
    return BoundFunction(dataclasses.replace(function, shapes=tuple(tuple(p.shape) for p in tensors)), theta)
