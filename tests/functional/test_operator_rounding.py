"""Rounding errors are not bad input: covariances of low rank, matrices symmetric up to rounding."""

import pytest
import torch

import matbackprop as mb
from helpers.matrices import generator, orthogonal, relu_features, symmetric
from matbackprop.errors import DomainError, SymmetryError

OF_SYMMETRIC = {
    "log": mb.matrix_log,
    "sqrt": mb.matrix_sqrt,
    "inv_sqrt": mb.matrix_inv_sqrt,
    "exp": mb.matrix_exp,
    "inverse": mb.matrix_inverse,
    "power": lambda a: mb.matrix_power(a, 0.7),
    "spectral_projector": lambda a: mb.spectral_projector(a, rank=3),
    "projector": lambda a: mb.projector(a[..., :4]),
}


@pytest.mark.parametrize("n", [2, 5, 9, 30])
@pytest.mark.parametrize("name", OF_SYMMETRIC)
def test_results_are_bitwise_symmetric(name, n):
    """Sums of symmetric results stay symmetric."""
    if n < 5 and "projector" in name:
        pytest.skip("the projectors here need five rows")
    a = symmetric(tuple(torch.linspace(0.3, 4, n).tolist()), 3, seed=n)
    out = OF_SYMMETRIC[name](a)
    assert torch.equal(out, out.mT)


@pytest.mark.parametrize("n", [2, 5, 12, 30])
@pytest.mark.parametrize("condition", [1e2, 1e6])
def test_the_textbook_karcher_mean(n, condition):
    """S ← S^½ exp(mean log(S^−½ Aᵢ S^−½)) S^½ with plain products of results, until convergence."""
    stretch = mb.matrix_sqrt(symmetric(tuple(condition ** (-i / (n - 1)) for i in range(n)), seed=n))
    a = stretch @ symmetric(tuple(torch.linspace(0.5, 2, n).tolist()), 8, seed=n + 1) @ stretch
    mean = a.mean(0)
    for _ in range(20):
        root, inverse = mb.matrix_sqrt(mean), mb.matrix_inv_sqrt(mean)
        step = mb.matrix_log(inverse @ a @ inverse).mean(0)
        mean = root @ mb.matrix_exp(step) @ root
    assert torch.linalg.matrix_norm(step) < 1e-9
    mb.matrix_exp(root @ inverse - inverse @ root)  # zero up to rounding


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_asymmetric_matrices_are_rejected_in_every_dtype(dtype):
    a = symmetric("separated").to(dtype)
    mb.matrix_exp(a + 0.2 * torch.finfo(dtype).eps * a.triu())
    a[0, 1] += 0.5
    with pytest.raises(SymmetryError, match="differs from its transpose"):
        mb.matrix_exp(a)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m", [20, 49, 64])
def test_square_root_of_a_covariance_of_low_rank(dtype, m):
    """Its zero eigenvalues are computed as negative rounding errors."""
    for seed in range(10):
        f = torch.randn(m, 64, generator=generator(seed)).to(dtype)
        f = f - f.mean(0)
        covariance = f.mT @ f / m
        root = mb.matrix_sqrt(covariance.detach()).double()
        error = torch.linalg.matrix_norm(root @ root - covariance.double(), 2)
        assert error <= 0.1 * torch.finfo(dtype).eps ** 0.5 * torch.linalg.matrix_norm(
            covariance.double(), 2
        ) + 0.05 * (dtype in (torch.float16, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_negative_eigenvalues_above_rounding_are_rejected(dtype):
    a = torch.diag(torch.tensor([1.0, -0.05, 0.5])).to(dtype)
    with pytest.raises(DomainError, match="needs nonnegative eigenvalues"):
        mb.matrix_sqrt(a)


def test_the_derivative_of_a_square_root_at_a_singular_matrix_is_rejected():
    """It is infinite there: raise an error instead of returning NaN."""
    a = torch.diag(torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64))
    for way in (mb.matrix_sqrt, lambda x: mb.matrix_power(x, 0.5)):
        out = way(a.clone().requires_grad_())
        torch.testing.assert_close(out.detach(), a.sqrt())
        with pytest.raises(DomainError, match="sqrt has an infinite derivative"):
            out.sum().backward()
        with (
            torch.autograd.forward_ad.dual_level(),
            pytest.raises(DomainError, match="sqrt has an infinite derivative"),
        ):
            way(torch.autograd.forward_ad.make_dual(a, torch.eye(3, dtype=torch.float64)))
    f = relu_features(3, 5).requires_grad_()
    mb.second_order_pool(f, function="sqrt", eps=0.0).sum().backward()  # as a function of F it is finite
    assert f.grad.isfinite().all()


@pytest.mark.parametrize(
    "overflow",
    [
        lambda: mb.matrix_exp(1000 * torch.eye(3)),
        lambda: mb.matrix_power(1e200 * torch.eye(2, dtype=torch.float64), 2),
        lambda: mb.matrix_inverse(1e-310 * torch.eye(2, dtype=torch.float64)),
    ],
)
def test_a_result_that_overflows_is_rejected(overflow):
    with pytest.raises(DomainError, match="overflows"):
        overflow()


def test_a_result_too_large_for_float32_is_infinite():
    out = mb.matrix_exp(100 * torch.eye(2))
    assert torch.equal(out, torch.diag(torch.full((2,), torch.inf)))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_exponent_with_one_element_of_any_shape(shape, batch):
    a = symmetric("separated", *batch)
    p = torch.full(shape, 0.3, dtype=torch.float64, requires_grad=True)
    out = mb.matrix_power(a, p)
    torch.testing.assert_close(out, mb.matrix_power(a, 0.3))
    out.sum().backward()
    assert p.grad.shape == shape and bool(p.grad.abs().sum() > 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_invalid_exponents_are_rejected(bad):
    a = symmetric("separated")
    for exponent in (bad, torch.tensor(bad)):
        with pytest.raises(ValueError, match="exponent"):
            mb.matrix_power(a, exponent)
        with pytest.raises(ValueError, match="exponent"):
            mb.second_order_pool(a, function="power", exponent=exponent)


def test_orthogonal_congruence_is_within_rounding_of_symmetric():
    """QAQᵀ as plain products, as after a change of basis."""
    q = orthogonal(30)
    a = q @ symmetric(tuple(torch.linspace(0.1, 2, 30).tolist())) @ q.mT
    torch.testing.assert_close(mb.matrix_exp(mb.matrix_log(a)), 0.5 * (a + a.mT))
