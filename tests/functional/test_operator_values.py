"""Values against SciPy, mpmath and numpy."""

import numpy as np
import pytest
import torch

import matbackprop as mb
from helpers.matrices import SPECTRA, dead_and_duplicate, relu_features, symmetric, with_singular_values


def test_integer_powers_accept_indefinite_matrices():
    a = symmetric((-2.0, 0.0, 1.5))
    torch.testing.assert_close(mb.matrix_power(a, 3), a @ a @ a)
    torch.testing.assert_close(mb.matrix_power(a, 0), torch.eye(3, dtype=torch.float64))
    b = symmetric((-2.0, 0.5, 1.5))
    torch.testing.assert_close(mb.matrix_power(b, -2), torch.linalg.inv(b @ b))
    torch.testing.assert_close(mb.matrix_inverse(b), torch.linalg.inv(b))


def test_user_defined_functions_equal_built_in_ones():
    a = symmetric("near_repeated", 2)
    torch.testing.assert_close(mb.matrix_function(a, (torch.log, torch.reciprocal)), mb.matrix_log(a))
    pair = (torch.log, lambda x, y: torch.where(x == y, 1 / x, (x / y).log() / torch.where(x == y, 1, x - y)))
    torch.testing.assert_close(mb.matrix_function(a, pair), mb.matrix_log(a))

    class Slope:
        def __call__(self, x):
            return 1 / x

    b = symmetric("repeated").requires_grad_()
    mb.matrix_function(b, (torch.log, Slope())).sum().backward()
    c = b.detach().clone().requires_grad_()
    mb.matrix_log(c).sum().backward()
    torch.testing.assert_close(b.grad, c.grad)


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6)])
@pytest.mark.parametrize("function", ["log", "sqrt", "inv_sqrt", "exp", "inverse"])
def test_pool_equals_the_matrix_function(shape, function):
    f = 0.3 * dead_and_duplicate(*shape, 2)
    a = f.mT @ f + 0.1 * torch.eye(shape[1], dtype=torch.float64)
    expected = mb.matrix_function(a, function)
    torch.testing.assert_close(mb.second_order_pool(f, eps=0.1, function=function), expected)


@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
@pytest.mark.parametrize("center", [False, True])
def test_weights_and_regions_equal_pooling_the_selected_rows(shape, center):
    f = relu_features(*shape, 2)
    masks = torch.zeros(2, 3, shape[0], dtype=torch.bool)
    masks[:, 0, :3] = True
    masks[:, 1, 2:] = True  # the third region is empty
    pooled = mb.second_order_pool(f, weight=masks, center=center)
    assert pooled.shape == (2, 3, shape[1], shape[1])
    for b in range(2):
        for r in range(2):
            selected = mb.second_order_pool(f[b][masks[b, r]], center=center)
            torch.testing.assert_close(pooled[b, r], selected, rtol=1e-9, atol=1e-9)
    empty = torch.eye(shape[1], dtype=torch.float64) * np.log(1e-3)
    torch.testing.assert_close(pooled[:, 2], empty.expand(2, -1, -1))
    alone = mb.second_order_pool(f, weight=masks[:, 1], center=center)
    torch.testing.assert_close(alone, pooled[:, 1])


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)])
@pytest.mark.parametrize("method", ["svd", "eig"])
def test_reference_routes_agree_at_full_rank(shape, method):
    """Values and gradients of all inputs, without ties."""
    grads = []
    for route in ("fused", method):
        f = relu_features(*shape, 2, seed=3).requires_grad_()
        w = (
            torch.rand(2, shape[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
        ).requires_grad_()
        eps = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
        c = mb.second_order_pool(f, eps=eps, weight=w, method=route)
        target = torch.linspace(-1, 1, c.numel(), dtype=torch.float64).reshape(c.shape)
        grads.append((c, *torch.autograd.grad((c * target).sum(), (f, w, eps))))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_reference_routes_are_finite_and_wrong_at_ties():
    """A repeated singular value: dropping the pair loses part of the gradient."""
    target = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6)
    grads = {}
    for method in ("fused", "svd", "eig"):
        f = with_singular_values(4, 6, (1.0, 1.0, 1.0, 2.0)).requires_grad_()
        (mb.second_order_pool(f, method=method) * target).sum().backward()
        assert f.grad.isfinite().all()
        grads[method] = f.grad
    for method in ("svd", "eig"):
        assert (grads[method] - grads["fused"]).norm() > 0.01 * grads["fused"].norm()


def test_eigh_and_svd_rebuild_their_inputs():
    a = symmetric("separated", 2)
    lam, u = mb.eigh(a)
    torch.testing.assert_close((u * lam.unsqueeze(-2)) @ u.mT, a)
    torch.testing.assert_close(lam, torch.tensor(SPECTRA["separated"], dtype=torch.float64).expand(2, -1))
    for shape in ((4, 6), (6, 4)):
        for full in (False, True):
            f = relu_features(*shape, 2)
            u, s, vh = mb.svd(f, full)
            k = min(shape)
            torch.testing.assert_close((u[..., :k] * s.unsqueeze(-2)) @ vh[..., :k, :], f)
            assert u.shape[-1] == (shape[0] if full else k)
            assert vh.shape[-2] == (shape[1] if full else k)
            torch.testing.assert_close(u.mT @ u, torch.eye(u.shape[-1], dtype=torch.float64).expand(2, -1, -1))


def test_vectorizing_keeps_inner_products_and_round_trips():
    a, b = symmetric("separated", 2, seed=1), symmetric("repeated", 2, seed=2)
    v, w = mb.vectorize_symmetric(a), mb.vectorize_symmetric(b)
    assert v.shape == (2, 10)
    torch.testing.assert_close((v * w).sum(-1), (a * b).sum((-2, -1)), rtol=1e-14, atol=0)
    torch.testing.assert_close(mb.unvectorize_symmetric(v), a, rtol=1e-15, atol=0)
    assert mb.vectorize_symmetric(torch.zeros(3, 0, 0)).shape == (3, 0)
    assert mb.unvectorize_symmetric(torch.zeros(3, 0)).shape == (3, 0, 0)
