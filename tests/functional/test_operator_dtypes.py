"""Half precision, autocast and the precision argument."""

import pytest
import torch

import matbackprop as mb
from helpers.operators import WITH_OPTIONS, case_id, real_parts
from matbackprop.errors import DtypeError

# These compute in the dtype of the inputs before the operator.
_UNROUNDED = ("projector_symmetric", "pinv_deficient")
ROUNDED = [case for case in WITH_OPTIONS if not case.name.endswith(_UNROUNDED)]


def _raw(case, *inputs, **options):
    """The outputs, squared if the sign or phase of a vector is free."""
    if case.takes_symmetric:
        inputs = (0.5 * (inputs[0] + inputs[0].mH), *inputs[1:])
    out = case.call(*inputs, **options)
    return torch.cat([(part * part.conj()).real.flatten() for part in (out if isinstance(out, tuple) else (out,))])


def _wide(t):
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


LOW = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize(
    ("case", "low"), [(c, low) for c in ROUNDED for low in LOW if not c.complex or low is torch.float32], ids=case_id
)
def test_low_precision_results_are_rounded_once(case, low, device):
    """The result is the float64 result for the same input, rounded to the input's dtype; the gradient too."""
    inputs = tuple(t.requires_grad_() for t in case.inputs("separated", device, low))
    wide = tuple(_wide(t.detach()).requires_grad_() for t in inputs)
    outs, expected = case.call(*inputs), case.call(*wide)
    if isinstance(outs, torch.Tensor):
        outs, expected = (outs,), (expected,)
    for out, exact in zip(outs, expected, strict=True):
        assert out.dtype.to_real() == low
        if device.type == "cpu" and not case.name.startswith("svd"):
            assert torch.equal(out, exact.to(out.dtype))
        else:  # float32 kernels add in another order; singular vectors have a sign
            eps = torch.finfo(low).eps
            torch.testing.assert_close(_wide(out).abs(), exact.abs(), rtol=eps, atol=eps)
    # The first output is determined: values, and not vectors, of a decomposition.
    first, exact = (pair[1] if len(pair) == 3 and "svd" in case.name else pair[0] for pair in (outs, expected))
    upstream = torch.ones_like(first)
    grads = torch.autograd.grad(first, inputs, upstream)
    wide_grads = torch.autograd.grad(exact, wide, _wide(upstream))
    for one, other in zip(grads, wide_grads, strict=True):
        assert one.dtype.to_real() == low
        size = float(other.abs().max())
        torch.testing.assert_close(_wide(one), other, rtol=torch.finfo(low).eps, atol=4 * torch.finfo(low).eps * size)


def _value(case, inputs):
    return (_raw(case, *inputs, precision=torch.float32),)


def _all_derivatives(case, inputs):
    """The value, the gradient, the gradient of the gradient, and the derivative along a direction."""

    def single(*inputs):
        return _raw(case, *inputs, precision=torch.float32)

    out = single(*inputs)
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    again = torch.autograd.grad(sum(g.sin().sum() for g in real_parts(grads)), inputs)
    plain = torch.autograd.grad(single(*inputs).square().sum(), inputs)
    points = tuple(t.detach() for t in inputs)
    _, along = torch.func.jvp(single, points, tuple(t.cos() for t in points))
    return out, *grads, *again, *plain, along


@pytest.mark.parametrize("case", [case for case in WITH_OPTIONS if "full" not in case.name], ids=case_id)
def test_autocast_does_not_change_results(case, device):
    """In float32, because autocast ignores float64; derivatives are taken inside autocast.

    For compositions of torch factorizations only the value, because autocast changes their derivatives.
    """
    inputs = tuple(t.requires_grad_() for t in case.inputs("separated", device, torch.float32))
    every = _value if case.composed else _all_derivatives
    expected = every(case, inputs)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = every(case, inputs)
    assert all(out.dtype.to_real() == torch.float32 for out in inside)
    assert all(torch.equal(one, other) for one, other in zip(inside, expected, strict=True))


def test_features_of_an_autocast_layer_are_accepted():
    layer = torch.nn.Linear(4, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        c = mb.second_order_pool(layer(torch.ones(3, 4)))
    assert c.dtype == torch.bfloat16
    c.float().sum().backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("case", WITH_OPTIONS, ids=case_id)
def test_precision(case, device):
    inputs = case.inputs("separated", device)
    default, single = _raw(case, *inputs), _raw(case, *inputs, precision=torch.float32)
    assert torch.equal(default, _raw(case, *inputs, precision=torch.float64))
    assert single.dtype == torch.float64
    assert not torch.equal(single, default)
    if "full" not in case.name:
        torch.testing.assert_close(single, default, rtol=1e-3, atol=1e-3)
    with pytest.raises(DtypeError, match="precision must be"):
        _raw(case, *inputs, precision=torch.bfloat16)
