"""Sylvester and Lyapunov equations: values by SciPy, laws, and equations without a unique solution."""

import pytest
import scipy.linalg
import torch

import matbackprop as mb
from helpers.matrices import generator, symmetric, to_complex
from matbackprop.errors import DomainError, ShapeError, SymmetryError

A, B = symmetric("separated", 2, seed=1), symmetric((-0.2, 0.4, 2.0), 2, seed=2)
C = torch.randn(2, 4, 3, generator=generator(3), dtype=torch.float64)


@pytest.mark.parametrize("kind", [lambda x: x, to_complex], ids=["real", "complex"])
def test_values_equal_scipy(kind):
    a, b = kind(A), kind(B)
    x = mb.sylvester(a, b, C)
    assert x.dtype == a.dtype
    for i in range(2):
        expected = torch.from_numpy(scipy.linalg.solve_sylvester(a[i].numpy(), b[i].numpy(), C[i].numpy()))
        torch.testing.assert_close(x[i], expected.to(x.dtype))
    torch.testing.assert_close(mb.lyapunov(A, A), 0.5 * torch.eye(4).double().expand(2, 4, 4))
    single = mb.sylvester(A[0].float(), B.float(), C[0].float())  # batches broadcast
    torch.testing.assert_close(single.double(), mb.sylvester(A[:1].expand(2, 4, 4), B, C[:1].expand(2, 4, 3)))


def test_equations_without_a_unique_solution_are_rejected_or_nan():
    opposite = -B.clone()
    opposite[1] = A[1, :3, :3] + 5 * torch.eye(3)
    with pytest.raises(DomainError, match="1 of 2 matrices a have an eigenvalue that plus one of b is zero"):
        mb.sylvester(B, opposite, C[:, :3])
    for out in (
        mb.sylvester(B, opposite, C[:, :3], check=False),
        torch.func.vmap(mb.sylvester)(B, opposite, C[:, :3]),
    ):
        assert out.isnan().all((-2, -1)).tolist() == [True, False]
    singular = torch.diag(torch.tensor([1.0, 0.0]))
    with pytest.raises(DomainError, match="Add a multiple of the identity"):
        mb.lyapunov(singular, torch.eye(2))
    f = torch.randn(20, 4, 2, generator=generator(4))
    with pytest.raises(DomainError, match="20 of 20"):  # by size, not by rounding errors of float32
        mb.lyapunov(f @ f.mT, torch.eye(4))


def test_bad_input():
    with pytest.raises(ShapeError, match=r"c must be \(\*batch, 4, 3\)"):
        mb.sylvester(A, B, C.mT)
    with pytest.raises(ShapeError, match="do not broadcast"):
        mb.sylvester(A, B, torch.ones(3, 4, 3))
    with pytest.raises(SymmetryError, match="b must be symmetric"):
        mb.sylvester(A, B.triu(), C)
