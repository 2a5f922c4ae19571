"""Segment many files in batches and in parallel."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from matbackprop.errors import DataError
from matbackprop.vision.devices import processors
from matbackprop.vision.inference.segmenting import (
    Segments,
    check_options,
    divide,
    network_contours,
    prepare,
    threshold_of,
)
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.workers import Workers, read_ahead

T = TypeVar("T")
_READERS = 4
_FEW = 8  # for fewer images, starting processes does not pay off


def segment_files(
    jobs: Sequence[tuple[Path, str]],
    model: ContourNet | None,
    finish: Callable[[Segments, str], T],
    *,
    ks: Sequence[int] | None = None,
    side: int,
    scales: Sequence[float] = (1.0,),
    mirror: bool = False,
    workers: int | None = None,
    batch_size: int | None = None,
) -> Iterator[tuple[Path, T | DataError]]:
    """Segment files in parallel.

    Threads read images, the network processes batches of equal size, and worker processes build the regions and call
    ``finish``. Only a few images are in memory at a time. Results are yielded in the order of completion.

    Args:
        jobs: paths of images, each with a name for its results.
        model: a contour network on its device, or None for image gradients.
        finish: picklable function of a result and its name, for example to write the result.
        ks: numbers of regions in exports.
        side: maximum length of the longer side; larger images are reduced.
        scales, mirror: images over which contours are averaged, as in :func:`~matbackprop.segment`.
        workers: number of worker processes; 0 for none. None for all cores but one, or for none if there are few
            images.
        batch_size: images per batch; None for 16 on a GPU and 1 on a CPU.

    Yields:
        Path and result of ``finish``, or path and error if an image cannot be read.
    """
    numbers = check_options(model, ks, side, scales, mirror)
    on_gpu = model is not None and next(model.parameters()).is_cuda
    size = batch_size or (16 if on_gpu else 1)
    if workers is None:
        workers = min(16, processors() - 1)
    workers = workers if len(jobs) >= _FEW else 0
    threshold = threshold_of(model)

    done: deque[tuple[Path, Future[T]]] = deque()
    with Workers(workers) as pool, ThreadPoolExecutor(_READERS) as readers:
        read = read_ahead(lambda job: readers.submit(_read, *job, side), jobs, max(_READERS, size))
        for batch in _batches(read, size):
            if isinstance(batch[0][2], DataError):
                yield batch[0][0], batch[0][2]
                continue
            started = time.perf_counter()
            images = torch.stack([image.small for _, _, image in batch])
            maps = [None] * len(batch) if model is None else network_contours(model, images, scales, mirror)
            each = (time.perf_counter() - started) / len(batch)
            for (path, stem, image), contours in zip(batch, maps, strict=True):
                done.append((path, pool.submit(_finish, finish, stem, image, contours, threshold, numbers, each)))
            while done and (done[0][1].done() or len(done) > 2 * max(workers, 1)):  # bounds memory
                path, result = done.popleft()
                yield path, result.result()
        for path, result in done:
            yield path, result.result()


def _read(path: Path, stem: str, side: int) -> tuple[Path, str, Any]:
    try:
        return path, stem, prepare(path, side)
    except DataError as error:
        return path, stem, error


def _batches(files: Iterable[tuple[Path, str, Any]], size: int) -> Iterator[list[tuple[Path, str, Any]]]:
    """Group ``size`` images of equal shape. A file that cannot be read is a batch."""
    groups: dict[tuple[int, ...], list[tuple[Path, str, Any]]] = {}
    for file in files:
        if isinstance(file[2], DataError):
            yield [file]
            continue
        shape = tuple(file[2].small.shape)
        groups.setdefault(shape, []).append(file)
        if len(groups[shape]) == size:
            yield groups.pop(shape)
        elif sum(map(len, groups.values())) >= 4 * size:  # bounds memory
            yield groups.pop(max(groups, key=lambda shape: len(groups[shape])))
    yield from groups.values()


def _finish(finish: Callable[[Segments, str], T], stem: str, *arguments: Any) -> T:
    return finish(divide(*arguments), stem)
