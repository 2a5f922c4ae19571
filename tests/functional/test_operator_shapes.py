"""Leading dimensions, empty inputs, the meta device and determinism."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import matbackprop as mb
from helpers.matrices import relu_features, symmetric
from helpers.operators import CASES, case_id, loss, outputs

OF_MATRICES = {
    "matrix_log": lambda a: (mb.matrix_log(a),),
    "matrix_power": lambda a: (mb.matrix_power(a, torch.tensor(0.3)),),
    "pool": lambda a: (mb.second_order_pool(a),),
    "pool_centered": lambda a: (mb.second_order_pool(a, center=True),),
    "pool_svd": lambda a: (mb.second_order_pool(a, method="svd"),),
    "pool_eig": lambda a: (mb.second_order_pool(a, method="eig"),),
    "eigh": mb.eigh,
    "svd": mb.svd,
    "svd_full": lambda a: mb.svd(a, True),
    "vectorize": lambda a: (mb.vectorize_symmetric(a),),
}


@pytest.mark.parametrize("name", OF_MATRICES)
def test_any_leading_dimensions(name):
    a = symmetric("separated", 2, 3)
    for out, flat in zip(OF_MATRICES[name](a), OF_MATRICES[name](a.flatten(0, 1)), strict=True):
        assert out.shape[:2] == (2, 3)
        torch.testing.assert_close(out.flatten(0, 1), flat)
    single = OF_MATRICES[name](a[1, 2])
    for one, all_ in zip(single, OF_MATRICES[name](a), strict=True):
        torch.testing.assert_close(one, all_[1, 2])


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 3, 3), (2, 0, 0)])
@pytest.mark.parametrize("name", OF_MATRICES)
def test_empty_batches_and_matrices(name, shape):
    a = torch.zeros(shape, requires_grad=True)
    outs = OF_MATRICES[name](a)
    sum(out.sum() for out in outs).backward()
    assert a.grad.shape == shape
    assert all(out.shape[: len(shape) - 2] == shape[:-2] for out in outs)


@pytest.mark.parametrize("method", ["fused", "svd", "eig"])
def test_a_map_without_locations_pools_to_the_value_at_eps(method):
    f = torch.zeros(2, 0, 3, requires_grad=True)
    c = mb.second_order_pool(f, eps=0.5, method=method, center=True)
    torch.testing.assert_close(c, torch.eye(3).mul(torch.tensor(0.5).log()).expand(2, 3, 3))
    c.sum().backward()
    assert mb.second_order_pool(torch.zeros(2, 3, 0)).shape == (2, 0, 0)
    assert mb.second_order_pool(torch.ones(2, 3, 4), weight=torch.ones(2, 0, 3)).shape == (2, 0, 4, 4)


@pytest.mark.parametrize("shape", [(2, 0, 3), (2, 3, 0), (0, 3), (3, 0)])
@pytest.mark.parametrize("name", ["pool", "pool_svd", "pool_eig", "svd", "svd_full"])
def test_empty_rectangles(name, shape):
    a = torch.zeros(shape, requires_grad=True)
    sum(out.sum() for out in OF_MATRICES[name](a)).backward()
    assert a.grad.shape == shape


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3), (0, 0)])
@pytest.mark.parametrize("full", [False, True])
def test_derivatives_of_the_svd_of_nothing(shape, full):
    x = torch.zeros(shape, dtype=torch.float64)
    outs, tangents = torch.func.jvp(lambda a: tuple(mb.svd(a, full)), (x,), (x,))
    assert [t.shape for t in tangents] == [o.shape for o in outs]
    x = x.requires_grad_()
    outs = mb.svd(x, full, ties="drop")
    batched = [torch.ones(5, *o.shape, dtype=torch.float64) for o in outs]
    (grad,) = torch.autograd.grad(outs, x, batched, is_grads_batched=True)
    assert grad.shape == (5, *shape)


def test_kept_indices_do_not_cross_modes():
    """A triangle made in inference mode or for fake tensors must not serve a training step of the same order."""
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


@pytest.mark.parametrize("name", OF_MATRICES)
def test_meta(name):
    a = torch.empty(2, 4, 4, device="meta")
    real = OF_MATRICES[name](symmetric("separated", 2).float())
    for out, expected in zip(OF_MATRICES[name](a), real, strict=True):
        assert out.device.type == "meta"
        assert (out.shape, out.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("name", OF_MATRICES)
def test_fake_tensors(name):
    """What torch.export and shape propagation outside of torch.compile use."""
    with FakeTensorMode():
        a = torch.ones(2, 4, 4, requires_grad=True)
        outs = OF_MATRICES[name](a)
        sum(out.sum() for out in outs).backward()
    assert all(type(out) is FakeTensor for out in outs)
    assert a.grad.shape == (2, 4, 4)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_deterministic(case):
    """Bit for bit the same twice, gradients too, and with torch's deterministic mode on."""
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            inputs = [t.requires_grad_() for t in case.inputs("separated")]
            results.append((*outputs(case, *inputs), *torch.autograd.grad(loss(case, *inputs), inputs)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_inputs_are_left_alone():
    """No operator writes into what it was given, also where it is not contiguous."""
    f = relu_features(9, 5, 2).mT
    before = f.clone()
    w = torch.ones(2, 5, dtype=torch.float64)
    expected = mb.second_order_pool(f.contiguous(), weight=w)
    torch.testing.assert_close(mb.second_order_pool(f, weight=w), expected)
    assert torch.equal(f, before)
    assert torch.equal(w, torch.ones_like(w))
