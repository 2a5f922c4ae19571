"""Distances, geodesics, maps and means of positive definite matrices: closed forms, laws, bad input.

Derivatives, transformations and precisions are tested by the rows of the table of operators.
"""

import mpmath
import pytest
import scipy.linalg
import torch

from helpers import truth
from helpers.accuracy import Row, true_gradients
from helpers.matrices import generator, symmetric, to_complex
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


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("back", [False, True])
def test_affine_geodesics_between_different_units_are_accurate_in_every_entry(t, back):
    """From D·A·D over 20 decades to a plain matrix; errors of entries relative to √(cᵢᵢcⱼⱼ)."""
    d = torch.diag(torch.tensor([1e5, 1e-5, 1e2, 1e-3], dtype=torch.float64))
    a, b = sym(d @ A[0] @ d), B[0]
    a, b = (b, a) if back else (a, b)
    with mpmath.workdps(80):
        exact = truth.spd_geodesic(
            mpmath.matrix(a.tolist()), mpmath.matrix(b.tolist()), mpmath.mpf(t), "affine_invariant"
        )
    expected = torch.tensor(exact.tolist(), dtype=torch.float64)
    size = expected.diagonal().sqrt()
    error = (spd.geodesic(a, b, t) - expected) / (size.unsqueeze(-1) * size)
    assert error.abs().max() < 1e-13


def test_affine_geodesics_between_units_that_cannot_be_resolved_are_refused():
    d = torch.diag(torch.tensor([1e11, 1e10, 1e9, 1e-11], dtype=torch.float64))
    a, b = sym(d @ A[0] @ d), B[0]
    with pytest.raises(DomainError, match="units"):
        spd.geodesic(a, b, 0.5)
    assert bool(spd.geodesic(a, b, 0.5, check=False).isnan().all())


@pytest.mark.parametrize("t", [0.0, 1.0, 0.3])
def test_derivatives_of_log_euclidean_geodesics_of_ill_conditioned_matrices(t):
    """The point is linear in A at t = 0, in B at t = 1, and in A = B: log and exp must cancel."""
    d = torch.tensor([3e-5, 1.0, 4e-5], dtype=torch.float64)
    a, b = (
        sym(m + m.mT + 4 * torch.eye(3)) * d * d.unsqueeze(-1)
        for m in torch.rand(2, 3, 3, generator=generator(3)).double()
    )
    velocity = sym(torch.rand(3, 3, dtype=torch.float64, generator=generator(4)))

    def point(x):
        pair = {0.0: (x, b), 1.0: (b, x), 0.3: (x, x)}[t]
        return spd.geodesic(*pair, t, metric="log_euclidean")

    def slope(x):
        return torch.func.jvp(point, (x,), (velocity,))[1]

    first, second = torch.func.jvp(slope, (a,), (velocity,))
    torch.testing.assert_close(first, velocity, rtol=0, atol=1e-14)
    assert second.abs().max() < 1e-4  # the derivatives of the logarithm are 1e18


def test_bures_distance_of_close_matrices_does_not_cancel():
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


def points(*batch, m=5, n=3, seed=0):
    x = torch.randn(*batch, m, n, 2 * n, generator=generator(seed), dtype=torch.float64)
    return x @ x.mT / n


@metrics
def test_the_mean_minimizes_the_sum_of_squared_distances(metric):
    a = points(2)
    weight = torch.rand(2, 5, generator=generator(1), dtype=torch.float64)
    middle = spd.mean(a, weight, metric=metric)

    def total(m):
        fraction = weight / weight.sum(-1, keepdim=True)
        return (fraction * spd.distance(m.unsqueeze(-3), a, metric=metric, squared=True)).sum(-1)

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


@pytest.mark.parametrize("kind", [lambda x: x, to_complex], ids=["real", "complex"])
@metrics
def test_means_of_equal_ill_conditioned_matrices(metric, kind):
    """The mean of A and A is A, and its variation is the mean of the variations."""
    a = kind(torch.tensor(scipy.linalg.hilbert(7)))
    a = torch.stack([a, a])
    b = sym(torch.randn(2, 7, 7, generator=generator(0), dtype=a.dtype))
    m, dm = torch.func.jvp(lambda a: spd.mean(a, metric=metric), (a,), (b,))
    torch.testing.assert_close(m, a[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(dm, b.mean(0), rtol=0, atol=1e-6)


def test_the_iteration_for_means_is_not_mapped():
    a = torch.stack([EYE, 2 * EYE])
    with pytest.raises(SolverError, match="leading dimensions"):
        torch.func.vmap(torch.func.grad(lambda a: spd.mean(a).sum()))(torch.stack([a, a]))
    with pytest.raises(SolverError, match="leading dimensions"):
        torch.func.vmap(lambda weight: spd.mean(a, weight))(torch.rand(3, 2))


def test_log_euclidean_means_are_mapped_over_weights():
    a, weights = torch.stack([EYE, 2 * EYE]), torch.tensor([[1.0, 1.0], [1.0, 3.0]], dtype=EYE.dtype)
    means = torch.func.vmap(lambda weight: spd.mean(a, weight, metric="log_euclidean"))(weights)
    torch.testing.assert_close(means[:, 0, 0], torch.tensor([2**0.5, 2**0.75], dtype=EYE.dtype))


@pytest.mark.parametrize("decades", [3, 5])
def test_gradients_of_bures_distances_of_channels_in_different_units(decades):
    """The gradient of d²(I, B) in B is I − B^(−½)."""
    d = torch.logspace(-decades, decades, 4, dtype=torch.float64)
    b = d.unsqueeze(-1) * (symmetric((0.5, 1.0, 1.5, 2.0)) + EYE) * d
    b = sym(b).requires_grad_()
    with mpmath.workdps(60):
        values, vectors = mpmath.eigsy(mpmath.matrix(b.tolist()))
        root = vectors * mpmath.diag([1 / mpmath.sqrt(x) for x in values]) * vectors.T
        expected = EYE - torch.tensor([[float(root[i, j]) for j in range(4)] for i in range(4)], dtype=torch.float64)

    def squared(b):
        return spd.distance(EYE, b, metric="bures_wasserstein", squared=True)

    for grad in (torch.autograd.grad(squared(b), b)[0], torch.func.grad(squared)(b.detach())):
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))


def test_results_that_overflow_their_dtype_are_rejected():
    p, v = torch.eye(2) * 1e-3, torch.eye(2) * 0.2
    assert spd.exp_map(p.double(), v.double()).isfinite().all()
    with pytest.raises(DomainError, match="float32"):
        spd.exp_map(p, v)


@pytest.mark.parametrize("n", [4, 6, 12])
def test_functional_derivatives_of_geodesics_between_nearly_equal_eigenvalues(n):
    """Asymmetric rounding errors of products, divided by small gaps, once made the rotations of vectors oblique."""
    for seed in range(4):
        a = symmetric(tuple(1 + 1e-9 * i for i in range(n)), seed=seed)
        b, loss = 3 * torch.eye(n, dtype=torch.float64), lambda a, b: spd.geodesic(a, b, 0.2)[0].sum()
        x = a.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(x, b), x)
        torch.testing.assert_close(torch.func.grad(loss)(a, b), expected)


@metrics
def test_complex_means(metric):
    a = to_complex(points(m=4))
    middle = spd.mean(a, metric=metric)
    assert middle.dtype == torch.complex128
    m = middle.clone().requires_grad_()
    (slope,) = torch.autograd.grad(spd.distance(m.unsqueeze(-3), a, metric=metric, squared=True).sum(), m)
    assert float(slope.abs().max()) < 1e-8


def test_bad_input():
    with pytest.raises(ConfigurationError, match="metric must be one of 'affine_invariant'"):
        spd.distance(A, B, metric="euclidean")
    with pytest.raises(ShapeError, match="the same order"):
        spd.distance(A, EYE[:2, :2])
    with pytest.raises(ShapeError, match="do not broadcast"):
        spd.distance(A, torch.stack([EYE] * 3))
    with pytest.raises(ShapeError, match="square"):
        spd.geodesic(A, A[..., :2], 0.5)
    with pytest.raises(DtypeError):
        spd.distance(A.long(), B)
    with pytest.raises(NonFiniteError, match="entries of b"):
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
    with pytest.raises(DomainError, match="All weights are zero"):
        spd.mean(A, torch.zeros(2))
    with pytest.raises(DomainError, match="negative"):
        spd.mean(A, torch.tensor([2.0, -1.0]))
    with pytest.raises(SolverError, match="did not converge in 1 iteration"):
        spd.mean(points(), max_iterations=1)


@metrics
def test_large_units_do_not_cost_digits(metric):
    unit = 2.0**40
    close = A + 1e-6 * EYE
    factor = unit**0.5 if metric == "bures_wasserstein" else 1.0
    small, large = (spd.distance(s * A, s * close, metric=metric) for s in (1.0, unit))
    torch.testing.assert_close(large, factor * small, rtol=1e-9, atol=0)
    point = spd.geodesic(A, B, 0.3, metric=metric)
    torch.testing.assert_close(spd.geodesic(unit * A, unit * B, 0.3, metric=metric), unit * point, rtol=1e-13, atol=0)


def test_the_mean_rejects_singular_float32_matrices():
    singular = torch.full((2, 2), 1e15, dtype=torch.float32)
    with pytest.raises((DomainError, NumericalError), match=r"[Aa]dd a multiple of the identity"):
        spd.mean(torch.stack([singular, 1e15 * torch.eye(2)]))


def test_velocities_that_underflow_and_nonfinite_times_are_rejected():
    p = torch.diag(torch.tensor([1e-8, 1.0], dtype=torch.float64))
    with pytest.raises(NumericalError, match="leaves the positive definite"):
        spd.exp_map(p, -torch.eye(2, dtype=torch.float64), metric="log_euclidean")
    for metric in METRICS:
        with pytest.raises(NonFiniteError, match="t "):
            spd.geodesic(A, B, torch.tensor(torch.nan), metric=metric)
        with pytest.raises(NonFiniteError, match="t "):
            spd.geodesic(A, B, torch.inf, metric=metric)
        with pytest.raises(ShapeError, match="t must broadcast"):
            spd.geodesic(A, B, torch.ones(5), metric=metric)


def test_bures_geodesics_that_leave_the_cone_are_nan_or_rejected():
    """Where the exponential map of the velocity is."""
    a, b = EYE.expand(2, 4, 4), torch.stack([9 * EYE, 0.9 * EYE])  # T = 3I and almost I
    with pytest.raises(DomainError, match="leaves the positive definite matrices"):
        spd.geodesic(a, b, -1.0, metric="bures_wasserstein")
    times = torch.tensor([-1.0, -1.0]).double()
    for out in (
        spd.geodesic(a, b, -1.0, metric="bures_wasserstein", check=False),
        torch.func.vmap(lambda a, b, t: spd.geodesic(a, b, t, metric="bures_wasserstein"))(a, b, times),
    ):
        assert out.isnan().all((-2, -1)).tolist() == [True, False]
    beyond = spd.geodesic(a, b, 3.0, metric="bures_wasserstein")
    velocity = 3 * spd.log_map(a, b, metric="bures_wasserstein")
    torch.testing.assert_close(beyond, spd.exp_map(a, velocity, metric="bures_wasserstein"))


@metrics
def test_invalid_weights_of_a_mean_are_nan_for_their_matrices_alone(metric):
    weight = torch.tensor([[1.0, 2.0], [torch.nan, 1.0], [torch.inf, 1.0], [-1.0, 3.0], [0.0, 0.0]]).requires_grad_()
    out = spd.mean(A[:2].expand(5, 2, 4, 4), weight, metric=metric, check=False)
    (grad,) = torch.autograd.grad(out.sum(), weight)
    assert out.isnan().all((-2, -1)).tolist() == [False, True, True, True, True]
    assert grad.isnan().all(-1).tolist() == [False, True, True, True, True]


def test_bures_geodesics_from_a_nearly_singular_matrix_reach_the_end():
    a, b = symmetric((1e-14, 1e-7, 1.0), seed=1), symmetric((1.0, 1.5, 2.0), seed=2)
    torch.testing.assert_close(spd.geodesic(a, b, 1.0, metric="bures_wasserstein"), b, rtol=0, atol=1e-15)


def test_bimap_promotes_dtypes():
    x, w = torch.eye(3, dtype=torch.float64), torch.ones(3, 2)
    assert torch.equal(spd.bimap(x, w), torch.full((2, 2), 3.0, dtype=torch.float64))
    assert spd.bimap(x.half(), w).dtype == torch.float32


def test_bimap_in_half_precision_does_not_overflow_early():
    x = 1e4 * torch.eye(2, dtype=torch.float16)
    torch.testing.assert_close(spd.bimap(x, 2 * torch.eye(2, dtype=torch.float16)), 4 * x)


def gram(*batch, n=4, k=None, seed=0, dtype=torch.float64):
    x = torch.randn(*batch, n, 2 * n if k is None else k, generator=generator(seed), dtype=dtype)
    return x @ x.mT


def exact(function, *inputs):
    """Value of a function of symmetric mpmath matrices, and gradients of Σ cᵢⱼvalueᵢⱼ by differences."""
    row = Row("", None, lambda *x: [function(*x)], None, tuple(range(len(inputs))))
    grads = true_gradients(row, inputs, [cotangent(inputs[0].shape[-1]).flatten().tolist()])
    with mpmath.workdps(60):
        value = function(*(mpmath.matrix(x.tolist()) for x in inputs))
    return torch.tensor(value.tolist(), dtype=torch.float64), [torch.from_numpy(g) for g in grads]


def cotangent(n):
    return sym(torch.randn(n, n, generator=generator(9), dtype=torch.float64))


def relative(actual, expected):
    return float((actual - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize("units", [(1e-3, 1.0, 1e3), (1.0, 1e2, 1e-2), (1e-5, 1.0, 1.0)])
def test_bures_means_of_channels_in_different_units(units):
    d = torch.diag(torch.tensor(units, dtype=torch.float64))
    a = sym(d @ gram(2, n=3, seed=3) @ d)
    value, grads = exact(lambda x, y: truth.spd_mean_of_two(x, y, [1, 1], "bures_wasserstein"), *a)
    a.requires_grad_()
    middle = spd.mean(a, metric="bures_wasserstein")
    (grad,) = torch.autograd.grad((middle * cotangent(3)).sum(), a)
    inverse = torch.linalg.inv(d)
    assert relative(inverse @ middle @ inverse, inverse @ value @ inverse) < 1e-10
    assert relative(d @ grad @ d, d @ torch.stack(grads) @ d) < 1e-10  # each entry in its units
    assert relative(grad, torch.stack(grads)) < 1e-8


def test_bures_means_of_many_channels_in_different_units_converge():
    d = torch.diag(torch.logspace(-3, 3, 6, dtype=torch.float64))
    a = sym(d @ gram(5, n=6, seed=1) @ d).requires_grad_()
    middle = spd.mean(a, metric="bures_wasserstein")
    torch.autograd.grad(middle.sum(), a)
    slope = spd.log_map(middle, a, metric="bures_wasserstein").mean(0).detach()
    inverse = torch.linalg.inv(d)
    assert float((inverse @ slope @ inverse).abs().max()) < 1e-7


@metrics
@pytest.mark.parametrize("kind", [lambda x: x, to_complex], ids=["real", "complex"])
def test_the_gradient_of_the_distance_of_equal_matrices_is_zero(metric, kind):
    a = kind(gram(200, seed=5)).requires_grad_()
    (grad,) = torch.autograd.grad(spd.distance(a, a.detach(), metric=metric).sum(), a)
    assert torch.equal(grad, torch.zeros_like(grad))
    moved = torch.func.vmap(torch.func.grad(lambda x, y: spd.distance(x, y, metric=metric)))
    if kind is not to_complex:
        assert torch.equal(moved(a.detach(), a.detach()), torch.zeros_like(grad))
    (slope,) = torch.autograd.grad(spd.distance(a, a.detach(), metric=metric, squared=True).sum(), a, create_graph=True)
    assert float(slope.detach().abs().max()) < 1e-9
    curved = torch.autograd.grad(slope.real.sum(), a)[0]
    assert bool((curved.abs().amax((-2, -1)) > 0).all())  # the square keeps its second derivative


HERMITIAN = torch.tensor([[2.0, 0.5j], [-0.5j, 1.0]])
REAL = torch.tensor([[1.5, 0.2], [0.2, 1.0]])


@metrics
@pytest.mark.parametrize("call", [
    lambda a, b, metric: spd.geodesic(a, b, 0.3, metric=metric),
    lambda a, b, metric: spd.log_map(a, b, metric=metric),
    lambda a, b, metric: spd.exp_map(a, 0.1 * b, metric=metric),
    lambda a, b, metric: spd.batch_norm(a, b),
    lambda a, b, metric: spd.batch_norm(a, a, bias=b),
])  # fmt: skip
def test_a_real_next_to_a_complex_matrix_gives_a_complex_result(call, metric):
    expected = call(REAL.to(torch.complex64), HERMITIAN, metric)
    mixed = call(REAL, HERMITIAN, metric)
    assert mixed.dtype == torch.complex64 and float(mixed.imag.abs().max()) > 1e-3
    torch.testing.assert_close(mixed, expected)
    assert call(HERMITIAN, REAL, metric).dtype == torch.complex64


@pytest.mark.parametrize("metric", ["affine_invariant", "log_euclidean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rank_deficient_matrices_are_rejected_by_size(metric, dtype):
    """Not by the sign of a rounding error: all of 300, at any scale."""
    singular = gram(300, k=3, dtype=dtype)
    d = torch.diag(torch.tensor([1e-4, 1.0, 10.0, 1e3], dtype=dtype))
    regular = gram(300, k=8, dtype=dtype)
    eye = torch.eye(4, dtype=dtype)
    for units in (eye, d):
        assert bool(spd.distance(sym(units @ singular @ units), eye, metric=metric, check=False).isnan().all())
        assert bool(spd.distance(sym(units @ regular @ units), eye, metric=metric).isfinite().all())
    with pytest.raises(DomainError, match="300 of 300 matrices a are not positive definite"):
        spd.distance(singular, eye, metric=metric)
    mixed = torch.stack([singular[0], regular[0]])
    assert spd.distance(mixed, eye, metric=metric, check=False).isnan().tolist() == [True, False]


@metrics
def test_unchecked_undefined_input_is_nan(metric):
    bad = torch.stack([torch.full((4, 4), torch.nan).double(), -EYE, A[0].triu()])
    batch = torch.cat([bad, A[:1]]).requires_grad_()
    for out in (
        spd.distance(batch, EYE, metric=metric, check=False),
        spd.distance(EYE, batch, metric=metric, check=False),
        torch.func.vmap(lambda x: spd.distance(x, EYE, metric=metric))(batch),
        spd.geodesic(batch, EYE, 0.5, metric=metric, check=False).sum((-2, -1)),
        spd.log_map(batch, EYE, metric=metric, check=False).sum((-2, -1)),
        spd.exp_map(batch, 0.1 * EYE, metric=metric, check=False).sum((-2, -1)),
        spd.mean(batch.unsqueeze(-3), metric=metric, check=False).sum((-2, -1)),
        spd.batch_norm(batch, EYE, check=False).sum((-2, -1)),
    ):
        assert out.isnan().tolist() == [True, True, True, False]
        (grad,) = torch.autograd.grad(out.sum(), batch)
        assert grad.isnan().all((-2, -1)).tolist() == [True, True, True, False]


def test_bures_geodesics_of_channels_in_different_units_are_accurate():
    """The eigenvalues of P have rounding errors of the largest one, 1e17 times the smallest."""
    units = torch.diag(torch.tensor([1.0, 1e-5, 1e4], dtype=torch.float64))
    p, v = (sym(units @ x @ units) for x in (gram(n=3, seed=1), 0.1 * gram(n=3, seed=2)))
    value, grads = exact(lambda x, y: truth.spd_exp_map(x, y, "bures_wasserstein"), p, v)
    p, v = p.requires_grad_(), v.requires_grad_()
    end = spd.exp_map(p, v, metric="bures_wasserstein")
    (end * cotangent(3)).sum().backward()
    inverse = torch.linalg.inv(units)
    assert relative(inverse @ end @ inverse, inverse @ value @ inverse) < 1e-9
    for x, want in ((p, grads[0]), (v, grads[1])):
        assert relative(units @ sym(x.grad) @ units, units @ want @ units) < 1e-8


def test_log_euclidean_geodesics_of_channels_in_different_units_are_accurate():
    units = torch.diag(torch.tensor([1e-4, 1e4, 10.0], dtype=torch.float64))
    a, b = (sym(units @ gram(n=3, seed=seed) @ units) for seed in (1, 2))
    value, grads = exact(lambda x, y: truth.spd_geodesic(x, y, mpmath.mpf("0.3"), "log_euclidean"), a, b)
    a, b = a.requires_grad_(), b.requires_grad_()
    point = spd.geodesic(a, b, 0.3, metric="log_euclidean")
    (point * cotangent(3)).sum().backward()
    inverse = torch.linalg.inv(units)
    assert relative(inverse @ point @ inverse, inverse @ value @ inverse) < 1e-13
    for x, want in ((a, grads[0]), (b, grads[1])):
        assert relative(units @ sym(x.grad) @ units, units @ want @ units) < 1e-12


def test_unresolved_gradients_of_bures_distances_are_rejected():
    units = torch.tensor([1e-2, 1e-1, 1e8], dtype=torch.float64)
    x = units.unsqueeze(-1) * torch.randn(2, 3, 9, generator=generator(2), dtype=torch.float64)
    a, b = x @ x.mT
    assert spd.distance(a, b, metric="bures_wasserstein").isfinite()
    a.requires_grad_()
    with pytest.raises(DomainError, match="units of the two matrices differ"):
        spd.distance(a, b, metric="bures_wasserstein")
    assert spd.distance(a, b, metric="bures_wasserstein", check=False).isnan()


def test_a_velocity_out_of_the_bures_cone_is_nan_or_rejected():
    p, v = torch.eye(2).expand(2, 2, 2), torch.stack([-3 * torch.eye(2), 0.1 * torch.eye(2)]).requires_grad_()
    with pytest.raises(DomainError, match="leaves the positive definite matrices"):
        spd.exp_map(p, v, metric="bures_wasserstein")
    for out in (
        spd.exp_map(p, v, metric="bures_wasserstein", check=False),
        torch.func.vmap(lambda p, v: spd.exp_map(p, v, metric="bures_wasserstein"))(p, v),
    ):
        (grad,) = torch.autograd.grad(out.sum(), v)
        for t in (out, grad):
            assert t.isnan().all((-2, -1)).tolist() == [True, False]


@metrics
@pytest.mark.parametrize("units", [([1e-2, 1.0, 1e2], [30.0, 1.0, 0.1]), ([1e-4, 1e4, 10.0], [1e-4, 1e4, 10.0])])
def test_transforms_are_accurate_for_matrices_in_different_units(metric, units):
    """Gradients and tangents of the velocity at D·A·D under torch.func, against 60 digits."""
    one, other = (torch.diag(torch.tensor(x, dtype=torch.float64)) for x in units)
    p, q = sym(one @ gram(n=3, seed=1) @ one), sym(other @ gram(n=3, seed=2) @ other)
    _, expected = exact(lambda x, y: truth.spd_log_map(x, y, metric), p, q)

    def total(p, q):
        return (spd.log_map(p, q, metric=metric) * cotangent(3)).sum()

    grads = torch.func.grad(total, (0, 1))(p, q)
    for unit, grad, want in zip((one, other), grads, expected, strict=True):
        assert relative(grad, want) < 1e-10
        assert relative(unit @ grad @ unit, unit @ want @ unit) < 1e-10
    directions = tuple(sym(unit @ gram(n=3, seed=7) @ unit) for unit in (one, other))
    _, slope = torch.func.jvp(total, (p, q), directions)
    want = sum((e * g).sum() for e, g in zip(directions, expected, strict=True))
    torch.testing.assert_close(slope, want, rtol=1e-8, atol=0)


@metrics
@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (2, 3, 0, 0), (0, 2, 0, 0)])
def test_means_of_empty_batches_and_matrices(metric, shape):
    a = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    middle = spd.mean(a, metric=metric)
    assert middle.shape == (shape[0], *shape[2:])
    middle.sum().backward()
    assert a.grad.shape == shape


@pytest.mark.parametrize("metric", ["affine_invariant", "bures_wasserstein"])
@pytest.mark.parametrize("n", [4, 32])
def test_means_in_float32_at_condition_1000(metric, n):
    u = torch.linalg.qr(torch.randn(8, n, n, generator=generator(0), dtype=torch.float64))[0]
    a = sym((u * torch.logspace(0, 3, n, dtype=torch.float64)) @ u.mT)
    outs, grads = [], []
    for x, precision in ((a.float(), torch.float32), (a, None)):
        x.requires_grad_()
        outs.append(spd.mean(x, metric=metric, precision=precision))
        grads.append(torch.autograd.grad(outs[-1].square().sum(), x)[0].double())
    assert relative(outs[0].double(), outs[1]) < 1e-4
    assert relative(*grads) < 1e-3
