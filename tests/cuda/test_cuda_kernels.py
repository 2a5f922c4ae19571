"""The CUDA kernels, compiled for the CPU and run thread by thread: the same source that NVRTC compiles for a GPU."""

import numpy as np
import pytest
import torch

from helpers import cuda_on_cpu
from matbackprop import normalized_cut_j1, normalized_cut_j2, normalized_cut_soft, second_order_pool
from matbackprop.cuda import cuts as cut_kernels
from matbackprop.cuda import jacobi as jacobi_kernel
from matbackprop.cuda import pool
from matbackprop.numerics import gram_tolerance
from matbackprop.spectral import segment
from matbackprop.spectral.segment import _number, connected_components

IN = {np.float32: "float", np.float64: "double"}

JACOBI = """
int main(int, char** argv) {
    const int n = atoi(argv[1]), batch = atoi(argv[2]), threads = atoi(argv[3]);
    auto a = read<REAL>(batch * n * n);
    std::vector<REAL> values(batch * n), vectors(batch * n * n);
    launch({batch, 1, 1}, threads, Sizes(n).a_threads,
           [&] { jacobi_eigh(a.data(), values.data(), vectors.data(), n); });
    write(values);
    write(vectors);
}
"""

POOL = """
int main(int, char** argv) {
    const int m = atoi(argv[1]), d = atoi(argv[2]), batch = atoi(argv[3]), threads = atoi(argv[4]);
    const double eps = atof(argv[5]);
    auto f = read<IN>(batch * m * d), g = read<IN>(batch * d * d);
    std::vector<IN> c(batch * d * d), out(batch * m * d);
    std::vector<REAL> s(batch * m), slopes(s), u(batch * m * m), y(batch * m * d), t(y), mixing(batch * 2 * m * m);
    const int tiles = (d + 63) / 64;
    launch({batch, 1, 1}, threads, Sizes(m).a_threads, [&] {
        pool_spectrum(f.data(), nullptr, eps, s.data(), slopes.data(), u.data(), y.data(), m, d);
    });
    launch({batch, tiles * (tiles + 1) / 2, 1}, PRODUCT_THREADS, 0,
           [&] { pool_output(y.data(), slopes.data(), nullptr, eps, c.data(), m, d); });
    launch({batch, tiles, 1}, PRODUCT_THREADS, 0, [&] { pool_project(y.data(), g.data(), t.data(), m, d); });
    launch({batch, 1, 1}, PRODUCT_THREADS, 0, [&] {
        pool_mixing(y.data(), t.data(), s.data(), slopes.data(), u.data(), nullptr, eps, mixing.data(), m, d);
    });
    launch({batch, tiles, 1}, PRODUCT_THREADS, 0,
           [&] { pool_gradient(mixing.data(), t.data(), y.data(), out.data(), m, d); });
    write(c);
    write(out);
}
"""

CUTS = """
int main(int, char** argv) {
    const int n = atoi(argv[1]), m = atoi(argv[2]), d = atoi(argv[3]), k = atoi(argv[4]), a = atoi(argv[5]);
    const int piece = atoi(argv[6]), threads = atoi(argv[7]);
    const double ridge = atof(argv[8]), tol = atof(argv[9]);
    auto f = read<IN>(n / a * m * d);
    auto labels = read<long long>(n * m);
    auto given = read<REAL>(atoi(argv[10]) * n / a * m);
    const REAL* weights = given.empty() ? nullptr : given.data();
    const int pieces = (m + piece - 1) / piece, entries = (d + k) * (d + 1);
    std::vector<REAL> partial(n * pieces * entries), sums(n * entries), rows(n * k * d), terms(n * k * 2), q(n * d * d);
    std::vector<IN> value(n), g(n, 1), out(n * m * d);
    launch({n, pieces, (d + k + TILE - 1) / TILE}, PRODUCT_THREADS, 0,
           [&] { cut_sums(f.data(), labels.data(), weights, partial.data(), m, d, k, piece, a); });
    launch({n, 1, 1}, threads, Sizes(d).a_threads, [&] {
        cut_solve(partial.data(), sums.data(), rows.data(), terms.data(), q.data(), value.data(), ridge, tol, pieces, d,
                  k);
    });
    launch({n, (m + TILE - 1) / TILE, 1}, PRODUCT_THREADS, 0, [&] {
        cut_gradient(f.data(), labels.data(), weights, rows.data(), q.data(), g.data(), out.data(), m, d, k, a);
    });
    write(value);
    write(out);
}
"""


COMPONENTS = """
int main(int, char** argv) {
    const int n = atoi(argv[1]), h = atoi(argv[2]), w = atoi(argv[3]), diagonal = atoi(argv[4]), count = n * h * w;
    auto labels = read<long long>(count);
    std::vector<int> parent(count);
    std::vector<long long> root(count);
    const Index grid{(count + 63) / 64, 1, 1};
    launch(grid, 64, 0, [&] { components_start(parent.data(), count); });
    launch(grid, 64, 0, [&] { components_unite(labels.data(), parent.data(), count, h, w, diagonal); });
    launch(grid, 64, 0, [&] { components_finish(parent.data(), root.data(), count); });
    write(root);
}
"""


@pytest.fixture(scope="module", params=[np.float32, np.float64], ids=["float32", "float64"])
def jacobi(request, tmp_path_factory):
    double = int(request.param is np.float64)
    program = cuda_on_cpu.build(tmp_path_factory.mktemp("jacobi"), jacobi_kernel.SOURCE, JACOBI, REAL_IS_DOUBLE=double)

    def solve(a):
        a = np.ascontiguousarray(a, dtype=request.param)
        batch, n, _ = a.shape
        out = cuda_on_cpu.run(program, (n, batch, jacobi_kernel.Sizes(n).threads), a, dtype=request.param)
        return a, out[: batch * n].reshape(batch, n), out[batch * n :].reshape(batch, n, n)

    return solve


@pytest.mark.parametrize("n", [2, 3, 4])
def test_jacobi_ends_where_rounding_separates_equal_eigenvalues(jacobi, n):
    noise = np.random.default_rng(0).standard_normal((60, n, n))
    a, values, vectors = jacobi(np.eye(n) + np.finfo(float).eps * (noise + noise.swapaxes(-1, -2)))
    assert np.abs(values - 1).max() < 20 * np.finfo(a.dtype).eps and np.isfinite(vectors).all()


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_jacobi_diagonalises(jacobi, n):
    generator = np.random.default_rng(n)
    x = generator.standard_normal((2, n, n))
    tied = np.eye(n)
    tied[0, 0] = 3
    a, values, vectors = jacobi(np.stack([x[0] + x[0].T, 1e6 * x[1] @ x[1].T, np.zeros((n, n)), tied]))
    eps = np.finfo(a.dtype).eps
    scale = np.abs(a).max((1, 2), initial=1e-30)[:, None, None]
    wide = vectors.astype(np.float64)
    assert (np.diff(values) >= 0).all()
    assert np.abs((a @ wide - wide * values[:, None]) / scale).max() < 30 * eps
    assert np.abs(wide.swapaxes(1, 2) @ wide - np.eye(n)).max() < 10 * eps
    assert np.abs(values - np.linalg.eigvalsh(a.astype(np.float64))).max() <= (60 * eps * scale[:, 0]).max()


def test_jacobi_marks_what_it_cannot_solve(jacobi):
    a = np.stack([np.eye(3), np.full((3, 3), np.nan), np.diag([1.0, np.inf, 2.0]), 2 * np.eye(3)])
    _, values, vectors = jacobi(a)
    assert np.isnan(values[1:3]).all() and np.isnan(vectors[1:3]).all()
    assert (values[[0, 3]] == [[1, 1, 1], [2, 2, 2]]).all()


def test_jacobi_takes_any_scale(jacobi):
    big = np.finfo(jacobi(np.eye(2)[None])[0].dtype)
    for scale in (big.tiny / 4, big.max / 4):
        _, values, _ = jacobi(scale * np.array([[[1.0, 1.0], [1.0, 1.0]]]))
        assert abs(values[0, 1] / (2 * scale) - 1) < 1e-5
        assert abs(values[0, 0]) <= 1e-5 * scale


@pytest.mark.parametrize(("name", "kind"), [("log", np.float32), ("inv_sqrt", np.float64)])
def test_pool_kernels_agree_with_the_operator(name, kind, tmp_path):
    m, d, batch = 5, 70, 3  # an odd number of rows, more than one tile of columns
    number = pool._FUNCTIONS[name]
    program = cuda_on_cpu.build(tmp_path, pool.SOURCE, POOL, REAL_IS_DOUBLE=1, IN=IN[kind], FUNCTION=number)
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(batch, m, d, generator=generator).relu()
    f[1, 3] = f[1, 2]
    f[1, 4] = 0  # a repeated and a zero singular value
    f[1] *= 0.01  # eigenvalues near ε, where the second differences come from the series
    f[2, :, 0] = 1e7 * torch.rand(m, generator=generator)  # a channel that hides the others in the Gram matrix
    g = torch.randn(batch, d, d, generator=generator)
    threads = jacobi_kernel.Sizes(m).threads
    inputs = f.numpy().astype(kind), g.numpy().astype(kind)
    out = cuda_on_cpu.run(program, (m, d, batch, threads, 1e-3), *inputs, dtype=kind)
    x = f.double().requires_grad_()
    c = second_order_pool(x, eps=1e-3, function=name)
    (gradient,) = torch.autograd.grad(c, x, g.double())
    for actual, expected in ((out[: c.numel()], c), (out[c.numel() :], gradient)):
        for one, exact in zip(torch.from_numpy(actual.copy()).reshape(expected.shape), expected.detach(), strict=True):
            assert (one - exact).norm() < 1e-7 * exact.norm()


@pytest.fixture(scope="module")
def cuts(tmp_path_factory):
    return cuda_on_cpu.build(tmp_path_factory.mktemp("cuts"), cut_kernels.SOURCE, CUTS, REAL_IS_DOUBLE=1, IN="float")


@pytest.mark.parametrize("ridge", [0.0, 0.3], ids=["J2", "soft"])
@pytest.mark.parametrize("weighted", [False, True], ids=["rows", "weighted rows"])
def test_cut_kernels_agree_with_the_operators(cuts, ridge, weighted):
    images, annotators, m, d, k = 2, 2, 70, 4, 63  # more regions than one tile holds, most of them empty
    generator = torch.Generator().manual_seed(1)
    f = torch.rand(images, m, d, generator=generator)
    f[1, :, 3] = f[1, :, 2]  # lost rank
    labels = torch.randint(-1, k, (images, annotators, m), generator=generator)
    weight = torch.rand(images, m, generator=generator, dtype=torch.float64) if weighted else None
    far = labels.clone()
    far[0, 0, 1] = labels[0, 0, 1] + 2**33  # no label, and none that 32 bits would make of it
    labels[0, 0, 1] = -1
    tol = gram_tolerance(torch.float32, torch.float64, d, None)
    arguments = (
        images * annotators,
        m,
        d,
        k,
        annotators,
        32,
        jacobi_kernel.Sizes(d).threads,
        ridge,
        tol,
        int(weighted),
    )
    inputs = [f.numpy(), far.numpy(), *([weight.numpy()] if weighted else [])]
    out = torch.from_numpy(cuda_on_cpu.run(cuts, arguments, *inputs, dtype=np.float32).copy())
    count = images * annotators
    value, gradient = out[:count].view(images, annotators), out[count:].view(images, annotators, m, d)
    for a in range(annotators):
        x = f.double().requires_grad_()
        if ridge:
            expected = normalized_cut_soft(x, labels[:, a], ridge=ridge, num_labels=k, weight=weight)
        else:
            expected = normalized_cut_j2(x, labels[:, a], num_labels=k, rank_tol=torch.float32, weight=weight)
        (exact,) = torch.autograd.grad(expected.sum(), x)
        torch.testing.assert_close(value[:, a].double(), expected.detach(), rtol=1e-6, atol=1e-6)
        assert (gradient[:, a] - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("connectivity", [4, 8])
def test_component_kernels_find_the_first_pixels(connectivity, tmp_path):
    program = cuda_on_cpu.build(tmp_path, segment._COMPONENTS, COMPONENTS)
    shape = (2, 9, 13)
    labels = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0))
    out = cuda_on_cpu.run(program, (*shape, int(connectivity == 8)), labels.numpy(), dtype=np.int64)
    root = torch.from_numpy(out.copy())
    actual = _number(root, torch.arange(labels.numel()), labels.shape)
    assert torch.equal(actual, connected_components(labels, connectivity=connectivity))


def test_j1_is_j2_of_features_over_degrees_with_degrees_as_weights(monkeypatch):
    def solved(f, labels, weight, k, ridge, tol):
        e = torch.nn.functional.one_hot(labels.clamp_min(0), k).to(f) * (labels >= 0).unsqueeze(-1)
        c, s, n = (
            f.mT @ (weight.unsqueeze(-1) * f),
            f.mT @ (weight.unsqueeze(-1) * e),
            (weight.unsqueeze(-1) * e).sum(-2),
        )
        inverse = torch.linalg.pinv(c, hermitian=True)
        a = (s.mT @ inverse) / torch.where(n > 0, n, 1).unsqueeze(-1)
        rank, trace = torch.linalg.matrix_rank(c), (a * s.mT).sum((-2, -1))
        return 0.5 * (rank + (n > 0).sum(-1)) - trace, a, inverse @ s @ a

    monkeypatch.setattr(cut_kernels, "forward", solved)
    monkeypatch.setattr("matbackprop.cuda.twin.kernels_may_take", lambda *tensors: True)
    generator = torch.Generator().manual_seed(0)
    f = torch.rand(2, 30, 5, generator=generator, dtype=torch.float64)
    f[0, 3] = 0  # a row of degree zero is left out
    labels = torch.randint(-1, 4, (2, 30), generator=generator)
    weights = torch.tensor([1.0, -2.0], dtype=torch.float64)
    results = []
    for call in (
        lambda x: cut_kernels.degree_objective(x, labels, 4, 1e-13, lambda y: normalized_cut_j1(y, labels)),
        lambda x: normalized_cut_j1(x, labels, num_labels=4),
    ):
        x = f.clone().requires_grad_()
        value = call(x)
        results.append((value.detach(), torch.autograd.grad((weights * value).sum(), x)[0]))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)
