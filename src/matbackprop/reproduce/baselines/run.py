"""Score the baselines on a data set."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from matbackprop.data.bsds import BSDS
from matbackprop.errors import ConfigurationError
from matbackprop.metrics import ImageScores, score_image, summarize
from matbackprop.processes import Workers
from matbackprop.reproduce.baselines.clustering import ncut_pytorch, sklearn_spectral
from matbackprop.reproduce.baselines.felzenszwalb import felzenszwalb
from matbackprop.reproduce.baselines.humans import humans_leave_one_out
from matbackprop.reproduce.baselines.multiscale_ncut import multiscale_ncut
from matbackprop.reproduce.baselines.simple import fixed_grids, one_region

__all__ = ["BASELINES", "HUMANS", "run_baseline"]

#: Every baseline: an image uint8 ``(3, h, w)`` → its label maps, int64 ``(h, w)``.
BASELINES: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "one_region": one_region,
    "fixed_grids": fixed_grids,
    "sklearn_spectral": sklearn_spectral,
    "ncut_pytorch": ncut_pytorch,
    "multiscale_ncut": multiscale_ncut,
    "felzenszwalb": felzenszwalb,
}

#: The row that needs no image: people against each other.
HUMANS = "humans"


def run_baseline(method: str, data: BSDS, workers: Workers, *, boundary: bool = False) -> dict[str, Any]:
    """Segment the images of a data set with a baseline and score them.

    Args:
        method: a name from ``BASELINES``, or ``HUMANS``.
        data: the images with their human maps.
        workers: processes to share the work.
        boundary: also match boundaries.

    Returns:
        ``scores`` (see ``summarize``), ``per_image`` (image → its row of scores), and ``seconds_per_image`` of
        processor time for the segmentation alone.

    Raises:
        ConfigurationError: an unknown method.
        DataError: the data set is incomplete.
        MissingExtraError: the method's library is not installed.
    """
    known = [*BASELINES, HUMANS]
    if method not in known:
        raise ConfigurationError(f"there is no baseline {method!r}; there are {', '.join(known)}.")
    if method == HUMANS:
        rows = list(workers.map(partial(_people, data), range(len(data))))
        names = [name for name, value in rows[0].items() if isinstance(value, float)]
        return {"scores": {n: float(np.mean([row[n] for row in rows])) for n in names}, "per_image": _by_id(rows)}
    timed = list(workers.map(partial(_segment, data, method, boundary), range(len(data))))
    scores = [score for score, _ in timed]
    return {
        "scores": summarize(scores),
        "per_image": _by_id([score.row() for score in scores]),
        "seconds_per_image": float(np.mean([seconds for _, seconds in timed])),
    }


def _by_id(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["id"]: {name: value for name, value in row.items() if name != "id"} for row in rows}


def _people(data: BSDS, index: int) -> dict[str, Any]:
    name = data.ids[index]
    return humans_leave_one_out(name, data.segmentations(name))


def _segment(data: BSDS, method: str, boundary: bool, index: int) -> tuple[ImageScores, float]:
    sample = data[index]
    start = time.process_time()
    maps = BASELINES[method](sample.image)
    seconds = time.process_time() - start
    return score_image(sample.id, maps, sample.segmentations, boundary=boundary), seconds
