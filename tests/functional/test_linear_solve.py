"""Linear systems differentiated through their solutions, dense and matrix-free, and the Gaussian field."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from matbackprop import conjugate_gradient_solve, gaussian_crf, linear_solve
from matbackprop._torch import WHOLE_GRAPHS
from matbackprop.errors import (
    DomainError,
    DtypeError,
    NonFiniteError,
    NumericalError,
    ShapeError,
    SolverError,
    SymmetryError,
)
from matbackprop.numerics import symmetrize


def random(*shape, seed=0):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def positive_definite(*shape, seed=0):
    x = random(*shape, shape[-1], seed=seed)
    return x @ x.mT + torch.eye(shape[-1], dtype=torch.float64)


def product(x, theta, mix):
    """(diag(1 + θ²) + MᵀM) x for rows x."""
    return (1 + theta**2) * x + (x @ mix.mT) @ mix


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("a_batch", "b_shape"), [((), (4,)), ((), (4, 3)), ((2,), (2, 4)), ((2, 1), (3, 4, 2)), ((), (5, 4, 1))]
)
def test_dense_solution(symmetric, a_batch, b_shape, device):
    a, b = positive_definite(*a_batch, 4).to(device), random(*b_shape, seed=1).to(device)
    a = a if symmetric else a.triu()
    x = linear_solve(a, b, symmetric=symmetric)
    torch.testing.assert_close(x, torch.linalg.solve(a, b))


@pytest.mark.parametrize("symmetric", [True, False])
def test_dense_derivatives(symmetric):
    a, b = positive_definite(4), random(2, 4, 2, seed=1).requires_grad_()
    a = (a if symmetric else a + 2 * a.triu(1)).requires_grad_()  # not symmetric, to detect a missing transpose

    def function(a, b):
        return linear_solve(symmetrize(a) if symmetric else a, b, symmetric=symmetric)

    assert gradcheck(function, (a, b), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert gradgradcheck(function, (a, b), check_fwd_over_rev=True)


def test_dense_symmetric_gradient_is_symmetric():
    a = positive_definite(4).requires_grad_()
    linear_solve(a, random(4), symmetric=True).sum().backward()
    torch.testing.assert_close(a.grad, a.grad.mT)


def test_conjugate_gradients_find_the_dense_solution():
    theta, mix, b = random(6), random(6, 6, seed=1), random(3, 6, seed=2)
    a = torch.diag(1 + theta**2) + mix.mT @ mix
    x = conjugate_gradient_solve(product, b, (theta, mix))
    torch.testing.assert_close(x, torch.linalg.solve(a, b.mT).mT, rtol=1e-8, atol=1e-9)
    preconditioned = conjugate_gradient_solve(product, b, (theta, mix), preconditioner=1 / a.diagonal())
    torch.testing.assert_close(preconditioned, x, rtol=1e-8, atol=1e-9)
    fixed = conjugate_gradient_solve(product, b, (theta, mix), tolerance=None, max_iterations=12)
    torch.testing.assert_close(fixed, x, rtol=1e-8, atol=1e-9)


def test_conjugate_gradients_do_not_change_converged_systems():
    """Systems of one batch that need 1, 2 and 0 steps."""
    scale = torch.tensor([1.0, 2.0, 2.0, 2.0], dtype=torch.float64)
    b = torch.tensor([[0.0, 2.0, 4.0, 6.0], [1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(conjugate_gradient_solve(lambda x, s: s * x, b, (scale,)), b / scale)


@pytest.mark.slow
def test_conjugate_gradient_derivatives():
    inputs = (random(2, 4, seed=2).requires_grad_(), random(4).requires_grad_(), random(4, 4, seed=1).requires_grad_())

    def function(b, theta, mix):
        return conjugate_gradient_solve(product, b, (theta, mix), tolerance=1e-14, max_iterations=40)

    assert gradcheck(function, inputs, check_forward_ad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True)


def test_conjugate_gradients_under_functional_transforms():
    b, theta, mix = random(4), random(4, seed=1), random(4, 4, seed=2)

    def loss(theta):
        return conjugate_gradient_solve(product, b, (theta, mix)).square().sum()

    def dense(theta):
        return torch.linalg.solve(torch.diag(1 + theta**2) + mix.mT @ mix, b).square().sum()

    torch.testing.assert_close(torch.func.grad(loss)(theta), torch.func.grad(dense)(theta), rtol=1e-7, atol=1e-9)
    with pytest.raises(SolverError, match="leading dimensions"):
        torch.func.vmap(lambda b: conjugate_gradient_solve(product, b, (theta, mix)))(random(3, 4))

    def fixed(theta):  # a fixed number of steps
        return conjugate_gradient_solve(product, b, (theta, mix), tolerance=None, max_iterations=12).square().sum()

    several = random(3, 4, seed=3)
    expected = torch.stack([torch.func.grad(dense)(t) for t in several])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(fixed))(several), expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(torch.func.hessian(fixed)(theta), torch.func.hessian(dense)(theta), rtol=1e-6, atol=1e-8)


def test_conjugate_gradients_compute_in_float64():
    theta, mix, b = random(6), random(6, 6, seed=1), random(3, 6, seed=2)
    exact = conjugate_gradient_solve(product, b, (theta, mix))
    for dtype in (torch.float32, torch.bfloat16):
        low = [x.to(dtype) for x in (theta, mix, b)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = conjugate_gradient_solve(product, low[2], low[:2])
        assert x.dtype == dtype
        torch.testing.assert_close(
            x.double(), exact, rtol=20 * torch.finfo(dtype).eps, atol=20 * torch.finfo(dtype).eps
        )
    single = conjugate_gradient_solve(product, b, (theta, mix), precision=torch.float32, tolerance=1e-5)
    torch.testing.assert_close(single, exact, rtol=1e-4, atol=1e-4)


def test_integer_and_unused_parameters_are_accepted():
    theta, order = random(4).requires_grad_(), torch.tensor([3, 1, 0, 2])
    x = conjugate_gradient_solve(lambda x, t, order: t * x + 0 * x[..., order], random(4, seed=1), (theta, order))
    x.sum().backward()
    assert theta.grad.abs().min() > 0
    idle = random(4).requires_grad_()
    conjugate_gradient_solve(lambda x, t, i: t * x, random(4, seed=1), (theta, idle)).sum().backward()
    assert (idle.grad == 0).all()


def test_gaussian_field_is_the_minimum_of_its_energy():
    y, c, w = random(7), 0.5 + random(7, seed=1), random(7, 7, seed=2)
    w = w + w.mT
    x = gaussian_crf(y, c, affinity=w).requires_grad_()
    energy = (c * (x - y) ** 2).sum() + 0.5 * (w * (x.unsqueeze(-1) - x.unsqueeze(-2)) ** 2).sum()
    (slope,) = torch.autograd.grad(energy, x)
    assert slope.abs().max() < 1e-11
    assert (x - y).abs().max() > 0.05


def test_gaussian_field_of_features_equals_that_of_their_affinity():
    y, c, f = random(2, 9, 3), 0.5 + random(2, 9, seed=1), random(2, 9, 4, seed=2)
    dense = gaussian_crf(y, c, affinity=f @ f.mT)
    torch.testing.assert_close(gaussian_crf(y, c, features=f), dense, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(gaussian_crf(y[..., 0], c, features=f), dense[..., 0], rtol=1e-8, atol=1e-9)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["affinity", "features"])
def test_gaussian_field_derivatives(kind):
    inputs = (
        random(5, 2).requires_grad_(),
        (0.5 + random(5, seed=1)).requires_grad_(),
        random(5, 2, seed=2).requires_grad_(),
    )

    def function(y, c, f):
        how = (
            {"affinity": f @ f.mT} if kind == "affinity" else {"features": f, "tolerance": 1e-14, "max_iterations": 30}
        )
        return gaussian_crf(y, c, **how)

    assert gradcheck(function, inputs, check_forward_ad=True)
    assert gradgradcheck(function, inputs)


def test_high_confidence_keeps_values_and_a_strong_field_smooths_them():
    y, f = random(6), random(6, 2, seed=1)
    torch.testing.assert_close(gaussian_crf(y, torch.full((6,), 1e9).double(), features=f), y, rtol=0, atol=1e-6)
    flat = gaussian_crf(y, torch.full((6,), 1e-6).double(), features=f)
    torch.testing.assert_close(flat, y.mean().expand(6), rtol=0, atol=1e-4)


def test_transformations_of_the_dense_routes():
    a, b = positive_definite(3, 4), random(3, 4, seed=1)

    def loss(a, b):
        return linear_solve(a, b).square().sum() + gaussian_crf(b, torch.ones_like(b), affinity=a.square()).sum() ** 2

    whole = a.clone().requires_grad_()
    torch.func.vmap(loss)(whole, b).sum().backward()
    one = a[1].clone().requires_grad_()
    loss(one, b[1]).backward()
    torch.testing.assert_close(whole.grad[1], one.grad)
    compiled = a[1].clone().requires_grad_()
    torch.compile(loss, fullgraph=WHOLE_GRAPHS, backend="aot_eager")(compiled, b[1]).backward()
    torch.testing.assert_close(compiled.grad, one.grad)
    assert linear_solve(a.bfloat16(), b.bfloat16(), check=False).dtype == torch.bfloat16
    assert linear_solve(torch.empty(2, 3, 3, device="meta"), torch.empty(2, 3, device="meta")).shape == (2, 3)
    field = gaussian_crf(*(torch.empty(2, 3, device="meta"),) * 2, features=torch.empty(2, 3, 2, device="meta"))
    assert field.shape == (2, 3)
    assert linear_solve(torch.zeros(0, 3, 3), torch.zeros(0, 3)).shape == (0, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(linear_solve(a, b), torch.linalg.solve(a, b.unsqueeze(-1)).squeeze(-1))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: linear_solve(torch.ones(3, 2), torch.ones(3)), ShapeError),
        (lambda: linear_solve(torch.eye(3), torch.ones(2)), ShapeError),
        (lambda: linear_solve(torch.eye(3).expand(2, 3, 3), torch.ones(5, 3, 1)), ShapeError),
        (lambda: linear_solve(torch.eye(3).long(), torch.ones(3)), DtypeError),
        (lambda: linear_solve(torch.eye(3), torch.ones(3).long()), DtypeError),
        (lambda: linear_solve(torch.full((2, 2), torch.nan), torch.ones(2)), NonFiniteError),
        (lambda: linear_solve(torch.eye(2), torch.tensor([1.0, torch.inf])), NonFiniteError),
        (lambda: linear_solve(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.ones(2), symmetric=True), SymmetryError),
        (lambda: linear_solve(-torch.eye(2), torch.ones(2), symmetric=True), NumericalError),
        (lambda: linear_solve(torch.zeros(2, 2), torch.ones(2), symmetric=False), NumericalError),
        (lambda: conjugate_gradient_solve(lambda x: -x, torch.ones(3)), SolverError),
        (lambda: conjugate_gradient_solve(lambda x: x, torch.ones(3), tolerance=2.0), DomainError),
        (lambda: conjugate_gradient_solve(lambda x: x, torch.ones(3), max_iterations=-1), DomainError),
        (lambda: conjugate_gradient_solve(lambda x, s: s * x, torch.ones(3), (2.0,)), DtypeError),
        (lambda: conjugate_gradient_solve(lambda x: x, torch.ones(())), ShapeError),
        (lambda: conjugate_gradient_solve(lambda x: x, torch.tensor([torch.nan])), NonFiniteError),
        (lambda: gaussian_crf(torch.ones(3), torch.ones(3)), DomainError),
        (lambda: gaussian_crf(torch.ones(3), torch.zeros(3), affinity=torch.eye(3)), DomainError),
        (lambda: gaussian_crf(torch.ones(3), torch.ones(2), affinity=torch.eye(3)), ShapeError),
        (lambda: gaussian_crf(torch.ones(3), torch.ones(3), affinity=torch.eye(2)), ShapeError),
        (lambda: gaussian_crf(torch.ones(3), torch.ones(3), features=torch.ones(2, 2)), ShapeError),
        (lambda: gaussian_crf(torch.ones(3).long(), torch.ones(3), features=torch.ones(3, 2)), DtypeError),
    ],
)
def test_bad_input(call, error):
    with pytest.raises(error):
        call()


def test_conjugate_gradients_report_failed_convergence():
    scale = torch.logspace(0, 8, 50, dtype=torch.float64)
    with pytest.raises(SolverError, match="5 iterations at a relative residual"):
        conjugate_gradient_solve(lambda x, s: s * x, random(50), (scale,), max_iterations=5)


INDEFINITE = {
    "a field of features of both signs": lambda: gaussian_crf(
        torch.tensor([1.0, 2.0]), torch.full((2,), 0.1), features=torch.tensor([[1.0], [-1.0]])
    ),
    "the same field unchecked": lambda: gaussian_crf(
        torch.tensor([1.0, 2.0]), torch.full((2,), 0.1), features=torch.tensor([[1.0], [-1.0]]), check=False
    ),
    "an indefinite matrix": lambda: conjugate_gradient_solve(
        lambda x: x * torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([1.0, 1e-3]).double()
    ),
    "a product that is NaN": lambda: conjugate_gradient_solve(lambda x: x * torch.nan, torch.ones(2)),
    **{
        f"a preconditioner of {value}": lambda value=value: conjugate_gradient_solve(
            lambda x: 2 * x, torch.ones(3), preconditioner=torch.full((3,), value)
        )
        for value in (0.0, -1.0, torch.nan, torch.inf)
    },
}


@pytest.mark.parametrize("name", INDEFINITE)
def test_systems_that_are_not_positive_definite_are_rejected(name):
    with pytest.raises((SolverError, NumericalError), match="positive"):
        INDEFINITE[name]()


@pytest.mark.parametrize("scale", [1e-200, 1e200])
@pytest.mark.parametrize("tolerance", [1e-12, None])
def test_right_hand_sides_of_any_size_are_solved(scale, tolerance):
    diagonal = torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64)
    x = conjugate_gradient_solve(lambda x: diagonal * x, scale * torch.ones(3).double(), tolerance=tolerance)
    torch.testing.assert_close(x, scale / diagonal, rtol=1e-12, atol=0)


def test_without_a_tolerance_failures_are_marked():
    signs = torch.tensor([[1.0, 2.0], [1.0, -2.0]], dtype=torch.float64)
    x = conjugate_gradient_solve(lambda x: signs * x, torch.ones(2, 2).double(), tolerance=None)
    torch.testing.assert_close(x[0], 1 / signs[0])
    assert x[1].isnan().all()
