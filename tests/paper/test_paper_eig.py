"""Proposition 2, EIG variations."""

import torch

from helpers.paper import colon, diag_part, eig_near, error, inverse_gaps, matrix, spd, sym, variation
from matbackprop import eigh

N = 4
X, DX = spd(N), sym(matrix(N, N, seed=1))
VALUES, U = torch.linalg.eigh(X)
K_TILDE = inverse_gaps(VALUES)
K = inverse_gaps(VALUES**2)
G_U, G_SIGMA = matrix(N, N, seed=2), matrix(N, N, seed=3)


def printed_adjoint(g_u, g_sigma):
    return U @ (K_TILDE.mT * (U.mT @ g_u) + diag_part(g_sigma)) @ U.mT


def test_variations_with_k_tilde():
    du, ds = variation(eig_near(U), X, DX)
    assert error(ds, diag_part(U.mT @ DX @ U)) < 1e-8
    assert error(du, U @ (K_TILDE.mT * (U.mT @ DX @ U))) < 1e-8


def test_erratum_1_du_needs_k_tilde_and_not_k():
    """Printed: dU = U(Kᵀ∘(UᵀdXU)) with the K of the SVD, 1/(σᵢ² − σⱼ²). The proof has K̃, 1/(σᵢ − σⱼ)."""
    du, _ = variation(eig_near(U), X, DX)
    assert error(du, U @ (K.mT * (U.mT @ DX @ U))) > 0.05


def test_partial_derivatives_are_the_adjoint_of_the_variations():
    du, ds = variation(eig_near(U), X, DX)
    expected = colon(G_U, du) + colon(G_SIGMA, ds)
    assert abs(colon(printed_adjoint(G_U, G_SIGMA), DX) - expected) < 1e-7
    assert abs(colon(sym(printed_adjoint(G_U, G_SIGMA)), DX) - expected) < 1e-7


def test_erratum_2_the_gradient_must_be_symmetrized():
    """X is constrained to be symmetric. Printed without (·)_sym, the entries are wrong, and so is 2F·∂L/∂Z below."""
    printed = printed_adjoint(G_U, G_SIGMA)
    assert error(printed, sym(printed)) > 0.1

    f = matrix(6, N)
    z = f.mT @ f + 1e-3 * torch.eye(N).double()
    _, u = torch.linalg.eigh(z)

    def loss(f):
        vectors, q = eig_near(u)(f.mT @ f + 1e-3 * torch.eye(N).double())
        return colon(G_U, vectors) + colon(G_SIGMA, q)

    df = matrix(6, N, seed=4)
    expected = variation(loss, f, df)
    values = torch.linalg.eigvalsh(z)
    g_z = u @ (inverse_gaps(values).mT * (u.mT @ G_U) + diag_part(G_SIGMA)) @ u.mT
    assert abs(colon(2 * f @ sym(g_z), df) - expected) < 1e-7
    assert abs(colon(2 * f @ g_z, df) - expected) > 1e-2


def test_library_layer_computes_the_corrected_partial_derivatives():
    x = X.clone().requires_grad_()
    values, u = eigh(x)
    signs = torch.sign((U * u).sum(0)).detach()
    (g_x,) = torch.autograd.grad(colon(G_U, u * signs) + (G_SIGMA.diagonal() * values).sum(), x)
    assert error(g_x, sym(printed_adjoint(G_U, G_SIGMA))) < 1e-10


def test_library_layer_gives_the_variations_in_forward_mode():
    _, (d_values, du) = torch.func.jvp(eigh, (X,), (DX,))
    _, u = eigh(X)
    signs = torch.sign((U * u).sum(0))
    assert error(d_values, (U.mT @ DX @ U).diagonal()) < 1e-10
    assert error(du * signs, U @ (K_TILDE.mT * (U.mT @ DX @ U))) < 1e-10
