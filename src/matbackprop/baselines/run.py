"""Score the baselines on a data set and keep one summary a method."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from matbackprop.baselines.clustering import ncut_pytorch, sklearn_spectral
from matbackprop.baselines.felzenszwalb import felzenszwalb
from matbackprop.baselines.humans import humans_leave_one_out
from matbackprop.baselines.multiscale_ncut import multiscale_ncut
from matbackprop.baselines.simple import fixed_grids, one_region
from matbackprop.data.bsds import BSDS
from matbackprop.errors import ConfigurationError
from matbackprop.metrics import ImageScores, score_image, summarize
from matbackprop.processes import parallel_map

__all__ = ["BASELINES", "HUMANS", "run_baselines"]

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

_PACKAGES = {
    "sklearn_spectral": ("scikit-learn",),
    "ncut_pytorch": ("ncut-pytorch", "scikit-image"),
    "multiscale_ncut": ("scipy",),
    "felzenszwalb": ("scikit-image",),
}


def run_baselines(
    data: BSDS | str | Path,
    out: str | Path,
    methods: Sequence[str] | None = None,
    limit: int | None = None,
    *,
    split: str = "bsds300-test",
    boundary: bool = True,
    workers: int = 1,
    command: str = "",
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Segment the images of a data set with each baseline, score them, and write ``<out>/<method>.json``.

    Args:
        data: the data set, or its folder.
        out: folder of the summaries.
        methods: names from ``BASELINES`` or ``"humans"``; all by default.
        limit: only the first so many images.
        split: of the data set where a folder was given.
        boundary: also match boundaries.
        workers: number of processes.
        command: kept in the summary, so that a reader can do it again.
        progress: called with the method, the number of images done and of all.

    Returns:
        For each method what its file holds: ``method``, ``command``, ``split``, ``images``, ``scores`` (see
        ``summarize``), ``per_image`` rows, ``seconds_per_image`` of processor time for the segmentation alone, and
        ``versions``.

    Raises:
        ConfigurationError: an unknown method or a limit below one.
        DataError: the data set is incomplete.
        MissingExtraError: a method's library is not installed.
    """
    known = [*BASELINES, HUMANS]
    methods = known if methods is None else list(methods)
    unknown = [name for name in methods if name not in known]
    if unknown or (limit is not None and limit < 1):
        raise ConfigurationError(
            f"methods {unknown} and limit {limit}: the methods are {', '.join(known)}, a limit is ≥ 1"
        )
    dataset = data if isinstance(data, BSDS) else BSDS(data, split)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    summaries = {}
    for method in methods:
        done = []
        for row in _score_all(dataset, method, limit, boundary, workers):
            done.append(row)
            if progress is not None:
                progress(method, len(done), min(limit or len(dataset), len(dataset)))
        summary = _humans_summary(done) if method == HUMANS else _segmenter_summary(done)
        summary = {
            "method": method,
            "command": command,
            "split": dataset.split,
            "images": len(done),
            **summary,
            "versions": {name: version(name) for name in ("matbackprop", "numpy", *_PACKAGES.get(method, ()))},
        }
        (folder / f"{method}.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        summaries[method] = summary
    return summaries


def _score_all(dataset: BSDS, method: str, limit: int | None, boundary: bool, workers: int) -> Iterator[Any]:
    indices = range(min(limit or len(dataset), len(dataset)))
    return parallel_map(partial(_score_one, dataset, method, boundary), indices, workers)


def _score_one(dataset: BSDS, method: str, boundary: bool, index: int) -> Any:
    sample = dataset[index]
    if method == HUMANS:
        return humans_leave_one_out(sample.id, sample.segmentations)
    start = time.process_time()
    maps = BASELINES[method](sample.image)
    seconds = time.process_time() - start
    return score_image(sample.id, maps, sample.segmentations, boundary=boundary), seconds


def _segmenter_summary(done: list[tuple[ImageScores, float]]) -> dict[str, Any]:
    scores = [score for score, _ in done]
    return {
        "scores": summarize(scores),
        "seconds_per_image": float(np.mean([seconds for _, seconds in done])),
        "per_image": [score.row() for score in scores],
    }


def _humans_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    return {"scores": {name: float(np.mean([row[name] for row in rows])) for name in names}, "per_image": rows}
