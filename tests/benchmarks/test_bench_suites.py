"""The suites run, and their peers and references are correct."""

import numpy as np
import pytest
import torch

from benchmarks.speed import peers
from benchmarks.speed.measure import run_suite
from benchmarks.speed.suites import SUITES
from benchmarks.speed.suites.segmentation import scene
from matbackprop import inverse_root, matrix_function, second_order_pool

CPU = torch.device("cpu")


@pytest.mark.parametrize("suite", SUITES)
def test_our_side_of_every_suite_runs(suite):
    entries = [e for e in SUITES[suite](CPU, "quick") if e.method.startswith(("matbackprop", "DeepO2P"))]
    assert entries
    for entry in entries[:2]:
        entry.build(CPU)()


@pytest.mark.parametrize("suite", SUITES)
def test_every_case_has_a_peer(suite):
    cases = {}
    for entry in SUITES[suite](CPU, "full"):
        cases.setdefault(entry.case, []).append(entry.method)
    for methods in cases.values():
        assert len(methods) == len(set(methods)) >= 2


def test_suite_of_errors_end_to_end():
    seen = []
    results = run_suite("gradient-error", CPU, scale="quick", seconds=0.01, report=seen.append)
    assert seen == results.records
    ours = [float(r.error) for r in results.records if r.method == "matbackprop"]
    assert len(ours) > 4 and max(ours) < 2e-7


def test_newton_iterations_converge_to_the_roots():
    x = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a = x @ x.mT
    root = peers.isqrt(a, steps=20)
    torch.testing.assert_close(root @ root, a, rtol=1e-8, atol=1e-8)
    root = peers.coupled_newton(a, 4, 1e-3, tolerance=1e-12)
    torch.testing.assert_close(root, inverse_root(a, 4, eps=1e-3, relative=True), rtol=1e-8, atol=1e-8)


def test_mpn_cov_gradient_equals_that_of_the_newton_schulz_steps():
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a = (x @ x.mT).requires_grad_()
    g = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one, other = peers.mpn_cov_root(a), peers.isqrt(a)
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(*(torch.autograd.grad(root, a, g)[0] for root in (one, other)))


@pytest.mark.parametrize(("root", "digits"), [(peers.pade_root, 1e-6), (peers.taylor_root, 3e-3)])
def test_series_of_the_square_root_approximate_it_and_its_gradient(root, digits):
    """For a well-conditioned matrix, with the number of terms of the authors."""
    x = torch.randn(2, 3, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a = (x @ x.mT).requires_grad_()
    g = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    g = g + g.mT
    values = root(a), matrix_function(a, "sqrt")
    torch.testing.assert_close(*values, rtol=digits, atol=digits)
    torch.testing.assert_close(
        *(torch.autograd.grad(value, a, g)[0] for value in values), rtol=10 * digits, atol=10 * digits
    )


@pytest.mark.parametrize("name", ["log", "sqrt"])
@pytest.mark.parametrize("method", ["torch.linalg.svd + autograd", *peers.MATRIX_FUNCTIONS])
def test_peers_pool_the_same_matrix(name, method):
    f = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if method in peers.MATRIX_FUNCTIONS:
        try:
            pool = peers.pool_with(peers.MATRIX_FUNCTIONS[method](name), 1e-2)
        except peers.MissingPeer as missing:
            pytest.skip(str(missing))
    else:
        pool = peers.svd_pool(name, 1e-2)
    torch.testing.assert_close(pool(f), second_order_pool(f, eps=1e-2, function=name), rtol=1e-9, atol=1e-9)


def test_scene_consists_of_regions():
    image, f = scene(12, 20, 5)
    assert image.shape == (12, 20, 3) and f.shape == (12, 20, 5)
    assert f.min() > 0 and f.max() <= 1
    assert np.array_equal(image, scene(12, 20, 5)[0])
