"""vmap, functional derivatives in every nesting, and batched gradients."""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from helpers.matrices import symmetric
from helpers.operators import SPECTRA_OF_CASES, TRACED, case_id
from matbackprop import eigh, matrix_log, matrix_power, second_order_pool, svd
from matbackprop.errors import OrderError


@pytest.mark.quick(40)
@pytest.mark.parametrize("case", TRACED, ids=case_id)
def test_vmap_equals_the_batch(case, device, dtype):
    inputs = case.inputs("separated", device, dtype)
    for one, other in zip(vmap(case)(*inputs), case(*inputs), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.quick(40)
@pytest.mark.parametrize("case", TRACED, ids=case_id)
def test_per_sample_gradients(case, device, dtype):
    inputs = case.inputs("separated", device, dtype)
    mapped = vmap(grad(case.loss, argnums=tuple(range(len(inputs)))))(*inputs)
    for one, other in zip(mapped, case.gradients(*inputs), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.quick(40)
@pytest.mark.parametrize("case", TRACED, ids=case_id)
def test_a_batch_of_inputs_with_one_constant_tangent(case):
    inputs = case.inputs("separated")
    tangents = tuple(t[0].cos() for t in inputs)
    mapped = vmap(lambda *x: jvp(case.loss, x, tangents)[1])(*inputs)
    expected = [jvp(case.loss, tuple(t[i] for t in inputs), tangents)[1] for i in range(2)]
    torch.testing.assert_close(mapped, torch.stack(expected))


@pytest.mark.quick(40)
@pytest.mark.parametrize(("case", "spectrum"), SPECTRA_OF_CASES, ids=case_id)
def test_forward_mode_equals_reverse_mode(case, spectrum, device):
    inputs = case.inputs(spectrum, device)
    directions = tuple((torch.linspace(-1, 1, t.numel()).reshape(t.shape).to(t) + t.cos()) for t in inputs)
    _, forward = jvp(case.loss, inputs, directions)
    reverse = sum((g.conj() * d).real.sum() for g, d in zip(case.gradients(*inputs), directions, strict=True))
    torch.testing.assert_close(forward, reverse)


@pytest.mark.quick(40)
@pytest.mark.parametrize("case", [case for case in TRACED if case.orders > 1], ids=case_id)
def test_autograd_through_a_pullback(case):
    """torch.func.vjp inside, ordinary autograd outside: the second derivative of autograd alone."""
    inputs = tuple(t[:1].requires_grad_() for t in case.inputs("separated"))
    directions = [torch.linspace(-1, 1, t.numel()).reshape(t.shape).to(t) for t in inputs]
    value, pull = vjp(case.loss, *inputs)
    inside = pull(torch.ones_like(value))
    alone = torch.autograd.grad(case.loss(*inputs), inputs, create_graph=True)
    totals = [
        sum((g * d.conj()).real.sum() for g, d in zip(grads, directions, strict=True)) for grads in (inside, alone)
    ]
    if not totals[1].requires_grad:  # linear
        return
    one, other = (torch.autograd.grad(total, inputs, allow_unused=True) for total in totals)
    for x, y in zip(one, other, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.quick(8)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.quick(40)
@pytest.mark.parametrize("case", TRACED, ids=case_id)
def test_linearization_equals_forward_mode(case):
    """torch.func.linearize records the operations of forward mode, and values cannot be read."""
    inputs = case.inputs("separated")
    directions = tuple(torch.linspace(-1, 1, t.numel()).reshape(t.shape).to(t) for t in inputs)
    _, expected = jvp(case.loss, inputs, directions)
    _, push = linearize(case.loss, *inputs)
    torch.testing.assert_close(push(*directions), expected)


@pytest.mark.parametrize("layer", [lambda a: eigh(a).eigenvectors ** 2, lambda a: svd(a).U ** 2])
def test_batched_pullbacks_of_gradients(layer):
    """The saved tensors wrap those of transformations that have ended."""
    a = torch.stack([symmetric("separated", seed=seed) for seed in range(2)])
    gradient = grad(lambda a: (layer(a) * a.detach().cos()).sum())

    def pulled(a):
        return vjp(gradient, a)[1](a.sin())[0]

    torch.testing.assert_close(vmap(pulled)(a), torch.stack([pulled(x) for x in a]))


def test_hessians_by_nested_modes_agree():
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
def test_forward_over_forward_through_a_decomposition_is_rejected(layer):
    """torch would silently return zero."""
    a = torch.diag(torch.tensor([1.0, 2.0], dtype=torch.float64))
    with pytest.raises(OrderError, match="forward mode"):
        jacfwd(jacfwd(layer))(a)
    reverse = hessian(layer)(a)
    assert reverse.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (3, 3)])
def test_forward_mode_of_the_svd_in_every_dtype_and_shape(dtype, shape):
    """Regression: outputs that are views of solver memory failed in float32."""
    generator = torch.Generator().manual_seed(0)
    a, v = (torch.rand(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    (_, s, _), (du, ds, _) = jvp(svd, (a.to(dtype),), (v.to(dtype),))
    with torch.autograd.forward_ad.dual_level():
        dual = svd(torch.autograd.forward_ad.make_dual(a.to(dtype), v.to(dtype)))
        plain = torch.autograd.forward_ad.unpack_dual(dual[0][..., :1]).tangent
    torch.testing.assert_close(plain, du[..., :1])
    step = 1e-6
    slope = (torch.linalg.svdvals(a + step * v) - torch.linalg.svdvals(a - step * v)) / (2 * step)
    torch.testing.assert_close(ds, slope.to(dtype), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(s, torch.linalg.svdvals(a).to(dtype))


def test_vmap_over_the_parameter_only():
    f = torch.linspace(0, 1, 12, dtype=torch.float64).reshape(3, 4)
    eps = torch.tensor([0.1, 0.2], dtype=torch.float64)
    mapped = vmap(lambda e: second_order_pool(f, eps=e))(eps)
    torch.testing.assert_close(mapped, torch.stack([second_order_pool(f, eps=float(e)) for e in eps]))


def test_second_derivatives_are_linear_in_their_directions_and_have_no_third():
    a, v, w = (
        symmetric(values, seed=i) for i, values in enumerate([(0.5, 1.2, 2.1), (-1.0, 0.3, 1.0), (0.2, 0.7, 1.5)])
    )

    def of_log(a):
        return matrix_log(a).square().sum()

    def along(a, v):
        return jvp(grad(of_log), (a,), (v,))[1]

    by_direction = jvp(lambda v: along(a, v), (v,), (w,))[1]
    torch.testing.assert_close(by_direction, along(a, w))
    with pytest.raises(OrderError, match="third derivative"):
        jvp(lambda a: along(a, v), (a,), (w,))
