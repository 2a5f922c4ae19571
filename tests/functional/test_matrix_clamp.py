"""Clamped eigenvalues: the nearest positive semidefinite matrix, and divided differences of piecewise functions."""

import itertools

import pytest
import torch

from helpers.matrices import generator, symmetric
from matbackprop import matrix_clamp, nn
from matbackprop.divided_differences import CLAMP, KEEP_LARGE, STEP
from matbackprop.errors import DomainError

A = symmetric((-1.5, -0.2, 0.4, 2.0), seed=1)


def test_the_nearest_positive_semidefinite_matrix():
    """No other one is nearer, and the difference is negative semidefinite and orthogonal to it."""
    nearest = matrix_clamp(A)
    torch.testing.assert_close(torch.linalg.eigvalsh(nearest), torch.tensor([0.0, 0.0, 0.4, 2.0]).double())
    rest = A - nearest
    assert torch.linalg.eigvalsh(rest).max() < 1e-12
    torch.testing.assert_close((rest * nearest).sum(), torch.tensor(0.0).double())
    for _ in range(20):
        f = torch.randn(4, 4, generator=generator(0)).double()
        assert (A - f @ f.mT).norm() >= rest.norm()


def test_eigenvalues_above_the_bound_do_not_change():
    torch.testing.assert_close(matrix_clamp(A, -2.0), A)
    torch.testing.assert_close(nn.MatrixClamp(3.0)(A), 3 * torch.eye(4).double())
    a = (A @ A).requires_grad_()
    matrix_clamp(a, 1e-3).trace().backward()
    torch.testing.assert_close(a.grad, torch.eye(4).double())


@pytest.mark.parametrize("function", [STEP, KEEP_LARGE, CLAMP], ids=lambda f: f.name)
def test_divided_differences_of_two_pieces(function):
    """Against the definition for different arguments, and the slope of the piece for equal ones."""
    t = torch.tensor(0.7, dtype=torch.float64)
    points = [torch.tensor(x, dtype=torch.float64) for x in (-2.0, -0.9, -0.1, 0.5, 0.8, 3.0)]
    g = {float(x): function.value(x, t) for x in points}
    for a, b in itertools.permutations(points, 2):
        torch.testing.assert_close(function.first(a, b, t), (g[float(a)] - g[float(b)]) / (a - b))
    for a, b, c in itertools.permutations(points, 3):
        expected = (function.first(b, c, t) - function.first(a, b, t)) / (c - a)
        torch.testing.assert_close(function.second(a, b, c, t), expected, rtol=1e-12, atol=1e-14)
    for a in points:
        slope = (function.value(a + 1e-6, t) - function.value(a - 1e-6, t)) / 2e-6
        torch.testing.assert_close(function.first(a, a, t), slope, rtol=1e-8, atol=1e-8)
        assert function.second(a, a, a, t) == 0


def test_least_must_be_a_number():
    for build in (lambda: matrix_clamp(A, float("nan")), lambda: nn.MatrixClamp(float("inf"))):
        with pytest.raises(DomainError, match="least must be finite"):
            build()
