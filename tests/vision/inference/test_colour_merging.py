"""Merging without a network: colour, texture and contrast each divide; levels are nested; odd images are no trouble."""

import numpy as np
import pytest

from matbackprop.vision.inference.segmenting import merge_by_colour
from matbackprop.vision.segmentation import MERGE_KS


def halves(left, right, size=(60, 80)):
    image = np.empty((*size, 3), np.uint8)
    image[:, : size[1] // 2], image[:, size[1] // 2 :] = left, right
    return image


def agreement(labels, truth):
    """Share of pixels that two maps of two regions agree on."""
    same = (labels == truth).mean()
    return max(same, 1 - same)


def halved_slopes(*ends, turned):
    """Three slopes of grey side by side, each 40 columns wide and one superpixel, merged into two regions."""
    row = np.concatenate([np.linspace(*pair, 40) for pair in ends])
    image = np.repeat(np.repeat(row[None, :, None], 50, 0), 3, 2).astype(np.uint8)
    thirds = np.repeat(np.arange(120)[None] // 40, 50, 0)
    if turned:
        return merge_by_colour(image.transpose(1, 0, 2), [2], superpixels=thirds.T).labels[0].T
    return merge_by_colour(image, [2], superpixels=thirds).labels[0]


@pytest.mark.parametrize("right", [(40, 40, 160), (90, 90, 90)])
def test_colours_divide(right):
    noise = np.random.default_rng(0).integers(-8, 9, (60, 80, 3))
    image = (halves((40, 160, 40), right).astype(int) + noise).clip(0, 255).astype(np.uint8)
    truth = np.arange(80) >= 40
    assert agreement(merge_by_colour(image, [2], superpixels=60).labels[0], truth) > 0.97


@pytest.mark.parametrize("turned", [False, True])
def test_a_far_mean_divides_before_a_step_between_near_ones(turned):
    assert agreement(halved_slopes((60, 100), (110, 150), (110, 170), turned=turned), np.arange(120) >= 40) == 1


def test_texture_divides_before_faint_differences_of_the_mean():
    # Left plain, right a chessboard of the same mean; the lower half of both is a little lighter.
    board = 60 * (2 * ((np.arange(60)[:, None] + np.arange(40)) % 2) - 1)
    grey = np.concatenate([np.full((60, 40), 124), 128 + board], 1) + 3 * (np.arange(60)[:, None] >= 30)
    image = np.repeat(grey[..., None], 3, 2).astype(np.uint8)
    blocks = np.arange(60)[:, None] // 10 * 8 + np.arange(80) // 10
    labels = merge_by_colour(image, [2], superpixels=blocks).labels[0]
    assert agreement(labels, np.arange(80) >= 40) == 1


@pytest.mark.parametrize("turned", [False, True])
def test_a_step_divides_and_a_slope_does_not(turned):
    # Three slopes in a row: the first goes over into the second, whose mean is further away than that of the third,
    # which a step parts from it.
    assert agreement(halved_slopes((60, 100), (100, 140), (65, 105), turned=turned), np.arange(120) >= 80) == 1


def test_levels_are_nested_and_counted():
    image = np.random.default_rng(1).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    actual = merge_by_colour(image)
    assert [len(np.unique(m)) for m in actual.labels] == list(MERGE_KS)
    for coarse, fine in zip(actual.labels[:-1], actual.labels[1:], strict=True):
        pairs = np.unique(np.stack([coarse.ravel(), fine.ravel()]), axis=1)
        assert pairs.shape[1] == len(np.unique(fine))


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (3, 2), (5, 40)])
def test_tiny_and_flat_images(size):
    actual = merge_by_colour(np.zeros((*size, 3), np.uint8), [1, 2])
    assert actual.labels.shape == (2, *size) and actual.labels[0].max() == 0
    assert np.isfinite(actual.hierarchy.heights).all()
