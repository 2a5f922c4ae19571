"""Objects and parts: against an explicit implementation in integers, and edge cases."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matbackprop.errors import ShapeError
from matbackprop.vision.metrics import evaluate_segmentations, objects_and_parts, score_image
from matbackprop.vision.metrics.evaluation import over_scales
from matbackprop.vision.metrics.objects_parts import best_f

NINE, QUARTER, TENTH = Fraction(9, 10), Fraction(1, 4), Fraction(1, 10)


def regions(labels):
    """Sets of pixels, the largest first; of equal ones that of the smaller label."""
    labels = np.asarray(labels)
    sets = [frozenset(np.flatnonzero(labels == value).tolist()) for value in np.unique(labels)]
    return sorted(sets, key=lambda region: -len(region))


def candidates(sets, pixels):
    chosen, covered = [], 0
    for region in sets:
        if covered >= Fraction(99, 100) * pixels:
            break
        chosen.append(region)
        covered += len(region)
    return chosen


def written_out(segmentation, people):
    """Precision and recall by the definition, pair by pair."""
    mine, pixels = regions(segmentation), np.asarray(segmentation).size
    large = candidates(mine, pixels)
    kind = {}
    collected = dict.fromkeys(mine, Fraction(0))
    recalled, total = Fraction(0), 0
    for person in people:
        theirs = regions(person)
        large_here = candidates(theirs, pixels)
        kind_here, collected_here = {}, dict.fromkeys(theirs, Fraction(0))
        for r in mine:
            for g in theirs:
                p, q = Fraction(len(r & g), len(r)), Fraction(len(r & g), len(g))
                if p >= NINE > q:
                    collected_here[g] += q
                if q >= NINE > p:
                    collected[r] += p
                if r not in large or g not in large_here:
                    continue
                if p >= NINE and q >= NINE:
                    kind[r] = kind_here[g] = "object"
                elif p >= NINE and QUARTER <= q < NINE:
                    kind.setdefault(r, "part")
                elif q >= NINE and QUARTER <= p < NINE:
                    kind_here.setdefault(g, "part")
        for g in large_here:
            recalled += {"object": 1, "part": TENTH}.get(kind_here.get(g), collected_here[g])
        total += len(large_here)
    actual = sum(
        ({"object": Fraction(1), "part": TENTH}[kind[r]] if r in kind else collected[r] / len(people)) for r in large
    )
    return float(actual / len(large)), float(recalled / total)


def blocks(draw, height=6, width=8):
    values = draw(st.lists(st.integers(0, 4), min_size=height * width, max_size=height * width))
    coarse = np.array(values).reshape(height, width)
    return np.where(draw(st.booleans()), coarse, np.sort(coarse, 1))


@st.composite
def maps(draw):
    count = draw(st.integers(1, 3))
    people = [blocks(draw) for _ in range(count)]
    segmentation = blocks(draw)
    if draw(st.booleans()):  # a map similar to a human one
        segmentation = people[0].copy()
        segmentation.flat[draw(st.integers(0, 40)) :][:5] = draw(st.integers(0, 5))
    return segmentation, people


@settings(max_examples=150, deadline=None)
@given(maps())
def test_the_rule_written_out_pair_by_pair(case):
    segmentation, people = case
    np.testing.assert_allclose(objects_and_parts([segmentation], people)[0], written_out(segmentation, people))


def test_regions_beyond_99_percent_are_neither_matched_nor_counted():
    person = np.zeros((20, 20), int)
    person[0, :3] = [1, 2, 3]  # the large region covers 99.25 %
    split = np.where(person > 0, 9, 0)
    assert objects_and_parts([split], [person]).tolist() == [[1.0, 1.0]]


def test_thresholds_include_their_values():
    person = np.zeros(100, int)
    person[:10] = 1
    person[10:] = 2
    segmentation = person.copy()
    segmentation[9] = 2  # 9 of 10 pixels: q = .9 exactly
    assert objects_and_parts([segmentation[None]], [person[None]]).tolist() == [[1.0, 1.0]]


def test_summaries_over_images():
    first, second = np.array([[1.0, 0.5], [0.2, 0.2]]), np.array([[0.4, 0.8], [1.0, 1.0]])
    ods, ois = over_scales([first, second], best_f)
    f = [2 * p * r / (p + r) for p, r in (np.mean([first, second], 0))]
    assert ods == pytest.approx(max(f)) and ois == pytest.approx((2 / 3 + 1) / 2)
    assert np.isnan(over_scales([first, second[:1]], best_f)[0])
    assert over_scales([np.zeros((1, 2))], best_f) == (0.0, 0.0)


def test_the_evaluation_includes_them_on_request():
    segmentation, truth = {"a": [[[0, 0, 1, 1]]]}, {"a": [[[0, 0, 1, 1]]]}
    assert "objects_ods" not in evaluate_segmentations(segmentation, truth)
    actual = evaluate_segmentations(segmentation, truth, objects=True)
    assert (actual["objects_ods"], actual["objects_ois"]) == (1.0, 1.0)
    assert score_image("a", segmentation["a"], truth["a"], objects=True).row()["objects_f"] == 1.0


def test_maps_that_do_not_fit_together():
    with pytest.raises(ShapeError, match="no segmentation"):
        objects_and_parts([], [[[0]]])
    with pytest.raises(ShapeError, match="segmentation 1 has size 1×3"):
        objects_and_parts([[[0, 1, 2]]], [[[0, 1]]])
    with pytest.raises(ShapeError, match="human map 2 has size 2×1"):
        objects_and_parts([[[0, 1]]], [[[0, 1]], [[0], [1]]])
