"""Summaries over images: both conventions against explicit formulas, workers, and bad input."""

import numpy as np
import pytest

from matbackprop.errors import DataError
from matbackprop.vision.metrics import (
    evaluate_segmentations,
    f_measure,
    score_image,
    score_images,
    segmentation_covering,
    summarize,
)


def stripes(shape, count):
    return np.broadcast_to(np.arange(shape[1]) * count // shape[1], shape)


@pytest.fixture
def maps():
    rng = np.random.default_rng(0)
    shape = (12, 30)
    truth = {
        name: [rng.integers(0, 3, (2, 5)).repeat(6, 0).repeat(6, 1) for _ in range(n)]
        for name, n in (("a", 2), ("b", 4))
    }
    return {name: [stripes(shape, 1), stripes(shape, 2), stripes(shape, 5)] for name in truth}, truth


def test_both_conventions_written_out(maps):
    segmentations, truth = maps
    cover = {n: np.array([[segmentation_covering(s, g) for g in truth[n]] for s in segmentations[n]]) for n in truth}
    pooled = np.concatenate([cover["a"], cover["b"]], axis=1)  # an image with more annotators weighs more
    scores = evaluate_segmentations(segmentations, truth)
    assert scores["covering_ods"] == pytest.approx(pooled.mean(1).max())
    assert scores["covering_ois"] == pytest.approx((cover["a"].sum(1).max() + cover["b"].sum(1).max()) / 6)
    assert scores["paper_average"] == pytest.approx(np.mean([cover[n].mean(1).max() for n in truth]))
    assert scores["paper_best"] == pytest.approx(np.mean([cover[n].max() for n in truth]))
    assert scores["covering_ods"] <= scores["covering_ois"] <= scores["covering_best"]
    assert scores["pri_ods"] <= scores["pri_ois"] and scores["vi_ods"] >= scores["vi_ois"]
    assert "boundary_ods" not in scores


def test_boundary_pools_counts_before_dividing(maps):
    results = list(score_images(*maps, boundary=True))
    scores = summarize(results)
    counts = [result.boundary for result in results]
    best = sum(count[f_measure(count)[2].argmax()] for count in counts)
    assert scores["boundary_ois"] == pytest.approx(float(f_measure(best)[2]))
    at_scales = f_measure(sum(counts))[2].max()
    assert at_scales <= scores["boundary_ods"] <= at_scales + 0.1


def test_interpolation_between_scales():
    """Recall .2 → .8 and precision .8 → .2: the best F = .5 is half-way between the scales."""
    from matbackprop.vision.metrics.evaluation import boundary_scores

    counts = np.array([[[20, 100, 80, 100], [80, 100, 20, 100]]])
    scores = boundary_scores(counts)
    assert scores["boundary_ods"] == pytest.approx(0.5, abs=1e-3)
    assert scores["boundary_ois"] == pytest.approx(0.32)


def test_different_numbers_of_segmentations_have_no_ods(maps):
    segmentations, truth = maps
    scores = evaluate_segmentations({**segmentations, "b": segmentations["b"][:2]}, truth, boundary=True)
    assert {name for name, value in scores.items() if np.isnan(value)} == {
        "covering_ods",
        "pri_ods",
        "vi_ods",
        "boundary_ods",
        "boundary_ap",
    }


def test_every_bad_image_is_reported(maps):
    segmentations, truth = maps
    bad = {name: [np.asarray(actual[0]).T] for name, actual in segmentations.items()}
    with pytest.raises(DataError, match=r"2 of 2 images cannot be scored:\n  a: .*Transpose.*\n  b: "):
        evaluate_segmentations(bad, truth)
    with pytest.raises(DataError, match="a: segmentation 1 has size 30×12"):
        evaluate_segmentations({**segmentations, "a": bad["a"]}, truth)


def test_missing_ground_truth_and_empty_input(maps):
    segmentations, truth = maps
    with pytest.raises(DataError, match="1 of 2 images have no human map: b"):
        evaluate_segmentations(segmentations, {"a": truth["a"]})
    with pytest.raises(DataError, match="no segmentation"):
        evaluate_segmentations({}, truth)


def test_average_precision_is_the_area_under_precision_over_recall():
    """Precision 1 − recall/2 at recalls of .2 and .8, and on the straight line between them."""
    from matbackprop.vision.metrics.evaluation import boundary_average_precision

    counts = np.array([[[80, 100, 60, 100], [20, 100, 90, 100]]])
    points = np.arange(20, 81) / 100
    assert boundary_average_precision(counts) == pytest.approx(0.01 * (1 - points / 2).sum())
    assert boundary_average_precision(counts[:, :1]) == 0.0
    assert np.isnan(boundary_average_precision([counts[0], counts[0, :1]]))


def test_levels_that_are_one_object_are_scored_like_copies():
    rng = np.random.default_rng(2)
    fine, coarse, truth = (rng.integers(0, k, (4, 6)).repeat(5, 0).repeat(5, 1) for k in (9, 3, 4))
    options = {"boundary": True, "objects": True}
    shared = score_image("a", [fine, fine, coarse, coarse, fine], [truth, coarse], **options)
    copies = score_image("a", [one.copy() for one in (fine, fine, coarse, coarse, fine)], [truth, coarse], **options)
    for name in ("covering", "rand_index", "variation_of_information", "best_covering", "boundary", "objects"):
        np.testing.assert_array_equal(getattr(shared, name), getattr(copies, name))
