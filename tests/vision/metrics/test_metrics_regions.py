"""Region measures against scikit-learn, scikit-image and plain loops, and their invariances."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import variation_of_information as skimage_information
from sklearn.metrics import rand_score

from helpers.label_maps import voronoi
from matbackprop.errors import LabelError, ShapeError
from matbackprop.vision.metrics import (
    compact_labels,
    rand_index,
    region_scores,
    regions,
    segmentation_covering,
    variation_of_information,
)


def blobs(seed, shape=(23, 31), regions=9):
    """A label map of Voronoi cells with arbitrary label values."""
    rng = np.random.default_rng(seed)
    nearest = voronoi(shape, regions, rng)
    return rng.permutation(1000)[:regions][nearest]


def covering_by_loops(segmentation, truth):
    total = 0.0
    for region in np.unique(truth):
        inside = truth == region
        overlaps = [
            (inside & (segmentation == other)).sum() / (inside | (segmentation == other)).sum()
            for other in np.unique(segmentation)
        ]
        total += inside.sum() * max(overlaps)
    return total / truth.size


@pytest.mark.parametrize("seed", range(3))
def test_against_references(seed):
    segmentations = [blobs(seed + i, regions=3 + 5 * i) for i in range(3)]
    truth = [blobs(100 + seed + i, regions=4 + 3 * i) for i in range(4)]
    scores = region_scores(segmentations, truth)
    for t, segmentation in enumerate(segmentations):
        for g, human in enumerate(truth):
            assert scores.covering[t, g] == pytest.approx(covering_by_loops(segmentation, human), abs=1e-12)
            assert scores.rand_index[t, g] == pytest.approx(rand_score(human.ravel(), segmentation.ravel()), abs=1e-12)
            information = sum(skimage_information(human, segmentation))
            assert scores.variation_of_information[t, g] == pytest.approx(information, abs=1e-10)


def test_best_covering_uses_the_best_level_of_each_region():
    truth = np.repeat([[0, 0, 1, 1]], 2, 0)
    left, right = np.repeat([[0, 0, 1, 2]], 2, 0), np.repeat([[0, 1, 2, 2]], 2, 0)
    scores = region_scores([left, right], [truth])
    assert scores.covering.ravel().tolist() == [0.75, 0.75]
    assert scores.best_covering.tolist() == [1.0]


def test_sorted_counting_is_the_same_as_dense(monkeypatch):
    segmentations, truth = [blobs(1), blobs(2, regions=40)], [blobs(3), blobs(4)]
    dense = region_scores(segmentations, truth)
    monkeypatch.setattr(regions, "_DENSE_CELLS", 0)
    by_sorting = region_scores(segmentations, truth)
    for name in ("covering", "rand_index", "variation_of_information", "best_covering"):
        np.testing.assert_array_equal(getattr(dense, name), getattr(by_sorting, name))


def test_one_region_and_one_pixel_regions():
    size = 24
    one, every, half = np.zeros((4, 6), int), np.arange(size).reshape(4, 6), np.repeat([[0, 1]], 12, 0).reshape(4, 6)
    assert segmentation_covering(one, half) == 0.5
    assert segmentation_covering(every, half) == pytest.approx(1 / 12)
    assert rand_index(one, one) == 1 and variation_of_information(one, one) == 0
    assert variation_of_information(one, every) == pytest.approx(np.log2(size))
    assert rand_index([[3]], [[8]]) == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 12))
def test_laws(seed, many, others):
    rng = np.random.default_rng(seed)
    a, b, c = rng.integers(0, many, (7, 9)), rng.integers(0, others, (7, 9)), rng.integers(0, 4, (7, 9))
    renumbered = rng.permutation(many)[a] * 37 - 5
    assert segmentation_covering(a, b) == pytest.approx(segmentation_covering(renumbered, b))
    assert rand_index(a, b) == pytest.approx(rand_index(b, a))
    assert variation_of_information(a, b) == pytest.approx(variation_of_information(b, a))
    assert segmentation_covering(a, a) == 1 and rand_index(a, a) == 1
    assert variation_of_information(a, a) == pytest.approx(0, abs=1e-12)
    assert 0 < segmentation_covering(a, b) <= 1 and 0 <= rand_index(a, b) <= 1
    through = variation_of_information(a, c) + variation_of_information(c, b)
    assert variation_of_information(a, b) <= through + 1e-12


def test_any_kind_of_integers_is_accepted():
    labels = np.array([[0, 0, 1], [2, 2, 1]])
    for same in (labels.astype(np.uint16), labels.astype(float), torch.tensor(labels), labels.tolist(), labels - 70):
        assert segmentation_covering(same, labels) == 1
    assert rand_index(labels > 0, labels > 0) == 1


def test_compact_labels_of_far_apart_values():
    labels, count = compact_labels([[2**60, -(2**60)], [5, 5]])
    assert count == 3 and labels.tolist() == [[2, 0], [1, 1]]


@pytest.mark.parametrize(
    ("segmentations", "truth", "error", "match"),
    [
        ([], [np.zeros((2, 3), int)], ShapeError, "no segmentation"),
        ([np.zeros((2, 3), int)], [], ShapeError, "no human map"),
        ([np.zeros((3, 2), int)], [np.zeros((2, 3), int)], ShapeError, "Transpose"),
        (
            [np.zeros((2, 3), int)],
            [np.zeros((2, 3), int), np.zeros((2, 4), int)],
            ShapeError,
            "human map 2 has size 2×4",
        ),
        ([np.zeros((0, 3), int)], [np.zeros((0, 3), int)], ShapeError, "at least one pixel"),
        ([np.zeros(6, int)], [np.zeros((2, 3), int)], ShapeError, r"shape \(6,\)"),
        ([np.full((2, 3), 0.5)], [np.zeros((2, 3), int)], LabelError, "not integers"),
        ([np.full((2, 3), np.nan)], [np.zeros((2, 3), int)], LabelError, "not integers"),
        ([np.full((2, 3), "a")], [np.zeros((2, 3), int)], LabelError, "not integers"),
    ],
)
def test_wrong_input(segmentations, truth, error, match):
    with pytest.raises(error, match=match):
        region_scores(segmentations, truth)
