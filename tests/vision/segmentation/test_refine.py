"""Borders of large photographs are moved to the photograph's edges."""

import numpy as np
import pytest

from matbackprop.errors import ShapeError
from matbackprop.vision.segmentation.refine import enlarge_labels, refine_labels


def disks(h, w):
    y, x = np.mgrid[:h, :w] / h
    return ((y - 0.5) ** 2 + (x - 0.5) ** 2 < 0.1).astype(np.int32) + 2 * ((y - 0.3) ** 2 + (x - 1.1) ** 2 < 0.03)


def test_staircases_become_smooth_borders():
    true = disks(600, 800)
    noise = np.random.default_rng(0).normal(0, 12, (600, 800, 1))
    colors = np.array([[60, 60, 60], [170, 150, 120], [90, 120, 200], [200, 200, 90]])
    image = np.clip(colors[true] + noise, 0, 255).astype(np.uint8)
    small = enlarge_labels(true, (75, 100))
    before, after = enlarge_labels(small, (600, 800)), refine_labels(small, image)
    assert after.dtype == np.int32 and np.array_equal(np.unique(after), np.unique(true))
    assert (after != true).mean() < 0.1 * (before != true).mean()


def test_no_label_is_lost_and_interiors_do_not_change():
    rng = np.random.default_rng(1)
    small = rng.integers(0, 400, (20, 30)).astype(np.int32)  # regions of a few cells without an interior
    small[5:15, 5:20] = 7
    image = rng.integers(0, 256, (97, 143, 3), dtype=np.uint8)
    fine = refine_labels(small, image)
    assert np.array_equal(np.unique(fine), np.unique(small))
    assert (fine[40:60, 40:80] == 7).all()


def test_strips_do_not_change_the_result():
    """A map of more rows than one strip has is refined as one of fewer rows."""
    true = (np.mgrid[:1000, :24][1] > 11).astype(np.int32)
    image = np.repeat(np.where(true, 200, 40).astype(np.uint8)[..., None], 3, -1)
    small = enlarge_labels(true, (250, 6))
    assert np.array_equal(refine_labels(small, image), true)


def test_equal_sizes_are_unchanged_and_sizes_must_match():
    labels = disks(30, 40)
    assert np.array_equal(refine_labels(labels, np.zeros((30, 40, 3), np.uint8)), labels)
    with pytest.raises(ShapeError, match="no larger"):
        refine_labels(labels, np.zeros((20, 40, 3), np.uint8))
    with pytest.raises(ShapeError, match="contours"):
        refine_labels(labels, np.zeros((60, 80, 3), np.uint8), np.zeros((3, 3)))
