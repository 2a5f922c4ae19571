"""Precision and recall of objects and parts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matbackprop.vision.metrics.regions import HumanMaps, Overlaps, harmonic_mean

OBJECT = 0.9  #: Minimum relative overlap for two regions to be the same object, or for one to be inside the other.
PART = 0.25  #: Minimum fraction of a region that a part covers.
PART_WEIGHT = 0.1  #: Weight of a part relative to an object.
COVERED = 0.99  #: Fraction of the image covered by candidates.


def objects_and_parts(segmentations: Sequence[Any], ground_truth: Sequence[Any]) -> NDArray[np.float64]:
    """Compute precision and recall of objects and parts for the segmentations of one image.

    Let p = |r∩g|/|r| and q = |r∩g|/|g| for a region r of the segmentation and g of a human map. *Candidates* are the
    largest regions of a map, in order of area, until they cover 99 % of the image. Candidates r and g are both
    *objects* if p ≥ .9 and q ≥ .9. A candidate r that is not an object is a *part* if p ≥ .9 and .25 ≤ q < .9 for a
    candidate g, and g likewise with p and q exchanged. All regions count as *fragments*: r collects p from every g with
    q ≥ .9 > p, and g collects q from every r with p ≥ .9 > q. Then

    precision = (objects + .1·parts + (Σ collected by candidates r that are neither)/annotators) / candidates r,
    recall = (objects + .1·parts + Σ collected by candidates g that are neither) / candidates g,

    where r is an object or a part if it is one for any annotator, and recall counts the regions of all annotators.

    Args:
        segmentations: label maps ``(h, w)``, at least one.
        ground_truth: human label maps ``(h, w)``, at least one.

    Returns:
        Precision and recall of each segmentation, ``(t, 2)``.

    Raises:
        ShapeError: a list is empty or the maps differ in size.
        LabelError: the labels of a map are not integers.

    Example:
        >>> objects_and_parts([[[0, 0, 1, 1]], [[0, 0, 0, 0]]], [[[3, 3, 5, 5]]]).tolist()
        [[1.0, 1.0], [1.0, 0.1]]

    Reference: Pont-Tuset, Marques, "Measures and meta-measures for the supervised evaluation of image segmentation",
    CVPR 2013.
    """
    people = HumanMaps.of(ground_truth)
    return score_objects(people, people.all_overlaps(segmentations))


def score_objects(people: HumanMaps, overlaps: Sequence[Overlaps]) -> NDArray[np.float64]:
    """Compute :func:`objects_and_parts` from counted overlaps."""
    return np.array([_precision_and_recall(one, people) for one in overlaps])


def _candidates(areas: NDArray[np.int64]) -> NDArray[np.bool_]:
    order = np.argsort(-areas, kind="stable")
    before = np.cumsum(areas[order]) - areas[order]
    chosen = np.zeros(len(areas), dtype=bool)
    chosen[order] = before < COVERED * areas.sum()
    return chosen


def _precision_and_recall(overlaps: Overlaps, people: HumanMaps) -> tuple[float, float]:
    count = len(overlaps.areas)
    table = np.zeros((len(people.areas), count), dtype=np.int64)
    table[overlaps.rows, overlaps.columns] = overlaps.shared
    candidate = _candidates(overlaps.areas)
    is_object, is_part = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    collected = np.zeros(count)
    recalled, total = 0.0, 0
    for shared in np.split(table, people.first[1:]):
        own = shared.sum(1)
        theirs = _candidates(own)
        p, q = shared / overlaps.areas, shared / own[:, None]
        inside, around = p >= OBJECT, q >= OBJECT  # r is inside g, g is inside r
        both = theirs[:, None] & candidate
        same = both & inside & around
        is_object |= same.any(0)
        is_part |= (both & inside & ~around & (q >= PART)).any(0)
        collected += (p * (around & ~inside)).sum(0)
        object_here = same.any(1)
        part_here = (both & around & ~inside & (p >= PART)).any(1) & ~object_here
        fragments = (q * (inside & ~around)).sum(1)[theirs & ~object_here & ~part_here].sum()
        recalled += object_here.sum() + PART_WEIGHT * part_here.sum() + fragments
        total += int(theirs.sum())
    is_part &= ~is_object
    fragments = collected[candidate & ~is_object & ~is_part].sum() / len(people.first)
    precision = (is_object.sum() + PART_WEIGHT * is_part.sum() + fragments) / candidate.sum()
    return float(precision), float(recalled / total)


def best_f(pairs: NDArray[np.float64]) -> float:
    """Return the largest F-measure of precision and recall ``(t, 2)``."""
    return float(harmonic_mean(pairs[:, 0], pairs[:, 1]).max())
