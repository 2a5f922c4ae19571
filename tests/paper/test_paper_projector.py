"""Lemma 1, the projector, and its limits."""

import torch

from helpers.paper import colon, error, matrix, sym, variation
from matbackprop import projector, spectral_projector

N, R = 6, 3
FACTOR, D_FACTOR = matrix(N, R), matrix(N, R, seed=1)
A = FACTOR @ FACTOR.mT
G = matrix(N, N, seed=2)
PI, INVERSE = A @ torch.linalg.pinv(A, rtol=1e-9), torch.linalg.pinv(A, rtol=1e-9)
EYE = torch.eye(N).double()


def along(dx):
    """The variation of A = XXᵀ, which keeps the rank."""
    return 2 * sym(FACTOR @ dx.mT)


def test_variation_for_variations_that_keep_the_rank():
    d_pi = variation(lambda x: projector(x @ x.mT), FACTOR, D_FACTOR)
    assert error(d_pi, 2 * sym((EYE - PI) @ along(D_FACTOR) @ INVERSE)) < 1e-8


def test_the_properties_that_the_proof_uses():
    d_pi, d_a = variation(lambda x: projector(x @ x.mT), FACTOR, D_FACTOR), along(D_FACTOR)
    assert error(PI @ PI, PI) < 1e-12
    assert error(PI @ A, A) < 1e-11
    assert error(d_pi @ PI + PI @ d_pi, d_pi) < 1e-8
    assert error(d_pi @ A + PI @ d_a, d_a) < 1e-7
    assert error(PI @ d_pi @ PI, torch.zeros(N, N).double()) < 1e-8
    assert error((EYE - PI) @ d_pi @ (EYE - PI), torch.zeros(N, N).double()) < 1e-8


def test_partial_derivative_is_the_adjoint_and_the_library_agrees():
    expected = variation(lambda x: colon(G, projector(x @ x.mT)), FACTOR, D_FACTOR)
    printed = 2 * (EYE - PI) @ sym(G) @ INVERSE
    assert abs(colon(printed, along(D_FACTOR)) - expected) < 1e-7
    a = A.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(colon(G, projector(a, symmetric=True)), a)
    assert error(gradient, sym(printed)) < 1e-9
    assert abs(colon(gradient, along(D_FACTOR)) - expected) < 1e-7


def test_erratum_11_the_projector_is_discontinuous_for_other_variations():
    """Printed: for any symmetric dA. A generic one, however small, makes A regular and Π the identity."""
    d_a = sym(matrix(N, N, seed=3))
    moved = projector(A + 1e-6 * d_a / d_a.norm())
    assert error(moved, EYE) < 1e-9
    assert error(projector(A), EYE) > 0.3


def test_erratum_11_the_gradient_must_be_symmetrized():
    printed = 2 * (EYE - PI) @ sym(G) @ INVERSE
    assert error(printed, sym(printed)) > 1e-2


def test_erratum_12_a_truncated_projector_needs_the_eigenvalues_below_the_cut():
    """Lemma 1 applied to the three leading eigenvectors of a regular A lacks the λⱼ in 1/(λᵢ − λⱼ)."""
    a, d_a = A + 0.3 * torch.diag(torch.arange(1.0, N + 1).double()), sym(matrix(N, N, seed=3))
    expected = variation(lambda a: spectral_projector(sym(a), rank=R), a, d_a)
    values, u = torch.linalg.eigh(a)
    top = u[:, -R:]
    pi = top @ top.mT
    lemma = 2 * sym((EYE - pi) @ d_a @ (top / values[-R:]) @ top.mT)
    assert error(lemma, expected) > 1e-3
    gamma = torch.zeros(N, N).double()
    gamma[-R:, :-R] = 1 / (values[-R:, None] - values[None, :-R])
    cross = u @ ((gamma + gamma.mT) * (u.mT @ d_a @ u)) @ u.mT
    assert error(cross, expected) < 1e-8
    _, by_library = torch.func.jvp(lambda a: spectral_projector(a, rank=R), (a,), (d_a,))
    assert error(by_library, expected) < 1e-8


def test_rectangular_matrices():
    """∂L/∂A = 2(I − Π) G_sym (A⁺)ᵀ."""
    a, d_a = matrix(N, R, seed=4), matrix(N, R, seed=5)
    expected = variation(lambda a: colon(G, projector(a)), a, d_a)
    inverse = torch.linalg.pinv(a)
    formula = 2 * (EYE - a @ inverse) @ sym(G) @ inverse.mT
    assert abs(colon(formula, d_a) - expected) < 1e-8
    x = a.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(colon(G, projector(x)), x)
    assert error(gradient, formula) < 1e-10
