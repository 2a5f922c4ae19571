"""Inverse roots for preconditioners: values with many digits, damping, singular statistics."""

import pytest
import torch

from helpers.matrices import generator, rank_deficient, symmetric
from matbackprop import inverse_root, nn
from matbackprop.errors import DomainError, NumericalError


def test_power_inverts_the_root():
    a = symmetric("separated", 3)
    root = inverse_root(a, 4)
    torch.testing.assert_close(torch.linalg.matrix_power(root, 4) @ a, torch.eye(4, dtype=a.dtype).expand(3, 4, 4))
    torch.testing.assert_close(nn.InverseRoot(4)(a), root)


def test_relative_damping_equals_absolute_damping_times_the_largest_eigenvalue():
    a = torch.stack([symmetric("separated"), 1e4 * symmetric("repeated")])
    one = inverse_root(a, 4, eps=1e-2, relative=True)
    for i, largest in enumerate((3.4, 2e4)):
        torch.testing.assert_close(one[i], inverse_root(a[i], 4, eps=1e-2 * largest))
    f = 1e3 * rank_deficient(5, 5, 2)
    assert torch.linalg.cond(inverse_root(f @ f.mT, 1, eps=0.1, relative=True)) <= 11 * (1 + 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_singular_statistics_are_accepted(dtype):
    """Eigenvalues that are negative by rounding count as zero: λ + ε is ε, however small."""
    g = torch.randn(16, 3, generator=generator(0)).to(dtype)
    a = g @ g.mT
    root = inverse_root(a, 4, eps=1e-12, precision=torch.float64).double()
    assert float(torch.linalg.matrix_norm(root, 2)) <= 1e3 * (1 + 16 * torch.finfo(dtype).eps)
    with pytest.raises(DomainError, match="after damping by eps=0"):
        inverse_root(a, 4)
    with pytest.raises(DomainError, match=r"1 of 2 matrices have one down to -0\.5 after damping"):
        inverse_root(torch.stack([torch.eye(2), torch.diag(torch.tensor([1.0, -1.0]))]), 2, eps=0.5)


@pytest.mark.parametrize("bad", [0, -2, float("nan"), float("inf"), True, "4"])
def test_invalid_roots_are_rejected(bad):
    for build in (lambda: inverse_root(torch.eye(2), bad), lambda: nn.InverseRoot(bad)):
        with pytest.raises(DomainError, match="p must be a positive number"):
            build()
    with pytest.raises(NumericalError, match="eps must be a finite number"):
        nn.InverseRoot(2, eps=-1.0)
