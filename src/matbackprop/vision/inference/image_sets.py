"""Segment many files in batches and in parallel."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from matbackprop.errors import DataError
from matbackprop.vision.devices import processors
from matbackprop.vision.inference.segmenting import (
    as_batch,
    check_options,
    network_contours,
    prepare,
    segment_photograph,
)
from matbackprop.vision.inference.segments import Segments, divide_and_finish
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.workers import Workers, import_modules, read_ahead

if TYPE_CHECKING:
    from matbackprop.vision.inference.loading import Segmenter

T = TypeVar("T")
_READERS = 4
_THREADS = 8  # more threads would wait for the interpreter
_FEW = 8  # for fewer images, starting processes does not pay off
#: Modules without torch that the steps after the network need. They are imported in the background.
MODULES = ("matbackprop.cli.segment", "matbackprop.vision.inference.segments", "skimage.morphology",
            "skimage.segmentation", "scipy.io", "PIL.PngImagePlugin")  # fmt: skip


def start_workers(device: torch.device, images: int) -> Workers:
    """Start worker processes for :func:`segment_files` on a GPU; none on a CPU or for few images."""
    return Workers(min(16, processors() - 1) if device.type == "cuda" and images >= _FEW else 0).start(MODULES)


def segment_files(
    jobs: Sequence[tuple[Path, str]],
    model: Segmenter | None,
    finish: Callable[[Segments, str], T],
    *,
    ks: Sequence[int] | None = None,
    side: int,
    scales: Sequence[float] = (1.0,),
    mirror: bool = False,
    pool: Workers | None = None,
    batch_size: int = 16,
) -> Iterator[tuple[Path, T | DataError]]:
    """Segment files in parallel. Only a few images are in memory at a time.

    Without a pool, threads segment one image at a time each. To save memory, a network runs in one thread per two
    processors, with about 200 MB per thread. With a pool, for a contour network on a GPU, threads read images, the
    network processes batches of images of equal size, and worker processes build the regions and call ``finish``.

    Args:
        jobs: paths of images, each with a name for its results.
        model: a network on its device, or None for image gradients.
        finish: function of a result and its name, for example to write the result; picklable if there is a pool.
        ks: numbers of regions in exports.
        side: maximum length of the longer side; larger images are reduced.
        scales, mirror: images over which contours are averaged, as in :func:`~matbackprop.segment`.
        pool: worker processes. They need not import torch.
        batch_size: images per batch with a pool.

    Yields:
        Path and result of ``finish``, or path and error if an image cannot be read.
    """
    options: dict[str, Any] = {"side": side, "scales": scales, "mirror": mirror}
    numbers = check_options(model, ks, **options)
    threading.Thread(target=import_modules, args=(MODULES,), daemon=True).start()  # while the network runs
    if pool is not None and pool.count and isinstance(model, ContourNet):
        yield from _in_batches(jobs, model, finish, numbers, pool, batch_size, **options)
        return

    def one(job: tuple[Path, str]) -> tuple[Path, T | DataError]:
        path, name = job
        try:
            return path, finish(segment_photograph(path, model, numbers, **options), name)
        except DataError as error:
            return path, error

    before = torch.get_num_threads()
    threads = max(1, min(_THREADS, before if model is None else before // 2, len(jobs)))
    executor = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(before // threads,))
    try:
        yield from read_ahead(lambda job: executor.submit(one, job), jobs, 2 * threads)
    finally:
        executor.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def _in_batches(
    jobs: Iterable[tuple[Path, str]],
    model: ContourNet,
    finish: Callable[[Segments, str], T],
    ks: tuple[int, ...],
    pool: Workers,
    size: int,
    side: int,
    **averaged: Any,
) -> Iterator[tuple[Path, T | DataError]]:
    done: deque[tuple[Path, Future[T]]] = deque()
    with ThreadPoolExecutor(_READERS) as readers:
        read = read_ahead(lambda job: readers.submit(_read, *job, side), jobs, max(_READERS, size))
        for batch in _batches(read, size):
            if isinstance(batch[0][2], DataError):
                yield batch[0][0], batch[0][2]
                continue
            started = time.perf_counter()
            maps = network_contours(model, as_batch([photo for _, _, photo in batch]), **averaged)
            each = (time.perf_counter() - started) / len(batch)
            fields = {"ks": ks, "network": True, "seconds": each, "threshold": model.config.threshold}
            for (path, name, photo), contours in zip(batch, maps, strict=True):
                whole = {"contours": contours, "pixels": photo.pixels, **fields, **photo.origin}
                done.append((path, pool.submit(divide_and_finish, finish, name, **whole)))
            while done and (done[0][1].done() or len(done) > 2 * max(pool.count, 1)):  # bounds memory
                path, result = done.popleft()
                yield path, result.result()
        for path, result in done:
            yield path, result.result()


def _read(path: Path, name: str, side: int) -> tuple[Path, str, Any]:
    try:
        return path, name, prepare(path, side)
    except DataError as error:
        return path, name, error


def _batches(files: Iterable[tuple[Path, str, Any]], size: int) -> Iterator[list[tuple[Path, str, Any]]]:
    """Group ``size`` images of equal shape. A file that cannot be read is a batch."""
    groups: dict[tuple[int, ...], list[tuple[Path, str, Any]]] = {}
    for file in files:
        if isinstance(file[2], DataError):
            yield [file]
            continue
        shape = file[2].small.shape
        groups.setdefault(shape, []).append(file)
        if len(groups[shape]) == size:
            yield groups.pop(shape)
        elif sum(map(len, groups.values())) >= 4 * size:  # bounds memory
            yield groups.pop(max(groups, key=lambda shape: len(groups[shape])))
    yield from groups.values()
