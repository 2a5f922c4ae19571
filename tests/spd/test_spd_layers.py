"""Layers on positive definite matrices: values, training, public names."""

import inspect
import pickle

import mpmath
import pytest
import torch

from helpers.matrices import generator, symmetric
from matbackprop import matrix_clamp, matrix_log, spd, vectorize_symmetric
from matbackprop.errors import ConfigurationError, DomainError, NonFiniteError, ShapeError

A = symmetric("separated", 3, seed=1)


def covariances(count, n=4, seed=0):
    x = torch.randn(count, n, 3 * n, generator=generator(seed))
    mix = torch.randn(n, n, generator=generator(seed + 1))
    a = mix @ (x @ x.mT / (3 * n)) @ mix.mT
    return 0.5 * (a + a.mT)


def test_public_names():
    functions = {
        "batch_norm",
        "bimap",
        "distance",
        "exp_map",
        "frechet_distance",
        "geodesic",
        "log_eig",
        "log_map",
        "mean",
        "re_eig",
    }
    assert set(spd.__all__) == functions | {"BatchNorm", "BiMap", "LogEig", "ReEig"}
    for name in spd.__all__:
        public = getattr(spd, name)
        assert ">>>" in public.__doc__ and ("Args:" in public.__doc__ or "see :func:" in public.__doc__)
        parameters = inspect.signature(public).parameters.values()
        assert sum(p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters) <= 3


def test_modules_equal_functions():
    torch.testing.assert_close(spd.ReEig(1.5)(A), matrix_clamp(A, 1.5))
    torch.testing.assert_close(spd.re_eig(A, 1.5), matrix_clamp(A, 1.5))
    torch.testing.assert_close(spd.LogEig()(A), vectorize_symmetric(matrix_log(A)))
    torch.testing.assert_close(spd.LogEig(vectorize=False)(A), matrix_log(A))
    layer = spd.BiMap(4, 2, generator=generator(0)).double()
    w = layer.weight
    torch.testing.assert_close(w.mT @ w, torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(layer(A), spd.bimap(A, w))
    assert torch.equal(layer(A), layer(A).mT)
    for module in (spd.ReEig(), spd.LogEig(), layer, spd.BatchNorm(4)):
        assert repr(pickle.loads(pickle.dumps(module))) == repr(module)


def test_batch_norm_normalizes_mean_and_variance():
    x = covariances(20).double()
    layer = spd.BatchNorm(4).double()
    y = layer(x)
    torch.testing.assert_close(spd.mean(y), torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-8)
    spread = spd.distance(torch.eye(4, dtype=torch.float64), y, squared=True).mean()
    torch.testing.assert_close(spread, torch.tensor(1.0, dtype=torch.float64), rtol=1e-3, atol=0)
    torch.nn.init.constant_(layer.scale, 2.0)
    wider = spd.distance(torch.eye(4, dtype=torch.float64), layer(x), squared=True).mean()
    torch.testing.assert_close(wider, 4 * spread)
    only = spd.BatchNorm(4, dispersion=False, affine=False).double()
    assert list(only.parameters()) == []
    moved = only(x)
    torch.testing.assert_close(spd.distance(moved[0], moved[1]), spd.distance(x[0], x[1]))
    bias = symmetric("repeated")
    back = spd.batch_norm(x, spd.mean(x), bias=bias)
    torch.testing.assert_close(spd.mean(back), bias)


def test_running_statistics_converge_and_are_used_in_evaluation():
    layer = spd.BatchNorm(4, momentum=0.2)
    x = covariances(30)
    for _ in range(60):
        layer(x)
    torch.testing.assert_close(layer.running_mean, spd.mean(x), rtol=1e-3, atol=1e-3)
    before = layer.running_mean.clone()
    normalized = layer.eval()(x)
    layer(x[:1])
    assert torch.equal(layer.running_mean, before)
    torch.testing.assert_close(normalized, layer.train()(x), rtol=1e-2, atol=1e-2)


def test_gradients_include_the_batch_statistics():
    """The sum of logs of a centered batch is zero, and so is its gradient unless the mean is treated as constant."""
    x = covariances(6, n=3).double().requires_grad_()
    layer = spd.BatchNorm(3, dispersion=False, affine=False).double()
    total = (matrix_log(layer(x)).sum(0) * torch.randn(3, 3, generator=generator(4), dtype=torch.float64)).sum()
    (grad,) = torch.autograd.grad(total, x)
    assert float(grad.abs().max()) < 1e-8 * float(torch.linalg.inv(x.detach()).abs().max())
    assert torch.autograd.gradcheck(
        lambda t: spd.BatchNorm(3).double()(0.5 * (t + t.mT)), x[:3].detach().requires_grad_()
    )


def test_a_network_on_covariances_trains():
    torch.manual_seed(0)
    n, count = 6, 40
    network = torch.nn.Sequential(
        spd.BiMap(n, 4, generator=generator(0)), spd.BatchNorm(4), spd.ReEig(), spd.LogEig(), torch.nn.Linear(10, 2)
    )
    x = torch.randn(count, n, 30)
    labels = torch.arange(count) % 2
    x[labels == 1, 0] = x[labels == 1, 1] + 0.5 * x[labels == 1, 0]  # classes differ in a correlation
    x = x @ x.mT / 30
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-2)
    for _ in range(40):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(x), labels)
        loss.backward()
        optimizer.step()
    assert float((network(x).argmax(-1) == labels).float().mean()) > 0.95
    w = network[0].weight
    torch.testing.assert_close(w.mT @ w, torch.eye(4))


def test_bad_layers():
    with pytest.raises(ConfigurationError, match="k must be in 1 … 3"):
        spd.BiMap(3, 4)
    for build in (lambda: spd.ReEig(0.0), lambda: spd.re_eig(A, -1.0)):
        with pytest.raises(DomainError, match="threshold must be positive"):
            build()
    with pytest.raises(ConfigurationError, match="momentum"):
        spd.BatchNorm(3, momentum=2.0)
    with pytest.raises(DomainError, match="eps"):
        spd.BatchNorm(3, eps=0.0)
    with pytest.raises(ShapeError, match=r"\(\*batch, 3, 3\)"):
        spd.BatchNorm(3)(A)
    with pytest.raises(ShapeError, match="must have 4 rows"):
        spd.bimap(A, torch.eye(3))


def test_the_variance_may_be_a_number():
    x, mean = symmetric((0.5, 1.2, 2.1), 2, seed=1), symmetric((0.7, 1.0, 1.6), seed=2)
    by_number = spd.batch_norm(x, mean, variance=0.5, scale=1.5)
    assert torch.equal(by_number, spd.batch_norm(x, mean, variance=torch.tensor(0.5), scale=1.5))
    with pytest.raises(DomainError, match="eps must be positive"):
        spd.batch_norm(x, mean, eps=0.0)
    with pytest.raises(DomainError, match="variance must not be negative"):
        spd.batch_norm(x, mean, variance=-1.0)
    with pytest.raises(NonFiniteError, match="scale"):
        spd.batch_norm(x, mean, variance=1.0, scale=torch.nan)


@pytest.mark.parametrize("n", [2, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_eig_accepts_rectified_matrices_in_low_precision(n, dtype):
    """The threshold is below the rounding of the largest eigenvalue; the rounded matrix is still positive definite."""
    x = 30 * torch.randn(50, n, n, generator=generator(1))
    x = (x @ x.mT - 200 * torch.eye(n)).to(dtype)
    x = x.triu() + x.triu(1).mT
    rectified = spd.re_eig(x)
    assert rectified.dtype == dtype
    assert bool(torch.linalg.eigvalsh(rectified.double()).min() > 0)
    assert bool(spd.log_eig(rectified).isfinite().all())
    expected = matrix_clamp(x.double(), 1e-4)
    size = expected.diagonal(dim1=-2, dim2=-1).sqrt()
    error = (rectified.double() - expected).abs() / (size.unsqueeze(-1) * size.unsqueeze(-2))
    tolerance = 4 * torch.finfo(torch.float32).eps
    assert float(error.max()) <= (n**0.5 + 1) * torch.finfo(dtype).eps + tolerance
    resolved = torch.diag(torch.tensor([0.0, 3.0])).to(dtype)
    assert torch.equal(spd.re_eig(resolved, 0.5), torch.diag(torch.tensor([0.5, 3.0])).to(dtype))


@pytest.mark.parametrize("n", [4, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_log_eig_rejects_rank_deficient_matrices_by_size(n, dtype):
    """Not by the sign of a rounding error."""
    f = torch.randn(20, n, n - 1, generator=generator(2), dtype=dtype)
    assert bool(spd.log_eig(f @ f.mT, check=False).isnan().all())
    with pytest.raises(DomainError, match="positive"):
        spd.log_eig(f @ f.mT)


def test_batch_norm_of_channels_in_different_units_is_accurate():
    x, mean = symmetric((0.5, 1.2, 2.1), seed=1), symmetric((0.7, 1.0, 1.6), seed=2)
    d = torch.tensor([1e-6, 1.0, 1e6], dtype=torch.float64)
    units = d.unsqueeze(-1) * d
    y = spd.batch_norm(x * units, mean * units)
    expected = mpmath.matrix((x * units).tolist())
    with mpmath.workdps(60):
        values, vectors = mpmath.eigsy(mpmath.matrix((mean * units).tolist()))
        root = vectors * mpmath.diag([1 / mpmath.sqrt(v) for v in values]) * vectors.T
        expected = (root * expected * root).tolist()
    torch.testing.assert_close(y, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_log_eig_checks_symmetry_in_the_dtype_of_the_input():
    x = covariances(3)
    x[0, 0, 1] *= 1 + 1e-6
    torch.testing.assert_close(spd.log_eig(x), spd.log_eig(0.5 * (x + x.mT)))
