"""Laws that hold for every input, tested with Hypothesis."""

import hypothesis.extra.numpy as hnp
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import matbackprop as mb
from helpers.matrices import orthogonal

law = settings(deadline=None, max_examples=30, derandomize=True)
eigenvalues = hnp.arrays(np.float64, st.integers(1, 5), elements=st.floats(0.05, 20))
seeds = st.integers(0, 1000)
functions = st.sampled_from(["log", "sqrt", "inv_sqrt", "exp", "inverse"])


def features():
    shapes = st.tuples(st.integers(1, 6), st.integers(1, 6))
    return shapes.flatmap(lambda shape: hnp.arrays(np.float64, shape, elements=st.floats(-3, 3, width=32)))


def _symmetric(values, seed):
    q = orthogonal(len(values), seed=seed)
    a = (q * torch.from_numpy(values)) @ q.mT
    return 0.5 * (a + a.mT)


@law
@given(eigenvalues, seeds, functions)
def test_functions_are_orthogonally_equivariant(values, seed, function):
    """f(QAQᵀ) = Q f(A) Qᵀ."""
    a, q = _symmetric(values, seed), orthogonal(len(values), seed=seed + 1)
    turned = q @ a @ q.mT
    left = mb.matrix_function(0.5 * (turned + turned.mT), function)
    right = q @ mb.matrix_function(a, function) @ q.mT
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9 * float(right.abs().max()))


@law
@given(eigenvalues, seeds)
def test_exp_and_log_are_inverse(values, seed):
    a = _symmetric(values, seed)
    torch.testing.assert_close(mb.matrix_exp(mb.matrix_log(a)), a, rtol=1e-10, atol=1e-10)
    b = _symmetric(np.log(values), seed)
    torch.testing.assert_close(mb.matrix_log(mb.matrix_exp(b)), b, rtol=1e-9, atol=1e-9)


@law
@given(eigenvalues, seeds, st.floats(-2, 2), st.floats(-2, 2))
def test_powers_add_up(values, seed, p, q):
    a = _symmetric(values, seed)
    power = mb.matrix_power(a, torch.tensor(p)) @ mb.matrix_power(a, torch.tensor(q))
    expected = mb.matrix_power(a, torch.tensor(p, dtype=torch.float32) + torch.tensor(q, dtype=torch.float32))
    torch.testing.assert_close(power, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@law
@given(eigenvalues, seeds)
def test_square_roots(values, seed):
    a = _symmetric(values, seed)
    root, inverse_root = mb.matrix_sqrt(a), mb.matrix_inv_sqrt(a)
    torch.testing.assert_close(root @ root, a)
    torch.testing.assert_close(inverse_root @ a @ inverse_root, torch.eye(len(values), dtype=torch.float64))
    torch.testing.assert_close(mb.matrix_inverse(a), inverse_root @ inverse_root)


@law
@given(features(), seeds, st.sampled_from(["log", "sqrt", "inverse"]))
def test_pooling_is_equivariant_in_features_and_invariant_in_pixels(f, seed, function):
    f = torch.from_numpy(f)
    m, d = f.shape
    q, r = orthogonal(d, seed=seed), orthogonal(m, seed=seed + 1)
    order = torch.randperm(m, generator=torch.Generator().manual_seed(seed))

    def pool(f):
        return mb.second_order_pool(f, eps=0.1, function=function)

    c = pool(f)
    torch.testing.assert_close(pool(f[order]), c)
    torch.testing.assert_close(pool(f @ q), q.mT @ c @ q, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(pool(r @ f), c, rtol=1e-8, atol=1e-8)


@law
@given(features(), st.integers(1, 3))
def test_repeated_rows_equal_weights(f, times):
    f = torch.from_numpy(f)
    weight = torch.ones(len(f), dtype=torch.float64)
    weight[0] = times
    repeated = torch.cat([f[:1]] * (times - 1) + [f])
    expected = mb.second_order_pool(repeated, eps=0.1)
    torch.testing.assert_close(mb.second_order_pool(f, eps=0.1, weight=weight), expected, rtol=1e-8, atol=1e-8)


@law
@given(features(), st.lists(st.floats(-5, 5), min_size=6, max_size=6))
def test_centered_pooling_is_invariant_to_the_mean(f, shift):
    f = torch.from_numpy(f)
    moved = f + torch.tensor(shift[: f.shape[1]], dtype=torch.float64)
    expected = mb.second_order_pool(f, eps=0.1, center=True)
    torch.testing.assert_close(mb.second_order_pool(moved, eps=0.1, center=True), expected, rtol=1e-7, atol=1e-7)


@law
@given(features())
def test_gradients_are_finite_and_euler_holds(f):
    """log det: ⟨dL/dF, F⟩ = 2 tr(A⁻¹FᵀF) for L = tr log A, also at ties of F."""
    f = torch.from_numpy(f).requires_grad_()
    mb.second_order_pool(f, eps=0.1).diagonal().sum().backward()
    assert f.grad.isfinite().all()
    gram = f.detach().mT @ f.detach()
    expected = 2 * torch.linalg.solve(gram + 0.1 * torch.eye(len(gram), dtype=torch.float64), gram).trace()
    torch.testing.assert_close((f.grad * f.detach()).sum(), expected, rtol=1e-9, atol=1e-9)


@law
@given(features())
def test_svd_and_eigh_agree(f):
    f = torch.from_numpy(f)
    s = mb.svd(f)[1]
    lam = mb.eigh(f.mT @ f)[0].flip(-1)[: len(s)]
    torch.testing.assert_close(s.square(), lam, rtol=1e-9, atol=1e-9)
