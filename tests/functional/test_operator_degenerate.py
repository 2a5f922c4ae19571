"""Derivatives at degenerate inputs against their analytic limits."""

import pytest
import torch

import matbackprop as mb
from helpers.matrices import rank_deficient, relu_features

SLOPES = {
    "log": lambda x: 1 / x,
    "sqrt": lambda x: 0.5 * x**-0.5,
    "inv_sqrt": lambda x: -0.5 * x**-1.5,
    "exp": torch.exp,
    "inverse": lambda x: -(x**-2),
}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("name", SLOPES)
def test_at_a_multiple_of_the_identity(name, scale):
    """dL/dA = g'(c) G_sym at A = cI, where autograd through eigh gives NaN."""
    if name == "exp" and scale > 1:
        scale = 100.0
    a = (scale * torch.eye(4, dtype=torch.float64)).requires_grad_()
    g = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)
    mb.matrix_function(a, name).backward(g)
    expected = SLOPES[name](torch.tensor(scale, dtype=torch.float64)) * 0.5 * (g + g.mT)
    torch.testing.assert_close(a.grad, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize(("m", "d"), [(4, 6), (6, 4)])
@pytest.mark.parametrize("function", ["log", "sqrt", "inverse"])
def test_pool_gradient_of_rank_deficient_features(m, d, function):
    """Equal to the chain rule through the d×d matrix function, with the repeated eigenvalue ε."""
    g = torch.linspace(-1, 1, d * d, dtype=torch.float64).reshape(d, d)
    f = rank_deficient(m, d, 2, 2).requires_grad_()
    mb.second_order_pool(f, eps=0.1, function=function).backward(g.expand(2, d, d))
    h = f.detach().clone().requires_grad_()
    mb.matrix_function(h.mT @ h + 0.1 * torch.eye(d, dtype=torch.float64), function).backward(g.expand(2, d, d))
    torch.testing.assert_close(f.grad, h.grad, rtol=1e-9, atol=1e-10)


def test_dead_channels_and_duplicates_keep_symmetry():
    """Equal rows get equal gradients; a dead channel of a diagonal loss gets none."""
    f = relu_features(5, 8)
    f[:, 2] = 0
    f[4] = f[1]
    f.requires_grad_()
    mb.second_order_pool(f).diagonal().square().sum().backward()
    torch.testing.assert_close(f.grad[4], f.grad[1])
    torch.testing.assert_close(f.grad[:, 2], torch.zeros(5, dtype=torch.float64))


def test_a_row_without_weight_gets_no_gradient_but_its_weight_does():
    f = relu_features(5, 8).requires_grad_()
    w = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5], dtype=torch.float64, requires_grad=True)
    mb.second_order_pool(f, weight=w).diagonal().sum().backward()
    assert f.grad[2].count_nonzero() == 0
    assert f.grad[0].count_nonzero() > 0
    # One-sided difference in the weight: the trace of log is log det.
    step = 1e-7
    eye = 1e-3 * torch.eye(8, dtype=torch.float64)
    moved = w.detach() + step * torch.nn.functional.one_hot(torch.tensor(2), 5)
    before, after = (torch.logdet(f.detach().mT @ (f.detach() * v[:, None]) + eye) for v in (w.detach(), moved))
    assert float(w.grad[2]) == pytest.approx(float((after - before) / step), rel=1e-3)


@pytest.mark.parametrize(("m", "d"), [(4, 6), (6, 4)])
def test_square_root_pooling_without_eps(m, d):
    """√(FᵀF) at a rank-deficient F: the value is right, and the gradient is zero outside the span of F."""
    f = rank_deficient(m, d, 2).requires_grad_()
    root = mb.second_order_pool(f, eps=0.0, function="sqrt")
    torch.testing.assert_close(root @ root, f.mT @ f, rtol=1e-9, atol=1e-9)
    root.diagonal().sum().backward()  # the nuclear norm of F, whose gradient is UVᵀ on the span
    u, _, vh = torch.linalg.svd(f.detach(), full_matrices=False)
    torch.testing.assert_close(f.grad, u[:, :2] @ vh[:2], rtol=1e-7, atol=1e-7)


def test_tiny_and_huge_features():
    """dL/dF of log at cF is that at F over c if ε is negligible."""
    f = relu_features(4, 6)
    g = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6)
    grads = {}
    for scale in (1e-9, 1.0, 1e8):
        x = (scale * f).requires_grad_()
        mb.second_order_pool(x, eps=1e-3 * scale**2).backward(g)
        assert x.grad.isfinite().all()
        grads[scale] = x.grad * scale
    torch.testing.assert_close(grads[1e-9], grads[1.0])
    torch.testing.assert_close(grads[1e8], grads[1.0])
