"""The kernels of the singular value decomposition, compiled for the CPU and run thread by thread."""

import pytest
import torch

from helpers import cuda_on_cpu
from matbackprop.cuda import svd as kernel
from matbackprop.functional._svd import _SVD
from matbackprop.functional._ties import TiePolicy

LAUNCHER = """
extern "C" void launch_svd_factor(int batch, int threads, REAL* x, REAL* y, REAL* u, REAL* q, REAL* s, REAL* v,
                                  double limit, int k, int l, int tall) {
    launch({batch, 1, 1}, threads, Sizes(k).a_threads, [=] { svd_factor(x, y, u, q, s, v, limit, k, l, tall); });
}
extern "C" void launch_svd_adjoint(int batch, int threads, REAL* q, REAL* s, REAL* v, REAL* gq, REAL* gs, REAL* gv,
                                   REAL* out, unsigned char* flag, double tolerance, double broadening,
                                   double gauge, int k, int l, int tall) {
    launch({batch, 1, 1}, threads, 0, [=] {
        svd_adjoint(q, s, v, gq, gs, gv, out, flag, tolerance, broadening, gauge, k, l, tall);
    });
}
"""


TINY_LAUNCHER = """
extern "C" void launch_svd_tiny(int blocks, int threads, double* x, double* q, double* s, double* v, int count,
                                int tall) {
    launch({blocks, 1, 1}, threads, 0, [=] { svd_tiny(x, q, s, v, count, tall); });
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    program = cuda_on_cpu.build(tmp_path_factory.mktemp("svd"), kernel.SOURCE, LAUNCHER, shared=True, REAL_IS_DOUBLE=1)
    return cuda_on_cpu.Kernels(program)


def of_one_thread(folder, m, n):
    """The kernel of tiny matrices, compiled for one shape."""
    choices = {"K": min(m, n), "L": max(m, n)}
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


@pytest.mark.parametrize(("m", "n"), [(1, 20), (2, 9), (3, 70), (5, 7), (9, 4), (7, 7)])
@pytest.mark.parametrize("limit", [4e-15, 1e-9])
def test_factors_are_orthonormal_and_multiply_to_the_matrix(kernels, m, n, limit):
    x = matrices(m, n)
    check(x, *kernel.factor(x, limit, kernels), limit)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 2), (3, 3), (3, 5), (4, 2), (4, 4)])
def test_one_thread_decomposes_a_tiny_matrix(tmp_path, m, n):
    kernels, x = of_one_thread(tmp_path, m, n), matrices(m, n)
    check(x, *kernel.factor(x, 0.0, kernels), 0.0)
    assert kernels.launched == ["svd_tiny"]
    x[1, 0, 0] = torch.nan
    factors = kernel.factor(x, 0.0, kernels)
    assert all(part[1].isnan().all() and part[[0, 2, 3]].isfinite().all() for part in factors)


def test_small_singular_values_keep_their_digits(kernels):
    values = torch.tensor([1.0, 1e-3, 1e-6, 1e-9], dtype=torch.float64)
    x = (values.unsqueeze(-1) * torch.linalg.qr(matrices(9, 4)[0])[0].mT).unsqueeze(0)  # rows orthogonal as given
    torch.testing.assert_close(kernel.factor(x, 4e-15, kernels)[1][0], values, rtol=1e-14, atol=0)


def test_what_is_not_finite_gives_nan_for_that_matrix_only(kernels):
    x = matrices(5, 7)[:3].clone()
    x[1, 0, 0] = torch.inf
    u, s, vh = kernel.factor(x, 1e-9, kernels)
    for part in (u, s, vh):
        assert part[1].isnan().all() and part[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 70), (5, 7), (9, 4), (6, 6)])
@pytest.mark.parametrize("absent", ["none", "u", "s", "vh"])
@pytest.mark.parametrize("ties", ["drop", "broaden"])
def test_the_adjoint_is_the_one_of_the_layer(kernels, m, n, absent, ties):
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
def test_a_tie_is_flagged_where_the_loss_sees_the_choice_of_vectors(kernels, loss, seen):
    factors = tuple(torch.linalg.svd(matrices(5, 3)[4:5], full_matrices=False))
    u, s, vh = (t.clone().requires_grad_() for t in factors)
    value = u[..., 0].sum() if loss == "gauge" else (u @ torch.diag_embed(s) @ vh).cos().sum()
    gradients = torch.autograd.grad(value, (u, s, vh), materialize_grads=True)
    flags = [torch.zeros((), dtype=torch.bool) for _ in range(2)]
    kernel.adjoint(factors, gradients, 1e-14, 0.0, 1e-8, flags[0], kernels)
    kernel.adjoint(factors, gradients, 1e-14, 0.0, -1.0, flags[1], kernels)
    assert bool(flags[0]) is seen and bool(flags[1])  # whoever raises at ties does so when their vectors are used


def test_zero_singular_values_are_flagged_where_the_long_side_is_used(kernels):
    factors = tuple(torch.linalg.svd(matrices(5, 3)[2:3], full_matrices=False))
    gradients = (torch.zeros(1, 5, 3, dtype=torch.float64), None, None)
    for column, expected in ((0, False), (2, True)):
        gradients[0].zero_()[..., column] = 1
        for gauge in (-1.0, 1e-8):
            flag = torch.zeros((), dtype=torch.bool)
            kernel.adjoint(factors, gradients, 1e-12, 0.0, gauge, flag, kernels)
            assert bool(flag) is expected
