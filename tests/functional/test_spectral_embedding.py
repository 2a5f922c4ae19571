"""The thin spectral embedding solves the m×m eigenproblem."""

import pytest
import torch

from helpers.cuts import features
from matbackprop import projector, spectral_embedding
from matbackprop.errors import DomainError, DtypeError, NonFiniteError, ShapeError, TieError


def test_the_largest_coefficient_of_each_eigenvector_is_positive():
    f = features(40, 12, 6)
    _, vectors, degrees = spectral_embedding(f, 5)
    coefficients = (f / degrees.sqrt().unsqueeze(-1)).mT @ vectors
    largest = coefficients.gather(-2, coefficients.abs().argmax(-2, keepdim=True))
    assert bool((largest > 0).all())


def test_weights_equal_repeated_rows():
    f, weight = features(12, 3), torch.tensor([1.0, 2, 3, 0, 1, 1, 2, 1, 1, 1, 1, 4], dtype=torch.float64)
    values, vectors, degrees = spectral_embedding(f, 3, weight=weight)
    times = weight.long()
    repeated = spectral_embedding(f.repeat_interleave(times, 0), 3)
    torch.testing.assert_close(values, repeated[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(vectors.repeat_interleave(times, 0), repeated[1], rtol=0, atol=1e-10)
    torch.testing.assert_close(degrees.repeat_interleave(times), repeated[2])


def test_losses_of_vectors_are_rejected_at_ties_and_losses_of_the_span_are_not():
    """Two separate groups: eigenvalue 1 twice."""
    f = torch.tensor([[1.0, 0], [2, 0], [0, 1], [0, 3]], dtype=torch.float64).requires_grad_()
    target = torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values, u, _ = spectral_embedding(f, 2)
    torch.testing.assert_close(values, torch.ones(2, dtype=torch.float64))
    for loss in ((u @ u.mT * target).sum(), (u * target[:, :2]).sum()):
        with pytest.raises(TieError):
            loss.backward(retain_graph=True)
    degree = f @ f.sum(0)
    onto = projector(f * degree.rsqrt().unsqueeze(-1))
    torch.testing.assert_close(onto, u @ u.mT)
    assert torch.autograd.gradcheck(lambda x: projector(x * (x @ x.sum(0)).rsqrt().unsqueeze(-1)), f)


def test_rank_deficiency_and_zero_rows_give_zeros():
    f = features(10, 2)
    f = torch.cat([f, f[:, :1]], 1)
    f[4] = 0
    f.requires_grad_()
    values, vectors, degrees = spectral_embedding(f, 3)
    assert values[2] == 0
    assert (vectors[:, 2] == 0).all()
    assert (vectors[4] == 0).all()
    assert degrees[4] == 0
    (values.sum() + vectors[:, :2].square().sum() + vectors[0, 1]).backward()
    assert torch.isfinite(f.grad).all()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: spectral_embedding(torch.rand(5, 3), 4), DomainError),
        (lambda: spectral_embedding(torch.rand(5, 3), 0), DomainError),
        (lambda: spectral_embedding(torch.rand(5, 3), 1.5), DomainError),
        (lambda: spectral_embedding(torch.rand(5), 1), ShapeError),
        (lambda: spectral_embedding(torch.ones(5, 3).long(), 1), DtypeError),
        (lambda: spectral_embedding(torch.full((5, 3), torch.nan), 1), NonFiniteError),
        (lambda: spectral_embedding(torch.rand(5, 3), 1, weight=torch.ones(4)), ShapeError),
        (lambda: spectral_embedding(torch.tensor([[1.0], [1.0], [-0.5]]), 1), DomainError),
    ],
)
def test_bad_input(call, error):
    with pytest.raises(error):
        call()


@pytest.mark.parametrize("weighted", [False, True])
def test_partial_decomposition_equals_the_full_one(weighted):
    """Without a gradient LAPACK computes k pairs; with one it decomposes the whole matrix."""
    f = torch.rand(300, 140, generator=torch.Generator().manual_seed(0), dtype=torch.float64).square()
    weight = torch.rand(300, generator=torch.Generator().manual_seed(1), dtype=torch.float64) if weighted else None
    some = spectral_embedding(f, 6, weight=weight)
    whole = spectral_embedding(f.clone().requires_grad_(), 6, weight=weight)
    for one, other in zip(some, whole, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_with_an_outlier_equal_those_of_the_singular_vectors(weighted):
    """Singular vectors determine the second pair far better than the d×d problem."""
    f = features(6, 3).clone()
    f[0] *= 1e7
    w = torch.tensor([1.0, 2, 1, 0.5, 1, 3], dtype=torch.float64) if weighted else None
    g = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def of(pairs):
        x = f.clone().requires_grad_()
        values, vectors = pairs(x)
        loss = ((vectors[:, 1:2] @ vectors[:, 1:2].mT) * g).sum() + values[1]
        return torch.cat([loss.detach().reshape(1), (torch.autograd.grad(loss, x)[0] * f).flatten()])

    def by_svd(x):
        counts = torch.ones(6, dtype=torch.float64) if w is None else w
        degree = x @ (counts @ x)
        u, s, _ = torch.linalg.svd((counts / degree).sqrt().unsqueeze(-1) * x, full_matrices=False)
        return s.square(), u / counts.sqrt().unsqueeze(-1)

    mine = of(lambda x: spectral_embedding(x, 2, weight=w)[:2])
    torch.testing.assert_close(mine, of(by_svd), rtol=0, atol=1e-9)
    with torch.no_grad():
        values, _, _ = spectral_embedding(f, 3, weight=w)
        torch.testing.assert_close(values, by_svd(f)[0], rtol=1e-9, atol=0)


def test_second_derivatives_for_fewer_rows_than_channels():
    """UUᵀ = I for m = k, and no term of its derivatives is 1/β₂ = 1e10."""
    f = features(2, 3).abs() * torch.tensor([1e-6, 1.0, 1e-5], dtype=torch.float64)
    velocity = torch.rand(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def slope(f):
        _, u, _ = spectral_embedding(f, 2)
        return (u @ u.mT).square().cumsum(0).sum()

    _, second = torch.func.jvp(torch.func.grad(slope), (f,), (velocity,))
    assert float(second.abs().max()) < 1e-9


@pytest.mark.parametrize("shape", [(5, 3), (3, 5)])
def test_derivatives_do_not_depend_on_the_scale(shape):
    f, velocity = features(*shape).abs(), features(*shape, seed=1)

    def derivatives(unit):
        def loss(f):
            values, u, _ = spectral_embedding(f, 2)
            return (values * values).sum() + (u[0] * u[1]).sum()

        return torch.func.jvp(torch.func.grad(loss), (unit * f,), (unit * velocity,))

    expected = derivatives(1.0)
    for unit in (2.0**500, 2.0**-500):
        for found, want in zip(derivatives(unit), expected, strict=True):
            torch.testing.assert_close(found * unit, want, rtol=1e-12, atol=0)
