"""Kernels and their fallbacks: which tensors a kernel takes, and which of the two computes a derivative."""

from typing import NamedTuple

import pytest
import torch

from matbackprop.cuda import fallback
from matbackprop.cuda.fallback import call_kernels, is_plain, kernels_may_take


@pytest.fixture
def calls(monkeypatch):
    """Treat plain CPU tensors as CUDA tensors, and record the names of calls."""
    monkeypatch.setattr(fallback, "kernels_may_take", lambda *tensors, **_: is_plain(*tensors))
    return []


class Cube(NamedTuple):
    """x³ with a kernel that needs a data pointer, and a fallback that does not."""

    calls: list

    def forward(self, x):
        self.calls.append("forward kernel")
        assert x.data_ptr()
        return x**3, (x**2,)

    def gradient(self, g, x, square):
        self.calls.append("gradient kernel")
        assert g.data_ptr() and g.is_contiguous()
        return 3 * square * g

    def general(self, x):
        self.calls.append("general")
        return x**3


def cube(calls):
    return lambda x: call_kernels(x, Cube(calls))


def test_an_ordinary_step_uses_the_kernels_alone(calls):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (grad,) = torch.autograd.grad(cube(calls)(x), x, torch.tensor(5.0).expand(2))
    assert grad.tolist() == [15.0, 60.0]
    assert calls == ["forward kernel", "gradient kernel"]


def test_batched_gradients_take_the_fallback(calls):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = cube(calls)(x)
    (grads,) = torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    assert grads.tolist() == [[3.0, 0.0], [0.0, 12.0]]
    vectorized = torch.autograd.functional.jacobian(cube(calls), x.detach(), vectorize=True)
    assert torch.equal(vectorized, grads)
    assert "gradient kernel" not in calls


def test_second_derivatives_take_the_fallback(calls):
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(cube(calls), x, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(cube(calls), x, check_batched_grad=True)


def test_a_constant_inside_a_transformation_takes_the_fallback(calls):
    x = torch.tensor([1.0, 2.0])
    assert torch.func.grad(lambda w: (w * cube(calls)(x)).sum())(torch.ones(2)).tolist() == [1.0, 8.0]
    assert calls == ["general"]


def test_kernels_do_not_accept_cpu_tensors():
    assert not kernels_may_take(torch.ones(3))


def test_transformed_and_fake_tensors_are_not_plain():
    seen = []

    def look(x):
        seen.append(is_plain(x))
        return x * 2

    torch.func.vmap(look)(torch.ones(2))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(2))
    torch.func.jvp(look, (torch.ones(2),), (torch.ones(2),))
    assert seen == [False, False, False]
    assert not is_plain(torch.ones(2), torch.ones(2, device="meta"))
    assert is_plain(torch.ones(2), torch.nn.Parameter(torch.ones(2)))
