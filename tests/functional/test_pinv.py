"""Pseudo-inverse and least squares: values by SciPy, the Moore–Penrose conditions, gradients at the decided rank."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import matbackprop as mb
from helpers.matrices import generator, to_complex, with_singular_values
from matbackprop.errors import DomainError, DtypeError, NonFiniteError, ShapeError


def _randn(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


@settings(deadline=None, max_examples=40)
@given(
    m=st.integers(1, 6), n=st.integers(1, 6), rank=st.integers(0, 6), seed=st.integers(0, 99), is_complex=st.booleans()
)
def test_moore_penrose_conditions(m, n, rank, seed, is_complex):
    a = _randn(m, rank, seed=seed) @ _randn(rank, n, seed=seed + 1)
    a = a * torch.complex(_randn(m, 1), _randn(m, 1)) if is_complex else a
    p = mb.pinv(a)
    size = float(torch.linalg.matrix_norm(a)), float(torch.linalg.matrix_norm(p))
    torch.testing.assert_close(a @ p @ a, a, rtol=0, atol=1e-12 * (1 + size[0] ** 2 * size[1]))
    torch.testing.assert_close(p @ a @ p, p, rtol=0, atol=1e-12 * (1 + size[0] * size[1] ** 2))
    for x in (a @ p, p @ a):
        torch.testing.assert_close(x, x.mH, rtol=0, atol=1e-12 * (1 + size[0] * size[1]))
    torch.testing.assert_close(mb.pinv(a.mH), p.mH, rtol=1e-9, atol=1e-12 * (1 + size[1] ** 2))


@pytest.mark.parametrize("values", [(2.0, 2.0), (3.0, 1.0)], ids=["repeated", "simple"])
@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (3, 3)])
def test_derivatives_at_deficient_rank(values, shape):
    """In coordinates of the matrices of rank 2, A = XYᵀ, because A⁺ is discontinuous across ranks."""
    a = with_singular_values(*shape, (*values, 0.0))
    u, s, vh = torch.linalg.svd(a)
    x, y = (u[:, :2] * s[:2]).requires_grad_(), vh[:2].mT.clone().requires_grad_()
    assert gradcheck(lambda x, y: mb.pinv(x @ y.mT), (x, y), check_forward_ad=True)
    assert gradgradcheck(lambda x, y: mb.pinv(x @ y.mT), (x, y), check_fwd_over_rev=True)
    b = _randn(shape[0], 2).requires_grad_()
    assert gradcheck(lambda x, y, b: mb.lstsq(x @ y.mT, b), (x, y, b), check_forward_ad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_errors_do_not_count_as_rank(dtype):
    x, y = _randn(30, 2).to(dtype), _randn(2, 20, seed=1).to(dtype)
    a = (x @ y).requires_grad_()
    p = mb.pinv(a)
    assert torch.linalg.matrix_norm(p) < 10
    (grad,) = torch.autograd.grad(p.square().sum(), a)
    assert grad.abs().max() < 10
    assert torch.linalg.matrix_rank(mb.pinv(a.detach().double(), rtol=torch.float32)) == 2


def test_zero_and_empty_matrices():
    a = torch.zeros(2, 3, 2, requires_grad=True)
    out = mb.pinv(a)
    out.sum().backward()
    assert out.shape == (2, 2, 3) and not out.any() and not a.grad.any()
    for shape in ((0, 3, 2), (3, 0), (0, 3)):
        assert mb.pinv(torch.ones(shape)).shape == (*shape[:-2], shape[-1], shape[-2])
    assert mb.lstsq(torch.ones(3, 0), torch.ones(3)).shape == (0,)


def test_right_hand_sides_broadcast():
    a, b = _randn(2, 1, 4, 3), _randn(5, 4, 2)
    torch.testing.assert_close(mb.lstsq(a, b), torch.linalg.lstsq(a.expand(2, 5, 4, 3), b.expand(2, 5, 4, 2)).solution)
    torch.testing.assert_close(mb.lstsq(a[0, 0], b[0, :, 0]), mb.lstsq(a, b)[0, 0, :, 0])


def test_first_derivatives_are_exact_if_the_rank_cuts_separate_singular_values():
    a = with_singular_values(4, 3, (3.0, 2.0, 1.0)).requires_grad_()
    torch.testing.assert_close(mb.pinv(a, rtol=0.5), mb.pinv(mb.low_rank(a, 2)))
    assert gradcheck(lambda a: mb.pinv(mb.low_rank(a, 2)), a)
    for x in (a, a.detach().mT.clone().requires_grad_(), to_complex(a.detach()[None]).requires_grad_()):
        assert gradcheck(lambda x: mb.pinv(x, rtol=0.5), x, check_forward_ad=True)


def test_bad_input():
    with pytest.raises(DomainError, match="The rank tolerance must be"):
        mb.pinv(torch.eye(2), rtol=1.0)
    with pytest.raises(ShapeError, match=r"b must be \(\*batch, 3\)"):
        mb.lstsq(torch.ones(3, 2), torch.ones(2))
    with pytest.raises(DtypeError, match="both be real or both complex"):
        mb.lstsq(torch.ones(3, 2), torch.ones(3, dtype=torch.complex64))
    with pytest.raises(NonFiniteError, match=r"1 of .* entries of b"):
        mb.lstsq(torch.ones(2, 2), torch.tensor([1.0, torch.nan]))
    large = 1e200 * torch.eye(2, dtype=torch.float64)
    with pytest.raises(DomainError, match="largest entry"):
        mb.pinv(large)
    for out in (mb.pinv(large, check=False), torch.func.vmap(mb.pinv)(1e-290 * large[None])):
        assert out.isnan().all()


@pytest.mark.parametrize("shape", [(3, 1), (2, 4)])
def test_compiled_without_gradients(shape):
    """Regression: torch.compile returned A, because the operation's forward had variable arguments."""
    a = _randn(*shape)
    torch.testing.assert_close(torch.compile(mb.pinv, backend="eager", fullgraph=True)(a), mb.pinv(a))
