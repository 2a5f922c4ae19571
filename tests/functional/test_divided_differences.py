"""Divided differences against mpmath at gaps from 0 to many times the argument."""

import itertools

import mpmath
import pytest
import torch

from helpers.reference import divided_difference
from matbackprop.divided_differences import SpectralFunction, in_parameter, power_function, resolve_function
from matbackprop.errors import DomainError, DtypeError, OrderError

GAPS = [0.0, 1e-16, 1e-13, 1e-10, 1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 10.0, 1e4, 1e9]
FUNCTIONS = {
    "log": mpmath.log,
    "sqrt": mpmath.sqrt,
    "inv_sqrt": lambda x: 1 / mpmath.sqrt(x),
    "inverse": lambda x: 1 / x,
}
EXPONENTS = [0.7, -1.3, 2.5, 1e-3]


def _tensor(x):
    return torch.tensor(x, dtype=torch.float64)


def _worst(function, g, base, gaps, parameter=None, additive=False):
    """Largest relative errors of the first and second divided differences over all gaps."""
    first = second = 0.0
    more = () if parameter is None else (parameter,)
    points = [base + gap if additive else base * (1 + gap) for gap in gaps]
    for b in points:
        expected = divided_difference(g, (base, b))
        first = max(first, abs(float((function.first(_tensor(b), _tensor(base), *more).item() - expected) / expected)))
    for b, c in itertools.combinations_with_replacement(points, 2):
        expected = divided_difference(g, (base, b, c))
        actual = function.second(_tensor(c), _tensor(base), _tensor(b), *more).item()
        second = max(second, abs(float((actual - expected) / expected)))
    return first, second


@pytest.mark.parametrize("base", [1e-3, 7.0])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_closed_forms(name, base):
    function, _ = resolve_function(name)
    first, second = _worst(function, FUNCTIONS[name], base, GAPS)
    assert first <= 1e-15
    assert second <= 2e-15


@pytest.mark.parametrize("base", [-3.0, 0.0, 20.0])
def test_exp(base):
    function, _ = resolve_function("exp")
    first, second = _worst(function, mpmath.exp, base, [g for g in GAPS if g <= 10] + [300.0], additive=True)
    assert first <= 1e-15
    assert second <= 3e-15


@pytest.mark.parametrize("p", EXPONENTS)
def test_powers(p):
    function, (parameter,) = power_function(_tensor(p))
    first, second = _worst(function, lambda x: mpmath.power(x, mpmath.mpf(p)), 0.5, GAPS, parameter)
    assert first <= 1e-14
    assert second <= 3e-14


@pytest.mark.parametrize("p", EXPONENTS)
def test_derivative_of_powers_in_the_exponent(p):
    function = in_parameter(power_function(_tensor(p))[0])
    for gap in GAPS:
        a, b = 0.5, 0.5 * (1 + gap)
        expected = divided_difference(lambda x: mpmath.power(x, mpmath.mpf(p)) * mpmath.log(x), (a, b))
        actual = function.first(_tensor(a), _tensor(b), _tensor(p)).item()
        scale = abs(expected) + abs(divided_difference(lambda x: mpmath.power(x, mpmath.mpf(p)), (a, b)))
        assert abs(actual - expected) <= 2e-14 * scale


@pytest.mark.parametrize("n", [0, 1, 2, 5, -1, -3])
def test_integer_powers(n):
    function, _ = power_function(n)
    for a, b, c in [(0.5, 0.5, 0.5), (0.5, 0.5, 2.0), (-1.0, 0.25, 3.0), (2.0, -2.0, 2.0)]:
        for points, actual in [((a, b), function.first), ((a, b, c), function.second)]:
            expected = float(divided_difference(lambda x: x ** mpmath.mpf(n), points))
            assert actual(*map(_tensor, points)).item() == pytest.approx(expected, rel=1e-13, abs=1e-13)


def test_user_defined_functions():
    function = SpectralFunction.from_derivative(torch.tanh, lambda x: 1 - torch.tanh(x) ** 2)
    first, second = _worst(function, mpmath.tanh, 0.8, [gap for gap in GAPS if gap <= 1])
    assert first <= 1e-13
    assert second <= 1e-11


def test_user_defined_functions_at_zero_and_between_signs():
    function = SpectralFunction.from_derivative(torch.sin, torch.cos)
    assert function.first(_tensor(0.0), _tensor(0.0)).item() == pytest.approx(1)
    assert function.first(_tensor(-0.5), _tensor(0.5)).item() == pytest.approx(float(mpmath.sin(0.5)) * 2)


def test_wide_gaps_of_user_defined_functions_are_quotients():
    """Quadrature is inaccurate over wide gaps: log between 0.001 and 10."""
    function = SpectralFunction.from_derivative(torch.log, torch.reciprocal)
    expected = float((mpmath.log(10) - mpmath.log(0.001)) / (10 - mpmath.mpf(0.001)))
    assert function.first(_tensor(0.001), _tensor(10.0)).item() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("point", [0.0, 1e-17, 1e-3, -0.7, 0.5, 3.0, -40.0])
@pytest.mark.parametrize("spread", [0.0, 1e-17, 1e-14, 1e-7, 1e-4, 1e-2])
def test_second_differences_of_user_defined_functions_at_ties(point, spread):
    function = SpectralFunction.from_derivative(torch.sin, torch.cos)
    points = (point, point - spread, point + 0.3 * spread)
    expected = float(divided_difference(mpmath.sin, points))
    assert abs(function.second(*map(_tensor, points)).item() - expected) <= 1e-13


def test_invalid_functions_are_rejected():
    with pytest.raises(DomainError, match="Unknown matrix function 'logarithm'"):
        resolve_function("logarithm")
    with pytest.raises(DomainError, match="needs exponent"):
        resolve_function("power")
    with pytest.raises(DomainError, match='needs function="power"'):
        resolve_function("log", 0.5)
    with pytest.raises(DtypeError, match="pair of callables"):
        resolve_function((torch.log,))
    with pytest.raises(DtypeError, match="floating point"):
        resolve_function("power", torch.tensor(2))
    with pytest.raises(DtypeError, match="number or a tensor"):
        resolve_function("power", "2")


def test_missing_derivatives_are_reported():
    function, _ = resolve_function("log")
    with pytest.raises(OrderError, match="no derivative with respect to a parameter"):
        in_parameter(function)
    with pytest.raises(DomainError, match="needs function"):
        resolve_function("log", 2.0)
    assert resolve_function(function) == (function, ())


@pytest.mark.parametrize(
    ("p", "low", "high"),
    [(40.0, 1e-12, 1.0), (60.5, 1e-12, 1.0), (-40.0, 0.5, 1e12), (0.7, 1e-12, 1.0), (1e-8, 1e-300, 1e10)],
)
def test_powers_of_distant_numbers_do_not_overflow(p, low, high):
    function, (exponent,) = power_function(torch.tensor(p, dtype=torch.float64))
    actual = function.first(_tensor(low), _tensor(high), exponent).item()
    expected = divided_difference(lambda x: x ** mpmath.mpf(p), (low, high))
    assert actual == pytest.approx(float(expected), rel=1e-13)
    in_exponent = in_parameter(function).first(_tensor(low), _tensor(high), exponent).item()
    expected = divided_difference(lambda x: x ** mpmath.mpf(p) * mpmath.log(x), (low, high))
    assert in_exponent == pytest.approx(float(expected), rel=1e-12)
