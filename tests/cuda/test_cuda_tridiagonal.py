"""The tridiagonal route on the CPU: kernels compiled for the CPU, leaves solved by LAPACK."""

import pytest
import torch

from helpers import cuda_on_cpu
from helpers.spectra import defects, hard_spectra, lapack_ratios
from matbackprop.cuda import tridiagonal

THREADS = 96  # per block, at least the number of rows
EPS = torch.finfo(torch.float64).eps


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(tridiagonal.Plan, "threads", property(lambda plan: -(-plan.n // 32) * 32))


def compiled(**choices):
    return cuda_on_cpu.compiled(tridiagonal.SOURCE, CLUSTER=1, REDUCE_THREADS=THREADS, **choices)


@pytest.fixture
def kernels():
    return compiled()


def solve(kernels, a):
    t = tridiagonal.reduce(a.contiguous(), kernels)
    leaf = t.leaves.shape[-1]
    leaves = torch.linalg.eigh(t.leaves.view(-1, leaf, leaf))
    values, vectors = tridiagonal.conquer(t, *(x.contiguous() for x in leaves), kernels)
    return values, tridiagonal.reflect(t, vectors.contiguous(), kernels)


def check(a, values, vectors):
    """As good as LAPACK: at most three times its residual and its loss of orthonormality, or 4 eps."""
    expected = torch.linalg.eigh(a)
    for actual, reference in zip(defects(a, values, vectors), defects(a, *expected), strict=True):
        assert (actual <= 3 * reference.clamp_min(4 * EPS)).all()
    assert (values.diff(dim=-1) >= 0).all()
    largest = expected.eigenvalues.abs().amax(-1, keepdim=True)
    assert ((values - expected.eigenvalues).abs() <= 20 * EPS * largest).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", hard_spectra(3))
def test_decompositions_are_accurate_for_every_spectrum(kernels, name):
    a = hard_spectra(37)[name]
    values, vectors = solve(kernels, a)
    check(a, values, vectors)
    residual, defect, moved = lapack_ratios(a, values, vectors)
    assert (residual <= 3).all() and (defect <= 3).all() and (moved <= 1).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("n", [17, 32, 33, 64, 90])
def test_decompositions_are_accurate_at_every_order(kernels, n):
    a = hard_spectra(n, batch=1)["ReLU features"]
    check(a, *solve(kernels, a))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 19_000])
def test_matrices_that_do_not_fit_into_shared_memory(kernels, limit, monkeypatch):
    """Never, or as soon as 36 rows are left."""
    monkeypatch.setattr(kernels, "shared_limit", limit)
    for name in ("ReLU features", "indefinite"):
        a = hard_spectra(45)[name]
        check(a, *solve(kernels, a))
    assert tridiagonal.Plan(45).resident(limit - tridiagonal.Plan(45).shared_bytes(1), 1) == (36 if limit else 0)


@pytest.mark.slow
def test_couplings_that_vanish(kernels):
    """Block diagonal matrices, whose halves are merged without solving a secular equation."""
    a = torch.block_diag(*(hard_spectra(n, batch=1)["indefinite"][0] for n in (10, 20, 7))).unsqueeze(0)
    check(a, *solve(kernels, a))


@pytest.mark.slow
def test_underflow_does_not_reduce_the_accuracy_of_reflections(kernels):
    """Squares of 1e-150 underflow; regression: vectors were orthogonal to 1e-10 only, not to n eps."""
    a = torch.ones(1, 80, 80, dtype=torch.float64) + 1e-150 * torch.diag_embed(torch.arange(80.0, dtype=torch.float64))
    assert all((defect <= 80 * EPS).all() for defect in defects(a, *solve(kernels, a)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_matrices_become_nan(kernels, bad):
    a = hard_spectra(20, batch=3)["indefinite"]
    a[1, 5, 3] = bad
    values, vectors = solve(kernels, a)
    assert values[1].isnan().all() and vectors[1].isnan().all()
    check(a[::2], values[::2], vectors[::2])


@pytest.mark.slow
def test_unsolved_leaves_become_nan(kernels):
    a = hard_spectra(40)["indefinite"]
    t = tridiagonal.reduce(a, kernels)
    leaf = t.leaves.shape[-1]
    values, vectors = (x.contiguous() for x in torch.linalg.eigh(t.leaves.view(-1, leaf, leaf)))
    values[1] = torch.nan
    values, vectors = tridiagonal.conquer(t, values, vectors, kernels)
    assert values[0].isnan().all() and vectors[0].isnan().all()
    assert values[1].isfinite().all() and vectors[1].isfinite().all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("exponent", [-1040, -500, 500, 1020])
def test_matrices_of_any_scale_are_decomposed(kernels, exponent):
    a = hard_spectra(20)["decaying features"]
    a = a / a.abs().amax((-2, -1), keepdim=True)
    values, vectors = solve(kernels, torch.ldexp(a, torch.tensor(exponent)))
    if exponent > -1000:  # below, entries are subnormal
        check(a, torch.ldexp(values, torch.tensor(-exponent)), vectors)
    else:
        expected = torch.ldexp(torch.linalg.eigvalsh(a), torch.tensor(exponent))
        assert ((values - expected).abs() <= 1e-8 * expected.amax(-1, keepdim=True)).all()


def test_only_the_lower_triangle_is_read(kernels):
    a = hard_spectra(20)["indefinite"]
    values, vectors = solve(kernels, a.masked_fill(torch.ones(20, 20).triu(1).bool(), torch.nan))
    check(a, values, vectors)


@pytest.mark.slow
def test_the_tridiagonal_matrix_and_its_reflections(kernels):
    """A = H_0 H_1 ... T ... H_1 H_0 with reflections I - v v^T, in leaves whose cuts were taken from the diagonal."""
    a = hard_spectra(45, batch=1)["indefinite"]
    t = tridiagonal.reduce(a, kernels)
    plan = tridiagonal.Plan(45)
    assert (plan.parts, plan.leaf) == (4, 12) and t.leaves.shape == (1, 4, 12, 12)
    off = t.couplings[0, :44]
    whole = torch.block_diag(*t.leaves[0])
    for cut in (12, 24, 36):
        whole[cut - 1, cut - 1] += off[cut - 1].abs()
        whole[cut, cut] += off[cut - 1].abs()
        whole[cut - 1, cut] = whole[cut, cut - 1] = off[cut - 1]
    assert (whole[45:, :45] == 0).all() and (whole.diagonal()[45:] > torch.linalg.eigvalsh(a / t.scale).amax()).all()
    q = torch.eye(45, dtype=torch.float64)
    for v in t.reflectors[0].permute(0, 2, 1).reshape(-1, 45)[:43]:
        assert abs(float(v @ v) - 2) < 20 * EPS
        q = q - torch.outer(q @ v, v)
    assert (q @ whole[:45, :45] @ q.mT * t.scale - a[0]).abs().amax() < 50 * EPS * a.abs().amax()


def test_shared_memory_fits_a_block():
    for n, limit in ((512, 163 * 1024), (1024, 227 * 1024)):  # an A100's and an H200's
        plan = tridiagonal.Plan(n)
        assert plan.shared_bytes(1) <= limit


@pytest.mark.slow
def test_unconverged_secular_equations_become_nan():
    """With one step for each root, matrices that need a merge become NaN as a whole; the diagonal one needs none."""
    x = torch.randn(40, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, vectors = solve(compiled(MAX_STEPS=1), torch.stack([x + x.mT, torch.diag(torch.arange(1.0, 41).double())]))
    assert values[0].isnan().all() and vectors[0].isnan().all()
    torch.testing.assert_close(values[1], torch.arange(1.0, 41).double())
