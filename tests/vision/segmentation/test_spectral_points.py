"""The coordinates that are clustered, against their dense definitions, and the choice of K."""

import pytest
import torch

from matbackprop import normalized_cut_soft
from matbackprop.errors import ConfigurationError, DomainError, ShapeError, SymmetryError
from matbackprop.vision.segmentation import NCutSpace, SoftSpace


def features(m=40, d=6, seed=0, batch=()):
    return torch.rand(*batch, m, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense_embedding(w, k):
    degree = w.sum(-1)
    values, vectors = torch.linalg.eigh(w / (degree[:, None] * degree[None]).sqrt())
    return values.flip(0)[:k], vectors.flip(1)[:, :k] / degree.sqrt()[:, None], degree


@pytest.mark.parametrize("k, lam", [(4, None), (3, features(6, 6, 1) @ features(6, 6, 1).mT)])
def test_ncut_points_equal_the_dense_problem(k, lam):
    f = features()
    values, points, degree = dense_embedding(f @ f.mT if lam is None else f @ lam @ f.mT, k)
    actual = NCutSpace(lam).embed(f, k)
    torch.testing.assert_close(actual.eigenvalues, values)
    torch.testing.assert_close(actual.weights, degree)
    torch.testing.assert_close(actual.points.abs(), points.abs(), atol=1e-8, rtol=1e-6)


def test_invalid_parameter_matrices_are_rejected():
    f = features(d=3)
    with pytest.raises(SymmetryError):
        NCutSpace(torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]).double()).embed(f, 2)
    with pytest.raises(DomainError):
        NCutSpace(torch.diag(torch.tensor([1.0, 2.0, -0.5])).double()).embed(f, 2)
    with pytest.raises(ShapeError, match="lam"):
        NCutSpace(torch.eye(4).double()).embed(f, 2)


def test_a_parameter_matrix_gets_a_gradient():
    f, root = features(12, 4), features(4, 4, 1)
    lam = (root @ root.mT + torch.eye(4)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: NCutSpace((x + x.mT) / 2).embed(f, 3)[1:], lam)


def test_perfect_cut_gives_piecewise_constant_points():
    labels = torch.arange(30) % 3
    f = torch.nn.functional.one_hot(labels).double() * (1 + features(30, 1))
    points = NCutSpace().embed(f, 3).points
    for j in range(3):
        assert points[labels == j].std(0).max() < 1e-10


def test_rows_of_zeros_get_no_weight():
    f = features()
    f[5] = 0
    actual = NCutSpace().embed(f, 3)
    assert actual.weights[5] == 0 and (actual.points[5] == 0).all() and torch.isfinite(actual.points).all()


def test_at_most_as_many_eigenvectors_as_channels():
    assert NCutSpace().embed(features(d=3), 20).points.shape[-1] == 3
    with pytest.raises(ShapeError):
        NCutSpace().embed(features(), 0)


def test_soft_points_span_the_soft_projector():
    f, ridge = features(), 0.4
    scaled = f / (f * f).sum().sqrt()
    inner = scaled.mT @ scaled + ridge / f.shape[-1] * torch.eye(f.shape[-1], dtype=f.dtype)
    projector = scaled @ torch.linalg.solve(inner, scaled.mT)
    actual = SoftSpace(ridge).embed(f)
    torch.testing.assert_close(actual.points @ actual.points.mT, projector)
    # ... which is the one of the objective.
    labels = torch.arange(len(f)) % 4
    e = torch.nn.functional.one_hot(labels).double()
    target = e @ torch.diag(1 / e.sum(0)) @ e.mT
    dense = 0.5 * (projector - target).square().sum()
    torch.testing.assert_close(normalized_cut_soft(f, labels, ridge=ridge), dense)


def test_soft_points_of_zeros_are_zero():
    actual = SoftSpace().embed(torch.zeros(2, 5, 3))
    assert actual.points.dtype == actual.weights.dtype == actual.eigenvalues.dtype == torch.float32
    assert (actual.points == 0).all() and torch.isfinite(actual.eigenvalues).all()


def test_soft_rejects_invalid_options():
    with pytest.raises(ConfigurationError, match="ridge"):
        SoftSpace(0.0).embed(features())
