"""Leading dimensions, empty inputs, the meta device and determinism."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import matbackprop as mb
from helpers.operators import CASES, OF_ONE_INPUT, case_id

ANY_SHAPE = ("pool", "svd", "projector", "pinv", "polar", "low_rank", "whiten", "affinity")
OF_ANY_SHAPE = [case for case in OF_ONE_INPUT if case.name.startswith(ANY_SHAPE)]


def _call(case, a, **options):
    out = case.call(a, **options)
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_any_leading_dimensions(case, device, dtype):
    """Two leading dimensions, and none."""
    inputs = case.inputs("separated", device, dtype)
    stacked = case(*(torch.stack([t, t.flip(0), t]) for t in inputs))
    for out, flat, single in zip(stacked, case(*inputs), case(*(t[1] for t in inputs)), strict=True):
        assert out.shape[:2] == (3, 2)
        for entry, expected in ((out[0], flat), (out[1], flat.flip(0)), (out[2, 1], single)):
            torch.testing.assert_close(entry, expected)


@pytest.mark.quick(40)
@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 3, 3)])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_empty_batches(case, shape, device):
    inputs = tuple(t[:0].reshape(*shape[:-2], *t.shape[1:]).requires_grad_() for t in case.inputs("separated", device))
    outs = case(*inputs)
    assert all(out.shape[: len(shape) - 2] == shape[:-2] for out in outs)
    grads = torch.autograd.grad(sum(out.real.sum() for out in outs), inputs)
    assert [g.shape for g in grads] == [t.shape for t in inputs]


@pytest.mark.parametrize("shape", [(2, 0, 3), (2, 3, 0), (0, 3), (3, 0), (2, 0, 0)])
@pytest.mark.parametrize("case", OF_ANY_SHAPE, ids=case_id)
def test_empty_matrices(case, shape, device):
    a = torch.zeros(shape, device=device, requires_grad=True)
    sum(out.sum() for out in _call(case, a)).backward()
    assert a.grad.shape == shape


@pytest.mark.parametrize("method", ["fused", "svd", "eig"])
def test_empty_map_pools_to_the_function_of_eps(method):
    f = torch.zeros(2, 0, 3, requires_grad=True)
    c = mb.second_order_pool(f, eps=0.5, method=method, center=True)
    torch.testing.assert_close(c, torch.eye(3).mul(torch.tensor(0.5).log()).expand(2, 3, 3))
    c.sum().backward()
    assert mb.second_order_pool(torch.zeros(2, 3, 0)).shape == (2, 0, 0)
    assert mb.second_order_pool(torch.ones(2, 3, 4), weight=torch.ones(2, 0, 3)).shape == (2, 0, 4, 4)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3), (0, 0)])
@pytest.mark.parametrize("full", [False, True])
def test_derivatives_of_the_svd_of_empty_matrices(shape, full):
    x = torch.zeros(shape, dtype=torch.float64)
    outs, tangents = torch.func.jvp(lambda a: tuple(mb.svd(a, full)), (x,), (x,))
    assert [t.shape for t in tangents] == [o.shape for o in outs]
    x = x.requires_grad_()
    outs = mb.svd(x, full, ties="drop")
    batched = [torch.ones(5, *o.shape, dtype=torch.float64) for o in outs]
    (grad,) = torch.autograd.grad(outs, x, batched, is_grads_batched=True)
    assert grad.shape == (5, *shape)


def test_cached_indices_are_not_shared_between_modes():
    """Indices cached in inference mode or for fake tensors must not be used in a training step."""
    order = 17
    with torch.inference_mode():
        mb.vectorize_symmetric(torch.ones(order, order))
    with FakeTensorMode():
        mb.vectorize_symmetric(torch.ones(order, order))
    a = torch.ones(order, order, requires_grad=True)
    v = mb.vectorize_symmetric(a)
    assert type(v) is torch.Tensor
    v.square().sum().backward()
    torch.testing.assert_close(a.grad, torch.triu(torch.full((order, order), 4.0)) - 2 * torch.eye(order))
    with FakeTensorMode():
        assert type(mb.vectorize_symmetric(torch.ones(order, order))) is FakeTensor


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_meta(case):
    inputs = case.inputs("separated", dtype=torch.float32)
    outs = case(*(t.to("meta") for t in inputs))
    for out, expected in zip(outs, case(*inputs), strict=True):
        assert out.device.type == "meta"
        assert (out.shape, out.dtype) == (expected.shape, expected.dtype)


@pytest.mark.quick(40)
@pytest.mark.parametrize("case", [case for case in CASES if case.traced], ids=case_id)
def test_fake_tensors(case):
    """Fake tensors as in torch.export and shape propagation."""
    shapes = [(t.shape, t.dtype) for t in case.inputs("separated", dtype=torch.float32)]
    with FakeTensorMode():
        inputs = tuple(torch.ones(shape, dtype=dtype, requires_grad=True) for shape, dtype in shapes)
        outs = case(*inputs)
        grads = torch.autograd.grad(sum(out.real.sum() for out in outs), inputs)
    assert all(type(out) is FakeTensor for out in outs)
    assert [(g.shape, g.dtype) for g in grads] == shapes


@pytest.mark.quick(40)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_deterministic(case, dtype):
    """Values and gradients are bitwise reproducible, also in torch's deterministic mode."""
    inputs = case.inputs("separated", dtype=dtype)
    torch.use_deterministic_algorithms(True)
    try:
        results = [(*case(*inputs), *case.gradients(*inputs)) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.quick(40)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_operators_do_not_write_into_their_inputs(case, device):
    inputs = case.inputs("separated", device)
    strided = tuple(t.mT.contiguous().mT if t.ndim > 1 else t for t in inputs)
    before = [t.clone() for t in inputs]
    for given in (inputs, strided):
        case.gradients(*given)
        case(*given)
        assert all(torch.equal(one, other) for one, other in zip(given, before, strict=True))
    torch.testing.assert_close(case(*strided), case(*inputs))
