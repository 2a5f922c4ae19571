"""Merging without a network: colour, texture and contrast each divide; levels are nested; odd images are no trouble."""

import numpy as np
import pytest

from matbackprop.models.colour_merging import merge_by_colour
from matbackprop.spectral import MERGE_KS


def halves(left, right, size=(60, 80)):
    image = np.empty((*size, 3), np.uint8)
    image[:, : size[1] // 2], image[:, size[1] // 2 :] = left, right
    return image


def agreement(labels, truth):
    """Share of pixels that two maps of two regions agree on."""
    same = (labels == truth).mean()
    return max(same, 1 - same)


@pytest.mark.parametrize("right", [(40, 40, 160), (90, 90, 90)])
def test_colours_divide(right):
    noise = np.random.default_rng(0).integers(-8, 9, (60, 80, 3))
    image = (halves((40, 160, 40), right).astype(int) + noise).clip(0, 255).astype(np.uint8)
    truth = np.arange(80) >= 40
    assert agreement(merge_by_colour(image, [2], superpixels=60).labels[0], truth) > 0.97


def test_texture_divides_where_mean_colours_are_equal():
    image = halves((128, 128, 128), (128, 128, 128))
    image[:, 40:] = 128 + 60 * (2 * ((np.arange(60)[:, None] + np.arange(40)) % 2) - 1)[..., None]
    truth = np.arange(80) >= 40
    blocks = np.arange(60)[:, None] // 10 * 8 + np.arange(80) // 10
    assert agreement(merge_by_colour(image, [2], superpixels=blocks).labels[0], truth) == 1


def test_contrast_divides_what_a_slope_does_not():
    # Left: a slow slope over 60 columns. Right: a step of the same height.
    row = np.concatenate([np.linspace(60, 140, 60), np.full(10, 140), np.full(40, 60)])
    image = np.repeat(np.repeat(row[None, :, None], 50, 0), 3, 2).astype(np.uint8)
    labels = merge_by_colour(image, [2], superpixels=np.arange(50)[:, None] // 10 * 11 + np.arange(110) // 10).labels[0]
    assert (labels[:, :70] == labels[0, 0]).all() and (labels[:, 70:] == labels[0, -1]).all()
    assert labels[0, 0] != labels[0, -1]


def test_levels_are_nested_and_counted():
    image = np.random.default_rng(1).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    found = merge_by_colour(image)
    assert [len(np.unique(m)) for m in found.labels] == list(MERGE_KS)
    for coarse, fine in zip(found.labels[:-1], found.labels[1:], strict=True):
        pairs = np.unique(np.stack([coarse.ravel(), fine.ravel()]), axis=1)
        assert pairs.shape[1] == len(np.unique(fine))


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (3, 2), (5, 40)])
def test_tiny_and_flat_images(size):
    found = merge_by_colour(np.zeros((*size, 3), np.uint8), [1, 2])
    assert found.labels.shape == (2, *size) and found.labels[0].max() == 0
    assert np.isfinite(found.hierarchy.heights).all()
