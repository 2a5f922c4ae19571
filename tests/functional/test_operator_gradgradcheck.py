"""Second derivatives of every operator, reverse and forward over reverse, at simple and repeated spectra."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from helpers.operators import CASES, SPECTRA_OF_CASES, case_id
from matbackprop import eigh, matrix_log, second_order_pool
from matbackprop.errors import OrderError


def _one(case, spectrum, device):
    """Inputs with a batch of one, to save time."""
    return tuple(t[1:].requires_grad_() for t in case.inputs(spectrum, device))


@pytest.mark.quick(12)
@pytest.mark.parametrize(("case", "spectrum"), [c for c in SPECTRA_OF_CASES if c[0].orders > 1], ids=case_id)
def test_gradgradcheck(case, spectrum, device):
    fast = case.complex or case.composed
    assert gradgradcheck(case.loss, _one(case, spectrum, device), check_fwd_over_rev=True, fast_mode=fast)


@pytest.mark.parametrize("spectrum", ["separated", "repeated"])
def test_gradgradcheck_of_all_outputs(spectrum, device):
    for case in CASES:
        if case.name in ("matrix_log", "pool_thin_log"):
            assert gradgradcheck(case, _one(case, spectrum, device))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_eigenvalues_alone_have_two_orders(dtype):
    x = torch.randn(2, 4, 4, dtype=dtype, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def eigenvalues(x):
        return eigh(x + x.mH).eigenvalues

    assert gradcheck(eigenvalues, x) and gradgradcheck(eigenvalues, x)


def test_second_derivative_at_the_identity_equals_the_series():
    """log(I + H) = H − H²/2 + …, so the second derivative at I in H and H is −H²."""
    h = torch.tensor([[0.3, -1.0, 0.2], [-1.0, 0.5, 0.7], [0.2, 0.7, -0.4]], dtype=torch.float64)
    eye = torch.eye(3, dtype=torch.float64)
    first, second = torch.func.jvp(lambda a: torch.func.jvp(matrix_log, (a,), (h,))[1], (eye,), (h,))
    torch.testing.assert_close(first, h)
    torch.testing.assert_close(second, -h @ h)


@pytest.mark.parametrize("operator", [matrix_log, lambda a: second_order_pool(a, eps=0.1)])
def test_third_derivatives_are_rejected(operator):
    a = (torch.eye(3, dtype=torch.float64) * 2).requires_grad_()
    (first,) = torch.autograd.grad(operator(a).square().sum(), a, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), a, create_graph=True)
    with pytest.raises(OrderError, match="third derivative"):
        second.square().sum().backward()
