"""The Fréchet distance of samples, whose covariances may be singular."""

import numpy as np
import pytest
import scipy.linalg
import torch

from helpers.matrices import generator
from matbackprop import spd
from matbackprop.errors import NonFiniteError, OrderError, ShapeError


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


def test_full_rank_by_the_definition():
    x, y = samples(40, 3, seed=3), 2 * samples(50, 3, seed=4)
    a, b = (np.cov(s.numpy(), rowvar=False) for s in (x, y))
    trace = np.trace(a + b - 2 * scipy.linalg.sqrtm(a @ b).real)
    total = float((x.mean(0) - y.mean(0)).square().sum()) + trace
    assert float(spd.frechet_distance(x, y)) == pytest.approx(total, rel=1e-10)


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


def test_second_derivatives_and_bad_samples_are_refused():
    x, y = samples(4, 3, seed=7).requires_grad_(), samples(4, 3, seed=8)
    (grad,) = torch.autograd.grad(spd.frechet_distance(x, y), x, create_graph=True)
    with pytest.raises(OrderError, match="one derivative"):
        torch.autograd.grad(grad.sum(), x)
    with pytest.raises(ShapeError, match="at least two samples"):
        spd.frechet_distance(x[:1], y)
    with pytest.raises(ShapeError, match="same batch and dimension"):
        spd.frechet_distance(x, y[:, :2])
    with pytest.raises(NonFiniteError, match="y holds"):
        spd.frechet_distance(x, y / 0)
    several = torch.stack([y, y / 0])
    assert spd.frechet_distance(several, several, check=False).isnan().tolist() == [False, True]
