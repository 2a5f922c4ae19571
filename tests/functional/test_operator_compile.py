"""torch.compile(fullgraph=True), mostly with the backend that checks tracing and autograd without generating code."""

import pytest
import torch

from helpers.operators import CASES, case_id, loss
from matbackprop import nn, second_order_pool

_TRACED = {
    "matrix_log",
    "matrix_power",
    "own_derivative",
    "pool_thin_log",
    "pool_primal_log",
    "pool_regions_centered",
    "eigh",
    "svd_tall",
    "svd_full_wide",
    "vectorize",
    "unvectorize",
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("case", [case for case in CASES if case.name in _TRACED], ids=case_id)
def test_fullgraph_equals_eager(case):
    inputs = [t.requires_grad_() for t in case.inputs("separated")]
    compiled = torch.compile(lambda *args: loss(case, *args), fullgraph=True, backend="aot_eager")
    value, expected = compiled(*inputs), loss(case, *inputs)
    torch.testing.assert_close(value, expected)
    for one, other in zip(torch.autograd.grad(value, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_a_compiled_training_step_with_inductor():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.ReLU(), nn.SecondOrderPool(learn_eps=True, vectorize=True)
    )
    x = torch.randn(2, 4, 3)
    expected = model(x)
    (grad,) = torch.autograd.grad(expected.square().sum(), model[0].weight)
    compiled = torch.compile(model, fullgraph=True)
    out = compiled(x)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, grad)


def test_a_module_can_be_exported():
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), nn.SecondOrderPool(), nn.MatrixFunction("exp", check=True))
    x = torch.linspace(-1, 1, 24).reshape(2, 4, 3)
    exported = torch.export.export(module, (x,)).module()
    torch.testing.assert_close(exported(x), module(x))


def test_checks_do_not_run_while_compiling():
    f = torch.full((2, 3), float("nan"))
    out = torch.compile(lambda x: second_order_pool(x, check=True), fullgraph=True, backend="aot_eager")(f)
    assert out.isnan().any()
