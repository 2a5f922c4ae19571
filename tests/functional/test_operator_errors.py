"""Bad input: each kind raises an error with the problem and a fix."""

import warnings

import pytest
import torch

import matbackprop as mb
from helpers.matrices import relu_features, symmetric
from helpers.operators import OF_ONE_INPUT, OF_SYMMETRIC, case_id
from matbackprop.errors import (
    ConfigurationError,
    DomainError,
    DtypeError,
    NonFiniteError,
    ShapeError,
    SymmetryError,
)


def _tuple(out):
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", [case for case in OF_ONE_INPUT if case.options], ids=case_id)
def test_non_finite_entries(case, bad):
    a = case.inputs()[0]
    a[1, 1, 1] = bad
    with pytest.raises(NonFiniteError, match=f"1 of {a.numel()} entries of .* are non-finite"):
        case.call(a)


def test_overflow_of_a_sum_is_not_reported_as_bad_entries():
    f = torch.diag(torch.full((3,), 3e38))
    assert f.sum().isinf()
    torch.testing.assert_close(mb.svd(f)[1], torch.full((3,), 3e38))


@pytest.mark.parametrize("case", OF_ONE_INPUT, ids=case_id)
def test_integers_and_other_types(case):
    a = case.inputs()[0].real
    with pytest.raises(DtypeError, match=r"torch.int64. Convert it with .float\(\)"):
        case.call(a.long())
    with pytest.raises(DtypeError, match=r"got torch\.float8_e4m3fn. Convert it"):
        case.call(a.to(torch.float8_e4m3fn))


HAVE_NO_COMPLEX_FORM = ("affinity", "normalized", "spectral_embedding", "project_rotation")


@pytest.mark.parametrize("case", [c for c in OF_ONE_INPUT if c.name.startswith(HAVE_NO_COMPLEX_FORM)], ids=case_id)
def test_complex_input_of_real_operators(case):
    with pytest.raises(DtypeError, match=r"got torch\.complex64. Pass \.real; the operator has no complex form"):
        case.call(case.inputs()[0].to(torch.complex64))


def test_complex_numbers_of_16_bits_and_mixed_pairs():
    a = symmetric("separated")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning of torch about complex32
        half = a.to(torch.complex32)
    with pytest.raises(DtypeError, match=r"got torch\.complex32. Convert it to torch\.complex64"):
        mb.matrix_log(half)
    for operator in (mb.generalized_eigh, mb.linear_solve, lambda x, y: mb.procrustes(x, y, reflection=True)):
        with pytest.raises(DtypeError, match="both be real or both complex"):
            operator(a, a.to(torch.complex128))
    with pytest.raises(DtypeError, match=r"x must be a real floating-point tensor, got torch\.complex128"):
        mb.procrustes(a.to(torch.complex128), a.to(torch.complex128))


@pytest.mark.parametrize(
    "case", [case for case in OF_ONE_INPUT if not case.name.startswith("normalized_cut")], ids=case_id
)
def test_vectors_and_lists(case):
    with pytest.raises(ShapeError, match="dimension"):
        case.call(torch.ones(3))
    if case.name not in ("linear_solve",):
        with pytest.raises(DtypeError, match=r"must be a torch\.Tensor.*, got list"):
            case.call([[1.0]])


@pytest.mark.parametrize("case", [*OF_SYMMETRIC, *(c for c in OF_ONE_INPUT if "vectorize" in c.name)], ids=case_id)
def test_rectangles(case):
    with pytest.raises(ShapeError, match=r"square \(\*batch, n, n\), got shape \(2, 3\)"):
        case.call(torch.ones(2, 3))


@pytest.mark.parametrize("case", OF_SYMMETRIC, ids=case_id)
def test_matrices_that_are_not_symmetric(case):
    a = case.inputs()[0][0]
    a[0, 1] += 0.1
    with pytest.raises(SymmetryError, match=r"differs from its (conjugate )?transpose by up to 0.1"):
        case.call(a)
    for out in _tuple(case.call(a, check=False)):
        assert out.isnan().all()


def test_symmetry_tolerance_is_relative_to_each_matrix():
    a = torch.stack([1e9 * torch.eye(3), torch.tensor([[1.0, 0.1, 0], [0, 1, 0], [0, 0, 1]])])
    with pytest.raises(SymmetryError, match=r"differs from its transpose by up to 0\.1, with a largest entry of 1"):
        mb.matrix_log(a)


@pytest.mark.parametrize(
    ("name", "spectrum", "required"),
    [
        ("matrix_log", (-1.0, 1.0), "positive"),
        ("matrix_log", (0.0, 1.0), "positive"),
        ("matrix_inv_sqrt", (-1.0, 1.0), "positive"),
        ("matrix_sqrt", (-1.0, 1.0), "nonnegative"),
        ("matrix_power", (-1.0, 1.0), "nonnegative"),
        ("matrix_power_tensor", (-1.0, 1.0), "positive"),
    ],
)
def test_eigenvalues_outside_the_domain(name, spectrum, required):
    a = torch.diag(torch.tensor(spectrum, dtype=torch.float64))
    more = {"matrix_power": (0.3,), "matrix_power_tensor": (torch.tensor(0.3),)}.get(name, ())
    name = name.removesuffix("_tensor")
    with pytest.raises(DomainError, match=f"needs {required} eigenvalues; the smallest of a is .* Add a multiple"):
        getattr(mb, name)(a, *more)


def test_the_inverse_of_a_singular_matrix():
    with pytest.raises(DomainError, match="needs nonzero eigenvalues"):
        mb.matrix_inverse(torch.diag(torch.tensor([0.0, 1.0])))
    with pytest.raises(DomainError, match="needs nonzero eigenvalues"):
        mb.matrix_power(torch.diag(torch.tensor([0.0, 1.0])), -3)


def test_checks_can_be_switched_off():
    a = torch.diag(torch.tensor([-1.0, 1.0]))
    assert mb.matrix_log(a, check=False).isnan().any()
    with pytest.raises(DomainError):
        mb.matrix_log(a, check=True)
    assert mb.matrix_log(torch.full((3, 3), torch.nan), check=False).isnan().all()


def test_exponents():
    a = symmetric("separated", 2)
    with pytest.raises(ShapeError, match=r"exponent must broadcast to the batch shape \(2,\)"):
        mb.matrix_power(a, torch.ones(3))
    with pytest.raises(DtypeError, match="Python int"):
        mb.matrix_power(a, torch.tensor(2))


@pytest.mark.parametrize("eps", [-1e-3, float("nan"), float("inf"), 0.0])
def test_eps_as_a_number(eps):
    with pytest.raises(DomainError, match="log needs eps > 0"):
        mb.second_order_pool(relu_features(3, 4), eps=eps)


def test_eps_as_a_tensor():
    f = relu_features(3, 4, 2)
    with pytest.raises(DomainError, match=r"eps must not be negative, got -0\.1"):
        mb.second_order_pool(f, eps=torch.tensor([0.1, -0.1]))
    with pytest.raises(DomainError, match="Pass eps > 0"):
        mb.second_order_pool(f, eps=torch.tensor([0.1, 0.0]))
    with pytest.raises(NonFiniteError, match="eps"):
        mb.second_order_pool(f, eps=torch.tensor(float("nan")))
    with pytest.raises(ShapeError, match=r"eps must broadcast to the batch shape \(2,\)"):
        mb.second_order_pool(f, eps=torch.ones(3))


def test_eps_may_be_zero_if_the_function_is_finite_at_zero():
    f = relu_features(3, 4)
    root = mb.second_order_pool(f, eps=0.0, function="sqrt")
    torch.testing.assert_close(root @ root, f.mT @ f)
    with pytest.raises(DomainError, match="sqrt needs eps >= 0"):
        mb.second_order_pool(f, eps=-1.0, function="sqrt")


def test_shapes_of_weights():
    f = relu_features(3, 4, 2)
    with pytest.raises(ShapeError, match=r"\(2, 3\), one value per row, or \(2, r, 3\) for r regions"):
        mb.second_order_pool(f, weight=torch.ones(2, 4))
    with pytest.raises(ShapeError, match="weight must have shape"):
        mb.second_order_pool(f, weight=torch.ones(3, 2, 3))


def test_options():
    f = relu_features(3, 4)
    with pytest.raises(ConfigurationError, match="method must be"):
        mb.second_order_pool(f, method="qr")
    for operator in (mb.eigh, mb.svd):
        with pytest.raises(ConfigurationError, match="ties must be"):
            operator(torch.eye(3), ties="ignore")
        with pytest.raises(ConfigurationError, match="tie_tol must not be negative"):
            operator(torch.eye(3), tie_tol=-1.0)
        with pytest.raises(ConfigurationError, match="broadening must be positive"):
            operator(torch.eye(3), broadening=0.0)


def test_vectors_of_no_triangular_number_are_rejected():
    with pytest.raises(ShapeError, match=r"n\(n\+1\)/2 entries"):
        mb.unvectorize_symmetric(torch.ones(2, 4))
    with pytest.raises(ShapeError):
        mb.unvectorize_symmetric(torch.tensor(1.0))
    with pytest.raises(DtypeError):
        mb.unvectorize_symmetric(torch.ones(3, dtype=torch.int64))
