"""§5: the criterion, M and Ω, J₁, J₂, and gradients in F and Λ."""

import pytest
import torch

from helpers.paper import colon, error, matrix, sym, variation
from matbackprop import (
    affinity,
    normalized_affinity,
    normalized_cut_j1,
    normalized_cut_j2,
    normalized_cut_value,
    projector,
)

M, D, K = 12, 4, 3
F, DF = matrix(M, D).abs() + 0.1, matrix(M, D, seed=1)
LABELS = torch.arange(M) % K
E = torch.nn.functional.one_hot(LABELS).double()
W = F @ F.mT
DEGREE = W.sum(1)
ROOT = DEGREE.sqrt().diag()
DOWN = DEGREE.rsqrt().diag()
NORMAL = DOWN @ W @ DOWN
OMEGA = ROOT @ E @ E.mT @ ROOT
PSI = E @ torch.linalg.inv(E.mT @ E) @ E.mT
ONE = torch.ones(M, 1).double()
EYE = torch.eye(M).double()


def pinv(a):
    return torch.linalg.pinv(a, rtol=1e-9)


def onto(a):
    return a @ pinv(a)


def d_w(df, lam=None):
    lam = torch.eye(D).double() if lam is None else lam
    return df @ lam @ F.mT + F @ lam @ df.mT


def j1_of_w(w):
    m, omega = normalized_affinity(w, LABELS)
    return 0.5 * (projector(m, rank_tol=1e-9) - projector(omega, rank_tol=1e-9)).square().sum()


def j2_of_w(w):
    return 0.5 * (projector(w, rank_tol=1e-9) - PSI).square().sum()


def gradient_of_m_and_omega(g_m, g_omega):
    """∂J₁/∂W of the proposition."""
    diagonal = (DEGREE.reciprocal().diag() @ (OMEGA @ sym(g_omega) - NORMAL @ sym(g_m))).diagonal()
    return DOWN @ g_m @ DOWN + diagonal.unsqueeze(1) @ ONE.mT


# --- the criterion


def test_erratum_9_the_criterion_has_d_minus_w():
    """Printed: tr(EᵀWE(EᵀDE)⁻¹), the association within the regions. The cut is the complement."""
    z = ROOT @ E @ torch.linalg.inv(torch.linalg.cholesky(E.mT @ DEGREE.diag() @ E)).mT
    relaxed = K - (z.mT @ NORMAL @ z).trace()
    inverse = torch.linalg.inv(E.mT @ DEGREE.diag() @ E)
    printed = (E.mT @ W @ E @ inverse).trace()
    corrected = (E.mT @ (DEGREE.diag() - W) @ E @ inverse).trace()
    assert abs(printed - relaxed) > 0.1
    assert abs(corrected - relaxed) < 1e-12
    assert abs(normalized_cut_value(W, LABELS) - relaxed) < 1e-12


def test_erratum_10_d_to_the_minus_half_times_z_is_piecewise_constant():
    z = ROOT @ E @ torch.linalg.inv(torch.linalg.cholesky(E.mT @ DEGREE.diag() @ E)).mT
    assert error(z.mT @ z, torch.eye(K).double()) < 1e-12

    def spread_within_regions(x):
        return max(float((x[j == LABELS] - x[j == LABELS].mean(0)).abs().max()) for j in range(K))

    assert spread_within_regions(ROOT @ z) > 0.05
    assert spread_within_regions(DOWN @ z) < 1e-14


# --- the proposition on M and Ω


def test_variations_of_m_and_omega():
    dw = sym(matrix(M, M, seed=2).abs())
    dm, d_omega = variation(lambda w: normalized_affinity(w, LABELS), W, dw)
    turned = DEGREE.reciprocal().diag() @ (dw @ ONE).squeeze().diag()
    assert error(d_omega, sym(OMEGA @ turned)) < 1e-7
    assert error(dm, DOWN @ dw @ DOWN - sym(NORMAL @ turned)) < 1e-8


def test_partial_derivative_of_m_and_omega_is_their_adjoint():
    g_m, g_omega, dw = matrix(M, M, seed=3), matrix(M, M, seed=4), sym(matrix(M, M, seed=2))
    dm, d_omega = variation(lambda w: normalized_affinity(w, LABELS), W, dw)
    printed = gradient_of_m_and_omega(g_m, g_omega)
    assert abs(colon(printed, dw) - colon(g_m, dm) - colon(g_omega, d_omega)) < 1e-6
    w = W.clone().requires_grad_()
    m, omega = normalized_affinity(w, LABELS)
    (by_library,) = torch.autograd.grad(colon(g_m, m) + colon(g_omega, omega), w)
    assert abs(colon(by_library, dw) - colon(printed, dw)) < 1e-9


# --- J₁


def test_j1_by_the_four_layers_of_the_paper():
    """F → W → (M, Ω) → (Π_M, Π_Ω) → J₁ backwards, against differences and the thin form."""
    pi_m, pi_omega = onto(NORMAL), onto(OMEGA)
    assert abs(0.5 * (pi_m - pi_omega).square().sum() - normalized_cut_j1(F, LABELS)) < 1e-10
    g_m = 2 * sym((EYE - pi_m) @ sym(pi_m - pi_omega) @ pinv(NORMAL))
    g_omega = 2 * sym((EYE - pi_omega) @ sym(pi_omega - pi_m) @ pinv(OMEGA))
    g_w = gradient_of_m_and_omega(g_m, g_omega)
    g_f = 2 * sym(g_w) @ F
    expected = variation(lambda f: normalized_cut_j1(f, LABELS), F, DF)
    assert abs(colon(g_w, d_w(DF)) - expected) < 1e-8
    assert abs(colon(g_f, DF) - expected) < 1e-8
    f = F.clone().requires_grad_()
    (thin,) = torch.autograd.grad(normalized_cut_j1(f, LABELS), f)
    assert error(thin, g_f) < 1e-9


def test_j1_has_a_gradient_in_lambda():
    lam, d_lam = torch.eye(D).double() + 0.2 * matrix(D, D, seed=5).abs(), matrix(D, D, seed=6)
    expected = variation(lambda lam: j1_of_w(affinity(F, lam)), lam, d_lam)
    x = lam.clone().requires_grad_()
    (thin,) = torch.autograd.grad(normalized_cut_j1(F, LABELS, lam=x), x)
    assert abs(colon(thin, d_lam) - expected) < 1e-8
    assert thin.abs().max() > 1e-4


# --- J₂


def test_j2_and_the_last_line_of_its_proof():
    expected = variation(lambda f: normalized_cut_j2(f, LABELS), F, DF)
    g_w = -2 * (EYE - onto(W)) @ PSI @ pinv(W)
    assert abs(j2_of_w(W) - normalized_cut_j2(F, LABELS)) < 1e-10
    assert abs(colon(g_w, d_w(DF)) - expected) < 1e-8
    f = F.clone().requires_grad_()
    (thin,) = torch.autograd.grad(normalized_cut_j2(f, LABELS), f)
    assert error(thin, 2 * sym(g_w) @ F) < 1e-9


def test_erratum_13_the_first_two_lines_of_the_proof_have_the_wrong_sign():
    """Printed: −2(I − Π_W)(Π_W − Π_Ψ)W⁺. With a plus it is Lemma 1, and equals the last line."""
    last = -2 * (EYE - onto(W)) @ PSI @ pinv(W)
    second = (EYE - onto(W)) @ (onto(W) - PSI) @ pinv(W)
    assert error(2 * second, last) < 1e-10
    assert error(-2 * second, last) > 1e-2
    assert error(-2 * second, -last) < 1e-10


def test_erratum_14_w_is_recovered_with_d_to_the_plus_half():
    values, vectors = torch.linalg.eigh(NORMAL)
    core = vectors @ values.diag() @ vectors.mT
    assert error(DOWN @ core @ DOWN, W) > 0.5
    assert error(ROOT @ core @ ROOT, W) < 1e-12


def test_erratum_15_only_eigenvectors_of_nonzero_eigenvalues_span_w():
    """Printed: V = D^{1/2}U with U from the eigendecomposition of M. With all of U, Π_W is the identity."""
    values, vectors = torch.linalg.eigh(NORMAL)

    def from_vectors(u):
        v = ROOT @ u
        return v @ torch.linalg.inv(v.mT @ v) @ v.mT

    assert error(from_vectors(vectors), EYE) < 1e-9
    kept = vectors[:, values > 1e-10]
    assert kept.shape[1] == D
    assert error(from_vectors(kept), onto(W)) < 1e-9
    assert error(from_vectors(kept), onto(F)) < 1e-9  # the span of the features


def test_bach_and_jordan_project_on_another_subspace():
    values, vectors = torch.linalg.eigh(NORMAL)
    other = onto(DOWN @ vectors[:, values > 1e-10])
    assert error(other, onto(W)) > 1e-2


def test_erratum_16_a_non_symmetric_lambda():
    """Printed: ∂J/∂F = 2(∂J/∂W)_sym FΛᵀ. Right: (∂J/∂W)FΛᵀ + (∂J/∂W)ᵀFΛ."""
    lam, g_w = torch.eye(D).double() + matrix(D, D, seed=7).abs(), matrix(M, M, seed=8)
    expected = variation(lambda f: colon(g_w, affinity(f, lam)), F, DF)
    printed = 2 * sym(g_w) @ F @ lam.mT
    corrected = g_w @ F @ lam.mT + g_w.mT @ F @ lam
    assert abs(colon(corrected, DF) - expected) < 1e-7
    assert abs(colon(printed, DF) - expected) > 0.5
    f = F.clone().requires_grad_()
    (by_library,) = torch.autograd.grad(colon(g_w, affinity(f, lam)), f)
    assert error(by_library, corrected) < 1e-11
    symmetric = sym(lam)
    assert error(2 * sym(g_w) @ F @ symmetric.mT, g_w @ F @ symmetric.mT + g_w.mT @ F @ symmetric) < 1e-11


def test_partial_derivative_for_lambda():
    lam, d_lam, g_w = torch.eye(D).double() + matrix(D, D, seed=7).abs(), matrix(D, D, seed=9), matrix(M, M, seed=8)
    expected = variation(lambda lam: colon(g_w, affinity(F, lam)), lam, d_lam)
    assert abs(colon(F.mT @ g_w @ F, d_lam) - expected) < 1e-8


def test_j2_has_no_gradient_in_lambda():
    g_w = -2 * (EYE - onto(W)) @ PSI @ pinv(W)
    assert error(F.mT @ g_w @ F, torch.zeros(D, D).double()) < 1e-10
    lam = torch.eye(D).double() + 0.2 * matrix(D, D, seed=5).abs()
    assert abs(j2_of_w(affinity(F, lam)) - normalized_cut_j2(F, LABELS)) < 1e-9


@pytest.mark.parametrize("objective", [normalized_cut_j1, normalized_cut_j2])
def test_forward_mode_is_the_variation(objective):
    _, tangent = torch.func.jvp(lambda f: objective(f, LABELS, num_labels=K), (F,), (DF,))
    assert abs(tangent - variation(lambda f: objective(f, LABELS), F, DF)) < 1e-8
