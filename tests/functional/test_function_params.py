"""User-defined functions: gradients of their parameters, refused closures, rank-deficient matrices."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import matbackprop as mb
from helpers.matrices import generator, symmetric, to_complex, with_singular_values
from matbackprop.divided_differences import SpectralFunction
from matbackprop.errors import ConfigurationError, DomainError, DtypeError, OrderError

TANH = (
    lambda x, t, s: s * torch.tanh(t * x),
    lambda x, t, s: s * t * (1 - torch.tanh(t * x) ** 2),
)


def _parameters():
    return tuple(torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.7, 1.3))


@pytest.mark.parametrize("spectrum", ["separated", "repeated", "identity"])
@pytest.mark.parametrize("kind", [lambda a: a, to_complex], ids=["real", "complex"])
def test_gradcheck_of_the_matrix_and_the_parameters(spectrum, kind):
    a = kind(symmetric(spectrum, 2)).requires_grad_()

    def function(x, *params):
        return mb.matrix_function(0.5 * (x + x.mH), TANH, params=params)

    assert gradcheck(function, (a, *_parameters()), check_forward_ad=True)
    if spectrum == "repeated" and not a.is_complex():
        assert gradgradcheck(function, (a[0].detach().requires_grad_(), *_parameters()))


@pytest.mark.parametrize(("m", "d"), [(3, 5), (5, 3)])
def test_gradcheck_of_pooling_with_parameters(m, d):
    f = with_singular_values(m, d, (1.0, 1.0, 2.0), 2).requires_grad_()

    def pool(x, *params):
        return mb.second_order_pool(x, eps=0.1, function=TANH, params=params)

    assert gradcheck(pool, (f, *_parameters()))


def test_gradcheck_of_a_pencil_with_parameters():
    a, b = symmetric("separated", 2), symmetric("separated", 2, seed=5)

    def function(*params):
        return mb.generalized_matrix_function(a, b, TANH, params=params)

    assert gradcheck(function, _parameters())


@pytest.mark.parametrize("name", ["power law", "power", "log"])
def test_parameter_gradient_does_not_depend_on_the_function_name(name):
    """A function named "power law" once counted as a built-in power."""
    function = SpectralFunction.from_derivative(*TANH, name=name)
    t, s = _parameters()
    a = symmetric("separated")
    mb.matrix_function(a, function, params=(t, s)).trace().backward()
    torch.testing.assert_close(s.grad, torch.tanh(t.detach() * torch.linalg.eigvalsh(a)).sum())
    assert t.grad.abs() > 0


class _Scaled:
    """A method with a default argument once counted as a divided difference of two arguments."""

    def value(self, x, k=2.0):
        return torch.sin(k * x)

    def slope(self, x, k=2.0):
        return k * torch.cos(k * x)


def test_bound_methods_with_default_arguments():
    scaled = _Scaled()
    a = symmetric("repeated").requires_grad_()
    mb.matrix_function(a, (scaled.value, scaled.slope)).trace().backward()
    lam, u = torch.linalg.eigh(a.detach())
    torch.testing.assert_close(a.grad, (u * (2 * torch.cos(2 * lam))) @ u.mT)


def test_a_network_as_a_function():
    """Every parameter of a network of the eigenvalue receives a gradient, and a step of descent helps."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    names, params = zip(*net.named_parameters(), strict=True)

    def g(x, *values):
        weights = dict(zip(names, values, strict=True))
        return torch.func.functional_call(net, weights, x.unsqueeze(-1)).squeeze(-1)

    def slope(x, *values):
        return torch.func.grad(lambda y: g(y, *values).sum())(x)

    a = symmetric("separated", 2)

    def loss():
        return (mb.matrix_function(a, (g, slope), params=params) - mb.matrix_log(a)).square().sum()

    before = loss()
    before.backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in params)
    with torch.no_grad():
        for p in params:
            p -= 1e-3 * p.grad
    assert loss() < before


def test_closure_over_a_trainable_tensor_is_rejected():
    t = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    pair = (lambda x: torch.tanh(t * x), lambda x: t * (1 - torch.tanh(t * x) ** 2))
    a, f = symmetric("separated"), with_singular_values(3, 4, (1.0, 2.0, 3.0))
    for call in (
        lambda: mb.matrix_function(a, pair),
        lambda: mb.second_order_pool(f, function=pair),
        lambda: mb.generalized_matrix_function(a, a, pair),
    ):
        with pytest.raises(ConfigurationError, match="params="):
            call()
    with torch.no_grad():
        assert mb.matrix_function(a, pair).isfinite().all()
    t.requires_grad_(False)
    assert mb.matrix_function(a, pair).isfinite().all()


def test_orders_that_are_not_provided():
    t, s = _parameters()
    a = symmetric("separated").requires_grad_()
    (grad,) = torch.autograd.grad(mb.matrix_function(a, TANH, params=(t, s)).sum(), t, create_graph=True)
    with pytest.raises(OrderError, match="Differentiate twice"):
        torch.autograd.grad(grad, a, create_graph=True)
    with pytest.raises(OrderError, match="Differentiate twice"):
        torch.func.hessian(lambda t: mb.matrix_function(a.detach(), TANH, params=(t, s.detach())).sum())(t.detach())


def test_wrong_parameters():
    a = symmetric("separated")
    with pytest.raises(DomainError, match="params= needs a user-defined function"):
        mb.matrix_function(a, "log", params=(torch.ones(()),))
    with pytest.raises(DtypeError, match="params must be real floating-point tensors"):
        mb.matrix_function(a, TANH, params=(0.5, 1.0))


def test_the_module_accepts_parameters_in_the_call():
    t, s = _parameters()
    a = symmetric("separated")
    module = mb.nn.MatrixFunction(TANH)
    torch.testing.assert_close(module(a, params=(t, s)), mb.matrix_function(a, TANH, params=(t, s)))


INVERSE = (lambda x: 1 / (1 + x), lambda x: -1 / (1 + x) ** 2)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [4, 16])
def test_derivatives_at_a_rank_deficient_gram_matrix(seed, n):
    """Eigenvalues that differ by rounding count as equal: (I + A)⁻¹ has −X E X and X E X H X + X H X E X."""
    f = torch.randn(n, max(n // 4, 1), generator=generator(seed), dtype=torch.float64)
    a = (f @ f.mT).requires_grad_()
    e, h = (symmetric([0.1 * i for i in range(n)], seed=seed + i) for i in (1, 2))
    x = torch.linalg.inv(torch.eye(n, dtype=torch.float64) + a.detach())
    (grad,) = torch.autograd.grad((mb.matrix_function(a, INVERSE) * e).sum(), a, create_graph=True)
    torch.testing.assert_close(grad, -x @ e @ x, rtol=0, atol=1e-12)
    (second,) = torch.autograd.grad((grad * h).sum(), a)
    torch.testing.assert_close(second, x @ e @ x @ h @ x + x @ h @ x @ e @ x, rtol=0, atol=1e-10)
