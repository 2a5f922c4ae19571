"""Leading eigenpairs of dense, sparse and implicit operators against the full decomposition."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from helpers.matrices import generator, orthogonal, symmetric
from matbackprop import eigh, nn, spectral_projector, topk_eigh, topk_subspace
from matbackprop.errors import (
    DomainError,
    DtypeError,
    GaugeWarning,
    NonFiniteError,
    ShapeError,
    SolverError,
    SymmetryError,
    TieError,
)

N = 24


def features(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def product(x, f, lam):
    return f @ (lam @ (f.mT @ x))


def invariants(pairs):
    lam, v = pairs
    return lam, (v * lam.sin()) @ v.mT


def loss(pairs):
    lam, picture = invariants(pairs)
    weight = torch.linspace(-1, 1, picture.numel(), dtype=picture.dtype).reshape(picture.shape)
    return (picture * weight).sum() + lam.square().sum()


@pytest.mark.parametrize("largest", [True, False])
def test_an_operator_equals_its_matrix(largest):
    """W = FΛFᵀ, indefinite: values, vectors and gradients of F and Λ, against the dense route and eigh."""
    f, lam = features(N, N).requires_grad_(), symmetric("separated").requires_grad_()
    part = 0.5 * (lam + lam.mT)
    metric = torch.block_diag(part, -2 * part, *[0.3 * part] * 4)
    ways = (
        topk_eigh(product, 3, (f, metric), n=N, largest=largest),
        topk_eigh(product(torch.eye(N, dtype=torch.float64), f, metric), 3, largest=largest),
    )
    values, vectors = eigh(product(torch.eye(N, dtype=torch.float64), f, metric))
    whole = (values.flip(-1)[:3], vectors.flip(-1)[:, :3]) if largest else (values[:3], vectors[:, :3])
    torch.testing.assert_close(ways[0].eigenvectors, ways[1].eigenvectors, rtol=0, atol=1e-8)
    expected = torch.autograd.grad(loss(whole), (f, lam), retain_graph=True)
    for way in ways:
        torch.testing.assert_close(way.eigenvalues, whole[0], rtol=1e-11, atol=1e-11)
        for one, other in zip(torch.autograd.grad(loss(way), (f, lam), retain_graph=True), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_derivatives_of_both_orders_through_products_alone():
    f, lam = features(5, 3).requires_grad_(), torch.eye(3, dtype=torch.float64).requires_grad_()

    def call(f, lam):
        return invariants(topk_eigh(product, 2, (f, 0.5 * (lam + lam.mT)), n=5))

    assert gradcheck(call, (f, lam), check_forward_ad=True)
    assert gradgradcheck(lambda *x: sum(y.square().sum() for y in call(*x)), (f, lam), check_fwd_over_rev=True)


def test_large_dense_matrices_use_the_iteration():
    n = 600
    spectrum = torch.cat([torch.linspace(-1, 1, n - 3, dtype=torch.float64), torch.tensor([2.0, 3.0, 3.5])])
    q = orthogonal(n)
    a = ((q * spectrum) @ q.mT).requires_grad_()
    pairs = topk_eigh(a, 3)
    torch.testing.assert_close(pairs.eigenvalues, torch.tensor([3.5, 3.0, 2.0], dtype=torch.float64))
    (grad,) = torch.autograd.grad(loss(pairs), a)
    values, vectors = eigh(a)
    whole = (values.flip(-1)[:3], vectors.flip(-1)[:, :3])
    torch.testing.assert_close(grad, torch.autograd.grad(loss(whole), a)[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("implicit", [True, False])
def test_ties_inside_the_leading_pairs(implicit):
    """Losses of the projector are exact there; those of single vectors are refused."""
    a = symmetric((3.0, 3.0, 2.0, 1.0, 1.0, 0.5), seed=3).requires_grad_()

    def vectors(ties):
        matrix = (lambda x, m: 0.5 * (m + m.mT) @ x, 3, (a,)) if implicit else (0.5 * (a + a.mT), 3)
        return topk_eigh(*matrix, n=6, ties=ties).eigenvectors

    v = vectors("drop")
    expected = spectral_projector(a, rank=3)
    torch.testing.assert_close(v @ v.mT, expected, rtol=0, atol=1e-10)
    weight = features(6, 6, seed=4)
    one, other = (torch.autograd.grad((p * weight).sum(), a)[0] for p in (v @ v.mT, expected))
    torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
    with pytest.raises(TieError, match="repeated"):
        vectors("raise")[0, 0].backward()
    with pytest.warns(GaugeWarning):
        vectors("drop")[0, 0].backward()


@pytest.mark.parametrize("spectrum", [(3.0, 3.0, 1.0, 1.0, 0.5), (2.0, 2.0, 0.0, 0.0, 0.0)])
def test_the_subspace_is_exact_at_ties_to_second_order(spectrum):
    a = symmetric(spectrum, seed=3).requires_grad_()
    weight = features(5, 5, seed=4)

    def projector(a):
        v = topk_subspace(lambda x, m: 0.5 * (m + m.mT) @ x, 2, (a,), n=5)
        return v @ v.mT

    expected = spectral_projector(a, rank=2)
    torch.testing.assert_close(projector(a), expected, rtol=0, atol=1e-10)
    first = [torch.autograd.grad((p * weight).sum(), a, create_graph=True)[0] for p in (projector(a), expected)]
    torch.testing.assert_close(*first, rtol=1e-8, atol=1e-9)
    second = [torch.autograd.grad((g * weight).sum(), a)[0] for g in first]
    torch.testing.assert_close(*(0.5 * (h + h.mT) for h in second), rtol=1e-7, atol=1e-8)
    assert gradcheck(projector, a, check_forward_ad=True)
    assert gradgradcheck(lambda x: (projector(x) * weight).sum(), a, check_fwd_over_rev=True)


def test_loss_depending_on_the_basis_of_the_subspace_warns():
    a = symmetric((3.0, 2.0, 1.0)).requires_grad_()
    v = topk_subspace(a, 2)
    with pytest.warns(GaugeWarning, match="topk_subspace"):
        v[0, 0].backward()
    weight = features(3, 3)
    for way in (lambda: topk_subspace(a, 2), lambda: nn.TopkSubspace(2)(a)):
        v = way()
        (grad,) = torch.autograd.grad((v @ v.mT * weight).sum(), a)
        torch.testing.assert_close(grad, torch.autograd.grad((spectral_projector(a, rank=2) * weight).sum(), a)[0])
    smallest = topk_subspace(a, 1, largest=False)
    torch.testing.assert_close(smallest @ smallest.mT + v @ v.mT, torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("implicit", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_tie_after_the_last_pair(implicit, k):
    """Eigenvalues and their gradients need no gap; gradients of the vectors of the tie are refused."""
    a = symmetric((3.0, 2.0, 2.0, 1.0)).requires_grad_()

    def call(**options):
        matrix = 0.5 * (a + a.mT)
        return (
            topk_eigh(lambda x, m: m @ x, k, (matrix,), n=4, **options) if implicit else topk_eigh(matrix, k, **options)
        )

    values = call().eigenvalues
    assert values.tolist() == pytest.approx([3.0, 2.0, 2.0, 1.0][:k])
    (grad,) = torch.autograd.grad(values.sum(), a)
    assert grad.trace().item() == pytest.approx(k)
    v = call().eigenvectors
    v[:, 0].sum().square().backward()  # its eigenvalue is simple
    assert a.grad.isfinite().all()
    if k == 2:
        with pytest.raises(TieError, match="repeated"):
            call().eigenvectors[:, 1].sum().square().backward()
        with pytest.raises(TieError, match="both sides of k = 2"):
            topk_subspace(a, k)
        if not implicit:
            (grad,) = torch.autograd.grad(call(check=False).eigenvectors[:, 1].sum().square(), a)
            assert grad.isnan().any()


def test_tolerances_follow_the_precision():
    """With precision=float32 residuals of 1e-11 are unreachable, and relative gaps of 0.0025 are no ties."""
    n, q = 600, orthogonal(600)
    spectrum = torch.linspace(0, 0.5, n, dtype=torch.float64)
    spectrum[-3:] = torch.tensor([0.9, 0.9975, 1.0])
    a = ((q * spectrum) @ q.mT).float().requires_grad_()
    values, vectors = topk_eigh(a, 2, precision=torch.float32)
    torch.testing.assert_close(values, torch.tensor([1.0, 0.9975]), rtol=0, atol=1e-5)
    (vectors[:, 0].square() * torch.linspace(0, 1, n)).sum().backward()
    assert a.grad.isfinite().all()


@pytest.mark.parametrize(("n", "components", "k"), [(150, 5, 5), (300, 5, 3), (600, 20, 25)])
def test_the_smallest_pairs_of_a_graph_with_components(n, components, k):
    weight = torch.rand(n, n, generator=generator(5), dtype=torch.float64)
    part = torch.arange(n) * components // n
    weight = (weight + weight.mT) * (part.unsqueeze(-1) == part)
    laplacian = weight.sum(-1).diag() - weight
    values, vectors = topk_eigh(laplacian, k, largest=False)
    expected = torch.linalg.eigvalsh(laplacian)[:k]
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-10)
    if k >= components:  # the null space is that of the indicators of the components
        null = vectors[:, :components]
        expected = (part.unsqueeze(-1) == part).double() * components / n
        torch.testing.assert_close(null @ null.mT, expected, rtol=0, atol=1e-10)


def test_an_eigenvalue_with_many_copies():
    spectrum = torch.cat([torch.ones(12), torch.tensor([0.9, 0.8, 0.7]), torch.linspace(-0.5, 0.5, 585)]).double()
    values, vectors = topk_eigh(lambda x: spectrum.unsqueeze(-1) * x, 10, n=600)
    torch.testing.assert_close(values, torch.ones(10, dtype=torch.float64), rtol=0, atol=1e-11)
    torch.testing.assert_close(vectors[:12].mT @ vectors[:12], torch.eye(10, dtype=torch.float64), rtol=0, atol=1e-9)
    with pytest.raises(TieError, match="both sides of k = 10"):
        topk_subspace(lambda x: spectrum.unsqueeze(-1) * x, 10, n=600)


def graph(n, groups, degree=12, seed=0):
    """Edges inside groups of equal size, with positive weights: one large eigenvalue per group."""
    source = torch.randint(n, (n * degree // 2,), generator=generator(seed))
    size = n // groups
    target = source // size * size + torch.randint(size, source.shape, generator=generator(seed + 1))
    weight = torch.rand(len(source), generator=generator(seed + 2), dtype=torch.float64) * (1 + 0.1 * (source // size))
    return torch.stack([torch.cat([source, target]), torch.cat([target, source])]), torch.cat([weight, weight])


def sparse_matrix(places, weight, n):
    return torch.sparse_coo_tensor(places, weight, (n, n), check_invariants=True)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_matrix_equals_the_dense_one(layout):
    places, weight = graph(60, 3)
    a = sparse_matrix(places, weight, 60).coalesce()
    values = a.values().clone().requires_grad_()
    sparse = sparse_matrix(a.indices(), values, 60)
    ours = topk_eigh(sparse if layout == torch.sparse_coo else sparse.to_sparse_csr(), 3)
    dense = topk_eigh(sparse.to_dense(), 3)
    torch.testing.assert_close(ours.eigenvalues, dense.eigenvalues)
    torch.testing.assert_close(ours.eigenvectors, dense.eigenvectors, rtol=0, atol=1e-9)
    if layout == torch.sparse_csr:  # the conversion has no gradient in torch
        return
    one, other = (torch.autograd.grad(loss(pairs), values, retain_graph=True)[0] for pairs in (ours, dense))
    torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_second_derivatives_of_the_entries_of_a_graph():
    places = torch.tensor([[0, 1, 1, 2, 0], [1, 0, 2, 1, 0]])
    entries = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)

    def picture(entries):
        def edges(x, entries):
            return torch.zeros_like(x).index_add(0, places[0], entries[[0, 0, 1, 1, 2]].unsqueeze(-1) * x[places[1]])

        return invariants(topk_eigh(edges, 2, (entries,), n=3))

    def by_matrix(entries):
        return invariants(topk_eigh(torch.zeros(3, 3).double().index_put(tuple(places), entries[[0, 0, 1, 1, 2]]), 2))

    for one, other in zip(picture(entries), by_matrix(entries), strict=True):
        torch.testing.assert_close(one, other)
    assert gradgradcheck(lambda e: sum(y.square().sum() for y in picture(e)), entries)


def test_large_graph_without_a_dense_matrix():
    """20,000 nodes: 3.2 GB as a dense matrix. The derivative of the eigenvalue in an edge is 2 vᵢvⱼ."""
    n = 20_000
    places, weight = graph(n, 4)
    weight.requires_grad_()
    pairs = topk_eigh(sparse_matrix(places, weight, n), 4)
    v = pairs.eigenvectors.detach()
    (grad,) = torch.autograd.grad(pairs.eigenvalues[1], weight, retain_graph=True)
    torch.testing.assert_close(grad, v[places[0], 1] * v[places[1], 1], rtol=1e-6, atol=1e-12)
    target = features(n, 4, seed=9)
    (grad,) = torch.autograd.grad((pairs.eigenvectors * target).sum(), weight)
    step = 1e-6 * features(len(weight) // 2, seed=8).repeat(2)
    moved = [
        (topk_eigh(sparse_matrix(places, weight.detach() + s * step, n), 4).eigenvectors * target).sum()
        for s in (1, -1)
    ]
    assert float((moved[0] - moved[1]) / 2) == pytest.approx(float((grad * step).sum()), rel=1e-5)


def test_bad_operators():
    a = symmetric("separated")
    with pytest.raises(ShapeError, match="Pass n"):
        topk_eigh(lambda x: a @ x, 1)
    for k in (0, 5, -1, 1.5, True):
        with pytest.raises(DomainError, match="k must be an integer in 1 … 4"):
            topk_eigh(a, k)
        with pytest.raises(DomainError, match="order 4"):
            topk_eigh(lambda x: a @ x, k, n=4)
    with pytest.raises(DtypeError, match="params must be tensors"):
        topk_eigh(lambda x, s: s * x, 1, (2.0,), n=4)
    with pytest.raises(ShapeError, match=r"must map columns \(4, 2\) of torch\.float64"):
        topk_eigh(lambda x: x.sum(0), 1, n=4)
    with pytest.raises(ShapeError, match=r"torch\.float32 of shape"):
        topk_eigh(lambda x: x.float(), 1, n=4)
    with pytest.raises(SymmetryError, match="xᵀAy − yᵀAx"):
        topk_eigh(lambda x: torch.ones(4, 4).double().triu() @ x, 1, n=4)
    with pytest.raises(NonFiniteError, match="product"):
        topk_eigh(lambda x: x / 0, 1, n=4)
    skew = torch.ones(4, 4).triu().to_sparse()
    with pytest.raises(SymmetryError, match="differs from its transpose by up to 1"):
        topk_eigh(skew, 1)
    with pytest.raises(ShapeError, match=r"one square matrix \(n, n\)"):
        topk_eigh(torch.ones(2, 3).to_sparse(), 1)
    with pytest.raises(SolverError, match="did not converge in"):
        topk_eigh(
            lambda x: torch.linspace(0, 1, 3000, dtype=torch.float64).unsqueeze(-1) * x, 2, n=3000, max_products=60
        )
    with pytest.raises(SolverError, match="vmap"):
        torch.func.vmap(lambda s: topk_eigh(lambda x, s: s * x, 1, (s,), n=3).eigenvalues)(torch.ones(2))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_large_entry_does_not_hide_the_asymmetry_of_a_sparse_matrix(layout):
    a = torch.tensor([[1e10, 0, 0], [0, 1, 0.6], [0, 0, 1]], dtype=torch.float64).to_sparse(layout=layout)
    for operator in (topk_eigh, topk_subspace):
        with pytest.raises(SymmetryError, match=r"transpose by up to 0\.6"):
            operator(a, 1)


def test_unchecked_asymmetric_operators_are_nan():
    a = torch.tensor([[2.0, 0.6], [0.0, 1.0]], dtype=torch.float64)
    operators = [(a.to_sparse(), (), None), (a.to_sparse_csr(), (), None), (lambda x, a: a @ x, (a,), 2)]
    for operator, params, n in operators:
        assert bool(topk_eigh(operator, 1, params, n=n, check=False).eigenvalues.isnan().all())
        assert bool(topk_subspace(operator, 1, params, n=n, check=False).isnan().all())


def test_jacobians_of_an_operator_are_exact_or_rejected():
    def values(a):
        return topk_eigh(lambda x, a: a @ x, 3, (a,), n=4).eigenvalues

    a = symmetric("separated")
    expected = torch.func.jacrev(lambda a: topk_eigh(a, 3).eigenvalues)(a)
    torch.testing.assert_close(torch.func.jacrev(values)(a), expected)
    for transform in (torch.func.jacfwd, torch.func.hessian):
        with pytest.raises(SolverError, match="vmap and jacrev"):
            transform(values)(a)


def test_the_zero_matrix():
    assert topk_eigh(torch.zeros(3, 3), 1).eigenvalues.tolist() == [0]
    with pytest.raises(TieError, match="both sides"):
        topk_subspace(torch.zeros(3, 3), 1)


def test_starts_are_reproducible():
    big = torch.diag(torch.linspace(0, 1, 700, dtype=torch.float64).square())
    one, other = (topk_eigh(big, 2, generator=generator(seed)) for seed in (1, 2))
    torch.testing.assert_close(one.eigenvectors, other.eigenvectors, rtol=0, atol=1e-7)
    assert torch.equal(topk_eigh(big, 2).eigenvectors, topk_eigh(big, 2).eigenvectors)


def test_second_derivatives_are_accurate_if_other_eigenvalues_are_close():
    """Against the projector of rank 1, a matrix function that is exact at ties; forward mode over it, too."""
    q = orthogonal(5, seed=1)
    a = (q * torch.tensor([1.0, 2e-12, 1.1e-12, 1e-12, 1e-12], dtype=torch.float64)) @ q.mT
    g, v = (symmetric([1.0, -2.0, 0.5, 3.0, -1.0], seed=seed) for seed in (2, 3))

    def slope(project):
        x = (0.5 * (a + a.mT)).requires_grad_()
        (gradient,) = torch.autograd.grad((project(x) * g).sum(), x, create_graph=True)
        return torch.autograd.grad((gradient * v).sum(), x)[0]

    def leading(x):
        _, vectors = topk_eigh(x, 1)
        return vectors @ vectors.mT

    expected = slope(lambda x: spectral_projector(x, rank=1))
    torch.testing.assert_close(slope(leading), expected, rtol=0, atol=1e-12)
    _, ahead = torch.func.jvp(torch.func.grad(lambda x: (leading(x) * g).sum()), (a,), (v,))
    torch.testing.assert_close(0.5 * (ahead + ahead.mT), expected, rtol=0, atol=1e-12)


def test_derivatives_of_several_leading_pairs_of_a_dense_matrix():
    a = symmetric([1.0, -2.0, 0.5, 3.0, 2.0], seed=4)

    def pairs(x):
        values, vectors = topk_eigh(0.5 * (x + x.mT), 2)
        return values, vectors * vectors[:1].sign()

    assert gradcheck(pairs, a.requires_grad_(), check_forward_ad=True)
    assert gradgradcheck(pairs, a, check_fwd_over_rev=True)


def test_all_pairs_of_a_product_have_the_derivatives_of_the_matrix():
    """The vectors then span the whole space."""
    a = symmetric((0.5, 1.2, 2.1), seed=3).requires_grad_()

    def products(x, a):
        return 0.5 * (a + a.mT) @ x

    one, other = (
        torch.autograd.grad(loss(pairs), a)[0] for pairs in (topk_eigh(a, 3), topk_eigh(products, 3, (a,), n=3))
    )
    torch.testing.assert_close(one, other)
    v = topk_subspace(products, 3, (a,), n=3)
    (of_identity,) = torch.autograd.grad((v @ v.mT * torch.arange(9.0).view(3, 3)).sum(), a)
    torch.testing.assert_close(of_identity, torch.zeros_like(a))
