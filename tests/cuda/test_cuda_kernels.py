"""The CUDA kernels, compiled for the CPU and run thread by thread: the same source that NVRTC compiles for a GPU."""

import numpy as np
import pytest
import torch

from helpers import cuda_on_cpu
from matbackprop import second_order_pool
from matbackprop._torch import is_plain
from matbackprop.cuda import jacobi as jacobi_kernel
from matbackprop.cuda import pool
from matbackprop.divided_differences import named_function
from matbackprop.functional._second_order_pool import _center, _pool_by_kernels, _prepare_weight


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Run the kernels on the CPU, with small blocks."""
    cuda_on_cpu.emulate(monkeypatch, jacobi_kernel.SOURCE, *pool.SOURCES.values(), pool.PREPARE)
    monkeypatch.setattr("matbackprop.cuda.fallback.kernels_may_take", is_plain)
    monkeypatch.setattr(pool, "_PREPARE_THREADS", 64)
    monkeypatch.setattr(pool, "_PREPARE_MAX_THREADS", 96)


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def jacobi(request):
    def solve(a):
        a = np.ascontiguousarray(a, dtype=request.param)
        return a, *(x.numpy() for x in jacobi_kernel.solve(torch.from_numpy(a)))

    return solve


@pytest.mark.quick(1)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_jacobi_converges_if_rounding_separates_equal_eigenvalues(jacobi, n):
    noise = np.random.default_rng(0).standard_normal((60, n, n))
    a, values, vectors = jacobi(np.eye(n) + np.finfo(float).eps * (noise + noise.swapaxes(-1, -2)))
    assert np.abs(values - 1).max() < 20 * np.finfo(a.dtype).eps and np.isfinite(vectors).all()


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_jacobi_diagonalizes(jacobi, n):
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


def test_jacobi_returns_nan_if_it_fails(jacobi):
    a = np.stack([np.eye(3), np.full((3, 3), np.nan), np.diag([1.0, np.inf, 2.0]), 2 * np.eye(3)])
    _, values, vectors = jacobi(a)
    assert np.isnan(values[1:3]).all() and np.isnan(vectors[1:3]).all()
    assert (values[[0, 3]] == [[1, 1, 1], [2, 2, 2]]).all()


def test_jacobi_accepts_any_scale(jacobi):
    big = np.finfo(jacobi(np.eye(2)[None])[0].dtype)
    for scale in (big.tiny / 4, big.max / 4):
        _, values, _ = jacobi(scale * np.array([[[1.0, 1.0], [1.0, 1.0]]]))
        assert abs(values[0, 1] / (2 * scale) - 1) < 1e-5
        assert abs(values[0, 0]) <= 1e-5 * scale


def check_pool(f, name, eps=1e-3):
    """Compare value and gradient with those of the operator in float64; eps is a number, or one per matrix."""
    job = pool.Pooling(None, eps, named_function(name), False, None)
    c, saved = job.forward(f)
    g = torch.randn(c.shape, generator=torch.Generator().manual_seed(1)).to(f)
    x = f.double().requires_grad_()
    expected = second_order_pool(x, eps=eps, function=name)
    (exact,) = torch.autograd.grad(expected, x, g.double())
    for actual, reference in ((c, expected.detach()), (job.gradient(g, f, *saved), exact)):
        error = (actual - reference).norm(dim=(-2, -1)) / reference.norm(dim=(-2, -1)).clamp_min(1e-300)
        assert actual.dtype == f.dtype and error.max() < 1e-7, error


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "kind"), [("log", torch.float32), ("inv_sqrt", torch.float64)])
def test_pool_kernels_agree_with_the_operator(name, kind):
    m, d, batch = 5, 70, 3  # an odd number of rows, more than one tile of columns
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(batch, m, d, generator=generator).relu()
    f[1, 3] = f[1, 2]
    f[1, 4] = 0  # a repeated and a zero singular value
    f[1] *= 0.01  # eigenvalues near ε, where the second differences come from the series
    f[2, :, 0] = 1e7 * torch.rand(m, generator=generator)  # a channel that dominates the Gram matrix
    f = f.to(kind)
    check_pool(f, name)


def features(m, d):
    """Full rank, small, two rows, zero and equal channels, zero, an outlier row and an outlier channel."""
    generator = torch.Generator().manual_seed(m)
    f = torch.randn(7, m, d, generator=generator).relu()
    f[1] *= 0.01
    f[2, 2:] = 0
    f[3, :, d // 2 :] = f[3, :, : d - d // 2].clone()
    f[3, :, 0] = 0
    f[4] = 0
    f[5:] = torch.randn(2, m, d, generator=generator)
    f[5, m // 2] *= 1e7
    f[6, :, d // 2] *= 1e7
    return f


def centered(f):
    return f.double() - f.double().mean(-2, keepdim=True)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("m", "d", "name"),
    [
        (7, 7, "log"),
        (7, 7, "sqrt"),
        (7, 7, "inv_sqrt"),
        (7, 7, "inverse"),
        (1, 1, "sqrt"),
        (200, 5, "log"),
        (784, 2, "log"),
    ],
)
def test_primal_pool_kernels_agree_with_the_operator(m, d, name):
    f = features(m, d)
    check_pool(f, name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["centered rows in float64", "the largest order"])
def test_primal_pool_kernels_of_other_features(kind):
    largest = torch.randn(1, 130, 64, generator=torch.Generator().manual_seed(0)).relu()
    f = largest if kind == "the largest order" else centered(features(70, 6)[:4])
    check_pool(f, "log")


@pytest.mark.slow
@pytest.mark.parametrize(("m", "d"), [(30, 3), (4, 30)])
def test_pool_kernels_with_an_eps_of_each_matrix(m, d):
    """At ε = 0 the square root has no derivative in directions that F does not have, and needs none."""
    f = features(m, d)[:4]
    check_pool(f, "log", torch.tensor([1e-3, 1e-1, 1e-2, 2.0], dtype=torch.float64))
    check_pool(f, "sqrt", torch.tensor([0.0, 1e-3, 0.0, 0.0], dtype=torch.float64))


@pytest.mark.slow
def test_primal_pool_kernels_propagate_nan():
    f = features(9, 4)[:2]
    f[1, 2, 3] = torch.nan
    job = pool.Pooling(None, 1e-3, named_function("log"), False, None)
    c, saved = job.forward(f)
    gradient = job.gradient(torch.ones_like(c), f, *saved)
    assert all(x[0].isfinite().all() and x[1].isnan().all() for x in (c, gradient))


def some_weights(kind, m):
    """For two images: rows and a whole region without weight, one row with all of it."""
    regions = {"rows": 1, "regions": 3}.get(kind, 2)
    w = torch.rand(2, regions, m, generator=torch.Generator().manual_seed(m))
    w[:, :, :: max(m // 3, 2)] = 0
    w[1, -1] = 0
    w[0, -1] = torch.eye(m)[-1]
    if kind == "rows":
        return w[:, 0]
    return {"mask": w > 0.5, "half": w.bfloat16(), "double": 1e307 * w.double()}.get(kind, w)


def plain_rows(f, weight, center):
    """R by its formula in float64."""
    if weight is not None:
        x, w = _prepare_weight(weight, f.double())
        return (_center(x, w) if center else x) * w.sqrt().unsqueeze(-1)
    return _center(f.double(), None) if center else f.double()


@pytest.mark.quick(1)
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("kind", ["none", "rows", "regions", "mask", "double"])
@pytest.mark.parametrize(("m", "d"), [(1, 1), (5, 16), (9, 37), (131, 3)])
def test_prologue_applies_weights_and_centering(kind, center, m, d):
    generator = torch.Generator().manual_seed(d)
    f = torch.randn(2, m, d, generator=generator) + 100
    f[0, :, 0] = 0.1  # a channel that centering makes zero
    f = f.double() if kind == "double" else f
    w = None if kind == "none" else some_weights(kind, m)
    job = pool.Pooling(w, 1e-3, named_function("log"), center, None)
    rows = job.rows(f)
    if kind == "none" and not center:
        assert rows is f
        return
    x = f.double().requires_grad_()
    expected = plain_rows(x, w, center)
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(rows, expected.detach(), rtol=1e-14, atol=1e-14 * (100 * max(scale, 1) if center else 0))
    g = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
    (exact,) = torch.autograd.grad(expected, x, g)
    gradient = job.rows_gradient(g.clone(), f)
    assert gradient.dtype == f.dtype
    # Sums over regions are in float64: only the result is rounded.
    digits = {"rtol": torch.finfo(f.dtype).eps / 1.9, "atol": 1e-14 * float(exact.abs().max())}
    torch.testing.assert_close(gradient.double(), exact, **digits)
    if kind == "none":
        assert (rows[0, :, 0] == 0).all()


def by_kernels(f, weight, center, eps):
    """Square-root pooling as the operator calls the kernels."""
    return _pool_by_kernels(f, weight, center, eps, named_function("sqrt"))


@pytest.mark.quick(2)
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("kind", [None, "regions", "mask", "half"])
@pytest.mark.parametrize(("m", "d"), [(5, 9), (9, 5)])
def test_weighted_and_centered_pooling(kind, center, m, d):
    f = (torch.randn(2, m, d, generator=torch.Generator().manual_seed(m)) + 1).requires_grad_()
    weight = None if kind is None else some_weights(kind, m)
    batch = (2,) if weight is None else weight.shape[:-1]
    eps = torch.rand(batch, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    c = by_kernels(f, weight, center, eps)
    x = f.detach().double().requires_grad_()
    expected = second_order_pool(x, eps=eps, function="sqrt", weight=weight, center=center)
    g = torch.randn(c.shape, generator=torch.Generator().manual_seed(2))
    (gradient,) = torch.autograd.grad(c, f, g, retain_graph=True)
    (exact,) = torch.autograd.grad(expected, x, g.double(), create_graph=True)
    (again,) = torch.autograd.grad(c, f, g, create_graph=True)
    batched = torch.autograd.grad(c, f, torch.stack((g, 2 * g)), is_grads_batched=True, retain_graph=True)[0][1] / 2
    (second,) = torch.autograd.grad(again.square().sum(), f)
    (reference,) = torch.autograd.grad(exact.square().sum(), x)
    for actual, target in ((c, expected), *((t, exact) for t in (gradient, again, batched)), (second, reference)):
        assert actual.dtype == f.dtype and actual.shape == target.shape
        assert (actual - target).norm() < 1e-6 * target.norm()


def test_weights_modified_before_backward_are_detected():
    f, w = torch.randn(2, 5, 9, requires_grad=True), torch.ones(2, 5)
    c = by_kernels(f, w, True, 0.1)
    w[0, 0] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        c.sum().backward()


def test_half_precision_features_are_widened():
    f = features(4, 9)[:4].bfloat16().requires_grad_()
    c = by_kernels(f, None, False, 1e-2)
    (gradient,) = torch.autograd.grad(c.sum(), f)
    x = f.detach().double().requires_grad_()
    expected = second_order_pool(x, eps=1e-2, function="sqrt")
    (exact,) = torch.autograd.grad(expected.sum(), x)
    for actual, reference in ((c, expected), (gradient, exact)):
        assert torch.equal(actual, reference.bfloat16())


def test_pooling_stays_on_chip_if_it_fits_a_block():
    limit = 227 * 1024
    assert all(pool.on_chip(m, d, limit) for m, d in ((64, 64), (4096, 64), (64, 10000), (1, 1)))
    assert not any(pool.on_chip(m, d, limit) for m, d in ((65, 65), (4097, 8), (65, 256), (256, 65)))
    assert pool.on_chip(36, 256, 99 * 1024) and not pool.on_chip(64, 256, 99 * 1024)
