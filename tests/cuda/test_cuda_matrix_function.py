"""The CUDA kernels of matrix functions, compiled for the CPU and run thread by thread, against the general operator."""

import pytest
import torch

from helpers import cuda_on_cpu
from matbackprop import matrix_function
from matbackprop._torch import is_plain
from matbackprop.cuda import fallback
from matbackprop.cuda import matrix_function as chip
from matbackprop.cuda.compiler import FUNCTIONS
from matbackprop.divided_differences import SpectralFunction, named_function
from matbackprop.errors import DomainError
from matbackprop.functional import _matrix_function
from matbackprop.functional._matrix_function import zero_interval


@pytest.fixture
def launched(monkeypatch):
    """Run the kernels on the CPU; the names of launched ones."""
    return cuda_on_cpu.emulate(monkeypatch, chip.SOURCE)


@pytest.fixture
def compute(launched):
    """Value, and gradient as a function of G."""

    def by(a, name):
        rounding, _ = zero_interval(a.dtype, torch.float64, a.shape[-1], named_function(name).domain)
        job = chip.MatrixFunction(name, rounding, None)
        out, factors = job.forward(a)
        return out, lambda g: job.gradient(g, a, *factors)

    return by


@pytest.fixture
def routed(launched, monkeypatch):
    """Let the operator use the kernels; the names of launched ones."""
    monkeypatch.setattr(_matrix_function, "_kernels_take", lambda a, function: is_plain(a))
    monkeypatch.setattr(fallback, "kernels_may_take", lambda *tensors, **_: is_plain(*tensors))
    return launched


@pytest.mark.slow
def test_the_operator_uses_the_kernels_and_their_fallback(routed):
    """Kernels compute first derivatives; the fallback computes second derivatives and batched gradients."""

    def log(x, check=False):
        return matrix_function(0.5 * (x + x.mT), "log", check=check)

    a = matrices(3, "log")[1].requires_grad_()
    log(a, check=True)
    assert routed == ["function_forward"]  # check= does not choose the algorithm
    routed.clear()
    torch.autograd.grad(log(a).sum(), a)
    assert routed == ["function_forward", "function_backward"]
    assert torch.autograd.gradcheck(log, a, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(log, a)
    x = a.detach()
    several = torch.func.vmap(log)(torch.stack([x, 2 * x]))
    torch.testing.assert_close(several, log(torch.stack([x, 2 * x])))
    (tangent,) = torch.func.jvp(log, (x,), (torch.eye(3).double(),))[1:]
    torch.testing.assert_close(tangent, torch.linalg.inv(0.5 * (x + x.mT)))
    constant = torch.func.grad(lambda w: (w * log(x)).sum())(torch.ones_like(x))
    torch.testing.assert_close(constant, log(x))


@pytest.mark.slow
@pytest.mark.usefixtures("routed")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(dtype):
    a = torch.diag(torch.tensor([1.0, 4.0, -1e-3])).to(dtype).requires_grad_()  # the last by the rounding of its dtype
    out = matrix_function(a, "sqrt", check=False)
    assert out.dtype == dtype and torch.equal(out.detach(), torch.diag(torch.tensor([1.0, 2.0, 0.0])).to(dtype))
    b = (torch.eye(3) * 4).to(dtype).requires_grad_()
    (slope,) = torch.autograd.grad(matrix_function(b, "sqrt", check=False).sum(), b)
    assert torch.equal(slope, torch.full((3, 3), 0.25, dtype=dtype))


def matrices(n, name, kinds=4):
    """Separated, tied, two spectra 1e6 wide of which one is tied; exp and inverse get eigenvalues of both signs."""
    generator = torch.Generator().manual_seed(n)
    q = torch.linalg.qr(torch.randn(kinds, n, n, generator=generator, dtype=torch.float64)).Q
    plain, wide = torch.linspace(1.5, 3, n, dtype=torch.float64), torch.logspace(-5, 1, n, dtype=torch.float64)
    pairs = torch.arange(n) // 2 * 2
    spectra = torch.stack([plain, plain[pairs], wide, wide[pairs]])[:kinds]
    if name in ("exp", "inverse"):
        spectra[:, ::3] *= -1
    a = (q * spectra.unsqueeze(-2)) @ q.mT
    noise = torch.randn(a.shape, generator=generator, dtype=torch.float64)
    return a + noise - noise.mT  # the symmetric part is used


def check(a, name, out, gradient, tol):
    """Compare value and gradient with those of the operator in float64."""
    g = torch.randn(a.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(a.dtype)
    x = a.double().clone().requires_grad_()
    expected = matrix_function(0.5 * (x + x.mT), name, check=False)
    (exact,) = torch.autograd.grad(expected, x, g.double())
    for actual, reference in ((out, expected.detach()), (gradient(g), exact)):
        assert actual.dtype == a.dtype and torch.equal(actual, actual.mT)
        error = (actual - reference).norm(dim=(-2, -1)) / reference.norm(dim=(-2, -1))
        assert (error.flatten() < tol).all(), error


def tolerance(dtype, kinds=4):
    """Difference allowed between two eigensolvers: 1e-10 for the smallest eigenvalue of a spectrum 1e6 wide."""
    return torch.tensor([1e-12, 1e-12, 2e-9, 2e-9] if dtype == torch.float64 else [2e-7] * 4)[:kinds]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("n", "name"), [*((5, name) for name in FUNCTIONS), (1, "log"), (2, "exp")])
def test_on_chip_agrees_with_the_operator(compute, n, name):
    for dtype in (torch.float64, torch.float32):
        a = matrices(n, name).to(dtype)
        check(a, name, *compute(a, name), tolerance(dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("n", "kinds", "name"), [(36, 2, "exp"), (64, 1, "log")])
def test_on_chip_at_larger_orders(compute, n, kinds, name):
    a = matrices(n, name, kinds)
    check(a, name, *compute(a, name), tolerance(a.dtype, kinds))


@pytest.mark.slow
def test_the_identity_is_exact(compute):
    for name, value, slope in (("log", 0, 1), ("sqrt", 1, 0.5), ("inverse", 1, -1)):
        a = torch.eye(6, dtype=torch.float64).expand(2, 6, 6).contiguous()
        out, gradient = compute(a, name)
        g = torch.arange(72, dtype=torch.float64).reshape(2, 6, 6)
        assert torch.equal(out, value * a)
        torch.testing.assert_close(gradient(g), slope * 0.5 * (g + g.mT), rtol=1e-15, atol=0)


def test_eigenvalues_far_apart(compute):
    """Division by the smaller of the two eigenvalues would overflow."""
    for name, spectrum in (("exp", [-800.0, 0.0, 3.0]), ("log", [1e-12, 1.0, 1e2])):
        a = torch.diag(torch.tensor(spectrum, dtype=torch.float64)).unsqueeze(0)
        check(a, name, *compute(a, name), 1e-14)


@pytest.mark.slow
def test_the_root_at_zero(compute):
    """Zero, rank one, an eigenvalue negative by rounding, and one that is not."""
    a = torch.zeros(4, 5, 5, dtype=torch.float64)
    a[1, :2, :2] = 2
    a[2:] = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0]))
    a[2, 4, 4], a[3, 4, 4] = -1e-15, -1e-3
    out, gradient = compute(a, "sqrt")
    expected = matrix_function(a[:3], "sqrt", check=False)
    torch.testing.assert_close(out[:3], expected, rtol=1e-14, atol=1e-14)
    assert (out[0] == 0).all() and abs(float(expected[2, 4, 4])) < 1e-20
    torch.testing.assert_close(out[2].diagonal(), expected[2].diagonal(), rtol=1e-14, atol=1e-20)
    assert out[3].isnan().any()
    slope = gradient(torch.ones_like(a))
    x = a.clone().requires_grad_()
    (exact,) = torch.autograd.grad(matrix_function(x, "sqrt", check=False), x, torch.ones_like(a))
    assert torch.equal(slope.isfinite(), exact.isfinite())  # infinite or NaN like the operator


def test_an_infinite_derivative_raises_an_error_if_checked(routed):
    a = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    root = matrix_function(a, "sqrt", check=True)
    with pytest.raises(DomainError, match="infinite derivative"):
        root.sum().backward()
    routed.clear()
    regular = (a + torch.eye(2)).detach().requires_grad_()
    matrix_function(regular, "sqrt", check=True).sum().backward()
    assert routed == ["function_forward", "function_backward"]


def test_rounding_belongs_to_the_dtype(compute):
    a = torch.diag(torch.tensor([1.0, 2.0, -1e-6]))
    assert compute(a, "sqrt")[0].isfinite().all()
    assert compute(a.double(), "sqrt")[0].isnan().any()


@pytest.mark.quick(1)
def test_only_undefined_matrices_become_nan(compute):
    a = torch.eye(4, dtype=torch.float64).repeat(3, 1, 1) * torch.arange(1.0, 5.0)
    a[1, 2, 3] = torch.nan
    a[2, 0, 0] = -1.0
    a[2, 0, 1] = a[2, 1, 0] = 0.5
    out, gradient = compute(a, "log")
    slope = gradient(torch.ones_like(a))
    for x in (out, slope):
        assert x[0].isfinite().all() and x[1].isnan().all() and x[2].isnan().any()


def test_matrices_stay_on_chip_if_they_fit_a_block():
    assert chip.on_chip(1, 99 * 1024) and chip.on_chip(64, 163 * 1024)
    assert not chip.on_chip(64, 99 * 1024) and not chip.on_chip(65, 227 * 1024)


def test_kernels_accept_built_in_functions_only(monkeypatch):
    class There:
        is_cuda, dtype, shape = True, torch.float32, (3, 5, 5)
        get_device = staticmethod(lambda: 0)

    monkeypatch.setattr(chip, "kernels_may_take", lambda *tensors, **_: True)
    monkeypatch.setattr(chip, "shared_limit", lambda device: 227 * 1024)
    assert all(chip.takes(There(), named_function(name)) for name in FUNCTIONS)
    own = SpectralFunction.from_derivative(torch.log, torch.reciprocal, name="log")
    assert not chip.takes(There(), own)
    There.shape = (3, 65, 65)
    assert not chip.takes(There(), named_function("log"))
