"""The kernels of the singular value decomposition, compiled for the CPU and run thread by thread."""

from functools import partial

import pytest
import torch

import matbackprop
from helpers import cuda_on_cpu
from matbackprop.checks import is_plain
from matbackprop.cuda import svd as kernel
from matbackprop.functional import _svd
from matbackprop.functional._svd import _SVD
from matbackprop.functional._ties import TiePolicy

LAUNCHER = """
extern "C" void launch_svd_factor(int batch, int threads, IN* x, REAL* y, REAL* u, REAL* q, REAL* s, REAL* v,
                                  IN* q_out, IN* s_out, IN* v_out, double limit, int k, int l, int tall) {
    launch({batch, 1, 1}, threads, Sizes(k).a_threads,
           [=] { svd_factor(x, y, u, q, s, v, q_out, s_out, v_out, limit, k, l, tall); });
}
extern "C" void launch_svd_adjoint(int batch, int threads, REAL* q, REAL* s, REAL* v, IN* gq, IN* gs, IN* gv,
                                   IN* out, unsigned char* flag, double tolerance, double broadening,
                                   double gauge, int k, int l, int tall) {
    launch({batch, 1, 1}, threads, 0, [=] {
        svd_adjoint(q, s, v, gq, gs, gv, out, flag, tolerance, broadening, gauge, k, l, tall);
    });
}
"""


TINY_LAUNCHER = """
extern "C" void launch_svd_tiny(int blocks, int threads, IN* x, double* q, double* s, double* v, IN* q_out,
                                IN* s_out, IN* v_out, int count, int tall) {
    launch({blocks, 1, 1}, threads, 0, [=] { svd_tiny(x, q, s, v, q_out, s_out, v_out, count, tall); });
}
"""


def of_blocks(folder, kind):
    choices = {"REAL_IS_DOUBLE": 1, "IN": kind}
    return cuda_on_cpu.Kernels(cuda_on_cpu.build(folder, kernel.SOURCE, LAUNCHER, shared=True, **choices))


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return of_blocks(tmp_path_factory.mktemp("svd"), "double")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return of_blocks(tmp_path_factory.mktemp("svd_of_float32"), "float")


def of_one_thread(folder, m, n, kind="double"):
    """The kernel of tiny matrices, compiled for one shape."""
    choices = {"K": min(m, n), "L": max(m, n), "IN": kind}
    return cuda_on_cpu.Kernels(cuda_on_cpu.build(folder, kernel.TINY, TINY_LAUNCHER, shared=True, **choices))


def matrices(m, n, seed=0):
    """Random, graded, of rank one, zero, with equal singular values, with an outlier, very small and very large."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    k = min(m, n)
    u, v = torch.linalg.qr(random(m, k))[0], torch.linalg.qr(random(n, k))[0]
    graded = (u * 10.0 ** -torch.arange(k, dtype=torch.float64)) @ v.mT
    outlier = random(m, n)
    outlier[0] *= 1e6
    few = [random(m, n), graded, random(m, 1) * random(1, n), torch.zeros(m, n, dtype=torch.float64), u @ v.mT]
    return torch.stack([*few, outlier, 1e-200 * random(m, n), 1e200 * random(m, n)])


def check(x, u, s, vh, orthogonality):
    k, unit = min(x.shape[-2:]), x.abs().amax((-2, -1), keepdim=True).clamp_min(1e-300)
    eye, rounding = torch.eye(k, dtype=torch.float64), 2e-14
    short, long = (vh.mT, u) if x.shape[-2] > x.shape[-1] else (u, vh.mT)
    assert (short.mT @ short - eye).abs().max() < rounding
    assert (long.mT @ long - eye).abs().max() < rounding + orthogonality
    assert (((u * (s / unit[..., 0]).unsqueeze(-2)) @ vh - x / unit).abs() < 2 * rounding).all()
    assert (s.diff(dim=-1) <= 0).all()
    torch.testing.assert_close(s / unit[..., 0], torch.linalg.svdvals(x / unit), rtol=1e-14, atol=3e-15 * k)


@pytest.mark.quick(3)
@pytest.mark.parametrize(("m", "n"), [(1, 20), (2, 9), (3, 70), (5, 7), (9, 4), (7, 7)])
@pytest.mark.parametrize("limit", [4e-15, 1e-9])
def test_factors_are_orthonormal_and_multiply_to_the_matrix(kernels, m, n, limit):
    x = matrices(m, n)
    check(x, *kernel.factor(x, limit, kernels)[0], limit)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 2), (3, 3), (3, 5), (4, 2), (4, 4)])
def test_one_thread_decomposes_a_tiny_matrix(tmp_path, m, n):
    kernels, x = of_one_thread(tmp_path, m, n), matrices(m, n)
    check(x, *kernel.factor(x, 0.0, kernels)[0], 0.0)
    assert kernels.launched == ["svd_tiny"]
    x[1, 0, 0] = torch.nan
    factors = kernel.factor(x, 0.0, kernels)[0]
    assert all(part[1].isnan().all() and part[[0, 2, 3]].isfinite().all() for part in factors)


@pytest.mark.slow
@pytest.mark.parametrize(("m", "n"), [(3, 70), (9, 4), (7, 7), (3, 2), (2, 3)])
def test_float32_matrices_have_float64_factors_and_rounded_ones(single, tmp_path, m, n):
    launched = of_one_thread(tmp_path, m, n, "float") if m * n <= 16 else single
    x = matrices(m, n)[:6].float()
    factors, rounded = kernel.factor(x, 1e-9, launched)
    check(x.double(), *factors, 1e-9)
    for wide, narrow in zip(factors, rounded, strict=True):
        assert wide.dtype == torch.float64 and torch.equal(wide.float(), narrow)


@pytest.mark.parametrize(("m", "n"), [(3, 70), (9, 4), (6, 6)])
def test_adjoint_of_float32_gradients_is_the_rounded_float64_adjoint(kernels, single, m, n):
    factors = torch.linalg.svd(matrices(m, n)[[0, 1]], full_matrices=False)
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(t.shape, generator=generator) for t in factors]
    for absent in range(4):
        given = [None if i == absent else g for i, g in enumerate(gradients)]
        wide = [None if g is None else g.double() for g in given]
        expected = kernel.adjoint(tuple(factors), tuple(wide), 1e-14, 0.0, 1e-8, None, kernels)
        out = kernel.adjoint(tuple(factors), tuple(given), 1e-14, 0.0, 1e-8, None, single)
        assert out.dtype == torch.float32 and torch.equal(out, expected.float())


def test_small_singular_values_are_accurate(kernels):
    values = torch.tensor([1.0, 1e-3, 1e-6, 1e-9], dtype=torch.float64)
    x = (values.unsqueeze(-1) * torch.linalg.qr(matrices(9, 4)[0])[0].mT).unsqueeze(0)  # rows orthogonal as given
    torch.testing.assert_close(kernel.factor(x, 4e-15, kernels)[0][1][0], values, rtol=1e-14, atol=0)


def test_only_nonfinite_matrices_become_nan(kernels):
    x = matrices(5, 7)[:3].clone()
    x[1, 0, 0] = torch.inf
    u, s, vh = kernel.factor(x, 1e-9, kernels)[0]
    for part in (u, s, vh):
        assert part[1].isnan().all() and part[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 70), (5, 7), (9, 4), (6, 6)])
@pytest.mark.parametrize("absent", ["none", "u", "s", "vh"])
@pytest.mark.parametrize("ties", ["drop", "broaden"])
def test_adjoint_equals_that_of_the_layer(kernels, m, n, absent, ties):
    x = matrices(m, n)[[0, 1, 3, 4]]
    factors = torch.linalg.svd(x, full_matrices=False)
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in factors]
    given = [None if name == absent else g for name, g in zip(("u", "s", "vh"), gradients, strict=True)]
    policy = TiePolicy("svd", ties, 1e-14, 1e-3, 1e-8, False)
    expected = _SVD.adjoint((*factors, policy), (True,), *given)
    broadening = policy.broadening if ties == "broaden" else 0.0
    out = kernel.adjoint(tuple(factors), tuple(given), policy.tolerance, broadening, 1e-8, None, kernels)
    scale = expected.abs().amax((-2, -1), keepdim=True)
    assert ((out - expected).abs() <= 1e-12 * scale).all()


@pytest.mark.parametrize(("loss", "seen"), [("gauge", True), ("invariant", False)])
def test_a_tie_is_flagged_if_the_loss_depends_on_the_basis(kernels, loss, seen):
    factors = tuple(torch.linalg.svd(matrices(5, 3)[4:5], full_matrices=False))
    u, s, vh = (t.clone().requires_grad_() for t in factors)
    value = u[..., 0].sum() if loss == "gauge" else (u @ torch.diag_embed(s) @ vh).cos().sum()
    gradients = torch.autograd.grad(value, (u, s, vh), materialize_grads=True)
    flags = [torch.zeros((), dtype=torch.bool) for _ in range(2)]
    kernel.adjoint(factors, gradients, 1e-14, 0.0, 1e-8, flags[0], kernels)
    kernel.adjoint(factors, gradients, 1e-14, 0.0, -1.0, flags[1], kernels)
    assert bool(flags[0]) is seen and bool(flags[1])  # the caller raises if tied vectors are used


def test_zero_singular_values_are_flagged_if_the_long_side_is_used(kernels):
    factors = tuple(torch.linalg.svd(matrices(5, 3)[2:3], full_matrices=False))
    gradients = (torch.zeros(1, 5, 3, dtype=torch.float64), None, None)
    for column, expected in ((0, False), (2, True)):
        gradients[0].zero_()[..., column] = 1
        for gauge in (-1.0, 1e-8):
            flag = torch.zeros((), dtype=torch.bool)
            kernel.adjoint(factors, gradients, 1e-12, 0.0, gauge, flag, kernels)
            assert bool(flag) is expected


@pytest.fixture
def layer(single, monkeypatch):
    """`matbackprop.svd` of float32 matrices, as on a GPU, with the kernels on the CPU."""
    single.launched.clear()
    monkeypatch.setattr(_svd, "_kernel_takes_input", lambda a: a.dtype == torch.float32)
    monkeypatch.setattr(kernel, "factor", partial(kernel.factor, kernels=single))
    monkeypatch.setattr(kernel, "adjoint", partial(kernel.adjoint, kernels=single))
    monkeypatch.setattr(_svd, "kernels_may_take", is_plain)
    return partial(matbackprop.svd, ties="drop")


def weighted(factors):
    """A loss of all factors that does not depend on their signs."""
    return sum((t.square() * torch.arange(1, t.numel() + 1).view(t.shape).to(t)).sum() for t in factors)


@pytest.mark.parametrize("shape", [(2, 9, 4), (3, 20), (6, 6)])
def test_float32_layer_with_kernels_equals_the_layer_without_to_second_order(layer, single, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    results = []
    for call, a in ((layer, x.clone().requires_grad_()), (matbackprop.svd, x.double().requires_grad_())):
        factors = call(a)
        assert all(t.dtype == a.dtype for t in factors)
        grad = torch.autograd.grad(weighted(factors), a)[0]
        again = torch.autograd.grad(weighted(call(a)), a, create_graph=True)[0]
        second = torch.autograd.grad(again.square().sum(), a)[0]
        results.append([factors[1], grad, again, second])
    assert single.launched.count("svd_adjoint") == 1
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - expected).abs().max() < 2e-6 * expected.abs().max()


def test_batched_gradients_of_the_layer_by_kernels(layer):
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2), requires_grad=True)
    directions = torch.eye(5)
    rows = torch.autograd.grad(layer(x).S, x, directions, is_grads_batched=True)[0]
    u, _, vh = matbackprop.svd(x.detach())
    torch.testing.assert_close(rows, torch.einsum("ik,kj->kij", u, vh))


def test_unconverged_rotations_become_nan(tmp_path):
    """With one sweep, a matrix whose rows need rotations becomes NaN; one with orthogonal rows does not."""
    choices = {"K": 3, "L": 3, "IN": "double", "SWEEPS": 1}
    hurried = cuda_on_cpu.Kernels(cuda_on_cpu.build(tmp_path, kernel.TINY, TINY_LAUNCHER, shared=True, **choices))
    x = torch.stack([matrices(3, 3)[0], torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))])
    for factor in kernel.factor(x, 1e-14, hurried)[0]:
        assert factor[0].isnan().all() and factor[1].isfinite().all()


def test_rows_below_the_rounding_of_others_are_not_a_failure(tmp_path):
    x = torch.tensor([[[1.0, 1.0], [1e-200, 1e-200]]], dtype=torch.float64)
    u, s, vh = kernel.factor(x, 1e-14, of_one_thread(tmp_path, 2, 2))[0]
    torch.testing.assert_close(s, torch.tensor([[2**0.5, 0.0]], dtype=torch.float64))
    torch.testing.assert_close((u * s.unsqueeze(-2)) @ vh, x)
