"""Linear systems differentiated through their solutions, dense and matrix-free."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from matbackprop import generalized_eigh, linear_solve
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
from matbackprop.functional._linear_solve import solve_by_products
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


def test_dense_symmetric_gradient_is_symmetric():
    a = positive_definite(4).requires_grad_()
    linear_solve(a, random(4), symmetric=True).sum().backward()
    torch.testing.assert_close(a.grad, a.grad.mT)


def test_conjugate_gradients_find_the_dense_solution():
    theta, mix, b = random(6), random(6, 6, seed=1), random(3, 6, seed=2)
    a = torch.diag(1 + theta**2) + mix.mT @ mix
    x = solve_by_products(product, b, (theta, mix), 1e-10, 60)
    torch.testing.assert_close(x, torch.linalg.solve(a, b.mT).mT, rtol=1e-8, atol=1e-9)


def test_conjugate_gradients_do_not_change_converged_systems():
    """Systems of one batch that need 1, 2 and 0 steps."""
    scale = torch.tensor([1.0, 2.0, 2.0, 2.0], dtype=torch.float64)
    b = torch.tensor([[0.0, 2.0, 4.0, 6.0], [1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(solve_by_products(lambda x, s: s * x, b, (scale,), 1e-10, 9), b / scale)


@pytest.mark.slow
def test_conjugate_gradient_derivatives():
    inputs = (random(2, 4, seed=2).requires_grad_(), random(4).requires_grad_(), random(4, 4, seed=1).requires_grad_())

    def function(b, theta, mix):
        return solve_by_products(product, b, (theta, mix), 1e-14, 40)

    assert gradcheck(function, inputs, check_forward_ad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True)


def test_conjugate_gradients_under_functional_transforms():
    b, theta, mix = random(4), random(4, seed=1), random(4, 4, seed=2)

    def loss(theta):
        return solve_by_products(product, b, (theta, mix), 1e-10, 40).square().sum()

    def dense(theta):
        return torch.linalg.solve(torch.diag(1 + theta**2) + mix.mT @ mix, b).square().sum()

    torch.testing.assert_close(torch.func.grad(loss)(theta), torch.func.grad(dense)(theta), rtol=1e-7, atol=1e-9)
    with pytest.raises(SolverError, match="leading dimensions"):
        torch.func.vmap(lambda b: solve_by_products(product, b, (theta, mix), 1e-10, 40))(random(3, 4))


def test_transformations_of_the_dense_routes():
    a, b = positive_definite(3, 4), random(3, 4, seed=1)

    def loss(a, b):
        return linear_solve(a, b).square().sum() + linear_solve(symmetrize(a), b, symmetric=True).sum() ** 2

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
    ],
)
def test_bad_input(call, error):
    with pytest.raises(error):
        call()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.quick(4)
@pytest.mark.parametrize("n", [4, 5, 16, 40])
def test_singular_matrices_are_rejected_regardless_of_their_pivots(n, dtype):
    """Regression: in up to 24 % of them all pivots exceed the rounding error, in one of 1,000 by a factor of 2,000."""
    generator = torch.Generator().manual_seed(n)
    f, g = torch.randn(2, 3000, n, n - 1, dtype=torch.float64, generator=generator)
    gram, ones, eye = symmetrize(f @ f.mT).to(dtype), torch.ones(3000, n, dtype=dtype), torch.eye(n, dtype=dtype)
    operators = [
        (lambda a, check: linear_solve(a, ones, symmetric=True, check=check), gram),
        (lambda a, check: linear_solve(a, ones, check=check), (f @ g.mT).to(dtype)),
        (lambda a, check: generalized_eigh(eye.expand_as(a), a, check=check).eigenvectors, gram),
    ]
    for operator, a in operators:
        with pytest.raises(DomainError, match="3000 of 3000"):
            operator(a, None)
        assert bool(operator(a, False).isnan().all())


@pytest.mark.parametrize("n", [4, 16])
def test_regular_matrices_with_small_eigenvalues_are_solved(n):
    generator = torch.Generator().manual_seed(n)
    u, v = torch.linalg.qr(torch.randn(2, 50, n, n, dtype=torch.float64, generator=generator))[0]
    values = torch.logspace(0, -12, n, dtype=torch.float64)
    units = 10.0 ** torch.arange(n).double().remainder(7).sub(3)
    gram = symmetrize((u * values) @ u.mT)
    for a, symmetric in (
        (gram, True),
        (units * gram * units.unsqueeze(-1), True),
        ((u * values) @ v.mT * units, False),
    ):
        x = linear_solve(a, a.sum(-1), symmetric=symmetric)
        torch.testing.assert_close(x * units, units.expand_as(x), rtol=1e-2, atol=1e-2 * float(units.max()))


def test_conjugate_gradients_report_failed_convergence():
    scale = torch.logspace(0, 8, 50, dtype=torch.float64)
    with pytest.raises(SolverError, match="5 iterations at a relative residual"):
        solve_by_products(lambda x, s: s * x, random(50), (scale,), 1e-10, 5)


@pytest.mark.parametrize("factor", [-2.0, 0.0, torch.nan, torch.inf])
def test_systems_that_are_not_positive_definite_are_rejected(factor):
    diagonal = torch.tensor([1.0, factor], dtype=torch.float64)
    with pytest.raises(SolverError, match="not positive definite"):
        solve_by_products(lambda x: diagonal * x, torch.tensor([1.0, 1e-3]).double(), (), 1e-10, 20)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_right_hand_sides_of_any_size_are_solved(scale):
    diagonal = torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64)
    x = solve_by_products(lambda x: diagonal * x, scale * torch.ones(3).double(), (), 1e-12, 30)
    torch.testing.assert_close(x, scale / diagonal, rtol=1e-12, atol=0)
