"""Second-order pooling against an 80-bit reference: values and gradients, at ill-conditioned features."""

import functools

import mpmath
import numpy as np
import pytest
import torch

from helpers.matrices import FEATURES, dead_and_duplicate, generator, relu_features, with_singular_values
from helpers.reference import (
    log_gradient_longdouble,
    longdouble_svd,
    pool_gradient_mpmath,
    pool_longdouble,
    pool_value_mpmath,
)
from matbackprop import matrix_log, matrix_sqrt, second_order_pool
from matbackprop.cuda import pool as pool_kernels
from matbackprop.functional import _second_order_pool

LIMIT = {torch.float64: 5e-12, torch.float32: 2e-7}
EPS = 1e-3


def _relative(a, reference):
    return float(
        np.linalg.norm((a.detach().numpy() - reference).astype(float)) / np.linalg.norm(reference.astype(float))
    )


@functools.cache
def _problem(kind, m, d, function):
    """Features and a gradient that are exact in float32, so that one reference serves both dtypes."""
    f = FEATURES[kind](m, d, dtype=torch.float32)
    g = torch.randn(d, d, generator=generator(5), dtype=torch.float32)
    return f, g, *pool_longdouble(f.numpy(), g.numpy(), EPS, function)


def _errors(kind, m, d, function, dtype):
    """Relative errors of the value and of the gradient."""
    f, g, value, gradient = _problem(kind, m, d, function)
    x = f.to(dtype, copy=True).requires_grad_()
    c = second_order_pool(x, eps=EPS, function=function)
    c.backward(g.to(dtype))
    return _relative(c, value), _relative(x.grad, gradient)


@pytest.mark.parametrize("function", ["log", "sqrt"])
@pytest.mark.parametrize("kind", FEATURES)
@pytest.mark.parametrize(("m", "d"), [(36, 64), (169, 64), (36, 256)])
def test_against_80_bits(kind, m, d, function):
    for dtype, limit in LIMIT.items():
        assert max(_errors(kind, m, d, function, dtype)) <= limit


@pytest.mark.parametrize(("name", "function"), [("log", mpmath.log), ("sqrt", mpmath.sqrt)])
@pytest.mark.parametrize(("m", "d"), [(3, 5), (5, 3)])
def test_the_reference_against_50_digits(m, d, name, function):
    """The 80-bit reference and the layer, against the d×d matrix and its divided differences in mpmath."""
    f = dead_and_duplicate(m, d, seed=2)
    g = torch.randn(d, d, generator=generator(1), dtype=torch.float64)
    expected = pool_gradient_mpmath(f.numpy(), g.numpy(), EPS, function)
    _, reference = pool_longdouble(f.numpy(), g.numpy(), EPS, name)
    assert np.abs(reference - expected).max() <= 1e-15 * np.abs(expected).max()
    x = f.clone().requires_grad_()
    second_order_pool(x, eps=EPS, function=name).backward(g)
    assert np.abs(x.grad.numpy() - expected).max() <= 1e-13 * np.abs(expected).max()


def test_the_80_bit_decomposition():
    a = relu_features(20, 12).numpy()
    u, s, v = longdouble_svd(a)
    assert np.abs((u * s) @ v.T - a).max() <= 1e-17 * s.max()
    for side in (u, v):
        assert np.abs(side.T @ side - np.eye(12)).max() <= 1e-17


def test_the_80_bit_gradient_of_the_logarithm():
    a = relu_features(9, 5).mT @ relu_features(9, 5)
    g = torch.randn(5, 5, generator=generator(1), dtype=torch.float64)
    (ours,) = torch.autograd.grad(matrix_log(a.requires_grad_()), a, g)
    torch.testing.assert_close(
        (ours + ours.mT) / 2, torch.from_numpy(log_gradient_longdouble(a.detach(), g).astype(float))
    )


@pytest.mark.parametrize(("low", "high"), [(-2, 3), (-4, 2), (-0.5, 1.5), (0, 1.49)])
@pytest.mark.parametrize(("m", "d"), [(6, 9), (9, 6)])
def test_wide_spectra_against_mpmath(m, d, low, high):
    """Singular values over many orders: eigenvectors of the Gram matrix alone have errors of 1e-8."""
    f = with_singular_values(m, d, torch.logspace(low, high, 6, dtype=torch.float64), seed=3)
    g = torch.randn(d, d, generator=generator(2), dtype=torch.float64)
    expected = pool_gradient_mpmath(f.numpy(), g.numpy(), EPS, mpmath.log)
    x = f.clone().requires_grad_()
    second_order_pool(x, eps=EPS).backward(g)
    assert _relative(x.grad, expected) <= 5e-12
    mapped = torch.func.vmap(torch.func.grad(lambda y: (second_order_pool(y, eps=EPS) * g).sum()))(f[None])
    assert _relative(mapped[0], expected) <= 5e-12


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 1e7), (torch.float64, 1e9), (torch.float32, 1e7)])
@pytest.mark.parametrize("outlier", ["row", "column"])
@pytest.mark.parametrize(("m", "d"), [(8, 8), (12, 5), (5, 8)])
def test_outliers_against_mpmath(m, d, outlier, dtype, scale):
    """One row or channel dominates the Gram matrix; the features still determine the others."""
    f = torch.randn(m, d, generator=generator(7), dtype=dtype)
    (f if outlier == "row" else f.mT)[0] *= scale
    g = torch.randn(d, d, generator=generator(8), dtype=dtype)
    x = f.clone().requires_grad_()
    value = second_order_pool(x, eps=EPS)
    value.backward(g)
    assert _relative(value, pool_value_mpmath(f.numpy(), EPS, mpmath.log)) <= LIMIT[dtype]
    expected = pool_gradient_mpmath(f.numpy(), g.numpy(), EPS, mpmath.log, digits=60)
    assert _relative(x.grad, expected) <= LIMIT[dtype]
    mapped = torch.func.vmap(torch.func.grad(lambda y: (second_order_pool(y, eps=EPS) * g).sum()))(f[None])
    assert _relative(mapped[0], expected) <= LIMIT[dtype]


@pytest.mark.parametrize("function", ["log", "sqrt"])
@pytest.mark.parametrize("high", [2.99, 3.01])
def test_float32_features_around_the_condition_limit_of_the_short_route_against_80_bits(high, function):
    """Up to s_max/s_min = 1e6 the eigenvalues are not refined and the gradient is a product with F."""
    f = with_singular_values(30, 8, torch.logspace(0, high, 8, dtype=torch.float64), seed=5).float().requires_grad_()
    g = torch.randn(8, 8, generator=generator(3))
    c = second_order_pool(f, eps=1e-6, function=function)
    c.backward(g)
    for actual, expected in zip((c, f.grad), pool_longdouble(f.detach(), g, 1e-6, function), strict=True):
        assert _relative(actual, expected.astype(float)) <= LIMIT[torch.float32]


@pytest.mark.parametrize("high", [0.0, 1.49])
def test_narrow_spectrum_with_weights_equals_the_general_route(high):
    """The CPU checks s and takes the short route; vmap cannot."""
    f = with_singular_values(9, 6, torch.logspace(0, high, 6, dtype=torch.float64), seed=4)
    w = 0.5 + torch.rand(9, generator=generator(1), dtype=torch.float64)
    g = torch.randn(6, 6, generator=generator(2), dtype=torch.float64)

    def value(x, y):
        return (second_order_pool(x, weight=y, function="sqrt") * g).sum()

    there = torch.func.vmap(torch.func.grad(value, argnums=(0, 1)))(f[None], w[None])
    leaves = f.clone().requires_grad_(), w.clone().requires_grad_()
    for short, general in zip(torch.autograd.grad(value(*leaves), leaves), there, strict=True):
        torch.testing.assert_close(short, general[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "d"), [(36, 64), (64, 36)])
def test_the_gradient_at_zero_is_exactly_zero(m, d, dtype):
    f = torch.zeros(2, m, d, dtype=dtype, requires_grad=True)
    for function in ("log", "sqrt", "exp", "inverse"):
        (grad,) = torch.autograd.grad(second_order_pool(f, function=function).sum(), f)
        assert grad.count_nonzero() == 0


def test_precision_float32_reduces_accuracy():
    """precision=torch.float32 is less accurate than the default, float64."""
    f, g, _, gradient = _problem("relu", 36, 256, "log")
    x = f.clone().requires_grad_()
    second_order_pool(x, eps=EPS, precision=torch.float32).backward(g)
    assert 2e-7 < _relative(x.grad, gradient) < 1e-3


@pytest.mark.parametrize("d", [9, 4])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("weight", [None, "mask", "regions"])
def test_weights_and_centering_reach_the_kernels(weight, center, d, monkeypatch):
    """The fallback replaces the kernels here."""
    f = relu_features(6, d, 2).float()
    w = {
        None: None,
        "mask": torch.rand(2, 6, generator=generator(1)) > 0.4,
        "regions": torch.rand(2, 3, 6, generator=generator(2)),
    }[weight]
    g = torch.randn(d, d, generator=generator(3))
    exact = f.double().requires_grad_()
    expected = second_order_pool(exact, weight=w, center=center)
    (expected_grad,) = torch.autograd.grad((expected * g).sum(), exact)
    handed = []
    monkeypatch.setattr(_second_order_pool, "_kernels_take", lambda f, w, *_: _second_order_pool._fixed(w))
    monkeypatch.setattr(pool_kernels, "pool", lambda x, *given: handed.append(x) or given[-1](x, *given[:4]))
    x = f.clone().requires_grad_()
    value = second_order_pool(x, weight=w, center=center, check=False)
    (grad,) = torch.autograd.grad((value * g).sum(), x)
    assert len(handed) == 1 and value.dtype == torch.float32
    assert _relative(value, expected.detach().numpy()) < 2e-7 and _relative(grad, expected_grad.numpy()) < 2e-7
    if w is not None and w.is_floating_point():
        second_order_pool(x, weight=w.clone().requires_grad_(), center=center, check=False)
        assert len(handed) == 1  # trainable weights use the general operator


def test_exponent_gradient_ignores_directions_outside_the_row_space():
    """Two rows, parallel up to rounding, far above ε: all but one direction has the eigenvalue ε."""
    row = torch.tensor([0.96, 0.0, 1.0], dtype=torch.float64) * 1e15
    w, eps = torch.tensor([1.2e10, 0.87e10], dtype=torch.float64), 1e-12
    p = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    c = second_order_pool(row.expand(2, 3), weight=w, eps=eps, function="power", exponent=p)
    (gradient,) = torch.autograd.grad(c.diagonal().sum(), p)
    top = w.sum() * row.square().sum()
    expected = top**0.3 * top.log() + 2 * eps**0.3 * np.log(eps)
    assert abs(float(gradient / expected) - 1) < 1e-12


def test_gradients_of_weights_with_a_variance_that_rounding_may_make_negative():
    f = relu_features(6, 3).double() * torch.tensor([1e-12, 1e-7, 1.0])
    g = torch.randn(3, 3, generator=generator(5), dtype=torch.float64)
    w = torch.rand(6, generator=generator(6), dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad((second_order_pool(f, weight=w, eps=0.1, function="sqrt") * g).sum(), w)
    a = f.mT @ (w.unsqueeze(-1) * f) + 0.1 * torch.eye(3, dtype=torch.float64)
    (expected,) = torch.autograd.grad((matrix_sqrt(a) * g).sum(), w)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
@pytest.mark.parametrize("share", [1e-3, 1.0, 1e10])
def test_gradient_of_features_whose_squares_underflow(shape, share):
    """log(c²A) = log A + log(c²)I, so that the gradient of cF is that of F over c; c = 2^-500, ε in units of F²."""
    scale = 2.0**-500
    f = torch.randn(*shape, generator=generator(3), dtype=torch.float64)
    g = torch.randn(shape[1], shape[1], generator=generator(4), dtype=torch.float64)
    v = torch.randn(*shape, generator=generator(5), dtype=torch.float64)

    def pooled(factor):
        x = (f * factor).requires_grad_()
        c = second_order_pool(x, eps=share * factor**2)
        _, tangent = torch.func.jvp(lambda x: second_order_pool(x, eps=share * factor**2), (x,), (v * factor,))
        return c, torch.autograd.grad((c * g).sum(), x)[0] * factor, tangent

    (c, gradient, tangent), (small, small_gradient, small_tangent) = pooled(1.0), pooled(scale)
    shift = torch.eye(shape[1], dtype=torch.float64) * 2 * np.log(scale)
    torch.testing.assert_close(small - shift, c, rtol=0, atol=1e-12 * 700)
    torch.testing.assert_close(small_gradient, gradient, rtol=1e-11, atol=1e-25)
    torch.testing.assert_close(small_tangent, tangent, rtol=1e-11, atol=1e-11 / share)


def test_moments_below_the_range_next_to_eps_are_accurate():
    f = torch.randn(3, 3, generator=generator(7), dtype=torch.float64)
    w = torch.full((3,), 2.0**-33, dtype=torch.float64)
    small = second_order_pool(f * 2.0**-498, weight=w, eps=2.0**-996)  # their squares are 2^-1029 and less
    large = second_order_pool(f, weight=w, eps=1.0)
    shift = torch.eye(3, dtype=torch.float64) * 996 * np.log(2)
    torch.testing.assert_close(small + shift, large, rtol=0, atol=1e-12)


@pytest.mark.parametrize("centered", [False, True])
def test_second_derivatives_if_rows_are_rounding_errors_of_each_other(centered):
    """The eigenvectors of small singular values overlap by rounding errors of the largest row."""
    f = torch.randn(4, 5, generator=generator(0), dtype=torch.float64)
    f = f - f.mean(0) if centered else f
    f = f * torch.tensor([1e-2, 1e-3, 1e-5, 1e5, 10.0], dtype=torch.float64)
    eps = torch.tensor(1e10, dtype=torch.float64, requires_grad=True)
    g = torch.randn(5, 5, generator=generator(1), dtype=torch.float64)
    (slope,) = torch.autograd.grad(second_order_pool(f, eps=eps), eps, g, create_graph=True)
    (second,) = torch.autograd.grad(slope, eps)
    inverse = torch.linalg.inv(f.mT @ f + eps.detach() * torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(second, -(inverse @ inverse * g).sum(), rtol=1e-12, atol=0)
