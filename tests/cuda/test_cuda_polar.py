"""The kernels of small polar decompositions, compiled for the CPU and run thread by thread."""

import pytest
import torch

import matbackprop
from helpers import cuda_on_cpu
from matbackprop._torch import is_plain
from matbackprop.cuda import fallback, polar, svd
from matbackprop.errors import DomainError

SHAPES = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 3), (8, 2)]


@pytest.fixture(params=SHAPES, ids="{0[0]}×{0[1]}".format)
def shape(request):
    return request.param


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Run the kernels on plain tensors of the CPU; the names of launched ones."""
    monkeypatch.setattr(polar, "kernels_may_take", is_plain)
    monkeypatch.setattr(fallback, "kernels_may_take", is_plain)
    return cuda_on_cpu.emulate(monkeypatch, svd.TINY)


def matrices(shape, dtype=torch.float64):
    """Random, orthogonal (all singular values are equal), graded, very small and very large."""
    m, n = shape
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(5, m, n, generator=generator, dtype=torch.float64)
    orthogonal = torch.linalg.qr(random[1])[0]
    if m == n:
        orthogonal[:, 0] *= torch.linalg.det(orthogonal)
    graded = orthogonal * 10.0 ** -torch.arange(n, dtype=torch.float64)
    return torch.stack([random[0], orthogonal, graded, 1e-30 * random[3], 1e30 * random[4]]).to(dtype)


def loss(outputs, *, quadratic=True):
    weighted = [t * torch.arange(1, t[0].numel() + 1).view(t.shape[1:]).float().cos().to(t) for t in outputs]
    return sum(t.sum() + (t.square().sum() if quadratic else 0) for t in weighted)


def rotated(a):
    ramp = torch.arange(a.shape[-1], dtype=torch.float64)
    return (a.double() @ torch.matrix_exp(ramp.unsqueeze(-1) - ramp)).to(a.dtype)


FUNCTIONS = {
    "polar": lambda a, _: tuple(matbackprop.polar(a)),
    "Q alone": lambda a, _: (matbackprop.polar(a).Q,),
    "P alone": lambda a, _: (matbackprop.polar(a).P,),
    "rotation": lambda a, _: (matbackprop.project_rotation(a),),
    "procrustes": lambda a, y: (matbackprop.procrustes(a, y.to(a.dtype)),),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_derivatives_equal_those_without_kernels(launched, shape, name, dtype):
    function = FUNCTIONS[name]
    if name in ("rotation", "procrustes") and shape[0] != shape[1]:
        pytest.skip("needs square matrices")
    a = matrices(shape, dtype)[:3]
    y, quadratic = rotated(a), dtype == torch.float64  # a linear loss has gradients without rounding errors
    results = []
    for enabled in (True, False):
        x = (a if enabled else a.double()).clone().requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            if not enabled:
                patch.setattr(polar, "kernels_may_take", lambda *_: False)
            outputs = function(x, y)
            (first,) = torch.autograd.grad(loss(outputs, quadratic=quadratic), x)
            (again,) = torch.autograd.grad(loss(function(x, y), quadratic=quadratic), x, create_graph=True)
            (second,) = torch.autograd.grad(loss([again], quadratic=quadratic), x)
        results.append([*outputs, first, again, second])
        assert launched.count("polar_tiny") == 2
        assert launched.count("polar_tiny_adjoint") == 1 + quadratic
    rounding = 1e-7 if dtype == torch.float32 else 2e-13  # the condition of the graded matrix is 1e3
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == dtype
        scale = expected.detach().abs().amax((-2, -1), keepdim=True)
        assert ((ours - expected).abs() <= rounding * scale).all()


def test_scales_do_not_matter(shape):
    a = matrices(shape)
    q, p = matbackprop.polar(a, check=False)
    expected = torch.linalg.svd(a, full_matrices=False)
    torch.testing.assert_close(q, expected[0] @ expected[2], rtol=1e-13, atol=1e-13)
    size = a.abs().amax((-2, -1), keepdim=True)
    torch.testing.assert_close(q @ p / size, a / size, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("check", [True, False])
def test_matrices_without_a_unique_factor(shape, check):
    a = matrices(shape)[:3].clone()
    a[1] = 0
    if check:
        with pytest.raises(DomainError, match="1 of 3 matrices have no unique polar decomposition"):
            matbackprop.polar(a, check=True)
        return
    a.requires_grad_()
    q, p = matbackprop.polar(a, check=False)
    (grad,) = torch.autograd.grad(loss((q, p)), a)
    for t in (q, p, grad):
        assert t[1].isnan().all() and t[[0, 2]].isfinite().all()


def test_a_reflection_without_a_nearest_rotation_is_nan(shape):
    m, n = shape
    if m != n or n == 1:
        pytest.skip("needs square matrices")
    eye = torch.eye(n, dtype=torch.float64)
    mirrored = eye.clone()
    mirrored[0, 0] = -1
    r = matbackprop.project_rotation(torch.stack([eye, mirrored, 2 * eye - mirrored * 0.5]), check=False)
    assert r[1].isnan().all()
    torch.testing.assert_close(torch.linalg.det(r[[0, 2]]), torch.ones(2, dtype=torch.float64))
