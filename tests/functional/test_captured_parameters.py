"""Tensors that a function of one's own captures learn: their gradient is that of g(λ) on the spectrum."""

import pytest
import torch
from torch.autograd import gradcheck

import matbackprop as mb
from helpers.matrices import made_complex, symmetric, with_singular_values
from matbackprop.errors import OrderError


def _tanh(t, s):
    """s·tanh(tλ) and its derivative."""
    return lambda x: s * torch.tanh(t * x), lambda x: s * t * (1 - torch.tanh(t * x) ** 2)


def _parameters():
    return tuple(torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.7, 1.3))


@pytest.mark.parametrize("spectrum", ["separated", "repeated", "identity"])
@pytest.mark.parametrize("kind", [lambda a: a, made_complex], ids=["real", "complex"])
def test_gradcheck_of_the_matrix_and_of_captured_tensors(spectrum, kind):
    a = kind(symmetric(spectrum, 2)).requires_grad_()

    def function(x, t, s):
        return mb.matrix_function(0.5 * (x + x.mH), _tanh(t, s))

    assert gradcheck(function, (a, *_parameters()), check_forward_ad=True)


@pytest.mark.parametrize(("m", "d"), [(3, 5), (5, 3)])
def test_gradcheck_of_pooling_with_captured_tensors(m, d):
    f = with_singular_values(m, d, (1.0, 1.0, 2.0), 2).requires_grad_()

    def pool(x, t, s):
        return mb.second_order_pool(x, eps=0.1, function=_tanh(t, s))

    assert gradcheck(pool, (f, *_parameters()))


def test_a_divided_difference_and_several_functions_may_capture_too():
    t = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    a = symmetric("repeated")
    square = (lambda x: t * x**2, lambda x, y: t * (x + y))
    first, _ = mb.matrix_functions(a, [square, "log"])
    first.trace().backward()
    torch.testing.assert_close(t.grad, (a @ a).trace())


def test_a_module_learns_a_function():
    """A network of the eigenvalue: every parameter of it receives a gradient, and a step of descent helps."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()

    def g(x):
        return net(x.unsqueeze(-1)).squeeze(-1)

    def slope(x):
        return torch.func.grad(lambda y: g(y).sum())(x)

    a = symmetric("separated", 2)

    def loss():
        return (mb.matrix_function(a, (g, slope)) - mb.matrix_log(a)).square().sum()

    before = loss()
    before.backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in net.parameters())
    with torch.no_grad():
        for p in net.parameters():
            p -= 1e-3 * p.grad
    assert loss() < before


def test_a_second_order_is_refused_and_nothing_is_captured_without_gradients():
    t, s = _parameters()
    a = symmetric("separated").requires_grad_()
    out = mb.matrix_function(a, _tanh(t, s))
    for one, other in ((a, t), (t, a), (t, s), (a, a)):
        (grad,) = torch.autograd.grad(out.square().sum(), one, create_graph=True)
        with pytest.raises(OrderError, match="captures tensors which learn"):
            torch.autograd.grad(grad.sum(), other, retain_graph=True)
    fixed = mb.matrix_function(a, _tanh(t.detach(), s.detach()))
    (first,) = torch.autograd.grad(fixed.square().sum(), a, create_graph=True)
    assert torch.autograd.grad(first.sum(), a)[0].isfinite().all()
    with torch.no_grad():
        torch.testing.assert_close(mb.matrix_function(a, _tanh(t, s)), out.detach())


@pytest.mark.parametrize("one", [0, 1])
def test_a_mixed_second_order_of_a_linear_loss_is_refused_too(one):
    """Its gradients do not depend on the result, only on what the result depends on."""
    t, s = _parameters()
    a = symmetric("separated").requires_grad_()
    pair = (a, t)
    (grad,) = torch.autograd.grad(mb.matrix_function(a, _tanh(t, s)).sum(), pair[one], create_graph=True)
    with pytest.raises(OrderError, match="captures tensors which learn"):
        grad.sum().backward(inputs=[pair[1 - one]])
