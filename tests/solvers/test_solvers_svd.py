"""The singular value decomposition with the batched eigensolver: every spectrum, with and without its kernel."""

import math
from types import SimpleNamespace

import mpmath
import pytest
import torch

import matbackprop
from helpers import cuda_on_cpu
from helpers.matrices import generator, with_singular_values
from matbackprop._torch import WHOLE_GRAPHS
from matbackprop.cuda import jacobi
from matbackprop.solvers import batched_svd, svd
from matbackprop.solvers.svd import _thin_svd

SHAPES = [(1, 1), (1, 4), (5, 5), (3, 40), (40, 3), (12, 20), (36, 36)]
SPECTRA = {
    "random": lambda m, n, k: torch.randn(m, n, generator=generator(1), dtype=torch.float64),
    "graded": lambda m, n, k: with_singular_values(m, n, torch.logspace(0, -10, k, dtype=torch.float64), seed=2),
    "repeated": lambda m, n, k: with_singular_values(m, n, torch.full((k,), 3.0, dtype=torch.float64), seed=3),
    "rank one": lambda m, n, k: torch.arange(1.0, m + 1).double()[:, None] * torch.ones(n).double(),
    "zero": lambda m, n, k: torch.zeros(m, n, dtype=torch.float64),
    "huge": lambda m, n, k: 1e200 * torch.randn(m, n, generator=generator(4), dtype=torch.float64),
    "tiny": lambda m, n, k: 1e-200 * torch.randn(m, n, generator=generator(5), dtype=torch.float64),
    "one outlier": lambda m, n, k: torch.randn(m, n, generator=generator(6), dtype=torch.float64).index_fill(
        0, torch.tensor([0]), 1e9
    ),
}


def check(x, u, s, vh, orthogonality=1e-13):
    """Check orthonormal factors, descending values, and their product."""
    k = min(x.shape[-2:])
    assert (
        u.shape == (*x.shape[:-1], k) and s.shape == (*x.shape[:-2], k) and vh.shape == (*x.shape[:-2], k, x.shape[-1])
    )
    eye = torch.eye(k, dtype=x.dtype)
    assert (u.mT @ u - eye).abs().max() < orthogonality
    assert (vh @ vh.mT - eye).abs().max() < orthogonality
    assert (s.diff(dim=-1) <= 0).all() and (s >= 0).all()
    size = x.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    assert (((u * (s.unsqueeze(-2) / size)) @ vh - x / size).abs() < 1e-13 * max(x.shape)).all()


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_factors_are_accurate_for_every_spectrum(m, n, name):
    x = SPECTRA[name](m, n, min(m, n)).expand(2, m, n)
    check(x, *_thin_svd(x, True))
    if name not in ("huge", "tiny"):  # not in float32
        check(x, *_thin_svd(x, False), orthogonality=1e-8)


@pytest.mark.parametrize("name", ["random", "graded", "one outlier"])
def test_values_against_mpmath(name):
    x = SPECTRA[name](6, 9, 6)
    with mpmath.workdps(50):
        expected = sorted((float(v) for v in mpmath.svd_r(mpmath.matrix(x.tolist()), compute_uv=False)), reverse=True)
    _, s, _ = _thin_svd(x, True)
    assert (s - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-15 * 9 * expected[0]


def test_vmap_and_compile_use_the_same_route():
    x = SPECTRA["graded"](5, 8, 5).expand(3, 5, 8).clone()
    expected = _thin_svd(x, True)
    for actual, value in zip(torch.vmap(lambda one: _thin_svd(one, True))(x), expected, strict=True):
        torch.testing.assert_close(actual.abs(), value.abs(), rtol=1e-10, atol=1e-10)
    torch._dynamo.reset()
    compiled = torch.compile(lambda y: _thin_svd(y, True), fullgraph=WHOLE_GRAPHS, backend="aot_eager")
    check(x, *compiled(x))


def test_float64_and_full_matrices_use_lapack_on_the_cpu():
    x = SPECTRA["random"](4, 6, 4)
    for full in (True, False):
        for actual, expected in zip(batched_svd(x, full_matrices=full), torch.linalg.svd(x, full), strict=True):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", [name for name in SPECTRA if name not in ("huge", "tiny")])
@pytest.mark.parametrize(("m", "n"), [*SHAPES, (400, 3)])
def test_float32_uses_the_gram_matrix_in_float64(m, n, name):
    """Small singular values are accurate too, unlike in a float32 decomposition."""
    x = SPECTRA[name](m, n, min(m, n)).float().double().expand(2, m, n)
    u, s, vh = batched_svd(x, fine=False)
    check(x, u, s, vh, orthogonality=1e-8)
    assert ((s - torch.linalg.svdvals(x)).abs() <= 1e-13 * s[:, :1]).all()


def test_empty_matrices_are_decomposed():
    assert all(part.numel() == 0 for part in batched_svd(torch.zeros(0, 3)))


@pytest.mark.parametrize(("n", "k", "missing"), [(5, 5, 2), (4, 9, 1), (6, 7, 6)])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_kernel_completes_orthonormal_rows(monkeypatch, n, k, missing, layout):
    q, _ = torch.linalg.qr(torch.randn(2, k, n, generator=generator(8), dtype=torch.float64))
    sigma = torch.ones(2, n, dtype=torch.float64)
    sigma[:, n - missing :] = 0
    v = q.mT * sigma.unsqueeze(-1)
    v = v.contiguous() if layout == "rows" else v.mT.contiguous().mT
    monkeypatch.setattr(jacobi, "_threads", lambda n: 64)
    cuda_on_cpu.emulate(monkeypatch, jacobi.SEPARATE)
    completed = jacobi.complete_by_kernel(v.clone(), sigma)
    assert torch.equal(completed[:, : n - missing], v[:, : n - missing])
    eye = torch.eye(n, dtype=torch.float64).expand(2, n, n)
    torch.testing.assert_close(completed @ completed.mT, eye, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("m", "n"), [(12, 12), (40, 6), (6, 40)])
@pytest.mark.parametrize("smallest", [0.5, 1e-3])
def test_gradients_for_float32_equal_those_of_the_same_matrix_in_float64(m, n, smallest):
    """Gram route and LAPACK route, with the same incoming gradients."""
    k = min(m, n)
    x = with_singular_values(m, n, torch.logspace(0, torch.tensor(smallest).log10(), k, dtype=torch.float64)).float()
    grads = []
    for a in (x.clone().requires_grad_(), x.double().requires_grad_()):
        u, s, vh = matbackprop.svd(a)
        signs = u.detach().sum(-2).sign()  # same signs of the vectors
        weights = [torch.randn(t.shape, generator=generator(i)).to(a.dtype) for i, t in enumerate((u, s, vh))]
        outs = (u * signs, s, vh * signs.unsqueeze(-1))
        grads.append(torch.autograd.grad(outs, a, weights)[0].double())
    assert (grads[0] - grads[1]).norm() <= 2e-7 * grads[1].norm()


@pytest.mark.parametrize("fine", [True, False])
def test_vectors_of_a_matrix_with_a_column_of_zeros_and_a_repeated_row_are_orthonormal(fine):
    """The missing direction is completed, also if only rounding error is left of it."""
    rows = torch.tensor(
        [[-0.1156, -0.9984, 0, -0.228], [-0.2126, -0.7057, 0, -0.0659], [-0.9799, -0.1741, 0, 0.4037]],
        dtype=torch.float64,
    )
    x = torch.cat([rows, rows[:1]])
    u, s, vh = _thin_svd(x, fine)
    eye = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(u.mT @ u, eye, rtol=0, atol=1e-13)
    torch.testing.assert_close(vh @ vh.mT, eye, rtol=0, atol=1e-13)
    torch.testing.assert_close((u * s) @ vh, x, rtol=0, atol=1e-13)
    rotation = matbackprop.project_rotation(x.bfloat16()).double()
    torch.testing.assert_close(rotation.mT @ rotation, eye, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("m", "n", "spread"), [(5, 4, 1e3), (4, 9, 1e3), (300, 3, 1e3), (5, 4, 1e14), (4, 9, 1e14), (300, 3, 1e12)]
)
def test_every_singular_value_has_float32_accuracy(m, n, spread):
    """LAPACK is used if accurate enough, which it is not for a wide spectrum."""
    x = torch.randn(m, n, generator=generator(7), dtype=torch.float64)
    sizes = torch.logspace(-math.log10(spread), 0, min(m, n), dtype=torch.float64)
    x = (x * sizes if m > n else x * sizes.unsqueeze(-1)).float().double()
    with mpmath.workdps(60):
        short = mpmath.matrix((x if m < n else x.mT).tolist())
        squares = mpmath.eigsy(short * short.T, eigvals_only=True)
        expected = torch.tensor(sorted((float(mpmath.sqrt(v)) for v in squares), reverse=True), dtype=torch.float64)
    torch.testing.assert_close(batched_svd(x, fine=False)[1], expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("m", "n"), [(12, 20), (20, 12), (15, 15)])
def test_a_wide_spectrum_does_not_change_other_matrices_of_the_batch(m, n):
    names = ("random", "graded", "repeated", "one outlier", "zero", "random")
    x = torch.stack([SPECTRA[name](m, n, min(m, n)).float().double() for name in names]).view(2, 3, m, n)
    u, s, vh = _thin_svd(x, False)
    check(x, u, s, vh, orthogonality=1e-8)
    for one, value in zip(x.view(-1, m, n), s.view(-1, min(m, n)), strict=True):
        torch.testing.assert_close(_thin_svd(one, False)[1], value, rtol=1e-9, atol=1e-14 * float(value[0]))


@pytest.mark.parametrize("shape", [(2, 200, 6), (6, 100), (47, 6), (3, 25, 1)])
def test_a_long_side_in_parts(monkeypatch, shape):
    """Parts and the matrix of their singular vectors, recursively, equal one decomposition."""
    calls = []

    def factor(x, limit):
        calls.append(x.shape[:-2].numel())
        return torch.linalg.svd(x, full_matrices=False), ()

    monkeypatch.setattr(svd.kernels, "takes", lambda x: True)
    monkeypatch.setattr(svd.kernels, "factor", factor)
    monkeypatch.setattr(svd, "_PARTS", {64: 24})
    monkeypatch.setattr(svd, "_route", lambda x, full, fine: "parts" if max(x.shape[-2:]) > 24 else "kernel")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if x.ndim == 3:
        x[0, :, -1] = x[0, :, 0]  # deficient rank, if there are two columns
    u, s, vh = batched_svd(x)
    assert len(calls) > 1 and calls[0] > 1
    k = min(x.shape[-2:])
    eye = torch.eye(k, dtype=torch.float64).expand(*x.shape[:-2], k, k)
    torch.testing.assert_close(s, torch.linalg.svdvals(x), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close((u * s.unsqueeze(-2)) @ vh, x, rtol=0, atol=1e-13)
    for square in (u.mT @ u, vh @ vh.mT):
        torch.testing.assert_close(square, eye, rtol=0, atol=1e-13)


@pytest.mark.parametrize("n", [5, 12])
@pytest.mark.parametrize("spread", [1.0, 1e2, 1e6])
def test_polar_factor_of_tall_matrices(n, spread):
    """By the Gram matrix, or by singular values for a wide spectrum, in one matrix of the batch."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 300, n, dtype=torch.float64, generator=generator)
    x[1, :, 0] *= spread
    q, s, v = svd.batched_polar(x, fine=False)
    u, expected, vh = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(q, u @ vh, rtol=0, atol=1e-9)
    torch.testing.assert_close(s, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(
        (v * s.unsqueeze(-2)) @ v.mT, (vh.mT * expected.unsqueeze(-2)) @ vh, rtol=1e-9, atol=1e-8
    )


def test_routes(monkeypatch):
    """Named by device, dtype, shape and digits; kernels take a short side up to 64, of a few long matrices in parts."""
    monkeypatch.setattr(svd.kernels, "takes", lambda x: min(x.shape[-2:]) <= 64)

    def route(device, *shape, dtype=torch.float64, full=False, fine=True):
        x = torch.empty(shape, dtype=dtype)
        if device == "cuda":
            x = SimpleNamespace(dtype=dtype, shape=x.shape, device=torch.device("cuda"), numel=x.numel, is_cpu=False)
        return svd._route(x, full, fine)

    assert route("cpu", 3, 40, 5) == "torch"
    assert route("cpu", 3, 4, 5, fine=False) == "small"
    assert route("cpu", 30, 40, 5, fine=False) == "gram"
    assert route("cuda", 3, 40, 5) == "kernel"
    assert route("cuda", 3, 90, 80) == "gram"
    assert route("cuda", 3, 100_000, 16) == route("cuda", 16, 5000) == "parts"
    assert route("cuda", 100_000, 64) == route("cuda", 3, 40, 5000) == route("cuda", 60, 8000, 20) == "parts"
    assert route("cuda", 3, 100_000, 80) == "gram"
    assert route("cuda", 2000, 16) == route("cuda", 200, 5000, 16) == "kernel"
    assert route("cuda", 3, 40, 5, full=True) == route("cuda", 3, 40, 5, dtype=torch.complex128) == "torch"
    assert route("cuda", 0, 40, 5) == "torch"
