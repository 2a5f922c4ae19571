"""On a GPU (--device cuda): results equal those of the CPU, no synchronization, capture in a CUDA graph."""

import pytest
import torch

from helpers.matrices import generator, relu_features, symmetric
from helpers.operators import CASES, case_id
from matbackprop import matrix_log, nn, normalized_cut_j2, normalized_cut_soft, second_order_pool
from matbackprop.errors import ShapeError

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_equals_the_cpu(case, device):
    there, here = case.inputs("separated", device), case.inputs("separated")
    for one, other in zip(case(*there), case(*here), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-9, atol=1e-10)
    for one, other in zip(case.gradients(*there), case.gradients(*here), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "d"), [(8, 8), (90, 70), (36, 64), (80, 96)])
@pytest.mark.parametrize("outlier", ["row", "column"])
def test_small_directions_next_to_outliers_are_accurate(m, d, outlier, dtype, device):
    f = torch.randn(3, m, d, generator=generator(1), dtype=dtype)
    (f[:2] if outlier == "row" else f[:2].mT)[:, 0] *= 1e7
    g = torch.randn(3, d, d, generator=generator(2), dtype=dtype)
    here, there = f.clone().requires_grad_(), f.to(device).requires_grad_()
    for x in (here, there):
        second_order_pool(x).backward(g.to(x.device))
    for one, other in ((second_order_pool(there), second_order_pool(here)), (there.grad, here.grad)):
        error = (one.cpu() - other).norm(dim=(-2, -1)) / other.norm(dim=(-2, -1))
        assert error.max() < (1e-11 if dtype == torch.float64 else 2e-7)


STEPS = {
    "pool 36x64": lambda device: (relu_features(36, 64, 4), second_order_pool),
    "pool 80x96": lambda device: (relu_features(80, 96, 4), second_order_pool),
    "pool 49x16": lambda device: (relu_features(49, 16, 4), second_order_pool),
    "pool of regions": lambda device: (
        relu_features(20, 24, 2),
        lambda f: second_order_pool(f, weight=torch.ones(2, 3, 20, device=device), center=True, function="sqrt"),
    ),
    "matrix_log": lambda device: (symmetric("repeated", 4), matrix_log),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", STEPS)
def test_no_call_synchronizes(name, dtype, device):
    f, operator = STEPS[name](device)
    f = f.to(device, dtype).requires_grad_()
    torch.autograd.grad(operator(f).sum(), f)  # the first call compiles kernels and creates handles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (grad,) = torch.autograd.grad(operator(f).sum(), f)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert grad.isfinite().all()


def _training_step(m, device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 96), torch.nn.ReLU(), nn.SecondOrderPool(vectorize=True)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(4, m, 8, device=device)

    def step():
        optimizer.zero_grad(set_to_none=True)
        value = model(x).square().mean()
        value.backward()
        optimizer.step()
        return value.detach()

    return step


@pytest.mark.parametrize("m", [36, 80])
def test_a_training_step_in_a_cuda_graph(m, device):
    eager, step = _training_step(m, device), _training_step(m, device)
    expected = [float(eager()) for _ in range(7)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = step()
    losses = []
    for _ in range(4):
        graph.replay()
        losses.append(float(value))
    assert losses == pytest.approx(expected[3:], rel=1e-4)
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


def test_eps_on_the_cpu_is_moved_and_a_wrong_shape_is_rejected(device):
    f = relu_features(6, 9, 2).to(device, torch.float32)
    expected = second_order_pool(f, eps=1e-3)
    torch.testing.assert_close(second_order_pool(f, eps=torch.tensor(1e-3)), expected)
    torch.testing.assert_close(second_order_pool(f, eps=torch.full((2,), 1e-3)), expected)
    for eps in (torch.ones(3), torch.ones(3, device=device)):
        with pytest.raises(ShapeError, match="eps"):
            second_order_pool(f, eps=eps)
    torch.cuda.synchronize()


LABELS = torch.tensor([[0, 0, 1, 1, 2, -1], [0, 1, 1, 1, 1, 0]])
REGIONS = torch.stack((LABELS == 0, LABELS > 0), -2)
KERNELS = {
    "thin pool": lambda f: second_order_pool(f),
    "primal pool": lambda f: second_order_pool(f[..., :3]),
    "centered pool of regions": lambda f: second_order_pool(f, weight=REGIONS.to(f.device), center=True),
    "J2": lambda f: normalized_cut_j2(f[..., :4], LABELS.to(f.device), num_labels=3),
    "soft": lambda f: normalized_cut_soft(f[..., :4], LABELS.to(f.device), num_labels=3),
    "soft with few rows": lambda f: normalized_cut_soft(f, LABELS.to(f.device), num_labels=3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KERNELS)
def test_batched_gradients(name, dtype, device):
    f = relu_features(6, 9, 2).to(device, dtype).requires_grad_()
    value = KERNELS[name](f)
    g = torch.randn(3, *value.shape, generator=generator(1), dtype=dtype).to(device)
    (batched,) = torch.autograd.grad(value, f, g, is_grads_batched=True, retain_graph=True)
    for one, several in zip(g, batched, strict=True):
        (alone,) = torch.autograd.grad(value, f, one, retain_graph=True)
        error = (alone - several).norm() / alone.norm()
        assert error < (1e-9 if dtype == torch.float64 else 1e-6)
    jacobian = torch.autograd.functional.jacobian(KERNELS[name], f.detach(), vectorize=True)
    product = g[0].flatten() @ jacobian.reshape(g[0].numel(), -1)
    torch.testing.assert_close(product, batched[0].flatten(), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", KERNELS)
def test_features_on_a_device_that_is_not_current(name):
    f = relu_features(6, 9, 2).float()
    results = []
    for index in (1, 0, 1):
        x = f.to(f"cuda:{index}").requires_grad_()
        value = KERNELS[name](x)
        (grad,) = torch.autograd.grad(value.sum(), x)
        results.append((value.detach().cpu(), grad.cpu()))
        assert torch.cuda.current_device() == 0
    for one in results[1:]:
        for a, b in zip(one, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
