"""Projectors on spans and on leading eigenvectors: values, derivatives, transformations, bad input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from matbackprop import projector, spectral_projector
from matbackprop.errors import DomainError, DtypeError, OrderError, ShapeError, SymmetryError, TieError
from matbackprop.numerics import symmetrize


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_spectrum(*values, seed=0):
    q, _ = torch.linalg.qr(random(len(values), len(values), seed=seed))
    return symmetrize((q * torch.tensor(values, dtype=torch.float64)) @ q.mT)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 5))
def test_laws_of_projectors(seed, m, n):
    a = random(m, n, seed=seed)
    q, _ = torch.linalg.qr(random(m, m, seed=seed + 1))
    mix = torch.eye(n).double() + 0.3 * random(n, n, seed=seed + 2) / n
    torch.testing.assert_close(projector(q @ a), q @ projector(a) @ q.mT, rtol=0, atol=1e-9)
    torch.testing.assert_close(projector(a @ mix), projector(a), rtol=0, atol=1e-8)
    torch.testing.assert_close(projector(a @ a.mT, rank_tol=1e-10), projector(a), rtol=0, atol=1e-6)


@pytest.mark.parametrize("symmetric", [False, True])
def test_projector_derivatives_along_variations_that_keep_the_rank(symmetric):
    x = random(5, 2).requires_grad_()
    function = lambda x: projector(x @ x.mT, symmetric=symmetric)  # noqa: E731
    assert gradcheck(function, x, check_forward_ad=True)
    assert gradgradcheck(function, x)


def test_gradient_of_a_square_matrix_of_full_rank_is_zero():
    a = random(4, 4).requires_grad_()
    (projector(a) * random(4, 4, seed=1)).sum().backward()
    assert a.grad.abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "r", "d"), [(200, 3, 20), (20, 3, 64), (500, 1, 8)])
def test_rounding_does_not_increase_the_rank_and_weak_directions_are_kept(dtype, m, r, d):
    low = (random(m, r).abs() @ random(r, d, seed=1).abs()).to(dtype)
    assert projector(low).float().trace().round() == r
    u, v = torch.linalg.qr(random(m, 2))[0], torch.linalg.qr(random(d, 2, seed=1))[0]
    weak = 3 * torch.finfo(dtype).eps + 1e-4
    two = (u * torch.tensor([1.0, weak], dtype=torch.float64)) @ v.mT
    assert projector(two.to(dtype)).float().trace().round() == 2


def test_rank_follows_the_precision_of_the_data():
    low = random(40, 3).float() @ random(3, 10, seed=1).float()
    assert projector(low).trace().round() == 3
    assert projector(low.double()).trace().round() == 10
    assert projector(low.double(), rank_tol=torch.float32).trace().round() == 3
    assert projector(low.double(), rank_tol=1e-4).trace().round() == 3


def test_zero_and_empty_matrices():
    a = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    p = projector(a)
    p.sum().backward()
    assert (p == 0).all()
    assert (a.grad == 0).all()
    assert projector(torch.zeros(0, 4, 2)).shape == (0, 4, 4)
    assert projector(torch.zeros(4, 0)).shape == (4, 4)
    assert projector(torch.zeros(0, 4)).shape == (0, 0)
    assert spectral_projector(torch.zeros(0, 3, 3), rank=1).shape == (0, 3, 3)


@pytest.mark.parametrize("options", [{"rank": 2}, {"threshold": 2.5}])
def test_spectral_projector_uses_the_leading_eigenvectors(options):
    a = with_spectrum(4.0, -5.0, 3.0, 2.0)
    values, vectors = torch.linalg.eigh(a)
    expected = vectors[:, -2:] @ vectors[:, -2:].mT
    assert values[-2] > 2.5
    torch.testing.assert_close(spectral_projector(a, **options), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_eigenvalues_at_the_threshold_up_to_rounding_are_ties(seed):
    f = random(6, 2, seed=seed)
    with pytest.raises(TieError):  # the sign of rounding errors would decide
        spectral_projector(f @ f.mT, threshold=0.0)
    assert spectral_projector(f @ f.mT, threshold=0.0, check=False).isnan().all()


@pytest.mark.parametrize("rank", [0, 1, 3, 5])
def test_spectral_projector_derivatives_with_ties_inside_the_blocks(rank):
    spectrum = {0: (2.0, 2.0, 1.0), 1: (3.0, 1.0, 1.0, 1.0), 3: (3.0, 3.0, 3.0, 1.0, 1.0), 5: (3.0,) * 5}[rank]
    a = with_spectrum(*spectrum).requires_grad_()
    function = lambda a: spectral_projector(symmetrize(a), rank=rank)  # noqa: E731
    assert gradcheck(function, a, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(function, a, check_fwd_over_rev=True)


def test_spectral_projector_rejects_a_third_derivative():
    a = with_spectrum(3.0, 2.0, 1.0).requires_grad_()
    (first,) = torch.autograd.grad(spectral_projector(a, rank=1)[0, 0], a, create_graph=True)
    (second,) = torch.autograd.grad(first[0, 1], a, create_graph=True)
    with pytest.raises(OrderError, match="third"):
        torch.autograd.grad(second.sum(), a)


def test_forward_over_forward_is_rejected_and_not_silently_zero():
    a, v = random(4, 2), random(4, 2, seed=1)
    with pytest.raises(OrderError, match="hessian"):
        torch.func.jvp(lambda x: torch.func.jvp(projector, (x,), (v,))[1], (a,), (v,))


@pytest.mark.parametrize(
    ("a", "options", "error"),
    [
        (torch.ones(3, 2), {"symmetric": True}, ShapeError),
        (torch.tensor([[1.0, 2.0], [0.0, 1.0]]), {"symmetric": True}, SymmetryError),
        (torch.eye(2), {"rank_tol": 2.0}, DomainError),
        (torch.eye(2), {"precision": torch.float16}, DtypeError),
    ],
)
def test_bad_input_of_projector(a, options, error):
    with pytest.raises(error):
        projector(a, **options)


@pytest.mark.parametrize(
    ("a", "options", "error"),
    [
        (torch.eye(3), {}, DomainError),
        (torch.eye(3), {"rank": 1, "threshold": 0.5}, DomainError),
        (torch.eye(3), {"rank": 4}, DomainError),
        (torch.eye(3), {"threshold": float("nan")}, DomainError),
        (torch.eye(3), {"rank": 1}, TieError),
        (torch.eye(3), {"rank": 1.5}, DomainError),
        (torch.eye(3), {"threshold": 1.0}, TieError),
    ],
)
def test_bad_input_of_spectral_projector(a, options, error):
    with pytest.raises(error):
        spectral_projector(a, **options)
