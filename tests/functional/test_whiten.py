"""Whitening: properties of the result, statistics, principal axes, and the module with running statistics."""

import pytest
import torch

from helpers.matrices import generator, orthogonal, with_singular_values
from matbackprop import nn, whiten
from matbackprop.errors import ConfigurationError, DomainError, NonFiniteError, ShapeError, TieError

EYE = torch.eye(3, dtype=torch.float64)


def samples(*batch, m=20, d=3, seed=0):
    x = torch.randn(*batch, m, d, generator=generator(seed), dtype=torch.float64)
    return x @ torch.randn(d, d, generator=generator(seed + 1), dtype=torch.float64) + 5


def covariance(y, ddof=0):
    y = y - y.mean(-2, keepdim=True)
    return y.mT @ y / (y.shape[-2] - ddof)


def test_zca_is_the_nearest_whitened_sample():
    x = samples()
    x = x - x.mean(0)
    y = whiten(x, eps=1e-12)
    for seed in range(10):
        assert (x - y).norm() <= (x - y @ orthogonal(3, seed=seed)).norm()


def test_principal_components_are_sorted_and_signed():
    x = samples(3)
    y = whiten(x, method="pca", eps=1e-12)
    centered = x - x.mean(-2, keepdim=True)
    axes = torch.linalg.lstsq(centered, y).solution
    variances = 1 / axes.square().sum(-2)
    assert bool((variances.diff() <= 0).all())
    assert bool((axes.gather(-2, axes.abs().argmax(-2, keepdim=True)) > 0).all())
    torch.testing.assert_close(whiten(-x, method="pca", eps=1e-12), -y)


def test_masked_samples_do_not_count_and_weights_are_repetitions():
    x = samples()
    mask = torch.arange(20) < 12
    torch.testing.assert_close(whiten(x, weight=mask)[:12], whiten(x[:12]))
    twice = torch.ones(20).index_fill(0, torch.tensor([3, 4]), 2)
    torch.testing.assert_close(whiten(x, weight=twice), whiten(torch.cat([x, x[3:5]]))[:20])


def test_ties_of_variances():
    """ZCA and its derivatives are exact at equal variances; principal axes are not determined."""
    x = with_singular_values(6, 3, (1.0, 1.0, 1.0)) - 0.0
    x = (x - x.mean(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: whiten(t, eps=0.1), x)
    assert torch.autograd.gradgradcheck(lambda t: whiten(t, eps=0.1), x)
    y = torch.cat([EYE, -EYE]).requires_grad_()
    whiten(y, method="pca").detach()  # a value is fine
    with pytest.raises(TieError):
        whiten(y, method="pca")[0, 0].backward()
    constant = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    whiten(constant).sum().backward()
    assert torch.equal(constant.grad, torch.zeros(4, 3, dtype=torch.float64))


def test_bad_arguments():
    x = samples()
    with pytest.raises(ConfigurationError, match="method must be one of 'zca', 'pca'"):
        whiten(x, method="cholesky")
    for eps in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(DomainError, match="eps must be positive"):
            whiten(x, eps=eps)
    with pytest.raises(ShapeError, match="both mean and covariance"):
        whiten(x, mean=x[0])
    with pytest.raises(ShapeError, match="Remove it"):
        whiten(x, mean=x[0], covariance=EYE, weight=torch.ones(20))
    with pytest.raises(ShapeError, match=r"must broadcast to \(3,\) and \(3, 3\)"):
        whiten(x, mean=x[0, :2], covariance=EYE)
    with pytest.raises(NonFiniteError, match="covariance"):
        whiten(x, mean=x[0], covariance=EYE / 0)
    with pytest.raises(DomainError, match="All weights are zero in 1 of 1 batches"):
        whiten(x, weight=torch.zeros(20))
    for bad in ({"groups": 5}, {"groups": 0}, {"momentum": 2.0}, {"ties": "never"}, {"method": "qr"}):
        with pytest.raises(ConfigurationError):
            nn.Whitening(12, **bad)
    with pytest.raises(ShapeError, match=r"\(N, 12, \*\)"):
        nn.Whitening(12)(torch.ones(2, 3))
    with pytest.raises(ShapeError, match="more than one value per channel"):
        nn.Whitening(12)(torch.ones(1, 12))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_one_channel_per_group_is_batch_normalization(momentum):
    """In training, in evaluation, and in the running statistics."""
    torch.manual_seed(0)
    ours, theirs = nn.Whitening(6, groups=6, momentum=momentum), torch.nn.BatchNorm2d(6, momentum=momentum)
    for layer in (ours, theirs):
        torch.nn.init.constant_(layer.weight, 2.0)
        torch.nn.init.constant_(layer.bias, 0.5)
    for _ in range(3):
        x = 3 * torch.randn(4, 6, 5, 5) + 1
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.running_mean.flatten(), theirs.running_mean)
    torch.testing.assert_close(ours.running_covariance.flatten(), theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-4, atol=1e-5)


def test_groups_are_whitened_separately_and_running_statistics_converge():
    torch.manual_seed(0)
    mix = torch.randn(4, 4)
    layer = nn.Whitening(4, groups=2, affine=False, momentum=None)
    for _ in range(200):
        y = layer(torch.randn(64, 4) @ mix + 3)
    for part in (y[:, :2], y[:, 2:]):
        torch.testing.assert_close(covariance(part), torch.eye(2), rtol=0, atol=1e-4)
    expected = mix.mT @ mix
    blocks = torch.stack([expected[:2, :2], expected[2:, 2:]])
    torch.testing.assert_close(layer.running_covariance, blocks, rtol=0.05, atol=0.05)
    before = layer.running_mean.clone()
    y = layer.eval()(torch.randn(2000, 4) @ mix + 3)
    assert torch.equal(layer.running_mean, before)
    torch.testing.assert_close(covariance(y[:, :2]), torch.eye(2), rtol=0.1, atol=0.1)
    alone = layer(torch.zeros(1, 4))  # one sample is enough in evaluation
    assert alone.isfinite().all()
    without = nn.Whitening(4, track_running_stats=False).eval()
    assert list(without.state_dict()) == ["weight", "bias"]
    torch.testing.assert_close(covariance(without(torch.randn(50, 4))), torch.eye(4), rtol=0, atol=1e-3)


def test_a_network_with_whitening_trains():
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), nn.Whitening(8, groups=2), torch.nn.Flatten(), torch.nn.LazyLinear(1)
    )
    x, y = torch.randn(16, 3, 6, 6), torch.randn(16, 1)
    network(x)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (network(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_a_given_covariance_may_be_negative_by_the_rounding_of_its_own_dtype():
    q = orthogonal(4, seed=3)
    given = ((q * torch.logspace(0, -12, 4, dtype=torch.float64)) @ q.mT).bfloat16()
    given = given.triu() + given.triu(1).mT
    assert torch.linalg.eigvalsh(given.double())[0] < 0
    x, mean = torch.randn(3, 4, generator=generator(1)).bfloat16(), torch.zeros(4)
    assert bool(whiten(x, mean=mean, covariance=given, eps=1e-8).isfinite().all())
    with pytest.raises(DomainError, match="positive semidefinite"):
        whiten(x.double(), mean=mean, covariance=given.double(), eps=1e-8)


@pytest.mark.parametrize("method", ["zca", "pca"])
def test_a_covariance_with_negative_variances_is_rejected(method):
    x = samples(m=4)
    with pytest.raises(DomainError, match="covariance needs positive eigenvalues"):
        whiten(x, mean=x.mean(-2), covariance=EYE - 1.5 * EYE[:1].mT @ EYE[:1], method=method)


def test_eps_below_the_rounding_of_a_given_covariance_is_rejected():
    x = samples(m=4)
    with pytest.raises(DomainError, match="Raise eps"):
        whiten(x, mean=x.mean(-2), covariance=1e15 * torch.ones(3, 3, dtype=torch.float64), method="pca", eps=1e-8)


def test_principal_axes_of_rows_without_variance_in_a_direction():
    """Three rows have weight, so one variance is zero; the other rows are scaled by ε alone along it."""
    x = 1e15 * torch.randn(5, 3, generator=generator(2), dtype=torch.float64)
    w = torch.tensor([1.0, 2.0, 1.5, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    rows, eps = x.clone().requires_grad_(), 1e8
    last = whiten(rows, weight=w, eps=eps, method="pca")[3, 2].square()
    center = (w.detach()[:3, None] * x[:3]).sum(0) / 4.5
    normal = torch.linalg.cross(x[1] - x[0], x[2] - x[0])
    height = (x[3] - center) @ normal / normal.norm()
    torch.testing.assert_close(last.detach(), height.square() / eps, rtol=1e-12, atol=0)
    gradient, _ = torch.autograd.grad(last, (rows, w))
    torch.testing.assert_close(gradient[3], 2 * height / eps * normal / normal.norm(), rtol=1e-11, atol=0)


def test_samples_whose_rounding_is_larger_than_eps_are_rejected():
    """Two equal samples have no variance: their centered values are rounding errors and must not be divided by √ε."""
    x = 1e30 * torch.tensor([[0.1, 0.3], [0.1, 0.3]], dtype=torch.float64)
    with pytest.raises(DomainError, match="below the rounding error of samples"):
        whiten(x, weight=torch.tensor([0.3, 0.9], dtype=torch.float64), eps=1e8)
    for method in ("zca", "pca"):  # a plane in four dimensions, far larger than ε
        y = 1e13 * torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        y[1] *= 1e-13
        assert whiten(y, eps=0.01, method=method, check=False).isnan().all((-2, -1)).tolist() == [True, False]
    large = torch.diag(torch.tensor([1e20, 0.0], dtype=torch.float64))
    statistics = {"mean": torch.zeros(2).double(), "covariance": large}
    assert whiten(x, eps=0.01, method="pca", check=False, **statistics).isnan().all()
