"""The refined route on the CPU: its own steps, its kernels compiled for the CPU, and LAPACK's float32 as a start."""

import pytest
import torch

from helpers import cuda_on_cpu
from helpers.spectra import defects, hard_spectra
from matbackprop.cuda import refined

THREADS = 32
EPS = torch.finfo(torch.float64).eps

LAUNCHERS = """
extern "C" void launch_refine_prepare(int batch, int threads, const double* in, double* scaled, float* single,
                                      double* scale, int n) {
    launch({batch, 1, 1}, threads, 0, [=] { refine_prepare(in, scaled, single, scale, n); });
}
extern "C" void launch_refine_step(int batch, int threads, double* g, double* p, double* s, double* v,
                                   const double* a, const double* scale, double* values, int* turned, double limit,
                                   int last, int n, int spare) {
    launch({batch, 1, 1}, threads, 0,
           [=] { refine_step(g, p, s, v, a, scale, values, turned, limit, last, n, spare); });
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refine")
    return cuda_on_cpu.Kernels(cuda_on_cpu.build(folder, refined.SOURCE, LAUNCHERS, shared=True))


def solve(kernels, a, guess=None, threads=THREADS):
    scaled, single, scale = refined.prepare(a.contiguous(), kernels, threads)
    if guess is None:
        guess = torch.linalg.eigh(single).eigenvectors.mT
    values, rows, turned = refined.refine(scaled, scale, guess, kernels, threads)
    return values, rows.mT, turned


def check(a, values, vectors):
    """As good as LAPACK: at most three times its residual and its loss of orthonormality, or 2 eps."""
    expected = torch.linalg.eigh(a)
    for actual, reference in zip(defects(a, values, vectors), defects(a, *expected), strict=True):
        assert (actual <= 3 * reference.clamp_min(2 * EPS)).all()
    assert (values.diff(dim=-1) >= 0).all()
    largest = expected.eigenvalues.abs().amax(-1, keepdim=True)
    assert ((values - expected.eigenvalues).abs() <= 20 * EPS * largest).all()


@pytest.mark.parametrize("name", hard_spectra(3))
def test_any_spectrum_comes_out_in_double_precision(kernels, name):
    a = hard_spectra(37)[name]
    values, vectors, _ = solve(kernels, a)
    check(a, values, vectors)


def test_more_columns_than_a_tile_and_several_parts(kernels):
    a = hard_spectra(75, batch=1)["ReLU features"]
    check(a, *solve(kernels, a, threads=192)[:2])


@pytest.mark.parametrize("name", ["graded", "cluster of 1e-9", "identity and noise"])
def test_parts_that_do_not_fit_into_shared_memory(kernels, name, monkeypatch):
    monkeypatch.setattr(kernels, "shared_limit", 0)
    a = hard_spectra(37)[name]
    values, vectors, turned = solve(kernels, a)
    check(a, values, vectors)
    assert turned.all()


def test_rotations_are_for_close_pairs_only(kernels):
    spectra = hard_spectra(40)
    assert not solve(kernels, spectra["indefinite"])[2].any()
    assert not solve(kernels, spectra["ties"])[2].any()
    assert (solve(kernels, spectra["cluster of 1e-9"])[2] >= 40 // 3).all()


@pytest.mark.parametrize("guess", ["NaN", "random", "zero", "singular"])
def test_a_useless_start_is_not_trusted(kernels, guess):
    a = hard_spectra(24)["ReLU features"]
    start = torch.linalg.eigh(a.float()).eigenvectors.mT.contiguous()
    if guess == "NaN":
        start.fill_(torch.nan)
    elif guess == "zero":
        start.zero_()
    elif guess == "random":
        start = torch.rand(2, 24, 24, generator=torch.Generator().manual_seed(0))
    else:
        start[:, 1] = start[:, 0]
    values, vectors, turned = solve(kernels, a, start)
    check(a, values, vectors)
    assert (turned >= 48).all()


def test_a_coarse_start_is_enough(kernels):
    a = hard_spectra(24)["indefinite"]
    generator = torch.Generator().manual_seed(0)
    start = torch.linalg.eigh(a).eigenvectors.mT + 1e-5 * torch.randn(2, 24, 24, generator=generator)
    values, vectors, turned = solve(kernels, a, start.float())
    check(a, values, vectors)
    assert (turned < 48).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_matrices_that_are_not_finite_are_marked(kernels, bad):
    a = hard_spectra(20, batch=3)["indefinite"]
    a[1, 5, 3] = bad
    values, vectors, _ = solve(kernels, a)
    assert values[1].isnan().all() and vectors[1].isnan().all()
    check(a[::2], values[::2], vectors[::2])


@pytest.mark.parametrize("exponent", [-1040, -500, 500, 1020])
def test_any_scale(kernels, exponent):
    a = hard_spectra(20)["decaying features"]
    a = a / a.abs().amax((-2, -1), keepdim=True)
    values, vectors, _ = solve(kernels, torch.ldexp(a, torch.tensor(exponent)))
    if exponent > -1000:  # below, entries have lost digits already
        check(a, torch.ldexp(values, torch.tensor(-exponent)), vectors)
    else:
        expected = torch.ldexp(torch.linalg.eigvalsh(a), torch.tensor(exponent))
        assert ((values - expected).abs() <= 1e-8 * expected.amax(-1, keepdim=True)).all()


def test_scales_are_powers_of_two_of_the_lower_triangle(kernels):
    a = torch.tensor([[[3.0, 1e9], [-5.0, 1.0]], [[0.0, 2.0], [0.0, 0.0]]], dtype=torch.float64)
    scaled, single, scale = refined.prepare(a, kernels, THREADS)
    assert scale.tolist() == [4, 1]
    assert scaled.tolist() == [[[0.75, -1.25], [-1.25, 0.25]], [[0, 0], [0, 0]]]
    assert torch.equal(single.double(), scaled)


def test_a_block_has_room():
    assert refined.shared_bytes(refined.MAX_ORDER, 1024) <= 96 * 1024  # of the smallest device that takes the route
