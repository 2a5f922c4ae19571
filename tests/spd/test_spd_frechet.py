"""The Fréchet distance of samples, whose covariances may be singular."""

import numpy as np
import pytest
import torch

from helpers.matrices import generator
from matbackprop import spd
from matbackprop.errors import DomainError, NonFiniteError, OrderError, ShapeError


def samples(*shape, seed):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def expected(x, y):
    """By roots of covariances; negative eigenvalues are rounding errors."""

    def root(a):
        values, vectors = np.linalg.eigh(a)
        return (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T

    a, b = (np.atleast_2d(np.cov(s.numpy(), rowvar=False)) for s in (x, y))
    cross = root(a) @ b @ root(a)
    apart = float((x.mean(0) - y.mean(0)).square().sum())
    return apart + np.trace(a) + np.trace(b) - 2 * np.trace(root(0.5 * (cross + cross.T)))


@pytest.mark.parametrize(("m", "k", "d"), [(20, 30, 4), (3, 5, 8), (3, 30, 6), (30, 3, 6), (2, 2, 3), (6, 6, 1)])
def test_values_and_gradients_for_all_ranks(m, k, d):
    x, y = samples(m, d, seed=1), 0.5 + samples(k, d, seed=2)
    assert float(spd.frechet_distance(x, y)) == pytest.approx(expected(x, y), rel=1e-6)
    assert torch.autograd.gradcheck(
        spd.frechet_distance, (x.requires_grad_(), y.requires_grad_()), check_forward_ad=True
    )


def test_equal_and_close_samples_do_not_cancel():
    x = samples(3, 8, seed=5).requires_grad_()
    same = spd.frechet_distance(x, x.detach())
    (grad,) = torch.autograd.grad(same, x)
    assert 0 <= float(same.detach()) < 1e-28 and float(grad.abs().max()) < 1e-12
    near = spd.frechet_distance(x, x + 1e-9)  # the mean moves
    assert float(near.detach()) == pytest.approx(8e-18, rel=1e-6)
    constant = torch.ones(4, 3, requires_grad=True)
    spd.frechet_distance(constant, samples(4, 3, seed=6).float()).backward()
    assert bool(constant.grad.isfinite().all())


def test_second_derivatives_and_bad_samples_are_rejected():
    x, y = samples(4, 3, seed=7).requires_grad_(), samples(4, 3, seed=8)
    (grad,) = torch.autograd.grad(spd.frechet_distance(x, y), x, create_graph=True)
    with pytest.raises(OrderError, match="no second derivative"):
        torch.autograd.grad(grad.sum(), x)
    with pytest.raises(ShapeError, match="at least two samples"):
        spd.frechet_distance(x[:1], y)
    with pytest.raises(ShapeError, match="same batch and dimension"):
        spd.frechet_distance(x, y[:, :2])
    with pytest.raises(NonFiniteError, match="entries of y"):
        spd.frechet_distance(x, y / 0)
    several = torch.stack([y, y / 0])
    assert spd.frechet_distance(several, several, check=False).isnan().tolist() == [False, True]


def bures(a, b):
    return spd.distance(a, b, metric="bures_wasserstein", squared=True)


def covariances(m, k, d, seed=1):
    """Factors X, Y with A = XXᵀ of rank m and B = YYᵀ of rank k."""
    return samples(d, m, seed=seed), samples(d, k, seed=seed + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("m", "k"), [(2, 5), (5, 2), (2, 2), (1, 4), (3, 3)])
def test_bures_distance_of_singular_matrices(m, k, dtype):
    """By the nuclear norm of XᵀY, in any units of the channels."""
    x, y = (f.to(dtype) for f in covariances(m, k, 5))
    for units in (torch.ones(5, dtype=dtype), torch.logspace(-2, 2, 5, dtype=dtype)):
        one, other = units[:, None] * x, units[:, None] * y
        a, b = one @ one.mT, other @ other.mT
        u, v = one.double(), other.double()
        value = u.square().sum() + v.square().sum() - 2 * torch.linalg.matrix_norm(u.mT @ v, "nuc")
        tolerance = 1e-11 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(bures(a, b).double(), value, rtol=tolerance, atol=0)
        batch = torch.stack([a, torch.eye(5, dtype=dtype)])
        mapped = torch.func.vmap(bures)(batch, torch.stack([b, 4 * torch.eye(5, dtype=dtype)]))
        torch.testing.assert_close(mapped.double()[0], value, rtol=tolerance, atol=0)
        assert float(mapped[1]) == pytest.approx(5)


@pytest.mark.parametrize(("m", "k"), [(5, 2), (2, 5), (2, 2), (3, 2)])
def test_gradient_of_the_bures_distance_at_singular_matrices(m, k):
    """Along variations of factors, which keep the rank."""
    x, y = (f.requires_grad_() for f in covariances(m, k, 5))
    call = lambda x, y: bures(x @ x.mT, y @ y.mT)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, y), check_forward_ad=True)
    a = (x @ x.mT).detach().requires_grad_()
    (grad,) = torch.autograd.grad(bures(a, y @ y.mT), a, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), a)
    assert grad.isfinite().all() and (k == 5 or m == 5 or second.isnan().all())


def test_gradient_in_a_definite_matrix_next_to_a_singular_one():
    """rank AB = rank B: the distance is differentiable in A in every direction."""
    (x, y), e = covariances(6, 2, 4), samples(4, 4, seed=9)
    a, b, e = x @ x.mT, y @ y.mT, e + e.mT
    a.requires_grad_()
    (grad,) = torch.autograd.grad(bures(a, b), a)
    step = 1e-6
    slope = (bures(a + step * e, b) - bures(a - step * e, b)) / (2 * step)
    torch.testing.assert_close((grad * e).sum(), slope.detach(), rtol=1e-7, atol=0)


def test_bures_distance_of_orthogonal_equal_and_zero_matrices():
    one, other = torch.diag(torch.tensor([1.0, 0.0])), torch.diag(torch.tensor([0.0, 4.0]))
    for a, b, value in ((one, other, 5.0), (one, one, 0.0), (0 * one, other, 4.0), (0 * one, 0 * one, 0.0)):
        a = a.clone().requires_grad_()
        out = spd.distance(a, b, metric="bures_wasserstein")
        out.backward()
        assert float(out.detach()) == pytest.approx(value**0.5) and a.grad.isfinite().all()


def test_indefinite_matrices_are_rejected_or_nan():
    bad = torch.tensor([[[0.0, 1.0], [1.0, 1.0]], [[1.0, 0.0], [0.0, -1e-3]], [[1.0, 1.0], [1.0, 1.0]]])
    with pytest.raises(DomainError, match="2 of 3 matrices a are not positive semidefinite"):
        bures(bad, torch.eye(2))
    out = spd.distance(bad, torch.eye(2), metric="bures_wasserstein", check=False)
    assert out.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-11)])
def test_bures_gradient_of_singular_covariances_equals_that_of_their_samples(dtype, tolerance):
    """Channels in different units: small products of both factors are not zero."""
    x, y = (samples(60, 160, seed=s) * torch.logspace(-1, 1, 160, dtype=torch.float64) for s in (1, 2))
    x, y = ((s - s.mean(0)).requires_grad_() for s in (x, y))
    of_samples = spd.frechet_distance(x, y)
    expected = torch.autograd.grad(of_samples, (x, y))
    one, other = (s.detach().to(dtype).requires_grad_() for s in (x, y))
    value = bures(one.mT @ one / 59, other.mT @ other / 59)
    torch.testing.assert_close(value.double(), of_samples, rtol=1e-6, atol=0)
    for found, right in zip(torch.autograd.grad(value, (one, other)), expected, strict=True):
        assert torch.linalg.norm(found.double() - right) < tolerance * torch.linalg.norm(right)


def test_second_derivatives_of_definite_matrices_under_transformations():
    """The path of singular matrices is traced, too, and does not change them."""
    a, b = (x @ x.mT for x in covariances(6, 6, 3))
    for mode in (torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))):
        assert mode(lambda x: bures(x @ x.mT, b))(a).isfinite().all()
