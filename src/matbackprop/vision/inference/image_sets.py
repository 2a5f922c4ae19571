"""Segment many files: batches of one size through the network, the rest in processes."""

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
_FEW = 8  # for fewer pictures, starting processes takes longer than it saves


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
    """Segment files: threads read, the network computes batches of one size, processes build regions and ``finish``.

    Only a few pictures are in memory at a time. Results are in the order of completion.

    Args:
        jobs: paths of pictures, each with a name for its results.
        model: a contour network on its device, or None for image gradients.
        finish: picklable; called with each result and its name, for example to write it.
        ks: numbers of regions in exports.
        side: longer side at which larger pictures are segmented.
        scales: image sizes whose contours are averaged, as in :func:`~matbackprop.segment`.
        workers: processes for everything after the network; None for one per core but one, 0 for none. Few pictures
            need none.
        batch_size: pictures in a batch; None for 16 on a GPU and 1 on a CPU, which gains nothing from more.

    Yields:
        Each path with the result of ``finish``, or with the error of a picture that cannot be read.
    """
    numbers = check_options(model, ks, side, scales)
    on_gpu = model is not None and next(model.parameters()).is_cuda
    size = batch_size or (16 if on_gpu else 1)
    if workers is None:
        workers = min(16, processors() - 1)
    workers = workers if len(jobs) >= _FEW else 0
    threshold = threshold_of(model)
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
                # Only a few results are in memory.
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
