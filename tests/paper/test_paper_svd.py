"""Proposition 1, SVD variations, and the chain rule of §4.2.

Notation of the paper: X = UΣVᵀ with U m×m, Σ m×n, V n×n, m ≥ n; A:B = tr(AᵀB).
"""

import pytest
import torch

from helpers.paper import colon, diag_part, error, full_svd, inverse_gaps, matrix, svd_near, sym, variation
from matbackprop import matrix_log, second_order_pool, svd

M, N = 5, 3
X, DX = matrix(M, N), matrix(M, N, seed=1)
U, SIGMA, V = full_svd(X)
K = inverse_gaps(SIGMA.diagonal() ** 2)
SIGMA_N = SIGMA[:N]
U1, U2 = U[:, :N], U[:, N:]
G_U, G_SIGMA, G_V = matrix(M, M, seed=2), matrix(M, N, seed=3), matrix(N, N, seed=4)


def d_sigma(dx):
    return diag_part(U.mT @ dx @ V)


def d_v(dx):
    return 2 * V @ (K.mT * sym(SIGMA.mT @ U.mT @ dx @ V))


def d_u(dx):
    c = dx @ V - U @ d_sigma(dx) - U @ SIGMA @ d_v(dx).mT @ V
    inverse = torch.linalg.inv(SIGMA_N)
    return torch.cat([c @ inverse, -U1 @ inverse @ c.mT @ U2], 1)


def adjoint(g_u, g_sigma, g_v):
    """∂L/∂X as printed (it is right), with its D."""
    inverse = torch.linalg.inv(SIGMA_N)
    d = g_u[:, :N] @ inverse - U2 @ g_u[:, N:].mT @ U1 @ inverse
    rest = V.mT @ (g_v - V @ d.mT @ U @ SIGMA)
    return d @ V.mT + U @ diag_part(g_sigma - U.mT @ d) @ V.mT + 2 * U @ SIGMA @ sym(K.mT * rest) @ V.mT, d


def test_variations_of_all_three_factors():
    du, ds, dv = variation(svd_near(U, V), X, DX)
    assert error(ds, d_sigma(DX)) < 1e-8
    assert error(dv, d_v(DX)) < 1e-8
    assert error(du, d_u(DX)) < 1e-8


def test_variations_keep_the_factors_orthogonal():
    for q, dq in ((U, d_u(DX)), (V, d_v(DX))):
        assert error(q.mT @ dq + dq.mT @ q, torch.zeros_like(q)) < 1e-12


def test_partial_derivatives_are_the_adjoint_of_the_variations():
    g_x, _ = adjoint(G_U, G_SIGMA, G_V)
    du, ds, dv = d_u(DX), d_sigma(DX), d_v(DX)
    assert abs(colon(g_x, DX) - colon(G_U, du) - colon(G_SIGMA, ds) - colon(G_V, dv)) < 1e-12


def test_library_layer_computes_these_partial_derivatives():
    x = X.clone().requires_grad_()
    u, s, vh = svd(x)
    signs = torch.sign((V * vh.mT).sum(0)).detach()
    loss = colon(G_U[:, :N], u * signs) + (G_SIGMA.diagonal() * s).sum() + colon(G_V, vh.mT * signs)
    (g_x,) = torch.autograd.grad(loss, x)
    thin = G_U.clone()
    thin[:, N:] = 0
    expected, _ = adjoint(thin, G_SIGMA, G_V)
    assert error(g_x, expected) < 1e-10


def test_library_layer_gives_the_variations_in_forward_mode():
    _, (du, ds, dvh) = torch.func.jvp(svd, (X,), (DX,))
    u, _, vh = svd(X)
    signs = torch.sign((V * vh.mT).sum(0))
    assert error(du * signs, d_u(DX)[:, :N]) < 1e-10
    assert error(ds, d_sigma(DX).diagonal()) < 1e-12
    assert error(dvh.mT * signs, d_v(DX)) < 1e-10
    turn = u.mT @ du
    assert error(turn, -turn.mT) < 1e-12  # U stays orthonormal


def test_library_layer_accepts_the_full_matrices_of_the_proposition():
    x = X.clone().requires_grad_()
    u, _, vh = svd(x, full_matrices=True)
    target = sym(matrix(M, M, seed=5))
    # U₂U₂ᵀ does not depend on the gauge of U₂, so its derivative is determined.
    (g_x,) = torch.autograd.grad(colon(target, u[:, N:] @ u[:, N:].mT) + 0 * vh.sum(), x)
    expected, _ = adjoint(
        torch.cat([torch.zeros(M, N).double(), 2 * target @ U2], 1),
        torch.zeros(M, N).double(),
        torch.zeros(N, N).double(),
    )
    assert error(g_x, expected) < 1e-10


def test_erratum_5_a_product_in_the_proof_does_not_conform():
    """Printed: ΣUᵀDVᵀ : dVᵀ. Right: ΣᵀUᵀDVᵀ."""
    _, d = adjoint(G_U, G_SIGMA, G_V)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        SIGMA @ U.mT @ d @ V.mT
    dv = d_v(DX)
    printed_term = colon(d, U @ SIGMA @ dv.mT @ V)
    assert abs(printed_term - colon(SIGMA.mT @ U.mT @ d @ V.mT, dv.mT)) < 1e-12


def test_erratum_6_the_variation_of_u2_is_a_gauge_choice():
    """Printed: orthogonality determines dU₂. It leaves any U₂R, R antisymmetric; U₂ᵀdU₂ = 0 is chosen."""
    du2 = d_u(DX)[:, N:]
    assert error(U2.mT @ du2, torch.zeros(M - N, M - N).double()) < 1e-12
    turn = torch.tensor([[0.0, 0.3], [-0.3, 0.0]], dtype=torch.float64)

    def turning(x):  # also a valid decomposition: U₂ rotates while X changes
        u, sigma, v = svd_near(U, V)(x)
        angle = colon(x - X, DX) / colon(DX, DX)
        u = torch.cat([u[:, :N], u[:, N:] @ torch.matrix_exp(angle * turn)], 1)
        assert error(u @ sigma @ v.mT, x) < 1e-12
        assert error(u.mT @ u, torch.eye(M).double()) < 1e-12
        return u

    other = variation(turning, X, DX)
    assert error(other[:, :N], d_u(DX)[:, :N]) < 1e-8
    assert error(other[:, N:], du2) > 0.1
    assert error(other[:, N:], du2 + U2 @ turn) < 1e-8


def test_erratum_7_wide_matrices_make_k_infinite():
    """Printed for m ≥ n only; DeepO2P on a 6×6 grid with 256 channels is wide. The thin dual form takes it."""
    f = matrix(4, 7)
    g = sym(matrix(7, 7, seed=1))
    _, s, vh = torch.linalg.svd(f, full_matrices=True)
    squares = torch.cat([s**2, torch.zeros(3).double()])
    k = inverse_gaps(squares)
    assert torch.isinf(k).sum() == 6  # the three pairs of zero singular values
    v = vh.mT
    printed = k.mT * (v.mT @ (2 * g @ v @ torch.diag((squares + 1e-3).log())))
    assert not torch.isfinite(printed).all()

    x = f.clone().requires_grad_()
    (fused,) = torch.autograd.grad(colon(g, second_order_pool(x)), x)
    df = matrix(4, 7, seed=2)
    expected = variation(lambda f: colon(g, second_order_pool(f)), f, df, step=1e-5)
    assert abs(colon(fused, df) - expected) < 1e-5 * abs(expected)


def test_erratum_8_setting_k_to_zero_at_equal_singular_values_is_not_a_fix():
    """The named route "svd" drops tied pairs, as implementations of the paper do; the fused route does not need to."""
    left, _ = torch.linalg.qr(matrix(6, 4))
    right, _ = torch.linalg.qr(matrix(4, 4, seed=1))
    f = left @ torch.diag(torch.tensor([2.0, 1.0, 1.0, 0.5], dtype=torch.float64)) @ right
    g, df = sym(matrix(4, 4, seed=2)), matrix(6, 4, seed=3)

    def slope(method):
        x = f.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(colon(g, second_order_pool(x, method=method, check=False)), x)
        return colon(gradient, df)

    expected = variation(lambda f: colon(g, second_order_pool(f)), f, df, step=1e-5)
    assert abs(slope("fused") - expected) < 1e-4 * abs(expected)
    assert abs(slope("svd") - expected) > 1e-2 * abs(expected)


def test_erratum_8_dead_channels_ruin_the_gradient_of_z():
    """Two dead channels: Z = FᵀF + εI has the eigenvalue ε twice, where the right divided difference of log is 1/ε."""
    f = matrix(6, 4).relu()
    f[:, 2:] = 0
    z = f.mT @ f + 0.1 * torch.eye(4).double()
    g, dz = sym(matrix(4, 4, seed=2)), sym(matrix(4, 4, seed=3))
    expected = variation(lambda z: colon(g, matrix_log(z)), z, dz)
    values, u = torch.linalg.eigh(z)
    tied = (values.unsqueeze(1) - values.unsqueeze(0)).abs() < 1e-12
    k = torch.where(tied, 0.0, inverse_gaps(values))
    dropped = (
        u @ (k.mT * (u.mT @ (2 * g @ u @ values.log().diag())) + ((u.mT @ g @ u).diagonal() / values).diag()) @ u.mT
    )
    x = z.clone().requires_grad_()
    (fused,) = torch.autograd.grad(colon(g, matrix_log(x)), x)
    assert abs(colon(fused, dz) - expected) < 1e-7 * abs(expected)
    assert abs(colon(sym(dropped), dz) - expected) > 0.1 * abs(expected)


def test_erratum_18_x_is_the_input_of_the_layer_and_y_its_output():
    """Printed: X and Y are the matrix versions of x_l and x_{l−1}. But f(X) = Y and x_l = f(x_{l−1}), so X is x_{l−1}.

    The chain rule ∂(L∘f)/∂X : dX = ∂L/∂Y : dY holds only this way, as the shapes show.
    """
    x = X.clone().requires_grad_()
    y = second_order_pool(x)  # m×d to d×d
    g_y = matrix(N, N, seed=6)
    (g_x,) = torch.autograd.grad(colon(g_y, y), x)
    assert g_x.shape == X.shape
    _, dy = torch.func.jvp(second_order_pool, (X,), (DX,))
    assert dy.shape == g_y.shape
    assert abs(colon(g_x, DX) - colon(g_y, dy)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_gradient_of_a_square_matrix_that_is_not_symmetric(dtype):
    """Square matrices: the backward pass has separate branches, one for complex matrices."""
    a = torch.rand(3, 3, dtype=dtype, generator=torch.Generator().manual_seed(3)).requires_grad_()

    def loss(a):
        u, s, vh = svd(a)
        return (u * s.exp().unsqueeze(-2)) @ vh, s

    assert torch.autograd.gradcheck(loss, a)
