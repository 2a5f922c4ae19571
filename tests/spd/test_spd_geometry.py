"""Distances, geodesics, maps and means of positive definite matrices: closed forms, laws, bad input.

Their derivatives, transformations and precisions are tested by the rows of the table of operators.
"""

import mpmath
import numpy as np
import pytest
import scipy.linalg
import torch

from helpers.matrices import generator, made_complex, symmetric
from matbackprop import spd
from matbackprop.errors import (
    ConfigurationError,
    DomainError,
    DtypeError,
    NonFiniteError,
    NumericalError,
    ShapeError,
    SolverError,
    SymmetryError,
)

METRICS = ["affine_invariant", "log_euclidean", "bures_wasserstein"]
A = symmetric("separated", 2, seed=1)
B = symmetric("repeated", 2, seed=2)
EYE = torch.eye(4, dtype=torch.float64)
metrics = pytest.mark.parametrize("metric", METRICS)


def sym(a):
    return 0.5 * (a + a.mH)


def test_distances_by_their_definitions():
    for i in range(2):
        a, b = A[i].numpy(), B[i].numpy()
        values = scipy.linalg.eigh(b, a, eigvals_only=True)
        assert float(spd.distance(A[i], B[i])) == pytest.approx(np.linalg.norm(np.log(values)), rel=1e-12)
        log = np.linalg.norm(scipy.linalg.logm(a) - scipy.linalg.logm(b))
        assert float(spd.distance(A[i], B[i], metric="log_euclidean")) == pytest.approx(log, rel=1e-12)
        root = scipy.linalg.sqrtm(a)
        bures = np.sqrt(np.trace(a + b - 2 * scipy.linalg.sqrtm(root @ b @ root)))
        assert float(spd.distance(A[i], B[i], metric="bures_wasserstein")) == pytest.approx(bures, rel=1e-10)


def test_the_bures_distance_of_neighbours_keeps_its_digits():
    """The traces of the formula cancel: with 50 digits they tell what is right."""
    a, e = symmetric("separated", seed=1), symmetric((-1.0, 0.5, 1.0, 2.0), seed=5)
    for step in (1e-4, 1e-8, 1e-11):
        b = a + step * e
        with mpmath.workdps(60):
            x, y = (mpmath.matrix(m.tolist()) for m in (a, b))
            root = mpmath.sqrtm(x)
            inside = mpmath.sqrtm(root * y * root)
            expected = mpmath.sqrt(sum((x + y - 2 * inside)[i, i].real for i in range(4)))
        actual = float(spd.distance(a, b, metric="bures_wasserstein"))
        assert actual == pytest.approx(float(expected), rel=max(1e-9, 1e-15 / step))


@metrics
def test_a_distance_is_one(metric):
    c = symmetric((0.2, 0.9, 1.0, 5.0), 2, seed=4)
    d = {
        pair: spd.distance(*pair_of, metric=metric)
        for pair, pair_of in {"ab": (A, B), "ba": (B, A), "bc": (B, c), "ac": (A, c)}.items()
    }
    torch.testing.assert_close(d["ab"], d["ba"])
    assert bool((d["ac"] <= d["ab"] + d["bc"]).all())
    same = spd.distance(A, A, metric=metric)
    assert float(same.max()) < 1e-7
    torch.testing.assert_close(spd.distance(A, B, metric=metric, squared=True), d["ab"] ** 2)


def test_what_each_distance_does_not_see():
    w = torch.randn(4, 4, generator=generator(3), dtype=torch.float64) + 2 * EYE
    torch.testing.assert_close(spd.distance(w @ A @ w.mT, w @ B @ w.mT), spd.distance(A, B))
    inverse = [torch.linalg.inv(m) for m in (A, B)]
    for metric in METRICS[:2]:
        torch.testing.assert_close(spd.distance(*inverse, metric=metric), spd.distance(A, B, metric=metric))
    q = torch.linalg.qr(w)[0]
    for metric in METRICS[1:]:
        turned = spd.distance(q @ A @ q.mT, q @ B @ q.mT, metric=metric)
        torch.testing.assert_close(turned, spd.distance(A, B, metric=metric))


@metrics
def test_geodesics_run_at_constant_speed_and_maps_follow_them(metric):
    whole = spd.distance(A, B, metric=metric)
    for t in (0.0, 0.3, 1.0):
        point = spd.geodesic(A, B, t, metric=metric)
        torch.testing.assert_close(spd.distance(A, point, metric=metric), t * whole, rtol=1e-9, atol=1e-7)
        torch.testing.assert_close(spd.distance(point, B, metric=metric), (1 - t) * whole, rtol=1e-9, atol=1e-7)
    velocity = spd.log_map(A, B, metric=metric)
    torch.testing.assert_close(spd.exp_map(A, velocity, metric=metric), B)
    torch.testing.assert_close(spd.exp_map(A, 0.3 * velocity, metric=metric), spd.geodesic(A, B, 0.3, metric=metric))
    torch.testing.assert_close(spd.log_map(A, A, metric=metric), torch.zeros_like(A), rtol=0, atol=1e-12)
    several = spd.geodesic(A, B, torch.tensor([0.0, 1.0]), metric=metric)
    torch.testing.assert_close(several, torch.stack([A[0], B[1]]))


@metrics
def test_at_one_point_the_gradient_of_the_distance_is_zero(metric):
    a = symmetric("repeated").requires_grad_()
    for squared in (False, True):
        grads = torch.autograd.grad(
            spd.distance(a, EYE * 1.0 if squared else a.detach(), metric=metric, squared=squared), a
        )
        assert grads[0].isfinite().all()
    eye = EYE.clone().requires_grad_()
    (grad,) = torch.autograd.grad(spd.distance(eye, EYE, metric=metric), eye)
    assert torch.equal(grad, torch.zeros_like(EYE))


def points(*batch, m=5, n=3, seed=0):
    x = torch.randn(*batch, m, n, 2 * n, generator=generator(seed), dtype=torch.float64)
    return x @ x.mT / n


@metrics
def test_the_mean_minimises_and_is_a_mean(metric):
    a = points(2)
    weight = torch.rand(2, 5, generator=generator(1), dtype=torch.float64)
    middle = spd.mean(a, weight, metric=metric)

    def total(m):
        share = weight / weight.sum(-1, keepdim=True)
        return (share * spd.distance(m.unsqueeze(-3), a, metric=metric, squared=True)).sum(-1)

    m = middle.clone().requires_grad_()
    (slope,) = torch.autograd.grad(total(m).sum(), m)
    assert float(slope.abs().max()) < 1e-9
    nudge = 1e-2 * sym(torch.randn(2, 3, 3, generator=generator(2), dtype=torch.float64))
    assert bool((total(middle + nudge) > total(middle)).all() and (total(middle - nudge) > total(middle)).all())
    torch.testing.assert_close(spd.mean(a[:, :1].expand(2, 4, 3, 3), metric=metric), a[:, 0])
    torch.testing.assert_close(spd.mean(a[:, :2], metric=metric), spd.geodesic(a[:, 0], a[:, 1], 0.5, metric=metric))
    repeated = spd.mean(torch.cat([a, a[:, :1]], 1), metric=metric)
    twice = torch.tensor([2.0, 1, 1, 1, 1], dtype=torch.float64).expand(2, 5)
    torch.testing.assert_close(spd.mean(a, twice, metric=metric), repeated)


def test_the_affine_invariant_mean_has_the_mean_of_log_determinants():
    a = points(m=7)
    torch.testing.assert_close(torch.logdet(spd.mean(a)), torch.logdet(a).mean())
    w = torch.randn(3, 3, generator=generator(8), dtype=torch.float64)
    torch.testing.assert_close(spd.mean(w @ a @ w.mT), w @ spd.mean(a) @ w.mT)


@metrics
def test_complex_means(metric):
    a = made_complex(points(m=4))
    middle = spd.mean(a, metric=metric)
    assert middle.dtype == torch.complex128
    m = middle.clone().requires_grad_()
    (slope,) = torch.autograd.grad(spd.distance(m.unsqueeze(-3), a, metric=metric, squared=True).sum(), m)
    assert float(slope.abs().max()) < 1e-8


def test_bad_input():
    with pytest.raises(ConfigurationError, match="metric must be one of 'affine_invariant'"):
        spd.distance(A, B, metric="euclidean")
    with pytest.raises(ShapeError, match="one order"):
        spd.distance(A, EYE[:2, :2])
    with pytest.raises(ShapeError, match="do not broadcast"):
        spd.distance(A, torch.stack([EYE] * 3))
    with pytest.raises(ShapeError, match="square"):
        spd.geodesic(A, A[..., :2], 0.5)
    with pytest.raises(DtypeError):
        spd.distance(A.long(), B)
    with pytest.raises(NonFiniteError, match="b holds"):
        spd.distance(A, B / 0)
    with pytest.raises(SymmetryError, match="a must be symmetric"):
        spd.mean(A.triu())
    for metric in METRICS:
        with pytest.raises(NumericalError, match="positive"):
            spd.distance(-A, B, metric=metric)
        with pytest.raises(NumericalError, match="positive"):
            spd.mean(torch.stack([EYE, -EYE]), metric=metric)
    for scale in (1e-300, 1e150):  # products of entries would underflow to a wrong answer, or overflow
        with pytest.raises(DomainError, match="leave the range"):
            spd.geodesic(scale * A, scale * B, 0.3, metric="bures_wasserstein")
    with pytest.raises(NumericalError, match="leaves the positive definite"):
        spd.exp_map(EYE, -3 * EYE, metric="bures_wasserstein")
    with pytest.raises(ShapeError, match="m ≥ 1"):
        spd.mean(EYE)
    with pytest.raises(ShapeError, match="one per matrix"):
        spd.mean(A, torch.ones(3))
    with pytest.raises(DomainError, match="all be zero"):
        spd.mean(A, torch.zeros(2))
    with pytest.raises(DomainError, match="negative"):
        spd.mean(A, torch.tensor([2.0, -1.0]))
    with pytest.raises(SolverError, match="did not converge in 1 iterations"):
        spd.mean(points(), max_iterations=1)


@metrics
def test_no_geometry_sees_the_unit_in_its_digits(metric):
    """Of matrices a million million times larger: logarithms of that size would round away what tells them apart."""
    unit = 2.0**40
    close = A + 1e-6 * EYE
    factor = unit**0.5 if metric == "bures_wasserstein" else 1.0
    small, large = (spd.distance(s * A, s * close, metric=metric) for s in (1.0, unit))
    torch.testing.assert_close(large, factor * small, rtol=1e-9, atol=0)
    point = spd.geodesic(A, B, 0.3, metric=metric)
    torch.testing.assert_close(spd.geodesic(unit * A, unit * B, 0.3, metric=metric), unit * point, rtol=1e-13, atol=0)


def test_the_mean_refuses_a_matrix_that_is_singular_though_a_factor_of_it_exists():
    """In single precision the last pivot is rounding, and positive."""
    singular = torch.full((2, 2), 1e15, dtype=torch.float32)
    with pytest.raises((DomainError, NumericalError), match=r"[Aa]dd a multiple of the identity"):
        spd.mean(torch.stack([singular, 1e15 * torch.eye(2)]))


def test_velocities_out_of_the_range_and_times_that_are_not_finite_are_refused():
    p = torch.diag(torch.tensor([1e-8, 1.0], dtype=torch.float64))
    with pytest.raises(NumericalError, match="zero in floating point"):
        spd.exp_map(p, -torch.eye(2, dtype=torch.float64), metric="log_euclidean")
    for metric in METRICS:
        with pytest.raises(NonFiniteError, match="t "):
            spd.geodesic(A, B, torch.tensor(torch.nan), metric=metric)


def test_the_mean_says_so_where_an_iterate_is_not_finite():
    """A gradient of NaN is not a small one."""
    with pytest.raises(SolverError, match="nearly singular"):
        spd._mean._iterate(lambda m: (m, torch.tensor(torch.nan)), EYE, 1e-11, 5)


def test_a_geodesic_of_transports_arrives_at_its_end_from_a_nearly_singular_matrix():
    a, b = symmetric((1e-14, 1e-7, 1.0), seed=1), symmetric((1.0, 1.5, 2.0), seed=2)
    torch.testing.assert_close(spd.geodesic(a, b, 1.0, metric="bures_wasserstein"), b, rtol=0, atol=1e-15)


def test_a_bimap_of_half_precision_is_finite_where_its_values_are():
    x = 1e4 * torch.eye(2, dtype=torch.float16)
    torch.testing.assert_close(spd.bimap(x, 2 * torch.eye(2, dtype=torch.float16)), 4 * x)
