"""Boundary maps, thinning and matching against scikit-image and brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from skimage.morphology import thin

from matbackprop.errors import DomainError, ShapeError
from matbackprop.vision.metrics import (
    boundary_counts,
    boundary_f_measure,
    boundary_map,
    contour_counts,
    f_measure,
    thin_boundaries,
    thin_contours,
)
from matbackprop.vision.metrics.boundaries import TOLERANCE, _match, _offsets, _Pixels


def match_boundaries(boundary, truth, tolerance=TOLERANCE):
    """Masks of the matched pixels of two boundary maps."""
    offsets, margin = _offsets(tolerance, *boundary.shape)
    flags = _match(_Pixels.of(boundary, margin), _Pixels.of(truth, margin), offsets)
    matched = np.zeros((2, *boundary.shape), dtype=bool)
    for mask, source, flag in zip(matched, (boundary, truth), flags, strict=True):
        mask[source] = flag
    return matched


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.05, 0.95))
def test_thinning_is_that_of_scikit_image(seed, fraction):
    mask = np.random.default_rng(seed).random((17, 23)) < fraction
    np.testing.assert_array_equal(thin_boundaries(mask), thin(mask))


def assignment(boundary, truth, radius):
    """Size of the largest matching, from the dense assignment problem."""
    one, two = np.argwhere(boundary), np.argwhere(truth)
    distance = np.linalg.norm(one[:, None] - two[None], axis=-1)
    cost = np.where(distance <= radius, distance, 1e4)
    rows, columns = linear_sum_assignment(cost)
    inside = distance[rows, columns] <= radius
    return int(inside.sum())


@pytest.mark.parametrize("seed", range(6))
def test_matching_is_as_large_as_possible(seed):
    rng = np.random.default_rng(seed)
    shares = np.array([0.1, 0.3, 0.15, 0.15])[seed % 3 :][:2]
    boundary, truth = rng.random((2, 20, 21)) < shares[:, None, None]
    for tolerance in (0.0, 0.05, 0.08, 0.12):
        matched, matched_truth = match_boundaries(boundary, truth, tolerance)
        expected = assignment(boundary, truth, tolerance * np.hypot(20, 21))
        assert matched.sum() == matched_truth.sum() == expected
        assert not (matched & ~boundary).any() and not (matched_truth & ~truth).any()


def test_the_nearer_pixel_is_matched():
    boundary, truth = np.zeros((2, 3, 40), dtype=bool)
    boundary[0, 20] = boundary[2, 20] = truth[0, 20] = True
    for swapped in (False, True):
        maps = (truth, boundary) if swapped else (boundary, truth)
        matched = match_boundaries(*maps, 0.1)[int(swapped)]
        assert matched[0, 20] and not matched[2, 20]


def test_augmenting_paths_undo_greedy_choices():
    """Greedy matching pairs the two middle pixels and leaves the outer ones unmatched; both pairs are possible."""
    boundary, truth = np.zeros((2, 1, 9), dtype=bool)
    boundary[0, [1, 4]] = truth[0, [3, 6]] = True
    matched, matched_truth = match_boundaries(boundary, truth, 2.5 / np.hypot(1, 9))
    assert matched.sum() == matched_truth.sum() == 2


@pytest.mark.data
def test_near_the_exact_assignment_on_real_boundaries(data_root):
    """The objective of the benchmark, solved exactly; unmatched pixels have an extra partner of high cost."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import min_weight_full_bipartite_matching
    from scipy.spatial import cKDTree

    from matbackprop.vision.data.label_files import read_label_maps

    boundary = boundary_map(read_label_maps(data_root / "bsds_gold/segs/3063.mat")[1])
    radius = 0.0075 * np.hypot(*boundary.shape)
    union, exact_union = np.zeros((2, *boundary.shape), dtype=bool)
    points = np.argwhere(boundary)
    for labels in read_label_maps(data_root / "bsds_gold/groundTruth/3063.mat"):
        truth = boundary_map(labels)
        pairs = cKDTree(points).sparse_distance_matrix(cKDTree(np.argwhere(truth)), radius, output_type="coo_matrix")
        size, others = len(points), int(truth.sum())
        rows = np.concatenate([pairs.row, np.arange(size)])
        columns = np.concatenate([pairs.col, others + np.arange(size)])
        costs = np.concatenate([1 + pairs.data, np.full(size, 1 + 100 * radius)])
        indices = rows.astype(np.int32), columns.astype(np.int32)  # SciPy 1.11 takes no others
        graph = csr_array((costs, indices), shape=(size, others + size))
        actual = min_weight_full_bipartite_matching(graph)[1] < others
        matched, _ = match_boundaries(boundary, truth)
        assert matched.sum() == actual.sum()
        union |= matched
        exact_union[tuple(points[actual].T)] = True
    assert abs(union.sum() - exact_union.sum()) <= 0.002 * size


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
    with pytest.raises(ShapeError, match="Transpose"):
        boundary_counts([np.zeros((2, 3), int)], [np.zeros((3, 2), int)])
    with pytest.raises(DomainError, match="tolerance"):
        boundary_counts([np.ones((2, 3), int)], [np.ones((2, 3), int)], -1)


def ramp(shape=(60, 80), column=40):
    """A soft vertical contour around a column."""
    return np.broadcast_to(0.9 * np.exp(-(((np.arange(shape[1]) - column) / 2) ** 2)), shape)


def test_contours_are_thinned_to_their_ridge():
    ridge = thin_contours(ramp())
    inside = ridge[6:-6]  # the outermost pixels are weaker
    assert (inside.argmax(1) == 40).all() and (inside > 0.05).sum() == len(inside)
    assert inside.max() == pytest.approx(0.45 * (1 + np.exp(-0.25)), abs=1e-6)  # smoothed by 1 2 1 across
    np.testing.assert_allclose(thin_contours(ramp().T), ridge.T, atol=1e-6)
    assert not thin_contours(np.zeros((9, 7))).any()


def test_diagonal_contours_are_thinned():
    y, x = np.mgrid[:60, :60]
    ridge = thin_contours(0.9 * np.exp(-(((x - y) / 3) ** 2))) > 0.05
    assert (np.abs(x - y)[ridge] <= 1).all() and ridge[8:-8, 8:-8].any(1).all()


def test_counts_of_soft_contours():
    half = np.broadcast_to(np.arange(80) > 40, (60, 80)).astype(int)
    counts = contour_counts(ramp(), [half, half], thresholds=9)
    recall, precision, f = f_measure(counts)
    assert counts.shape == (9, 4) and f[0] > 0.95 and (precision[:8] == 1).all()
    assert recall[-1] == 0 and (np.diff(recall) <= 0).all()
    with pytest.raises(ShapeError, match="60×80"):
        contour_counts(ramp(), [half.T])


@pytest.mark.parametrize("bad", [np.full((4, 5), 1.5), np.full((4, 5), np.nan), np.full((4, 5), -0.1)])
def test_strengths_outside_the_unit_interval_are_rejected(bad):
    with pytest.raises(DomainError, match=r"outside \[0, 1\]"):
        thin_contours(bad)


def test_equal_neighboring_levels_have_equal_counts():
    rng = np.random.default_rng(5)
    fine, coarse, truth = (rng.integers(0, k, (6, 8)).repeat(5, 0).repeat(5, 1) for k in (9, 3, 4))
    counts = boundary_counts([fine, fine, coarse, fine], [truth, coarse])
    alone = [boundary_counts([labels], [truth, coarse])[0] for labels in (fine, fine, coarse, fine)]
    np.testing.assert_array_equal(counts, alone)
