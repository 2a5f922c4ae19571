"""How well people agree with each other: the level that a segmentation method can hope for."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from matbackprop.errors import DataError
from matbackprop.metrics import region_scores

__all__ = ["humans_leave_one_out"]


def humans_leave_one_out(id: str, ground_truth: Sequence[Any]) -> dict[str, float | int | str]:
    """Score each human map of an image against the maps of the others, and average over the people.

    With c the covering of map j by map i: best = mean_i max_{j≠i} c, average = mean_i mean_{j≠i} c; PRI and VI are
    means over all pairs of different people.

    Args:
        id: name of the image.
        ground_truth: human label maps ``(h, w)``, at least two.

    Returns:
        A row with the names of ``ImageScores.row()``: ``paper_best``, ``paper_average``, ``pri`` and ``vi``.

    Raises:
        DataError: fewer than two maps.

    Example:
        >>> humans_leave_one_out("a", [[[0, 0, 1, 1]], [[0, 0, 1, 1]], [[0, 0, 0, 0]]])["paper_best"]
        0.8333333333333334
    """
    people = len(ground_truth)
    if people < 2:
        raise DataError(f"{id} has {people} human map; people can be compared from two maps on")
    scores = region_scores(ground_truth, ground_truth)
    others = ~np.eye(people, dtype=bool)
    covering = scores.covering[others].reshape(people, people - 1)
    return {
        "id": id,
        "segmentations": people - 1,
        "annotators": people,
        "paper_best": float(covering.max(1).mean()),
        "paper_average": float(covering.mean()),
        "pri": float(scores.rand_index[others].mean()),
        "vi": float(scores.variation_of_information[others].mean()),
    }
