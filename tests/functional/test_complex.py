"""Hermitian and complex input against mpmath, SciPy, derivatives of torch, and the real operators."""

import pytest
import torch

import matbackprop as mb
from helpers.matrices import generator, symmetric, to_complex, with_singular_values
from matbackprop.errors import DomainError, DtypeError, GaugeWarning, SymmetryError, TieError
from matbackprop.solvers import batched_eigh, route

C = torch.complex128


def hermitian(spectrum, *batch, seed=0):
    return to_complex(symmetric(spectrum, *batch, seed=seed))


def cnormal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=C)


def doubled(a):
    """X + iY as the real matrix [[X, −Y], [Y, X]], an isomorphism; symmetric for Hermitian A."""
    return torch.cat([torch.cat([a.real, -a.imag], -1), torch.cat([a.imag, a.real], -1)], -2)


def test_procrustes_finds_the_unitary_matrix_between_complex_points():
    x, turn = cnormal(6, 3), torch.linalg.qr(cnormal(3, 3, seed=2))[0]
    torch.testing.assert_close(mb.procrustes(x, x @ turn, reflection=True), turn)


@pytest.mark.parametrize(
    "vectors",
    [
        lambda a, **o: mb.eigh(a, **o)[1],
        lambda a, **o: mb.svd(a, **o)[0],
        lambda a, **o: mb.generalized_eigh(a, 2 * a + a @ a, **o)[1],
    ],
    ids=["eigh", "svd", "generalized_eigh"],
)
def test_loss_depending_on_the_phase_of_a_vector_is_rejected(vectors):
    a = hermitian("separated").requires_grad_()
    with pytest.raises(TieError, match="phase of a complex vector"):
        vectors(a)[..., 0].real.sum().backward()
    with pytest.warns(GaugeWarning, match="phase"):
        vectors(a, ties="drop")[..., 0].real.sum().backward()
    a.grad = None
    vectors(a)[..., 0].abs().square()[0].backward()
    assert a.grad.isfinite().all()


def test_loss_of_vectors_of_a_zero_singular_value_is_rejected():
    x = to_complex(with_singular_values(3, 3, (2.0, 1.0, 0.0))).requires_grad_()
    u, _, vh = mb.svd(x)
    with pytest.raises(TieError):
        (u[:, 2:] @ vh[2:]).real.sum().backward()
    u, _, vh = mb.svd(x)
    (u[:, :1] @ vh[:1]).real.sum().backward()
    assert x.grad.isfinite().all()


def test_small_directions_are_accurate_next_to_an_outlier():
    """Eigenvectors that a Gram matrix mixes are refined."""
    f = cnormal(6, 9)
    f[0] *= 1e7
    expected = mb.second_order_pool(doubled(f), eps=1e-3)
    torch.testing.assert_close(doubled(mb.second_order_pool(f, eps=1e-3)), expected, rtol=1e-9, atol=1e-9)


def test_hermitian_input_is_checked():
    a = hermitian("separated")
    a[0, 1] += 0.5j
    with pytest.raises(SymmetryError, match=r"must be Hermitian, .* conjugate transpose by up to 0\.5"):
        mb.matrix_exp(a)
    with pytest.raises(SymmetryError, match="Hermitian"):  # symmetric, and not Hermitian
        mb.matrix_exp(torch.tensor([[0, 1j], [1j, 0]]))
    with pytest.raises(DomainError, match="needs positive eigenvalues"):
        mb.matrix_log(hermitian((-1.0, 1.0, 2.0)))


def test_solver_routes_of_complex_matrices():
    assert route("cuda", torch.complex64, n=36, batch=100) == route("cuda", C, n=512) == "torch"
    a = hermitian(tuple(torch.linspace(1, 2, 24).tolist()), 64)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert route("cpu", C, n=24, batch=64) == "lapack-threads"
        values, vectors = batched_eigh(a)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close((vectors * values.unsqueeze(-2)) @ vectors.mH, a)


def test_vectorized_hermitian_matrices_keep_inner_products_and_round_trip():
    a, b = hermitian("separated", 2), hermitian("repeated", 2, seed=3)
    v, w = mb.vectorize_symmetric(a), mb.vectorize_symmetric(b)
    torch.testing.assert_close((v.conj() * w).real.sum(-1), (a.conj() * b).real.sum((-2, -1)))
    torch.testing.assert_close(mb.unvectorize_symmetric(v), a)


def rows(m, d, seed=6):
    return cnormal(m, d, seed=seed) @ cnormal(d, d, seed=seed + 1) + (2 - 3j)


@pytest.mark.parametrize(("m", "d"), [(12, 3), (3, 5)])
def test_whitened_complex_samples_are_white_and_equal_the_doubled_problem(m, d):
    """Each complex sample corresponds to two real ones; statistics are passed because the means differ."""
    x, g = rows(m, d).requires_grad_(), cnormal(m, d, seed=1)
    y = mb.whiten(x, eps=0.1)
    centered = x.detach() - x.detach().mean(0)
    mean, covariance = torch.zeros(2 * d, dtype=torch.float64), doubled(centered.mH @ centered / m)
    expected = mb.whiten(doubled(centered), eps=0.1, mean=mean, covariance=covariance)
    torch.testing.assert_close(doubled(y.detach()), expected, rtol=1e-10, atol=1e-10)
    by_statistics = mb.whiten(x, eps=0.1, mean=x.detach().mean(0), covariance=centered.mH @ centered / m)
    torch.testing.assert_close(by_statistics, y)
    assert torch.autograd.gradcheck(lambda t: mb.whiten(t, eps=0.1, weight=torch.arange(1, m + 1.0)), x)
    if m > d:
        white = mb.whiten(x.detach(), eps=1e-13)
        torch.testing.assert_close(white.mH @ white / m, torch.eye(d, dtype=C), rtol=0, atol=1e-10)
    (y * g.conj()).real.sum().backward()
    assert x.grad.abs().max() > 0


def test_phases_of_complex_principal_components_are_fixed():
    x = rows(12, 3).requires_grad_()
    y = mb.whiten(x, method="pca", eps=1e-13)
    torch.testing.assert_close(y.mH @ y / 12, torch.eye(3, dtype=C), rtol=0, atol=1e-10)
    torch.testing.assert_close(mb.whiten(1j * x, method="pca", eps=1e-13), 1j * y)
    axes = torch.linalg.lstsq(x - x.mean(0), y).solution
    assert bool((1 / axes.abs().square().sum(-2)).diff().le(0).all())
    largest = axes.gather(-2, axes.abs().argmax(-2, keepdim=True))
    torch.testing.assert_close(largest, largest.abs().to(C))
    assert torch.autograd.gradcheck(lambda t: mb.whiten(t, method="pca", eps=0.1), x, check_forward_ad=True)


def test_whitening_layer_of_complex_channels_and_its_statistics():
    torch.manual_seed(0)
    layer = mb.nn.Whitening(4, groups=2, affine=False, momentum=None, dtype=torch.complex64)
    mix = torch.block_diag(cnormal(2, 2), cnormal(2, 2, seed=1)).to(torch.complex64)
    for _ in range(100):
        y = layer(torch.randn(64, 4, dtype=torch.complex64) @ mix + 3j)
    part = y[:, :2]
    torch.testing.assert_close(part.mH @ part / 64, torch.eye(2, dtype=part.dtype), rtol=0, atol=1e-4)
    expected = (mix.mH @ mix)[:2, :2]
    torch.testing.assert_close(layer.running_covariance[0], expected, rtol=0.05, atol=0.05)
    alone = layer.eval()(torch.zeros(1, 4, dtype=torch.complex64))
    assert alone.dtype == torch.complex64 and alone.isfinite().all()
    with pytest.raises(DtypeError, match="the layer is for complex input"):
        layer(torch.zeros(1, 4))
    with pytest.raises(DtypeError, match=r"dtype=torch\.complex64"):
        mb.nn.Whitening(4)(torch.zeros(2, 4, dtype=torch.complex64))
    with pytest.raises(DtypeError, match="mean must be a real"):
        mb.whiten(torch.ones(3, 2), mean=torch.ones(2) * 1j, covariance=torch.eye(2))


def entries(a):
    """Convert to a sparse matrix; torch's conversion has no gradient for complex entries."""
    places = torch.cartesian_prod(*(torch.arange(n) for n in a.shape)).mT
    return torch.sparse_coo_tensor(places, a.flatten(), a.shape, check_invariants=True)


@pytest.mark.parametrize("largest", [True, False])
def test_leading_pairs_of_hermitian_operators_by_every_route(largest):
    """Dense, sparse and matrix-free routes agree in values and gradients."""
    a = hermitian((-2.0, -1.0, 0.5, 1.0, 2.0, 3.0))
    g = cnormal(6, 2, seed=3)
    lam, u = torch.linalg.eigh(a)
    lam, u = (lam.flip(-1), u.flip(-1)) if largest else (lam, u)
    results = []
    for way in (
        lambda x: mb.topk_eigh(x, 2, largest=largest),
        lambda x: mb.topk_eigh(entries(x), 2, largest=largest),
        lambda x: mb.topk_eigh(lambda y, x: 0.5 * (x + x.mH) @ y, 2, (x,), n=6, largest=largest),
    ):
        leaf = a.clone().requires_grad_()
        pairs = way(leaf)
        torch.testing.assert_close(pairs.eigenvalues, lam[:2])
        torch.testing.assert_close(pairs.eigenvectors @ pairs.eigenvectors.mH, u[:, :2] @ u[:, :2].mH)
        loss = (pairs.eigenvectors * g.conj()).real.sum() + pairs.eigenvalues.square().sum()
        results.append((pairs.eigenvectors, torch.autograd.grad(loss, leaf)[0]))
    for vectors, gradient in results[1:]:
        torch.testing.assert_close(vectors, results[0][0], rtol=0, atol=1e-9)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-8, atol=1e-8)
    v = mb.topk_subspace(a, 2, largest=largest)
    torch.testing.assert_close(v @ v.mH, u[:, :2] @ u[:, :2].mH)
    a = a[:4, :4].contiguous().requires_grad_()

    def projector(a):
        v = mb.topk_subspace(0.5 * (a + a.mH), 2, largest=largest)
        return v @ v.mH

    assert torch.autograd.gradcheck(projector, a, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(projector, a, fast_mode=True)
    a = a.detach()
    with pytest.raises(SymmetryError, match="must be symmetric"):
        mb.topk_eigh((a + 0.1j).to_sparse(), 2)
    with pytest.raises(SymmetryError, match="xᵀAy"):
        mb.topk_eigh(lambda y, s: s * y, 1, (torch.tensor(1j),), n=4)
