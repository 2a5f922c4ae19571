"""Segment many files in batches and in parallel."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from matbackprop.errors import DataError
from matbackprop.vision.devices import processors
from matbackprop.vision.inference.segmenting import (
    Prepared,
    Segments,
    check_options,
    divide,
    network_contours,
    prepare,
    threshold_of,
)
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.workers import Workers

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
    scales: Sequence[float] = (),
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
        scales: image scales over which contours are averaged, as in :func:`~matbackprop.segment`.
        workers: number of worker processes; 0 for none. None for all cores but one, or for none if there are few
            images.
        batch_size: images per batch; None for 16 on a GPU and 1 on a CPU.

    Yields:
        Path and result of ``finish``, or path and error if an image cannot be read.
    """
    numbers = check_options(model, ks, side, scales)
    on_gpu = model is not None and next(model.parameters()).is_cuda
    size = batch_size or (16 if on_gpu else 1)
    if workers is None:
        workers = min(16, processors() - 1)
    workers = workers if len(jobs) >= _FEW else 0
    threshold = threshold_of(model, scales)
    todo = deque(jobs)
    reading: deque[tuple[Path, str, Future[Prepared]]] = deque()
    waiting: dict[tuple[int, ...], list[tuple[Path, str, Prepared]]] = {}  # by size
    done: deque[tuple[Path, Future[T]]] = deque()

    def infer(batch: list[tuple[Path, str, Prepared]]) -> None:
        started = time.perf_counter()
        images = torch.stack([photo.small for _, _, photo in batch])
        maps = [None] * len(batch) if model is None else network_contours(model, images, scales)
        each = (time.perf_counter() - started) / len(batch)
        for (path, stem, photo), contours in zip(batch, maps, strict=True):
            done.append((path, pool.submit(_finish, finish, stem, photo, contours, threshold, numbers, each)))

    with Workers(workers) as pool, ThreadPoolExecutor(_READERS) as readers:
        try:
            while todo or reading or waiting or done:
                while todo and len(reading) < max(_READERS, size):
                    path, stem = todo.popleft()
                    reading.append((path, stem, readers.submit(prepare, path, side)))
                if reading:
                    path, stem, future = reading.popleft()
                    try:
                        photo = future.result()
                    except DataError as error:
                        yield path, error
                        continue
                    waiting.setdefault(tuple(photo.small.shape), []).append((path, stem, photo))
                full = [shape for shape, group in waiting.items() if len(group) >= size]
                held = sum(map(len, waiting.values()))
                if not full and waiting and (not reading or held >= 4 * size):
                    full = [max(waiting, key=lambda shape: len(waiting[shape]))]
                for shape in full:
                    infer(waiting.pop(shape))
                # Bound the number of results in memory.
                while done and (done[0][1].done() or len(done) > 2 * max(workers, 1) or not (reading or waiting)):
                    path, result = done.popleft()
                    yield path, result.result()
        finally:
            for *_, read in reading:
                read.cancel()
            for _, result in done:
                result.cancel()


def _finish(finish: Callable[[Segments, str], T], stem: str, *arguments: Any) -> T:
    return finish(divide(*arguments), stem)
