"""Scalar functions g with their first and second divided differences, accurate where arguments coincide.

A matrix function needs g on the spectrum, its derivative the first divided differences

    g[a, b] = (g(a) − g(b)) / (a − b),   g[a, a] = g'(a),

and its second derivative g[a, b, c] = (g[b, c] − g[a, b]) / (c − a). Written as printed they lose every digit when
arguments meet. The forms below keep full accuracy for any gap, zero included. Most are closed; where a series is
needed it evaluates one smooth function to rounding error and no digit depends on where it takes over. First differences
are tables of n² entries: they are worked out in place, which the CPU does several times faster than in fresh memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from matbackprop.checks import check_result
from matbackprop.errors import DomainError, DtypeError, OrderError

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

# A relative gap below this is indistinguishable from zero in every dtype; log1p(x)/x and expm1(x)/x are exactly 1
# there.
_SMALLEST_GAP = 1e-30


def _ordered(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort three broadcastable tensors entry by entry."""
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    return torch.minimum(low, c), torch.maximum(low, torch.minimum(high, c)), torch.maximum(high, c)


def _positive_gap(low: Tensor, high: Tensor) -> Tensor:
    """high − low, kept from zero so that it can divide a numerator that vanishes with it."""
    gap = high - low
    return gap.clamp_min(torch.finfo(gap.dtype).tiny)


# --- log -------------------------------------------------------------------------------------------------------------


def _log_first(a: Tensor, b: Tensor, p: Tensor | None = None) -> Tensor:
    # log(r)/(r − 1) is smooth in r, and r − 1 is exact near 1: the rounding of r = a/b costs half a digit's last
    # place, no more.
    r = a / b
    r.masked_fill_(r == 1, 1 + torch.finfo(r.dtype).eps)
    return r.log().div_(r.sub_(1)).div_(b)


def _log_tail(low: Tensor, high: Tensor) -> Tensor:
    """atanh(r)/r − 1 with r = (high − low)/(high + low): what log[low, high] has beyond 2/(low + high)."""
    x = ((high - low) / low).clamp_min(_SMALLEST_GAP)
    r = x / (2 + x)
    q = r * r
    series = torch.zeros_like(q)
    for k in range(12, 0, -1):
        series = q * (series + 1 / (2 * k + 1))
    return torch.where(q < 0.02, series, 0.5 * x.log1p() / r - 1)


def _log_second(a: Tensor, b: Tensor, c: Tensor, p: Tensor | None = None) -> Tensor:
    a, b, c = _ordered(a, b, c)
    left, right = 2 / (a + b), 2 / (b + c)
    return (right * _log_tail(b, c) - left * _log_tail(a, b)) / _positive_gap(a, c) - 0.5 * left * right


# --- square roots and the inverse: closed forms ----------------------------------------------------------------------


def _sqrt_first(a: Tensor, b: Tensor, p: Tensor | None = None) -> Tensor:
    return (a.sqrt() + b.sqrt()).reciprocal_()


def _sqrt_second(a: Tensor, b: Tensor, c: Tensor, p: Tensor | None = None) -> Tensor:
    a, b, c = a.sqrt(), b.sqrt(), c.sqrt()
    return -1 / ((a + b) * (b + c) * (c + a))


def _inv_sqrt_first(a: Tensor, b: Tensor, p: Tensor | None = None) -> Tensor:
    a, b = a.sqrt(), b.sqrt()
    return (a + b).mul_(a).mul_(b).reciprocal_().neg_()


def _inv_sqrt_second(a: Tensor, b: Tensor, c: Tensor, p: Tensor | None = None) -> Tensor:
    a, b, c = a.sqrt(), b.sqrt(), c.sqrt()
    return (a + b + c) / (a * b * c * ((a + b) * (b + c) * (c + a)))


def _inverse_first(a: Tensor, b: Tensor, p: Tensor | None = None) -> Tensor:
    return (a * b).reciprocal_().neg_()


def _inverse_second(a: Tensor, b: Tensor, c: Tensor, p: Tensor | None = None) -> Tensor:
    return 1 / (a * b * c)


# --- exp -------------------------------------------------------------------------------------------------------------


def _expm1(x: Tensor) -> Tensor:
    """eˣ − 1 with all digits near zero, also in a compiled graph, which computes torch.expm1 as it is written here.

    There by Kahan's way: the rounding of u = eˣ cancels in (u − 1)/log u.
    """
    if not torch.compiler.is_compiling():
        return torch.expm1(x)
    u = x.exp()
    u = u.masked_fill(u == 1, 1 + torch.finfo(u.dtype).eps)
    return (u - 1) * torch.where(x.abs() < 1, x / u.log(), 1)


def _exp_first(a: Tensor, b: Tensor, p: Tensor | None = None) -> Tensor:
    gap = (a - b).abs_().clamp_min_(_SMALLEST_GAP).neg_()
    return torch.maximum(a, b).exp_().mul_(_expm1(gap)).div_(gap)


def _exp_second(a: Tensor, b: Tensor, c: Tensor, p: Tensor | None = None) -> Tensor:
    a, b, c = _ordered(a, b, c)
    x, y = c - b, a - b
    # exp[a, b, c] = e^b Σ_k h_k(x, y) / (k + 2)!, h_k the complete homogeneous polynomials; used where |x|, |y| ≤ 1.
    near = x - y < 1
    u, v = torch.where(near, x, 0), torch.where(near, y, 0)
    power = complete = torch.ones_like(u + v)
    series = 0.5 * complete
    for k in range(1, 18):
        power = power * u
        complete = power + v * complete
        series = series + complete / math.factorial(k + 2)
    far = (_exp_first(b, c) - _exp_first(a, b)) / _positive_gap(a, c)
    return torch.where(near, b.exp() * series, far)


# --- powers ----------------------------------------------------------------------------------------------------------


def _log_ratio(gap: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """log(high/low), not zero at a tie, where the ratio itself leaves the range too."""
    x = (gap / low).clamp_min_(_SMALLEST_GAP)
    return torch.where(x.isinf(), high.log() - low.log(), x.log1p())


def _power_first(a: Tensor, b: Tensor, p: Tensor) -> Tensor:
    """By the end at which λ^p is larger, so that only what vanishes beside it leaves the range."""
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    end = torch.where(p > 0, high, low)
    gap = (a - b).abs_()
    shrunk = _expm1(-p.abs() * _log_ratio(gap, low, high))
    return end ** (p - 1) * (shrunk / (gap / end).clamp_min_(_SMALLEST_GAP) * torch.where(p > 0, -1, 1))


def _power_second(a: Tensor, b: Tensor, c: Tensor, p: Tensor) -> Tensor:
    a, b, c = _ordered(a, b, c)
    x, y = (c - b) / b, (a - b) / b
    # The binomial series around the middle argument where all three are close, the quotient over the widest gap
    # elsewhere.
    near = (x - y) * p.abs().clamp_min(1) < 0.1
    u, v = torch.where(near, x, 0), torch.where(near, y, 0)
    power = complete = torch.ones_like(u + v)
    binomial = 0.5 * p * (p - 1)
    series = binomial * complete
    for k in range(1, 16):
        power = power * u
        complete = power + v * complete
        binomial = binomial * (p - (k + 1)) / (k + 2)
        series = series + binomial * complete
    far = (_power_first(b, c, p) - _power_first(a, b, p)) / _positive_gap(a, c)
    return torch.where(near, b ** (p - 2) * series, far)


def _power_log_first(a: Tensor, b: Tensor, p: Tensor) -> Tensor:
    """Divided difference of λ^p log λ, the derivative of λ^p in p."""
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    gap = (a - b).abs()
    t = _log_ratio(gap, low, high)
    shrunk = _expm1(-p.abs() * t)
    by_high = high ** (p - 1) * ((t - low.log() * shrunk) / (gap / high).clamp_min(_SMALLEST_GAP))
    by_low = low ** (p - 1) * ((low.log() * shrunk + t * (1 + shrunk)) / (gap / low).clamp_min(_SMALLEST_GAP))
    return torch.where(p > 0, by_high, by_low)


def _integer_powers(n: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]:
    """λⁿ for a whole number n: its divided differences are complete homogeneous polynomials, no gap divides."""
    degree = abs(n)

    def complete2(k: int, a: Tensor, b: Tensor) -> Tensor:
        total = torch.ones_like(a + b)
        power = torch.ones_like(a)
        for _ in range(k):
            power = power * a
            total = power + b * total
        return total if k >= 0 else torch.zeros_like(total)

    def complete3(k: int, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        pair = torch.ones_like(a + b)
        total = torch.ones_like(a + b + c)
        power = torch.ones_like(a)
        for _ in range(k):
            power = power * a
            pair = power + b * pair
            total = pair + c * total
        return total if k >= 0 else torch.zeros_like(total)

    def value(lam: Tensor, p: Tensor | None = None) -> Tensor:
        return lam**n

    def first(a: Tensor, b: Tensor, p: Tensor | None = None) -> Tensor:
        if n >= 0:
            return complete2(degree - 1, a, b)
        a, b = 1 / a, 1 / b
        return -a * b * complete2(degree - 1, a, b)

    def second(a: Tensor, b: Tensor, c: Tensor, p: Tensor | None = None) -> Tensor:
        if n >= 0:
            return complete3(degree - 2, a, b, c)
        a, b, c = 1 / a, 1 / b, 1 / c
        return a * b * c * complete3(degree - 1, a, b, c)

    return value, first, second


# --- a user's own function -------------------------------------------------------------------------------------------

# Eight-point Gauss–Legendre rule on [−1, 1], positive half.
_GAUSS = (
    (0.1834346424956498, 0.3626837833783620),
    (0.5255324099163290, 0.3137066458778873),
    (0.7966664774136267, 0.2223810344533745),
    (0.9602898564975363, 0.1012285362903763),
)
_DERIVATIVE_WINDOW = 2.0**-7  # pairs closer than this share of the larger one are integrated over g'
_STENCIL_RADIUS = 2.0**-9  # triples closer than this share of the largest one use a polynomial through nearby values
_STENCIL_POINTS = 8


def _first_from_derivative(
    g: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor]
) -> Callable[..., Tensor]:
    """g[a, b] from g and g': the quotient where the gap is wide, ∫₀¹ g'(a + t(b − a)) dt by Gauss's rule near a tie."""

    def first(a: Tensor, b: Tensor, p: Tensor | None = None) -> Tensor:
        gap = b - a
        near = gap.abs() <= _DERIVATIVE_WINDOW * torch.maximum(a.abs(), b.abs())
        middle, half = 0.5 * (a + b), torch.where(near, 0.5 * gap, 0)
        mean = torch.zeros_like(gap)
        for node, weight in _GAUSS:
            mean = mean + 0.5 * weight * (derivative(middle + node * half) + derivative(middle - node * half))
        quotient = (g(b) - g(a)) / torch.where(near, 1, gap)
        return torch.where(near, mean, quotient)

    return first


def _stencil() -> tuple[list[float], list[list[float]]]:
    """Chebyshev points z_k and the matrix that turns values there into coefficients of 1, z, z², …

    By the discrete cosine transform and the whole coefficients of the Chebyshev polynomials, so that it is the same on
    every machine: a matrix inverted by LAPACK is not.
    """
    n = _STENCIL_POINTS
    chebyshev = [[1], [0, 1]]
    while len(chebyshev) < n:
        last, before = chebyshev[-1], chebyshev[-2]
        chebyshev.append([2 * x - y for x, y in itertools.zip_longest([0, *last], before, fillvalue=0)])
    half = range(n // 2)  # the other half is its mirror image, to the bit
    points = [math.cos(math.pi * (2 * k + 1) / (2 * n)) for k in half]
    rows = []
    for i in range(n):
        terms = [(chebyshev[j][i] * (2 if j else 1) / n, j) for j in range(i, n)]
        row = [math.fsum(c * math.cos(j * math.pi * (2 * k + 1) / (2 * n)) for c, j in terms) for k in half]
        rows.append(row + [(-1) ** i * w for w in reversed(row)])
    return points + [-z for z in reversed(points)], rows


_STENCIL = _stencil()


def _second_from_first(first: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """g[a, b, c] from g[·, ·] alone: the quotient over the widest gap, at a tie a polynomial through neighbours.

    Its slope at a tie is a sum of eight values over the radius. Each carries a few units of rounding u of itself and of
    its argument, so the error stays below 64 u (max|g'| + |λ| max|g''|) / radius.
    """

    def second(a: Tensor, b: Tensor, c: Tensor, p: Tensor | None = None) -> Tensor:
        a, b, c = _ordered(a, b, c)
        scale = torch.maximum(a.abs(), c.abs())
        radius = _STENCIL_RADIUS * torch.where(scale == 0, 1, scale)
        near = c - a <= radius
        points, coefficients = _STENCIL
        x, y = torch.where(near, (a - b) / radius, 0), torch.where(near, (c - b) / radius, 0)
        values = [first(b + z * radius, b) for z in points]
        power = complete = torch.ones_like(x + y)
        slope = torch.zeros_like(complete)
        for row in coefficients[1:]:
            slope = slope + complete * sum(w * v for w, v in zip(row, values, strict=True))
            power = power * x
            complete = power + y * complete
        far = (first(b, c) - first(a, b)) / torch.where(near, 1, c - a)
        return torch.where(near, slope / radius, far)

    return second


# --- the object that operators take ----------------------------------------------------------------------------------


def _no_third_order(*_: Any) -> NoReturn:
    raise OrderError(
        "a third derivative of a matrix function was asked for; first and second derivatives are provided. "
        "Differentiate the expression of the second derivative by finite differences, or reduce the order."
    )


def _no_parameter() -> NoReturn:
    raise OrderError("this function has no exponent to differentiate.")


@dataclass(frozen=True)
class SpectralFunction:
    """A scalar function with its divided differences, ready to be applied to a spectrum.

    Args:
        name: how messages call it.
        value: g(λ, p); ``p`` is the exponent of a power and None for every other function.
        first: g[a, b], symmetric, with g'(a) at a = b.
        second: g[a, b, c], symmetric, with g''(a)/2 where all three coincide.
        domain: where g is defined.
        in_parameter: makes the function ∂g/∂p.

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
    in_parameter: Callable[[], SpectralFunction] = _no_parameter

    @classmethod
    def from_divided_difference(
        cls,
        g: Callable[[Tensor], Tensor],
        divided_difference: Callable[[Tensor, Tensor], Tensor],
        *,
        domain: Domain = "real",
        name: str = "custom",
    ) -> SpectralFunction:
        """Make one from g and its first divided difference, which must be right at a = b too."""

        def first(a: Tensor, b: Tensor, p: Tensor | None = None) -> Tensor:
            return divided_difference(a, b)

        return cls(name, lambda lam, p=None: g(lam), first, _second_from_first(first), domain)

    @classmethod
    def from_derivative(
        cls,
        g: Callable[[Tensor], Tensor],
        derivative: Callable[[Tensor], Tensor],
        *,
        domain: Domain = "real",
        name: str = "custom",
    ) -> SpectralFunction:
        """Make one from g and g'; pairs closer than 1/128 of the larger one are integrated over g' by Gauss's rule.

        g has to be smooth on that scale around each eigenvalue: 8 points resolve e^λ up to λ about 1000. Where three
        arguments meet at λ, the second divided difference is good to 4e-12 of |g'/λ| + |g''|, of |g'| at zero.
        """
        first = _first_from_derivative(g, derivative)
        return cls(name, lambda lam, p=None: g(lam), first, _second_from_first(first), domain)


@dataclass(frozen=True)
class BoundFunction:
    """A function with its exponent, one per matrix ``(*batch,)``, which broadcasts over any table of the spectrum."""

    function: SpectralFunction
    exponent: Tensor | None = None

    def _column(self, *arguments: Tensor) -> Tensor | None:
        p = self.exponent
        return None if p is None else p.reshape(p.shape + (1,) * (max(x.ndim for x in arguments) - p.ndim))

    def value(self, lam: Tensor) -> Tensor:
        """g(λ)."""
        return self.function.value(lam, self._column(lam))

    def first(self, a: Tensor, b: Tensor) -> Tensor:
        """g[a, b]."""
        return self.function.first(a, b, self._column(a, b))

    def second(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """g[a, b, c]."""
        return self.function.second(a, b, c, self._column(a, b, c))

    def in_exponent(self) -> BoundFunction:
        """∂g/∂p at the same exponent."""
        return BoundFunction(self.function.in_parameter(), self.exponent)


def _simple(name: str, value: Callable[[Tensor], Tensor], first: Any, second: Any, domain: Domain) -> SpectralFunction:
    return SpectralFunction(name, lambda lam, p=None: value(lam), first, second, domain)


_POWER_LOG2 = SpectralFunction(
    "power·log²", lambda lam, p: lam**p * lam.log() ** 2, _no_third_order, _no_third_order, "positive", _no_third_order
)
_POWER_LOG = SpectralFunction(
    "power·log", lambda lam, p: lam**p * lam.log(), _power_log_first, _no_third_order, "positive", lambda: _POWER_LOG2
)
_POWER = SpectralFunction("power", lambda lam, p: lam**p, _power_first, _power_second, "positive", lambda: _POWER_LOG)

_NAMED = {
    "log": _simple("log", torch.log, _log_first, _log_second, "positive"),
    "sqrt": _simple("sqrt", torch.sqrt, _sqrt_first, _sqrt_second, "nonnegative"),
    "inv_sqrt": _simple("inv_sqrt", torch.rsqrt, _inv_sqrt_first, _inv_sqrt_second, "positive"),
    "exp": _simple("exp", torch.exp, _exp_first, _exp_second, "real"),
    "inverse": _simple("inverse", torch.reciprocal, _inverse_first, _inverse_second, "nonzero"),
}


def _two_pieces(
    name: str,
    upper: Callable[[Tensor, Tensor], Tensor],
    excess: Callable[[Tensor, Tensor], Tensor],
    *,
    slope: float,
    lower: Callable[[Tensor], Tensor | float] = lambda p: 0.0,
) -> SpectralFunction:
    """A function of two straight pieces: e(λ) above a threshold, with a slope of 0 or 1, beside a constant piece.

    The threshold takes the place of the exponent. ``upper`` says where λ lies on the upper piece and ``excess`` how far
    that piece is from the lower one, so that nothing cancels: what two arguments on one piece and a third on the other
    leave of g[x, y, z] is ±e(x)/((x − y)(x − z)) of the odd one out. Numbers that are equal on both pieces are not told
    apart.
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
        x = torch.where(in_b == in_c, a, torch.where(in_a == in_c, b, c))  # the odd one out
        y = torch.where(in_b == in_c, b, a)
        z = torch.where((in_b == in_c) | (in_a == in_c), c, b)
        none = ((in_a == in_b) & (in_b == in_c)) | (x == y) | (x == z)
        e = excess(x, p)
        quotient = torch.where(upper(x, p), e, -e) / torch.where(none, 1, x - y) / torch.where(none, 1, x - z)
        return torch.where(none, 0, quotient)

    return SpectralFunction(name, value, first, second)


def _above(lam: Tensor, threshold: Tensor) -> Tensor:
    return lam > threshold


STEP = _two_pieces("step", _above, lambda lam, p: torch.ones_like(lam - p), slope=0)
"""1 above a threshold and 0 elsewhere."""

KEEP_LARGE = _two_pieces("keep large", lambda lam, p: lam.abs() > p, lambda lam, p: lam + 0 * p, slope=1)
"""λ where |λ| exceeds a threshold and 0 elsewhere."""

CLAMP = _two_pieces("clamp", _above, lambda lam, p: lam - p, slope=1, lower=lambda p: p)
"""The larger one of λ and a threshold."""


def named_function(name: str) -> SpectralFunction:
    """The built-in function of that name: log, sqrt, inv_sqrt, exp, inverse."""
    try:
        return _NAMED[name]
    except KeyError:
        known = ", ".join([*_NAMED, "power"])
        raise DomainError(
            f"unknown matrix function {name!r}; choose one of {known}, or pass a pair of callables."
        ) from None


def _integer_function(n: int) -> SpectralFunction:
    value, first, second = _integer_powers(n)
    return SpectralFunction(f"power {n}", value, first, second, "real" if n >= 0 else "nonzero")


def power_function(exponent: float | Tensor) -> tuple[SpectralFunction, float | Tensor | None]:
    """λ^p and the exponent to pass with it: None where p is a fixed number with a closed form of its own."""
    if isinstance(exponent, Tensor):
        if not exponent.dtype.is_floating_point:
            raise DtypeError(
                f"a tensor exponent must be floating point, got {exponent.dtype}; pass a Python int instead."
            )
        return _POWER, exponent
    if isinstance(exponent, bool) or not isinstance(exponent, (int, float)):
        raise DtypeError(f"exponent must be a number or a tensor, got {type(exponent).__name__}.")
    if not math.isfinite(exponent):
        raise DomainError(f"exponent must be finite, got {exponent}.")
    if float(exponent).is_integer():
        return _integer_function(int(exponent)), None
    if exponent == 0.5:
        return _NAMED["sqrt"], None
    if exponent == -0.5:
        return _NAMED["inv_sqrt"], None
    return _POWER, float(exponent)


def is_named(function: SpectralFunction) -> bool:
    """Whether a function is the package's own."""
    return function.name.startswith("power") or _NAMED.get(function.name) is function


def _refusing(function: SpectralFunction, message: str) -> SpectralFunction:
    """The same function, whose derivatives raise."""

    def refuse(*_: Any) -> NoReturn:
        raise DomainError(message)

    return dataclasses.replace(function, first=refuse, second=refuse)


def infinite_derivative(function: SpectralFunction) -> SpectralFunction:
    """The same function at a spectrum where its derivative is infinite: asking for the derivative raises."""
    return _refusing(
        function,
        f"{function.name} has an infinite derivative at a matrix with an eigenvalue of zero. Add a multiple of the "
        f"identity first, or pool the features themselves with second_order_pool, which has a derivative there.",
    )


def without_derivative(function: SpectralFunction, where: str) -> SpectralFunction:
    """The same function where the operator has a value and no derivative: asking for it raises."""
    return _refusing(function, f"there is no derivative at {where}; take a smaller rank, or add a small matrix to it.")


@functools.lru_cache(maxsize=64)
def announcing_overflow(function: SpectralFunction) -> SpectralFunction:
    """The same function, whose derivatives raise where they leave the range of floating point."""

    def announcing(difference: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def announced(*arguments: Any) -> Tensor:
            out = difference(*arguments)
            check_result(
                out, f"a derivative of {function.name} at these eigenvalues", "Scale the matrices, or raise eps."
            )
            return out

        return announced

    return dataclasses.replace(
        function,
        first=announcing(function.first),
        second=announcing(function.second),
        in_parameter=lambda: announcing_overflow(function.in_parameter()),
    )


def _required_arguments(function: Callable[..., Any]) -> int:
    """How many positional arguments a callable needs; 1 where Python cannot tell (built-in torch functions)."""
    code = getattr(function, "__code__", None)  # inspect.signature cannot be traced by torch.compile
    if code is None:
        method = type(function).__call__
        code = getattr(method, "__code__", None)
        return 1 if code is None else code.co_argcount - 1 - len(method.__defaults__ or ())
    return code.co_argcount - len(function.__defaults__ or ())


def resolve_function(
    function: str | SpectralFunction | tuple[Callable[..., Tensor], Callable[..., Tensor]],
    exponent: float | Tensor | None = None,
) -> tuple[SpectralFunction, float | Tensor | None]:
    """Turn what an operator was given into a `SpectralFunction` and the exponent that goes with it."""
    if function == "power":
        if exponent is None:
            raise DomainError('function="power" needs exponent=, a number or a tensor.')
        return power_function(exponent)
    if exponent is not None:
        raise DomainError(f'exponent= belongs to function="power", got function={function!r}.')
    if isinstance(function, SpectralFunction):
        return function, None
    if isinstance(function, str):
        return named_function(function), None
    if isinstance(function, tuple) and len(function) == 2 and all(callable(part) for part in function):
        g, companion = function
        if _required_arguments(companion) == 2:
            return SpectralFunction.from_divided_difference(g, companion), None
        return SpectralFunction.from_derivative(g, companion), None
    raise DtypeError(
        "function must be a name, a SpectralFunction or a pair of callables, (g, divided difference) or "
        f"(g, derivative); got {type(function).__name__}."
    )
