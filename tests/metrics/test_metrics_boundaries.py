"""Boundary maps, thinning and matching against scikit-image and brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from skimage.morphology import thin

from matbackprop.errors import DomainError, ShapeError
from matbackprop.metrics import boundary_counts, boundary_f_measure, boundary_map, match_boundaries, thin_boundaries


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.05, 0.95))
def test_thinning_is_that_of_scikit_image(seed, share):
    mask = np.random.default_rng(seed).random((17, 23)) < share
    np.testing.assert_array_equal(thin_boundaries(mask), thin(mask))


def test_boundary_of_one_region_is_empty():
    assert not boundary_map(np.full((5, 6), 3)).any()


def test_boundary_does_not_see_the_numbering():
    labels = np.random.default_rng(0).integers(0, 3, (9, 12)).repeat(3, 0).repeat(3, 1)
    np.testing.assert_array_equal(boundary_map(labels), boundary_map(np.array([7, 1, 900])[labels]))


def assignment(boundary, truth, radius):
    """Largest matching and its least total distance, from the dense assignment problem."""
    one, two = np.argwhere(boundary), np.argwhere(truth)
    distance = np.linalg.norm(one[:, None] - two[None], axis=-1)
    cost = np.where(distance <= radius, distance, 1e4)
    rows, columns = linear_sum_assignment(cost)
    inside = distance[rows, columns] <= radius
    return int(inside.sum()), float(distance[rows, columns][inside].sum())


@pytest.mark.parametrize("matching", ["largest", "nearest"])
@pytest.mark.parametrize("seed", range(4))
def test_matching_is_as_large_as_possible(matching, seed):
    rng = np.random.default_rng(seed)
    boundary, truth = rng.random((2, 20, 21)) < 0.15
    for tolerance in (0.0, 0.05, 0.08, 0.12):
        matched, matched_truth = match_boundaries(boundary, truth, tolerance, matching=matching)
        expected, _ = assignment(boundary, truth, tolerance * np.hypot(20, 21))
        assert matched.sum() == matched_truth.sum() == expected
        assert not (matched & ~boundary).any() and not (matched_truth & ~truth).any()


def test_nearest_matching_leaves_the_far_pixel_out():
    boundary, truth = np.zeros((2, 3, 40), dtype=bool)
    boundary[0, 20] = boundary[2, 20] = True
    truth[0, 20] = True
    matched, _ = match_boundaries(boundary, truth, 0.1, matching="nearest")
    assert matched[0, 20] and not matched[2, 20]


def test_nearest_matching_has_the_least_distance():
    """Of all largest matchings of a small example, none is shorter; checked over all subsets of matched pixels."""
    rng = np.random.default_rng(3)
    boundary, truth = np.zeros((2, 8, 8), dtype=bool)
    boundary.ravel()[rng.choice(64, 5, replace=False)] = True
    truth.ravel()[rng.choice(64, 3, replace=False)] = True
    radius = 0.3 * np.hypot(8, 8)
    matched, matched_truth = match_boundaries(boundary, truth, 0.3, matching="nearest")
    size, least = assignment(boundary, truth, radius)
    one, two = np.argwhere(matched), np.argwhere(matched_truth)
    lengths = [
        sum(np.linalg.norm(a - b) for a, b in zip(order, two, strict=True)) for order in itertools.permutations(one)
    ]
    assert len(one) == size and min(lengths) == pytest.approx(least)


def test_counts_of_several_people():
    """One person draws the line, one draws nothing: recall counts all human pixels, precision any partner."""
    half, whole = np.arange(40).reshape(1, 40).repeat(30, 0) > 20, np.zeros((30, 40), int)
    assert boundary_counts([half, whole], [half, whole]).tolist() == [[30, 30, 30, 30], [0, 30, 0, 0]]
    assert boundary_f_measure(half, [half, whole]) == 1
    assert boundary_f_measure(whole, [half]) == 0 and boundary_f_measure(half, [whole]) == 0


def test_shift_within_and_beyond_the_tolerance():
    labels = np.zeros((300, 400), int)
    labels[:, 200:] = 1  # the diagonal is 500, the tolerance 3.75 pixels
    assert boundary_f_measure(np.roll(labels[:, 3:-3], 3, 1), [labels[:, 3:-3]]) > 0.5
    near, far = np.zeros_like(labels), np.zeros_like(labels)
    near[:, 203:] = far[:, 204:] = 1
    assert boundary_f_measure(near, [labels]) == 1
    assert boundary_f_measure(far, [labels]) == 0


def test_wrong_input():
    with pytest.raises(ShapeError, match="transposed"):
        match_boundaries(np.zeros((2, 3), bool), np.zeros((3, 2), bool))
    with pytest.raises(DomainError, match="tolerance"):
        match_boundaries(np.ones((2, 3), bool), np.ones((2, 3), bool), -1)
    with pytest.raises(DomainError, match="'largest', 'nearest'"):
        match_boundaries(np.ones((2, 3), bool), np.ones((2, 3), bool), matching="greedy")
