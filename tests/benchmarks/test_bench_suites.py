"""The suites run, and their peers and references are correct."""

import numpy as np
import pytest
import torch

from benchmarks.speed import peers
from benchmarks.speed.suites import SUITES
from benchmarks.speed.suites.segmentation import scene
from matbackprop import inverse_root, second_order_pool

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


def test_newton_iterations_converge_to_the_roots():
    x = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a = x @ x.mT
    root = peers.isqrt(a, steps=20)
    torch.testing.assert_close(root @ root, a, rtol=1e-8, atol=1e-8)
    root = peers.coupled_newton(a, 4, 1e-3, tolerance=1e-12)
    torch.testing.assert_close(root, inverse_root(a, 4, eps=1e-3, relative=True), rtol=1e-8, atol=1e-8)


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
