"""Eigenvectors of Gram matrices whose small eigenvalues are lost in the largest one."""

import pytest
import torch

from helpers import cuda_on_cpu
from helpers.matrices import generator, relu_features, with_singular_values
from matbackprop.cuda import jacobi
from matbackprop.refinement import OVERLAP
from matbackprop.solvers import gram
from matbackprop.solvers.gram import gram_eigh

EPS = torch.tensor([1e-3, 1e-3], dtype=torch.float64)


def with_outliers(n, k):
    """Two matrices with one column and two columns far larger than the others."""
    x = torch.randn(2, n, k, generator=generator(1), dtype=torch.float64)
    x[0, :, 0] *= 1e7
    x[1, :, :2] *= torch.tensor([1e9, 1e5], dtype=torch.float64)
    return x


def check(x, s, q, y):
    """Check Y = QᵀX up to rounding of X, Q orthogonal, and rows of Y orthogonal relative to their norms."""
    n = x.shape[-2]
    assert (q.mT @ q - torch.eye(n, dtype=torch.float64)).abs().amax() < 1e-13
    assert ((q.mT @ x - y).norm(dim=(-2, -1)) < 1e-13 * x.norm(dim=(-2, -1))).all()
    unit = y / y.norm(dim=-1, keepdim=True)
    assert (unit @ unit.mT - torch.eye(n, dtype=torch.float64)).abs().amax() < 5e-12
    expected = torch.linalg.svdvals(x.flip(-1)).square()  # small ones to 1e-16 σ_max/σ
    torch.testing.assert_close(s.sort(-1, descending=True).values, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("n", "k"), [(2, 3), (5, 9), (8, 8)])
def test_small_rows_next_to_an_outlier_are_accurate(n, k):
    x = with_outliers(n, k)
    check(x, *gram_eigh(x, EPS, True))
    mapped = torch.func.vmap(lambda one, eps: gram_eigh(one, eps, True))(x, EPS)
    check(x, *mapped)


def test_only_matrices_that_need_it_are_rotated():
    x = torch.stack([with_outliers(6, 6)[0], relu_features(6, 6)])
    together = gram_eigh(x, EPS, False)
    alone = gram_eigh(x[1:], EPS[1:], False)
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a[1:], b)


@pytest.fixture
def on_cpu(monkeypatch):
    """Run the kernels on the CPU, with small blocks."""
    monkeypatch.setattr(jacobi, "_threads", lambda n: 64)
    cuda_on_cpu.emulate(monkeypatch, jacobi.SEPARATE)


@pytest.mark.parametrize(("n", "k"), [(3, 40), (7, 9)])
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.usefixtures("on_cpu")
def test_kernel_separates_rows(n, k, layout):
    x = with_outliers(n, k)
    _, q = torch.linalg.eigh(x @ x.mT)
    y = q.mT @ x
    if layout == "columns":
        q, y = q.mT.contiguous().mT, y.mT.contiguous().mT
    q, y = jacobi.separate_by_kernel(q, y, EPS, 1e-13)
    check(x, gram.squared_norms(y), q, y)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.usefixtures("on_cpu")
def test_kernel_separates_rows_to_a_tolerance(layout):
    x = with_outliers(7, 50)
    _, q = torch.linalg.eigh(x @ x.mT)
    y = q.mT @ x
    unit = y / y.norm(dim=-1, keepdim=True)
    assert (unit @ unit.mT).tril(-1).abs().amax() > 1e-3  # the solver left them mixed
    if layout == "columns":
        q, y = q.mT.contiguous().mT, y.mT.contiguous().mT
    limit = OVERLAP[False]
    q, y = jacobi.separate_by_kernel(q, y, EPS, limit)
    unit = y / (y.square().sum(-1, keepdim=True) + EPS[:, None, None]).sqrt()
    assert (unit @ unit.mT).tril(-1).abs().amax() < limit
    assert ((q.mT @ x - y).norm(dim=(-2, -1)) < 1e-13 * x.norm(dim=(-2, -1))).all()


@pytest.mark.parametrize("limit", [1e-11, 2e-8])
@pytest.mark.usefixtures("on_cpu")
def test_kernel_does_not_change_orthogonal_rows(limit):
    x = with_singular_values(5, 7, torch.logspace(0, 2, 5, dtype=torch.float64), seed=1)[None]
    _, q = torch.linalg.eigh(x @ x.mT)
    y = q.mT @ x
    new_q, new_y = jacobi.separate_by_kernel(q.clone(), y.clone(), EPS[:1], limit)
    assert torch.equal(new_q, q) and torch.equal(new_y, y)


@pytest.mark.usefixtures("on_cpu")
def test_unseparated_rows_become_nan(monkeypatch):
    """With one sweep, mixed rows become NaN and orthogonal ones do not change."""
    cuda_on_cpu.emulate(monkeypatch, jacobi.SEPARATE, SEPARATION_SWEEPS=1)
    x = with_outliers(7, 50)
    x[1] = torch.eye(7, 50)
    _, q = torch.linalg.eigh(x @ x.mT)
    new_q, new_y = jacobi.separate_by_kernel(q.clone(), q.mT @ x, EPS, 1e-13)
    assert new_q[0].isnan().all() and new_y[0].isnan().all()
    assert torch.equal(new_q[1], q[1]) and new_y[1].isfinite().all()
