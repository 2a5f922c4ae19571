"""Polar factors, rotations and low rank: values against SciPy, and derivatives at ties."""

import pytest
import scipy.linalg
import scipy.spatial.transform
import torch
from torch.autograd import gradcheck, gradgradcheck

from helpers.matrices import generator, orthogonal, with_singular_values
from matbackprop import low_rank, nn, polar, procrustes, project_rotation
from matbackprop.errors import DomainError, ShapeError, TieError


def random(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (3, 6)])
def test_polar_factors_equal_scipy(shape):
    a = random(*shape)
    q, p = polar(a)
    for one, other in zip((q, p), scipy.linalg.polar(a.numpy()), strict=True):
        torch.testing.assert_close(one, torch.from_numpy(other))
    torch.testing.assert_close(q @ p, a)
    assert polar(a)._fields == ("Q", "P")


DEGENERATE = {
    "equal singular values": (2.0, 2.0, 2.0),
    "a zero one": (2.0, 1.0, 0.0),
    "equal ones and a zero": (2.0, 2.0, 0.0),
    "a reflection": (3.0, 2.0, -1.0),
    "a reflection with equal ones": (2.0, 2.0, -1.0),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_rotations_are_differentiable_if_unique(name):
    q, v = orthogonal(3), orthogonal(3, seed=1)
    q, v = q * torch.linalg.det(q).sign(), v * torch.linalg.det(v).sign()
    a = ((q * torch.tensor(DEGENERATE[name], dtype=torch.float64)) @ v.mT).requires_grad_()
    torch.testing.assert_close(project_rotation(a.detach()), q @ v.mT)
    assert gradcheck(project_rotation, a, check_forward_ad=True)
    assert gradgradcheck(project_rotation, a, check_fwd_over_rev=True)


def test_points_in_a_plane_determine_a_rotation():
    x = random(5, 3)
    x[:, 2] = 0
    r = project_rotation(random(3, 3, seed=3))
    torch.testing.assert_close(procrustes(x, x @ r), r)
    assert gradcheck(lambda y: procrustes(x, y), (x @ r).requires_grad_())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: polar(with_singular_values(4, 3, (2.0, 1.0, 0.0))), "no unique polar decomposition"),
        (lambda: polar(torch.zeros(2, 2)), "no unique polar decomposition"),
        (lambda: project_rotation(torch.diag(torch.tensor([1.0, 0.0, 0.0]))), "no unique nearest rotation"),
        (lambda: project_rotation(torch.diag(torch.tensor([2.0, 1.0, -1.0]))), "no unique nearest rotation"),
        (lambda: procrustes(torch.ones(5, 3), torch.ones(5, 3)), "no unique rotation between the points"),
    ],
)
def test_nonunique_rotations_are_rejected(call, message):
    with pytest.raises(DomainError, match=message):
        call()


def test_shapes_of_points():
    with pytest.raises(ShapeError, match="same shape"):
        procrustes(torch.ones(4, 3), torch.ones(3, 4))


LOW_RANK = {
    "equal ones that are kept": (2.0, 2.0, 1.0, 0.5),
    "equal ones that are lost": (2.0, 1.5, 0.5, 0.5),
    "zeros that are lost": (2.0, 1.5, 0.0, 0.0),
    "equal ones on each side": (2.0, 2.0, 0.5, 0.5),
}


@pytest.mark.parametrize("name", LOW_RANK)
@pytest.mark.parametrize("shape", [(5, 4), (4, 5)])
def test_derivatives_of_low_rank_at_ties(name, shape):
    a = with_singular_values(*shape, LOW_RANK[name]).requires_grad_()
    assert gradcheck(lambda x: low_rank(x, 2), a, check_forward_ad=True)
    assert gradgradcheck(lambda x: low_rank(x, 2), a)


def test_low_rank_at_its_own_rank_projects_variations_on_the_tangent_space():
    """dA_k = ΠdA + dAΠ' − ΠdAΠ' where A has rank k, with the projectors on its spaces."""
    a = with_singular_values(5, 4, (2.0, 1.0, 0.0, 0.0))
    e = random(5, 4)
    u, _, vh = torch.linalg.svd(a)
    left, right = u[:, :2] @ u[:, :2].mT, vh[:2].mT @ vh[:2]
    _, along = torch.func.jvp(lambda x: low_rank(x, 2), (a,), (e,))
    torch.testing.assert_close(along, left @ e + e @ right - left @ e @ right)


def test_a_tie_at_the_cut_is_rejected():
    with pytest.raises(TieError, match="both sides of rank 1"):
        low_rank(torch.eye(3), 1)
    with pytest.raises(DomainError, match="an integer"):
        nn.LowRank(-1)


def test_derivatives_beyond_the_range_are_rejected_and_values_are_not():
    a = 1.2e308 * with_singular_values(4, 3, [1.0, 1e-2, 1e-4])
    a = a / a.abs().max() * 1.2e308
    q, _ = polar(a)
    torch.testing.assert_close(q.mT @ q, torch.eye(3, dtype=torch.float64))
    with pytest.raises(DomainError, match="Scale it"):
        polar(a.requires_grad_())


def test_polar_factors_of_the_largest_matrices():
    """Neither P nor intermediate results overflow."""
    a = torch.tensor([[-1.7e308], [1e306]], dtype=torch.float64)
    q, p = polar(a)
    torch.testing.assert_close(q @ p, a)


def test_low_rank_has_no_derivative_at_a_matrix_of_less_rank():
    a = torch.diag(torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)).requires_grad_()
    value = low_rank(a, 2)
    torch.testing.assert_close(value.detach(), a.detach())
    with pytest.raises(DomainError, match="derivative at a matrix of rank less than 2 does not exist"):
        value.sum().backward()
