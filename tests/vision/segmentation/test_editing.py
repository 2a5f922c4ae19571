"""Regions divided and united by hand follow the tree of merges."""

import numpy as np
import pytest

from matbackprop.vision.inference import segment
from matbackprop.vision.segmentation import split_region, unite_region


@pytest.fixture(scope="module")
def tree():
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    return segment(noise, None).hierarchy


def same_partition(one, other):
    pairs = np.unique(np.stack([one, other]), axis=1).shape[1]
    return pairs == one.max() + 1 == other.max() + 1


@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_dividing_the_region_that_was_merged_last_is_the_next_level(tree, k):
    coarse, fine = tree.levels([k, k + 1])
    divided = next(r for r in range(k) if len(np.unique(fine[coarse == r])) == 2)
    assert same_partition(split_region(tree, coarse, divided), fine)


@pytest.mark.parametrize("k", [2, 5, 9])
def test_uniting_one_of_the_next_pair_is_the_level_before(tree, k):
    coarse, fine = tree.levels([k - 1, k])
    pair = next(np.unique(fine[coarse == r]) for r in range(k - 1) if len(np.unique(fine[coarse == r])) == 2)
    for region in pair:
        assert same_partition(unite_region(tree, fine, int(region)), coarse)


def test_any_region_can_be_divided_and_united_again(tree):
    (labels,) = tree.levels([6])
    for region in range(6):
        split = split_region(tree, labels, region)
        if (labels == region).sum() > 1:
            assert split.max() == 6 and all(len(np.unique(labels[split == r])) == 1 for r in range(7))
            part = int(split[labels == region][0])
            assert same_partition(unite_region(tree, split, part), labels)


def test_one_region_cannot_be_united_and_the_finest_not_divided(tree):
    one, most = tree.levels([1, tree.count])
    assert same_partition(unite_region(tree, one, 0), one)
    assert same_partition(split_region(tree, most, 3), most)
