"""Zero features, zero degrees, absent regions, rank deficiency and low precision give finite, documented results."""

from functools import partial
from pathlib import Path

import mpmath
import pytest
import torch
from torch.autograd import forward_ad

from helpers import truth
from helpers.cuts import OBJECTIVES, dense_value, features, lambda_matrix, regions
from helpers.matrices import orthogonal
from matbackprop import normalized_cut_j1, normalized_cut_j2, normalized_cut_soft

NAMES = list(OBJECTIVES)


def thin(name, *arguments, **keywords):
    return OBJECTIVES[name][0](*arguments, **keywords)


@pytest.mark.parametrize(("name", "expected"), [("j1", 0.0), ("j2", 1.5), ("soft", 1.5)])
def test_zero_features_have_zero_gradient(name, expected):
    f = torch.zeros(10, 3, dtype=torch.float64, requires_grad=True)
    value = thin(name, f, regions(10, k=3))
    value.backward()
    assert value == expected  # no span against k regions; without degrees J1 has no regions either
    assert (f.grad == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_an_image_without_rows_has_value_zero_under_transformations(name):
    f, labels = torch.zeros(2, 0, 3, dtype=torch.float64), torch.zeros(2, 0, dtype=torch.long)
    call = partial(thin, name, num_labels=3)
    assert (torch.vmap(call)(f, labels) == 0).all()
    assert torch.func.grad(lambda x: call(x, labels[0]))(f[0]).shape == (0, 3)


@pytest.mark.parametrize("name", NAMES)
def test_an_image_of_zeros_does_not_change_the_others(name):
    f, labels = features(2, 20, 3), regions(2, 20)
    f[1] = 0
    f.requires_grad_()
    value = thin(name, f, labels)
    value.sum().backward()
    torch.testing.assert_close(value[0], thin(name, f[0], labels[0]))
    assert torch.isfinite(f.grad).all()
    assert (f.grad[1] == 0).all()


def test_j1_ignores_rows_of_degree_zero():
    f, labels = features(20, 3), regions(20)
    f[7] = 0
    without = labels.clone()
    without[7] = -1
    a = f.clone().requires_grad_()
    value = normalized_cut_j1(a, labels)
    value.backward()
    torch.testing.assert_close(value, normalized_cut_j1(f, without), rtol=0, atol=1e-12)
    assert torch.isfinite(a.grad).all()


def test_zero_rows_count_in_j2():
    f, labels = features(20, 3), regions(20)
    f[7] = 0
    torch.testing.assert_close(normalized_cut_j2(f, labels), dense_value("j2", f, labels), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_absent_regions_and_a_large_bound_do_not_change_the_result(name):
    f, labels = features(20, 3), regions(20, k=3)
    expected = dense_value(name, f, labels)
    torch.testing.assert_close(thin(name, f, labels, num_labels=50), expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(thin(name, f, labels * 7), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_dead_and_duplicate_channels(name):
    """The rank drops below d; value and gradient are those of the dense form, which drops the same directions."""
    f, labels = features(25, 3), regions(25)
    f = torch.cat([f, torch.zeros(25, 1, dtype=torch.float64), f[:, :1]], 1)
    a, b = f.clone().requires_grad_(), f.clone().requires_grad_()
    value, expected = thin(name, a, labels), dense_value(name, b, labels)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-9)
    value.backward()
    expected.backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("function", [normalized_cut_j1, normalized_cut_j2])
def test_rank_tolerance_follows_the_dtype_of_the_data(function):
    """A float32 map of rank 3 cast to float64 has float32 rank; a float64 tolerance gives a wrong gradient."""
    labels = regions(200, k=3)
    exact = features(200, 3) @ features(3, 8, seed=1)
    rounded = (features(200, 3).float() @ features(3, 8, seed=1).float()).requires_grad_()
    (reference,) = torch.autograd.grad(function(exact.requires_grad_(), labels), exact)
    (single,) = torch.autograd.grad(function(rounded, labels), rounded)
    upcast = rounded.detach().double().requires_grad_()
    (declared,) = torch.autograd.grad(function(upcast, labels, rank_tol=torch.float32), upcast)
    (wrong,) = torch.autograd.grad(function(upcast, labels, rank_tol=1e-12), upcast)
    size = reference.abs().max()
    assert (single - reference).abs().max() < 1e-4 * size
    assert (declared - reference).abs().max() < 1e-4 * size
    assert (wrong - reference).abs().max() > 1e3 * size


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("least", [1e-160, 1e-300])
def test_gradients_of_regions_with_tiny_weights(name, least):
    """Regression: 1/mass² overflowed. A region of one row does not depend on the size of its weight."""
    labels, grads = torch.tensor([0, 0, 1, 1, 2]), []
    for size in (1e-100, least):
        inputs = (features(5, 3).requires_grad_(), torch.tensor([1.0, 1, 1, 1, size]).double().requires_grad_())
        grads.append(torch.autograd.grad(thin(name, inputs[0], labels, weight=inputs[1]), inputs))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_an_image_without_labels_counts_zero_when_values_are_not_checked(name):
    f, labels = features(2, 12, 3).requires_grad_(), regions(2, 12)
    labels[1] = -1
    value = thin(name, f, labels, check=False)
    value.sum().backward()
    assert value[1] == 0
    assert (f.grad[1] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_labels_out_of_bounds_give_nan_when_values_are_not_checked(name):
    f, labels = features(2, 20, 3), regions(2, 20, k=3)
    labels[1, 0] = 3
    value = thin(name, f, labels, num_labels=3, check=False)
    assert value.isnan().tolist() == [False, True]
    torch.testing.assert_close(value[0], thin(name, f[0], labels[0]))


def peak_memory():
    """The largest resident set since the last reset, in MB."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
def test_a_whole_image_needs_little_memory():
    """m = 154,401, d = 20: no m×m matrix (190 GB) and no m×d² one (500 MB); the extra memory is a few copies of F."""
    f = torch.rand(154_401, 20, requires_grad=True)
    labels = torch.arange(154_401) * 30 // 154_401
    f.grad = torch.zeros_like(f)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    for function in (normalized_cut_j1, normalized_cut_j2, normalized_cut_soft):
        function(f, labels).backward()
    assert peak_memory() - before < 300
    assert torch.isfinite(f.grad).all()
    torch.empty(100_000_000).fill_(1.0)
    assert peak_memory() - before > 150  # the measurement works


def test_lambda_must_have_the_batch_shape():
    f, labels = features(2, 20, 3), regions(2, 20)
    shared = normalized_cut_j1(f, labels, lam=lambda_matrix(3))
    each = normalized_cut_j1(f, labels, lam=lambda_matrix(3).expand(2, 3, 3))
    torch.testing.assert_close(shared, each)


def test_weights_equal_repeated_rows_with_fewer_rows_than_features():
    f, labels = features(5, 9), regions(5, k=2)
    weight = torch.tensor([1.0, 2.0, 1.0, 0.0, 3.0], dtype=torch.float64).requires_grad_()
    value = normalized_cut_soft(f, labels, weight=weight)
    torch.testing.assert_close(value, dense_value("soft", f, labels, weight.detach()))
    positive = (weight.detach() + 1e-9 * (weight == 0)).requires_grad_()
    (grad,), (near,) = (torch.autograd.grad(normalized_cut_soft(f, labels, weight=w), w) for w in (weight, positive))
    torch.testing.assert_close(grad, near, rtol=1e-5, atol=1e-7)
    inputs = (f.requires_grad_(), (weight.detach() + 0.1).requires_grad_())
    unchecked = partial(normalized_cut_soft, labels=labels, check=False)
    assert torch.autograd.gradcheck(lambda x, w: unchecked(x, weight=w), inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: unchecked(x, weight=weight.detach()), (f,))


def outlier_rows(size, d=3):
    f = torch.rand(5, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    return torch.cat([size * f[:1], f[1:]]), torch.tensor([0, 2, 0, 2, 0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_forward_mode_with_an_outlier_row_is_as_accurate_as_the_gradient(name, size):
    f, labels = outlier_rows(size)
    objective = partial(OBJECTIVES[name][0], labels=labels, num_labels=3)
    v = f @ torch.randn(3, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(objective(forward_ad.make_dual(f, v))).tangent
    f.requires_grad_()
    (gradient,) = torch.autograd.grad(objective(f), f)
    torch.testing.assert_close(tangent, (gradient * v).sum(), rtol=0, atol=1e-12 * max(1, size * 1e-3))


@pytest.mark.parametrize("size", [1e6, 3e6, 8e6, 2e7])
def test_j2_with_an_outlier_equals_that_of_the_singular_vectors(size):
    """Gram matrices determine the other directions to a few percent only."""
    f, labels = outlier_rows(size)
    u, s, _ = torch.linalg.svd(f, full_matrices=False)
    u = u[:, s > (16 * 3 * torch.finfo(torch.float64).eps) ** 0.5 * s[0]]
    e = torch.nn.functional.one_hot(labels).double()[:, [0, 2]]
    overlap = (u.mT @ (e / e.sum(0).sqrt())).square().sum()
    expected = 0.5 * (u.shape[1] + 2) - overlap
    torch.testing.assert_close(normalized_cut_j2(f, labels, num_labels=3), expected, rtol=0, atol=1e-16 * 30 * size)


def test_soft_values_of_features_of_rank_one():
    """Π = 11ᵀ/m · 1/(1 + ridge/d) for any weights, without cancellation."""
    w = torch.tensor([1.84, 1.75, 1.24, 1.51], dtype=torch.float64)
    labels, ridge = torch.tensor([1, 2, 1, 2]), 1e-3
    value = normalized_cut_soft(torch.ones(4, 4, dtype=torch.float64), labels, weight=w, num_labels=3, ridge=ridge)
    share = 1 / (1 + ridge / 4)
    assert abs(float(value) - (0.5 * share**2 - share + 1)) < 2e-15


def test_unlabeled_rows_do_not_reduce_the_accuracy_of_soft():
    """Fewer rows than features are labeled, and the largest row is not: the objective is nearly constant."""
    f, labels = outlier_rows(1e4)
    v = torch.randn(5, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    labels = torch.tensor([-1, 2, 1, -1, -1])

    def slope(x, rows):
        (gradient,) = torch.autograd.grad(
            normalized_cut_soft(x, labels[rows], num_labels=3, ridge=1e-14), x, create_graph=True
        )
        return torch.autograd.grad((gradient * v[rows]).sum(), x)[0]

    every, counted = torch.arange(5), torch.tensor([1, 2])
    whole = slope(f.clone().requires_grad_(), every)
    torch.testing.assert_close(whole[counted], slope(f[counted].requires_grad_(), counted), rtol=0, atol=1e-12)
    assert not bool(whole[[0, 3, 4]].any())


@pytest.mark.parametrize("shape", [(3, 5), (6, 3)])
@pytest.mark.parametrize("ridge", [1e-3, 1e-8])
@pytest.mark.parametrize("weighted", [False, True])
def test_soft_cuts_are_accurate_over_five_decades_of_singular_values(shape, ridge, weighted):
    """The Gram matrix determines small directions to half of their digits. Reference with 60 digits."""
    m, d = shape
    k = min(m, d)
    left, right = orthogonal(m, seed=1)[:, :k], orthogonal(d, seed=2)[:k]
    f = (left * torch.logspace(0, -5, k, dtype=torch.float64)) @ right
    turn = 0.5 * f @ orthogonal(d, seed=3)  # a direction that keeps the small ones small
    weight = torch.linspace(0.5, 2, m, dtype=torch.float64) if weighted else None
    labels = torch.arange(m) % 3
    with mpmath.workdps(90):
        x, v, step = mpmath.matrix(f.tolist()), mpmath.matrix(turn.tolist()), mpmath.mpf(10) ** -30
        w = None if weight is None else mpmath.matrix(weight.tolist())
        middle, forth, back = (truth.soft(x + t * v, labels.tolist(), ridge, w)[0] for t in (0, step, -step))
        expected, slope = float(middle), float((forth - back) / (2 * step))
    f.requires_grad_()
    value = normalized_cut_soft(f, labels, num_labels=3, ridge=ridge, weight=weight)
    assert value.item() == pytest.approx(expected, rel=1e-9)
    (gradient,) = torch.autograd.grad(value, f)
    assert (gradient * turn).sum().item() == pytest.approx(slope, rel=1e-8, abs=1e-11)
