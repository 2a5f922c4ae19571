"""Half precision, autocast and the precision argument."""

import functools

import pytest
import torch

import matbackprop as mb
from helpers.matrices import relu_features, symmetric
from matbackprop.errors import DtypeError

LABELS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2]).expand(2, 9)


def _cut(objective, f, **options):
    return objective(f, LABELS, num_labels=3, **options)


OPERATORS = {
    "matrix_log": (mb.matrix_log, lambda: symmetric("separated", 2)),
    "matrix_sqrt": (mb.matrix_sqrt, lambda: symmetric("separated", 2)),
    "matrix_power": (lambda a, **kw: mb.matrix_power(a, 0.3, **kw), lambda: symmetric("separated", 2)),
    "pool_thin": (mb.second_order_pool, lambda: relu_features(6, 9, 2)),
    "pool_primal": (mb.second_order_pool, lambda: relu_features(9, 6, 2)),
    "eigh": (lambda a, **kw: mb.eigh(a, **kw)[0], lambda: symmetric("separated", 2)),
    "svd": (lambda a, **kw: mb.svd(a, **kw)[1], lambda: relu_features(6, 9, 2)),
    "pool_centered": (
        lambda f, **kw: mb.second_order_pool(f, center=True, weight=torch.linspace(0, 1, 9).expand(2, 9), **kw),
        lambda: relu_features(9, 6, 2),
    ),
    "normalized_cut_j1": (functools.partial(_cut, mb.normalized_cut_j1), lambda: relu_features(9, 4, 2)),
    "normalized_cut_j2": (functools.partial(_cut, mb.normalized_cut_j2), lambda: relu_features(9, 4, 2)),
    "normalized_cut_soft": (functools.partial(_cut, mb.normalized_cut_soft), lambda: relu_features(9, 4, 2)),
    "linear_solve": (
        lambda a, **kw: mb.linear_solve(a, torch.ones(2, 4, 1, dtype=a.dtype), **kw),
        lambda: symmetric("separated", 2),
    ),
    "projector": (mb.projector, lambda: relu_features(9, 4, 2)),
    "spectral_projector": (lambda a, **kw: mb.spectral_projector(a, rank=2, **kw), lambda: symmetric("separated", 2)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", OPERATORS)
def test_low_precision_is_rounded_once(name, dtype):
    """The result is the float64 result for the same input, rounded to the input's dtype; the gradient too."""
    operator, make = OPERATORS[name]
    low = make().to(dtype).requires_grad_()
    high = low.detach().double().requires_grad_()
    out, expected = operator(low), operator(high)
    assert out.dtype == dtype
    assert torch.equal(out, expected.to(dtype))
    out.sum().backward()
    expected.sum().backward()
    assert low.grad.dtype == dtype
    torch.testing.assert_close(low.grad, high.grad.to(dtype), rtol=torch.finfo(dtype).eps * 4, atol=1e-5)


# Products outside of the operators are left to autocast; sums of entries are not.
OF_VECTORS = {
    "eigh": (lambda a, **kw: mb.eigh(a, **kw)[1][..., :2].square(), lambda: symmetric("separated", 2)),
    "svd": (lambda a, **kw: mb.svd(a, **kw)[2].square(), lambda: relu_features(6, 9, 2)),
}


def _all_derivatives(operator, x):
    """The value, the gradient, the gradient of the gradient, and the derivative along a direction."""
    single = functools.partial(operator, precision=torch.float32)
    out = single(x)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(grad.sin().sum(), x)
    _, along = torch.func.jvp(single, (x.detach(),), (x.detach().cos(),))
    return out, grad, again, along


@pytest.mark.parametrize(
    ("operator", "make"),
    [
        pytest.param(*case, id=name)
        for name, case in [*OPERATORS.items(), *((f"vectors of {n}", c) for n, c in OF_VECTORS.items())]
    ],
)
def test_autocast_does_not_reach_inside(operator, make):
    """In float32, for autocast leaves float64 alone; with every derivative taken inside it."""
    x = make().float().requires_grad_()
    expected = _all_derivatives(operator, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = _all_derivatives(operator, x)
        (plain,) = torch.autograd.grad(operator(x, precision=torch.float32).square().sum(), x)
    assert all(out.dtype == torch.float32 for out in inside)
    assert all(torch.equal(one, other) for one, other in zip(inside, expected, strict=True))
    assert torch.equal(plain, torch.autograd.grad(operator(x, precision=torch.float32).square().sum(), x)[0])


def test_features_of_an_autocast_layer_are_taken():
    layer = torch.nn.Linear(4, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        c = mb.second_order_pool(layer(torch.ones(3, 4)))
    assert c.dtype == torch.bfloat16
    c.float().sum().backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("name", OPERATORS)
def test_precision(name):
    operator, make = OPERATORS[name]
    x = make()
    default = operator(x)
    assert torch.equal(default, operator(x, precision=torch.float64))
    single = operator(x, precision=torch.float32)
    assert single.dtype == torch.float64
    assert not torch.equal(single, default)
    torch.testing.assert_close(single, default, rtol=1e-2, atol=1e-2)
    with pytest.raises(DtypeError, match="precision must be"):
        operator(x, precision=torch.bfloat16)
