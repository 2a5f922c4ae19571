"""The kernels of the singular value decomposition, compiled for the CPU and run thread by thread."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import matbackprop
from helpers import cuda_on_cpu
from matbackprop._torch import is_plain
from matbackprop.cuda import svd as kernel
from matbackprop.functional import _svd
from matbackprop.functional._svd import _SVD
from matbackprop.functional._ties import TiePolicy


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Run the kernels on the CPU; the names of launched ones."""
    return cuda_on_cpu.emulate(monkeypatch, kernel.SOURCE, kernel.TINY)


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
def test_factors_are_orthonormal_and_multiply_to_the_matrix(m, n, limit):
    x = matrices(m, n)
    check(x, *kernel.factor(x, limit)[0], limit)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 2), (3, 3), (3, 5), (4, 2), (4, 4)])
def test_one_thread_decomposes_a_tiny_matrix(launched, m, n):
    x = matrices(m, n)
    check(x, *kernel.factor(x, 0.0)[0], 0.0)
    assert launched == ["svd_tiny"]
    x[1, 0, 0] = torch.nan
    factors = kernel.factor(x, 0.0)[0]
    assert all(part[1].isnan().all() and part[[0, 2, 3]].isfinite().all() for part in factors)


@pytest.mark.slow
@pytest.mark.parametrize(("m", "n"), [(3, 70), (9, 4), (7, 7), (3, 2), (2, 3)])
def test_float32_matrices_have_float64_factors_and_rounded_ones(m, n):
    x = matrices(m, n)[:6].float()
    factors, rounded = kernel.factor(x, 1e-9)
    check(x.double(), *factors, 1e-9)
    for wide, narrow in zip(factors, rounded, strict=True):
        assert wide.dtype == torch.float64 and torch.equal(wide.float(), narrow)


@pytest.mark.parametrize(("m", "n"), [(3, 70), (9, 4), (6, 6)])
def test_adjoint_of_float32_gradients_is_the_rounded_float64_adjoint(m, n):
    factors = torch.linalg.svd(matrices(m, n)[[0, 1]], full_matrices=False)
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(t.shape, generator=generator) for t in factors]
    for absent in range(4):
        given = [None if i == absent else g for i, g in enumerate(gradients)]
        wide = [None if g is None else g.double() for g in given]
        expected = kernel.adjoint(tuple(factors), tuple(wide), 1e-14, 0.0, 1e-8, None)
        out = kernel.adjoint(tuple(factors), tuple(given), 1e-14, 0.0, 1e-8, None)
        assert out.dtype == torch.float32 and torch.equal(out, expected.float())


def test_small_singular_values_are_accurate():
    values = torch.tensor([1.0, 1e-3, 1e-6, 1e-9], dtype=torch.float64)
    x = (values.unsqueeze(-1) * torch.linalg.qr(matrices(9, 4)[0])[0].mT).unsqueeze(0)  # rows orthogonal as given
    torch.testing.assert_close(kernel.factor(x, 4e-15)[0][1][0], values, rtol=1e-14, atol=0)


def test_only_nonfinite_matrices_become_nan():
    x = matrices(5, 7)[:3].clone()
    x[1, 0, 0] = torch.inf
    u, s, vh = kernel.factor(x, 1e-9)[0]
    for part in (u, s, vh):
        assert part[1].isnan().all() and part[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 70), (5, 7), (9, 4), (6, 6)])
@pytest.mark.parametrize("absent", ["none", "u", "s", "vh"])
@pytest.mark.parametrize("ties", ["drop", "broaden"])
def test_adjoint_equals_that_of_the_layer(m, n, absent, ties):
    x = matrices(m, n)[[0, 1, 3, 4]]
    factors = torch.linalg.svd(x, full_matrices=False)
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in factors]
    given = [None if name == absent else g for name, g in zip(("u", "s", "vh"), gradients, strict=True)]
    policy = TiePolicy("svd", ties, 1e-14, 1e-3, 1e-8, False)
    expected = _SVD.adjoint((*factors, policy), (True,), *given)
    broadening = policy.broadening if ties == "broaden" else 0.0
    out = kernel.adjoint(tuple(factors), tuple(given), policy.tolerance, broadening, 1e-8, None)
    scale = expected.abs().amax((-2, -1), keepdim=True)
    assert ((out - expected).abs() <= 1e-12 * scale).all()


@pytest.mark.parametrize(("loss", "seen"), [("gauge", True), ("invariant", False)])
def test_a_tie_is_flagged_if_the_loss_depends_on_the_basis(loss, seen):
    factors = tuple(torch.linalg.svd(matrices(5, 3)[4:5], full_matrices=False))
    u, s, vh = (t.clone().requires_grad_() for t in factors)
    value = u[..., 0].sum() if loss == "gauge" else (u @ torch.diag_embed(s) @ vh).cos().sum()
    gradients = torch.autograd.grad(value, (u, s, vh), materialize_grads=True)
    flags = [torch.zeros((), dtype=torch.bool) for _ in range(2)]
    kernel.adjoint(factors, gradients, 1e-14, 0.0, 1e-8, flags[0])
    kernel.adjoint(factors, gradients, 1e-14, 0.0, -1.0, flags[1])
    assert bool(flags[0]) is seen and bool(flags[1])  # the caller raises if tied vectors are used


def test_zero_singular_values_are_flagged_if_the_long_side_is_used():
    factors = tuple(torch.linalg.svd(matrices(5, 3)[2:3], full_matrices=False))
    gradients = (torch.zeros(1, 5, 3, dtype=torch.float64), None, None)
    for column, expected in ((0, False), (2, True)):
        gradients[0].zero_()[..., column] = 1
        for gauge in (-1.0, 1e-8):
            flag = torch.zeros((), dtype=torch.bool)
            kernel.adjoint(factors, gradients, 1e-12, 0.0, gauge, flag)
            assert bool(flag) is expected


@pytest.fixture
def layer(monkeypatch):
    """`matbackprop.svd` of float32 matrices as on a GPU."""
    monkeypatch.setattr(_svd, "_kernel_takes_input", lambda a: a.dtype == torch.float32)
    monkeypatch.setattr(_svd, "kernels_may_take", is_plain)
    return partial(matbackprop.svd, ties="drop")


def weighted(factors):
    """A loss of all factors that does not depend on their signs."""
    return sum((t.square() * torch.arange(1, t.numel() + 1).view(t.shape).to(t)).sum() for t in factors)


@pytest.mark.parametrize("shape", [(2, 9, 4), (3, 20), (6, 6)])
def test_float32_layer_with_kernels_equals_the_layer_without_to_second_order(layer, launched, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    results = []
    for call, a in ((layer, x.clone().requires_grad_()), (matbackprop.svd, x.double().requires_grad_())):
        factors = call(a)
        assert all(t.dtype == a.dtype for t in factors)
        grad = torch.autograd.grad(weighted(factors), a)[0]
        again = torch.autograd.grad(weighted(call(a)), a, create_graph=True)[0]
        second = torch.autograd.grad(again.square().sum(), a)[0]
        results.append([factors[1], grad, again, second])
    assert launched.count("svd_adjoint") == 1
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize(
    ("shape", "expected"), [((2, 9, 4), True), ((5000, 16), False), ((16, 5000), False), ((200, 5000, 16), True)]
)
@torch.no_grad()
def test_few_long_matrices_are_not_left_to_one_block_each(monkeypatch, shape, expected):
    monkeypatch.setattr(kernel, "kernels_may_take", lambda x: True)
    monkeypatch.setattr(_svd, "kernels_may_take", lambda *tensors: True)
    *batch, m, n = shape
    k = min(m, n)

    def on_gpu(*sizes, dtype):
        return SimpleNamespace(is_cuda=True, dtype=dtype, shape=torch.Size(sizes))

    assert _svd._kernel_takes_input(on_gpu(*shape, dtype=torch.float32)) is expected
    factors = (on_gpu(*batch, *sides, dtype=torch.float64) for sides in ((m, k), (k,), (k, n)))
    assert _svd._kernel_takes(*factors) is expected


def test_batched_gradients_of_the_layer_by_kernels(layer):
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2), requires_grad=True)
    directions = torch.eye(5)
    rows = torch.autograd.grad(layer(x).S, x, directions, is_grads_batched=True)[0]
    u, _, vh = matbackprop.svd(x.detach())
    torch.testing.assert_close(rows, torch.einsum("ik,kj->kij", u, vh))


def test_unconverged_rotations_become_nan(monkeypatch):
    """With one sweep, a matrix whose rows need rotations becomes NaN; one with orthogonal rows does not."""
    cuda_on_cpu.emulate(monkeypatch, kernel.TINY, SWEEPS=1)
    x = torch.stack([matrices(3, 3)[0], torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))])
    for factor in kernel.factor(x, 1e-14)[0]:
        assert factor[0].isnan().all() and factor[1].isfinite().all()


def test_rows_below_the_rounding_of_others_are_not_a_failure():
    x = torch.tensor([[[1.0, 1.0], [1e-200, 1e-200]]], dtype=torch.float64)
    u, s, vh = kernel.factor(x, 1e-14)[0]
    torch.testing.assert_close(s, torch.tensor([[2**0.5, 0.0]], dtype=torch.float64))
    torch.testing.assert_close((u * s.unsqueeze(-2)) @ vh, x)
