"""Propositions 3 and 4, matrix functions from the SVD and from EIG, and the DeepO2P corollary."""

import pytest
import torch

from helpers.paper import colon, diag_part, error, full_svd, inverse_gaps, matrix, svd_near, sym, variation
from matbackprop import matrix_function, second_order_pool

M, D, EPS = 6, 4, 1e-3
F, DF = matrix(M, D), matrix(M, D, seed=1)
G = matrix(D, D, seed=2)
U, SIGMA, V = full_svd(F)
LAMBDA = SIGMA.mT @ SIGMA + EPS * torch.eye(D).double()

# name → (g, g')
FUNCTIONS = {
    "log": (torch.log, torch.reciprocal),
    "sqrt": (torch.sqrt, lambda x: 0.5 * x.rsqrt()),
    "inv_sqrt": (torch.rsqrt, lambda x: -0.5 * x**-1.5),
    # e^{x/10}: the eigenvalues reach 20
    "exp": (lambda x: (x / 10).exp(), lambda x: (x / 10).exp() / 10),
    "inverse": (torch.reciprocal, lambda x: -(x**-2)),
}


def on_diagonal(function, a):
    return torch.diag(function(a.diagonal()))


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_a_matrix_function_acts_on_the_singular_values(name):
    g, _ = FUNCTIONS[name]
    c = V @ on_diagonal(g, LAMBDA) @ V.mT
    z = F.mT @ F + EPS * torch.eye(D).double()
    by_library = matrix_function(z / 10 if name == "exp" else z, name)
    assert error(by_library, c) < 1e-9 * c.abs().max()
    if name != "exp":
        assert error(second_order_pool(F, eps=EPS, function=name), c) < 1e-9 * c.abs().max()


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_svd_matrix_function_variation_and_partial_derivatives(name):
    """C as a function of (Σ, V), which vary independently in the proposition."""
    g, slope = FUNCTIONS[name]
    d_sigma, d_v = diag_part(matrix(M, D, seed=3)), V @ (matrix(D, D, seed=4) - matrix(D, D, seed=4).mT)

    def layer(t):
        sigma, v = SIGMA + t * d_sigma, V + t * d_v
        return v @ on_diagonal(g, sigma.mT @ sigma + EPS * torch.eye(D).double()) @ v.mT

    dc = variation(layer, torch.zeros(()).double(), torch.ones(()).double())
    value, derivative = on_diagonal(g, LAMBDA), on_diagonal(slope, LAMBDA)
    printed = 2 * sym(d_v @ value @ V.mT) + 2 * sym(V @ derivative @ SIGMA.mT @ d_sigma @ V.mT)
    scale = dc.abs().max()
    assert error(dc, printed) < 1e-7 * scale
    g_v = 2 * sym(G) @ V @ value
    g_sigma = diag_part(2 * SIGMA @ derivative @ V.mT @ sym(G) @ V)
    assert abs(colon(G, dc) - colon(g_v, d_v) - colon(g_sigma, d_sigma)) < 1e-6 * scale


def test_erratum_3_the_proof_lacks_a_transpose():
    """Printed in the proof: (dV g V)_sym. The proposition itself has (dV g Vᵀ)_sym."""
    g, _ = FUNCTIONS["log"]
    d_v = V @ (matrix(D, D, seed=4) - matrix(D, D, seed=4).mT)
    value = on_diagonal(g, LAMBDA)
    dc = variation(
        lambda t: (V + t * d_v) @ value @ (V + t * d_v).mT, torch.zeros(()).double(), torch.ones(()).double()
    )
    assert error(dc, 2 * sym(d_v @ value @ V.mT)) < 1e-8
    assert error(dc, 2 * sym(d_v @ value @ V)) > 0.5


def test_erratum_4_only_the_diagonal_of_the_partial_derivative_counts():
    """Printed: ∂L/∂Σ and ∂L/∂Q are full matrices. Σ and Q stay diagonal, so the rest must be dropped."""
    value, derivative = on_diagonal(torch.log, LAMBDA), on_diagonal(torch.reciprocal, LAMBDA)
    g_q = derivative @ V.mT @ G @ V
    assert error(g_q, diag_part(g_q)) > 0.1
    g_u = 2 * sym(G) @ V @ value
    z = F.mT @ F + EPS * torch.eye(D).double()
    inside = inverse_gaps(LAMBDA.diagonal()).mT * (V.mT @ g_u)
    expected = variation(lambda f: colon(G, second_order_pool(f, eps=EPS)), F, DF)
    right = 2 * F @ sym(V @ (inside + diag_part(g_q)) @ V.mT)
    wrong = 2 * F @ sym(V @ (inside + g_q) @ V.mT)
    assert abs(colon(right, DF) - expected) < 1e-6 * abs(expected)
    assert abs(colon(wrong, DF) - expected) > 1e-2 * abs(expected)
    assert error(z, V @ LAMBDA @ V.mT) < 1e-12


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_eig_matrix_function_variation_and_partial_derivatives(name):
    g, slope = FUNCTIONS[name]
    d_u = V @ (matrix(D, D, seed=4) - matrix(D, D, seed=4).mT)
    d_q = diag_part(matrix(D, D, seed=3)) * LAMBDA  # of the size of the eigenvalues, the smallest of which is near zero

    def layer(t):
        u = V + t * d_u
        return u @ on_diagonal(g, LAMBDA + t * d_q) @ u.mT

    dc = variation(layer, torch.zeros(()).double(), torch.ones(()).double())
    value, derivative = on_diagonal(g, LAMBDA), on_diagonal(slope, LAMBDA)
    scale = dc.abs().max()
    assert error(dc, 2 * sym(d_u @ value @ V.mT) + V @ derivative @ d_q @ V.mT) < 1e-7 * scale
    g_u, g_q = 2 * sym(G) @ V @ value, diag_part(derivative @ V.mT @ G @ V)
    assert abs(colon(G, dc) - colon(g_u, d_u) - colon(g_q, d_q)) < 1e-6 * scale


@pytest.mark.parametrize("method", ["svd", "eig", "fused"])
def test_corollary_deep_o2p_by_all_three_routes(method):
    f = F.clone().requires_grad_()
    c = second_order_pool(f, eps=EPS, method=method)
    assert error(c, V @ on_diagonal(torch.log, LAMBDA) @ V.mT) < 1e-9
    (gradient,) = torch.autograd.grad(colon(G, c), f)
    expected = variation(lambda f: colon(G, second_order_pool(f, eps=EPS)), F, DF)
    assert abs(colon(gradient, DF) - expected) < 1e-7 * abs(expected)


def test_corollary_deep_o2p_svd_by_hand():
    """∂L/∂V and ∂L/∂Σ of the corollary, sent through Proposition 1, are the library's gradient."""
    g_v = 2 * sym(G) @ V @ on_diagonal(torch.log, LAMBDA)
    g_sigma = diag_part(2 * SIGMA @ torch.linalg.inv(LAMBDA) @ V.mT @ sym(G) @ V)
    k = inverse_gaps(SIGMA.diagonal() ** 2)
    by_hand = U @ g_sigma @ V.mT + 2 * U @ SIGMA @ sym(k.mT * (V.mT @ g_v)) @ V.mT
    f = F.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(colon(G, second_order_pool(f, eps=EPS)), f)
    assert error(gradient, by_hand) < 1e-9 * by_hand.abs().max()
    ds, dv = (d for i, d in enumerate(variation(svd_near(U, V), F, DF)) if i)
    assert abs(colon(by_hand, DF) - colon(g_sigma, ds) - colon(g_v, dv)) < 1e-6 * by_hand.abs().max()
