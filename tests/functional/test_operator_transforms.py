"""vmap, functional derivatives in every nesting, and batched gradients."""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from helpers.operators import CASES, SPECTRA_OF_CASES, case_id, loss, outputs
from matbackprop import eigh, matrix_power, second_order_pool, svd
from matbackprop.errors import OrderError

BATCHED = [case for case in CASES if not case.name.endswith("weighted_power")]  # their exponent has no batch


def _gradients(case, inputs):
    inputs = [t.clone().requires_grad_() for t in inputs]
    return torch.autograd.grad(loss(case, *inputs), inputs)


@pytest.mark.parametrize("case", BATCHED, ids=case_id)
def test_vmap_equals_the_batch(case):
    inputs = case.inputs("separated")
    mapped = vmap(lambda *args: outputs(case, *args))(*inputs)
    for one, other in zip(mapped, outputs(case, *inputs), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("case", BATCHED, ids=case_id)
def test_per_sample_gradients(case):
    inputs = case.inputs("separated")
    mapped = vmap(grad(lambda *args: loss(case, *args), argnums=tuple(range(len(inputs)))))(*inputs)
    for one, other in zip(mapped, _gradients(case, inputs), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("case", "spectrum"), SPECTRA_OF_CASES, ids=case_id)
def test_forward_mode_equals_reverse_mode(case, spectrum):
    inputs = case.inputs(spectrum)
    directions = tuple(torch.linspace(-1, 1, t.numel(), dtype=t.dtype).reshape(t.shape) for t in inputs)
    _, forward = jvp(lambda *args: loss(case, *args), inputs, directions)
    reverse = sum((g * d).sum() for g, d in zip(_gradients(case, inputs), directions, strict=True))
    torch.testing.assert_close(forward, reverse)


def test_four_ways_to_a_hessian():
    """Forward and reverse nested in each order agree, for F, ε, weight and exponent at once."""
    f = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).sin()
    p = torch.tensor(0.7, dtype=torch.float64)

    def pooled(p):
        weight = p + torch.arange(3, dtype=torch.float64)
        c = second_order_pool(f * p, eps=p, weight=weight, function="power", exponent=p)
        return (c.square() + matrix_power(c + torch.eye(4, dtype=torch.float64), p)).sum()

    reference = hessian(pooled)(p)
    for way in (jacrev(jacrev(pooled)), jacfwd(jacfwd(pooled)), jacrev(jacfwd(pooled))):
        torch.testing.assert_close(way(p), reference)


@pytest.mark.parametrize("layer", [lambda a: eigh(a)[0].sum(), lambda a: svd(a)[1].sum()], ids=["eigh", "svd"])
def test_forward_over_forward_through_a_decomposition_is_refused(layer):
    """torch would return zero without a word."""
    a = torch.diag(torch.tensor([1.0, 2.0], dtype=torch.float64))
    with pytest.raises(OrderError, match="forward mode"):
        jacfwd(jacfwd(layer))(a)
    reverse = hessian(layer)(a)
    assert reverse.isfinite().all()


def test_vmap_over_the_parameter_alone():
    f = torch.linspace(0, 1, 12, dtype=torch.float64).reshape(3, 4)
    eps = torch.tensor([0.1, 0.2], dtype=torch.float64)
    mapped = vmap(lambda e: second_order_pool(f, eps=e))(eps)
    torch.testing.assert_close(mapped, torch.stack([second_order_pool(f, eps=float(e)) for e in eps]))
