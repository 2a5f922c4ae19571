"""The thin objectives equal the dense definitions for every batch layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.cuts import OBJECTIVES, dense_value, features, lambda_matrix, regions
from matbackprop import normalized_cut_j1, normalized_cut_j2, normalized_cut_soft

NAMES = list(OBJECTIVES)


def thin(name, *arguments, **keywords):
    return OBJECTIVES[name][0](*arguments, **keywords)


LAMBDAS = {
    "general": lambda x: x,
    "symmetric": lambda x: x + x.mT,
    "singular": lambda x: x[:, :3] @ x[:, :3].mT,  # of rank 3 for any x
}


@pytest.mark.parametrize("kind", LAMBDAS)
def test_j1_with_lambda_equals_dense_in_value_and_gradients(kind, device):
    f, labels, lam = features(30, 4, device=device), regions(30, device=device), lambda_matrix(4, device=device)
    ours, theirs = ([x.clone().requires_grad_() for x in (f, lam)] for _ in range(2))
    value = normalized_cut_j1(ours[0], labels, lam=LAMBDAS[kind](ours[1]))
    reference = dense_value("j1", theirs[0], labels, lam=LAMBDAS[kind](theirs[1]))
    torch.testing.assert_close(value, reference, rtol=0, atol=1e-9)
    for mine, expected in zip(torch.autograd.grad(value, ours), torch.autograd.grad(reference, theirs), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-8, atol=1e-9)
        assert mine.abs().max() > 1e-4
    if kind == "singular":  # the span lost a dimension
        assert (value - normalized_cut_j1(f, labels)).abs() > 1e-2


def test_j2_is_invariant_to_an_invertible_mixing_of_features():
    f, labels, lam = features(30, 4), regions(30), lambda_matrix(4)
    torch.testing.assert_close(normalized_cut_j2(f @ lam, labels), normalized_cut_j2(f, labels), rtol=0, atol=1e-10)
    assert (normalized_cut_soft(f @ lam, labels) - normalized_cut_soft(f, labels)).abs() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_weights_count_rows(name):
    f, labels = features(20, 4), regions(20, ignored=0.1)
    weight = torch.randint(1, 4, (20,), generator=torch.Generator().manual_seed(0)).double()
    expected = dense_value(name, f, labels, weight)
    torch.testing.assert_close(thin(name, f, labels, weight=weight), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_of_zero_is_a_label_of_minus_one(name):
    f, labels = features(20, 4), regions(20)
    weight = torch.ones(20, dtype=torch.float64)
    weight[[7, 11]] = 0
    ignored = labels.clone()
    ignored[[7, 11]] = -1
    expected = thin(name, f, ignored)
    torch.testing.assert_close(thin(name, f, labels, weight=weight), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(thin(name, f, labels, weight=weight > 0), expected, rtol=0, atol=1e-12)  # a mask


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("as_tensor", [True, False])
def test_packed_and_padded_batches_agree_with_single_images(name, as_tensor, device):
    sizes = [12, 30, 7]
    images = [(features(n, 4, seed=n, device=device), regions(n, k=3, seed=n, device=device)) for n in sizes]
    expected = torch.stack([thin(name, *image) for image in images])
    packed = torch.cat([f for f, _ in images]).requires_grad_()
    offsets = [0, 12, 42, 49]
    value = thin(
        name, packed, torch.cat([x for _, x in images]), offsets=torch.tensor(offsets) if as_tensor else offsets
    )
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-11)
    padded = torch.rand(3, 30, 4, dtype=torch.float64, device=device)  # padding may hold any values
    padded_labels = torch.full((3, 30), -1, device=device)
    for i, (f, x) in enumerate(images):
        padded[i, : len(f)], padded_labels[i, : len(f)] = f, x
    padded.requires_grad_()
    again = thin(name, padded, padded_labels)
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-11)
    value.sum().backward()
    again.sum().backward()
    for i, n in enumerate(sizes):
        torch.testing.assert_close(packed.grad[offsets[i] : offsets[i + 1]], padded.grad[i, :n], rtol=1e-9, atol=1e-12)
        if n < 30:
            assert (padded.grad[i, n:] == 0).all()


def test_packed_weights_and_annotators():
    sizes, offsets = [9, 14], [0, 9, 23]
    f, weight = features(23, 3), 1 + torch.rand(23, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.stack([regions(23, k=3, seed=s) for s in range(2)])
    labels[:, 9:12] = torch.arange(3)
    value = normalized_cut_soft(f, labels, weight=weight, offsets=offsets)
    assert value.shape == (2,)
    for i in range(len(sizes)):
        part = slice(offsets[i], offsets[i + 1])
        alone = torch.stack([normalized_cut_soft(f[part], x[part], weight=weight[part]) for x in labels]).mean()
        torch.testing.assert_close(value[i], alone, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_annotators_are_averaged_and_empty_ones_ignored(name):
    f = features(2, 20, 4)
    labels = torch.stack([regions(2, 20, k=k, ignored=0.1, seed=k) for k in (2, 4, 6)], dim=1)
    labels[1, 2] = -1  # the second image has two annotators only
    value = thin(name, f, labels)
    each = torch.stack([thin(name, f, labels[:, a], check=False) for a in range(3)], dim=1)
    assert value.shape == (2,)
    torch.testing.assert_close(value[0], each[0].mean(), rtol=0, atol=1e-11)
    torch.testing.assert_close(value[1], each[1, :2].mean(), rtol=0, atol=1e-11)


def test_j1_accepts_one_lambda_per_image_with_annotators():
    f, lam = features(2, 20, 3), torch.stack([lambda_matrix(3, seed=s) for s in range(2)])
    labels = torch.stack([regions(2, 20, k=k) for k in (2, 3)], dim=1)
    value = normalized_cut_j1(f, labels, lam=lam)
    alone = torch.stack([normalized_cut_j1(f[i], labels[i], lam=lam[i]) for i in range(2)])
    torch.testing.assert_close(value, alone, rtol=0, atol=1e-11)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(NAMES))
def test_objectives_are_invariant_to_label_numbers_and_row_order(seed, name):
    generator = torch.Generator().manual_seed(seed)
    f, labels = features(15, 3, seed=seed), regions(15, k=4, ignored=0.1, seed=seed)
    value = thin(name, f, labels)
    numbers = torch.randperm(9, generator=generator)  # with gaps: absent regions do not count
    renamed = torch.where(labels >= 0, numbers[labels.clamp(min=0)], -1)
    order = torch.randperm(15, generator=generator)
    torch.testing.assert_close(thin(name, f[order], renamed[order]), value, rtol=0, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000))
def test_bounds_of_j2(seed):
    f, labels = features(15, 3, seed=seed), regions(15, k=1 + seed % 6, seed=seed)
    rank, k = torch.linalg.matrix_rank(f), len(labels.unique())
    value = normalized_cut_j2(f, labels)
    assert abs(rank - k) / 2 - 1e-9 <= value <= (rank + k) / 2 + 1e-9


@pytest.mark.parametrize("name", ["j1", "j2"])
def test_perfect_features_have_zero_loss(name):
    labels = regions(30, k=4)
    f = torch.nn.functional.one_hot(labels).double() @ lambda_matrix(4)
    f.requires_grad_()
    value = thin(name, f, labels)
    value.backward()
    assert value.abs() < 1e-12
    assert f.grad.abs().max() < 1e-10


def test_a_small_ridge_is_j2_and_the_soft_rank_has_a_gradient():
    f, labels = features(30, 4), regions(30, k=3)
    torch.testing.assert_close(
        normalized_cut_soft(f, labels, ridge=1e-9), normalized_cut_j2(f, labels), rtol=0, atol=1e-5
    )
    # A fourth direction orthogonal to the regions: J2 does not depend on its size; the soft objective does.
    e = torch.nn.functional.one_hot(labels).double()
    useless = torch.randn(30, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    useless = useless - e @ torch.linalg.lstsq(e, useless).solution
    scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (hard,) = torch.autograd.grad(normalized_cut_j2(torch.cat([e, scale * useless], 1), labels), scale)
    (soft,) = torch.autograd.grad(normalized_cut_soft(torch.cat([e, scale * useless], 1), labels), scale)
    assert hard.abs() < 1e-12
    assert soft > 1e-2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packed", [False, True])
def test_weights_may_differ_between_annotators(name, packed):
    f, weight = features(20, 4), features(2, 20, seed=3)
    labels = torch.stack([regions(20, seed=s) for s in (0, 1)])
    each = [OBJECTIVES[name][0](f, y, weight=w) for y, w in zip(labels, weight, strict=True)]
    options = {"offsets": [0, 20]} if packed else {}
    value = OBJECTIVES[name][0](f, labels, weight=weight, **options)
    torch.testing.assert_close(value.squeeze(), torch.stack(each).mean())
