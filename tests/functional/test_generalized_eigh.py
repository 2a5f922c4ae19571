"""The generalized eigenproblem: values against SciPy, gradients for both matrices, ties."""

import mpmath
import pytest
import scipy.linalg
import torch

from helpers import truth
from helpers.matrices import symmetric
from matbackprop import (
    generalized_eigh,
    generalized_matrix_function,
    matrix_function,
    matrix_functions,
    matrix_log,
    nn,
    spd,
)
from matbackprop.errors import DomainError, NumericalError, ShapeError, TieError

A = symmetric((-1.0, 0.5, 1.2, 2.1), 2, seed=1)
B = symmetric((0.3, 0.7, 1.0, 4.0), 2, seed=2)


def test_ties_and_bad_pencils():
    b = symmetric((0.5, 1.0, 2.0), seed=3)
    a = (2 * b).requires_grad_()
    generalized_eigh(a, b).eigenvalues.sum().backward()
    torch.testing.assert_close(a.grad, torch.linalg.inv(b))
    with pytest.raises(TieError, match="generalized_eigh"):
        generalized_eigh(a, b).eigenvectors.square().sum().backward()
    with pytest.raises(NumericalError, match="1 of 2 matrices b are not positive definite"):
        generalized_eigh(A, torch.stack([B[0], -B[1]]))
    with pytest.raises(ShapeError, match="same shape"):
        generalized_eigh(A, B[0])


def test_functions_from_one_decomposition_equal_single_calls():
    p = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    own = (torch.tanh, lambda x: 1 - torch.tanh(x) ** 2)
    functions = [("sqrt", None), ("inv_sqrt", None), ("power", 0.3), ("power", p), (own, None)]
    outs = matrix_functions(B, ["sqrt", "inv_sqrt", 0.3, p, own])
    for out, (function, exponent) in zip(outs, functions, strict=True):
        assert torch.equal(out, matrix_function(B, function, exponent=exponent))
    outs[3].sum().backward()
    assert p.grad is not None
    with pytest.raises(DomainError, match="inv_sqrt needs positive"):
        matrix_functions(A, ["exp", "inv_sqrt"])
    assert matrix_functions(B, []) == ()


def test_matrix_functions_decompose_once(monkeypatch):
    from matbackprop.functional import _matrix_function

    calls = []
    solve = _matrix_function.batched_eigh
    monkeypatch.setattr(_matrix_function, "batched_eigh", lambda a: calls.append(1) or solve(a))
    matrix_functions(B, ["sqrt", "inv_sqrt", "log"])
    assert len(calls) == 1


def test_function_of_a_pencil_equals_that_of_its_eigenpairs():
    values, vectors = generalized_eigh(A, B)
    side = B @ vectors
    for name, g in (("exp", torch.exp), ("inverse", torch.reciprocal)):
        expected = (side * g(values).unsqueeze(-2)) @ side.mT
        torch.testing.assert_close(generalized_matrix_function(A, B, name), expected)
        torch.testing.assert_close(nn.GeneralizedMatrixFunction(name)(A, B), expected)
    torch.testing.assert_close(generalized_matrix_function(A, B, "power", exponent=1), A)
    torch.testing.assert_close(generalized_matrix_function(A, B, "power", exponent=0), B)
    inside = scipy.linalg.expm((torch.linalg.inv(B[0]) @ A[0]).numpy())  # of B⁻¹A, which is not symmetric
    torch.testing.assert_close(generalized_matrix_function(A, B, "exp")[0], B[0] @ torch.from_numpy(inside))


def test_functions_of_pencils_are_equivariant_and_equal_the_geometry():
    a, w = A @ A + 0.1 * B, torch.linspace(-1, 2, 16, dtype=torch.float64).reshape(4, 4).sin() + torch.eye(4)
    root = generalized_matrix_function(a, B, "sqrt")
    turned = generalized_matrix_function(w.mT @ a @ w, w.mT @ B @ w, "sqrt")
    torch.testing.assert_close(turned, w.mT @ root @ w)
    torch.testing.assert_close(root, generalized_matrix_function(B, a, "sqrt"))  # the geometric mean is symmetric
    torch.testing.assert_close(root, spd.geodesic(B, a, 0.5))
    eye = torch.eye(4, dtype=torch.float64).expand_as(a)
    torch.testing.assert_close(generalized_matrix_function(a, eye, "log"), matrix_log(a))
    with pytest.raises(NumericalError, match="b are not positive definite"):
        generalized_matrix_function(B, A, "exp")
    with pytest.raises(DomainError, match="log needs positive eigenvalues"):
        generalized_matrix_function(A, B, "log")


def test_wide_spectra_are_as_accurate_as_the_matrices_determine():
    """B of condition 1e12, against 120 digits. The reduced matrix alone determines five digits."""
    a, b = symmetric((2.0, 2.3, 2.9), seed=3), symmetric((1e-12, 1e-6, 1.0), seed=4)
    g, da, db = (symmetric((-1.0, 0.4, 1.0), seed=i) for i in (5, 6, 7))
    db = b @ db @ b  # a direction that keeps the small eigenvalues of B
    with mpmath.workdps(120):
        x, y, e, h = (mpmath.matrix(m.tolist()) for m in (a, b, da, db))

        def inside(t):
            return truth.pencil_function(x + t * e, y + t * h, mpmath.log)

        step = mpmath.mpf(10) ** -40
        expected = torch.tensor([[float(v) for v in row] for row in inside(0).tolist()], dtype=torch.float64)
        slope = (inside(step) - inside(-step)) / (2 * step)
        slope = float(sum(v * w for v, w in zip(mpmath.matrix(g.tolist()), slope, strict=True)))
    a.requires_grad_()
    b.requires_grad_()
    actual = generalized_matrix_function(a, b, "log")
    torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=2e-14 * float(expected.abs().max()))
    in_a, in_b = torch.autograd.grad((g * actual).sum(), (a, b))
    assert float((in_a * da).sum() + (in_b * db).sum()) == pytest.approx(slope, rel=1e-9)
    values = generalized_eigh(a.detach(), b.detach()).eigenvalues
    with mpmath.workdps(60):
        assert values.tolist() == pytest.approx([float(v) for v in truth.pencil(x, y)[0]], rel=1e-4)
        assert float(values[0]) == pytest.approx(float(truth.pencil(x, y)[0][0]), rel=1e-14)


def test_vectors_of_a_singular_matrix_whose_cholesky_factor_exists():
    a = torch.tensor([[8, 4, 4, 2], [4, 5, 2, -2], [4, 2, 2, 1], [2, -2, 1, 5]], dtype=torch.float64)
    b = torch.eye(4, dtype=torch.float64) + 0.1 * torch.ones(4, 4, dtype=torch.float64)
    lam, u = generalized_eigh(a, b)
    torch.testing.assert_close(u.mT @ b @ u, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-13)
    torch.testing.assert_close(a @ u, b @ u * lam, rtol=0, atol=1e-13)


def test_functions_of_a_pencil_with_a_singular_matrix_are_nan_without_checks():
    a, b = torch.eye(2), torch.tensor([[1.0, 1.0], [1.0, 1.0 + torch.finfo(torch.float32).eps]])
    with pytest.raises(DomainError, match="not positive definite"):
        generalized_matrix_function(a, b, "sqrt")
    batch = generalized_matrix_function(torch.stack([a, a]), torch.stack([b, a]), "sqrt", check=False)
    assert bool(batch[0].isnan().all()) and bool(batch[1].isfinite().all())
