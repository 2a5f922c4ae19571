"""Segmenting whole sets of images with a network: batches by size, clustering on the device, merging in processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from matbackprop.data.prepared import PreparedImages, pad_stack
from matbackprop.errors import ConfigurationError
from matbackprop.models.deep_ncuts import DEFAULT_KS, DeepNCuts, merge_superpixels
from matbackprop.processes import WorkerPool
from matbackprop.spectral import MergeCost, region_graph, slic_superpixels

__all__ = ["Segmented", "Workers", "segment_images"]


class Segmented(NamedTuple):
    """Segmentations of a set of images.

    Attributes:
        labels: id → (n, h, w) int32 label maps.
        seconds: wall time from decoded images in memory to all label maps in memory.
    """

    labels: dict[str, NDArray[np.int32]]
    seconds: float


class Workers:
    """Processes for the parts that run on the CPU; without processes the calls run here.

    Args:
        count: number of processes; below 2 none is started.
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._pool = WorkerPool(count) if count > 1 else None

    def warm(self) -> None:
        """Wait until every process is up, so that starting them is in nobody's measured time."""
        if self._pool is not None:
            list(self._pool.map(_rest, [0.5] * self.count, chunksize=1))

    def map(self, function: Any, tasks: Sequence[Any], chunk: int = 1) -> list[Any]:
        """Apply a picklable function to every task, in order."""
        if self._pool is None:
            return [function(task) for task in tasks]
        return list(self._pool.map(function, tasks, chunksize=chunk))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._pool is not None:
            self._pool.__exit__(*error)


def _rest(seconds: float) -> None:
    import skimage.segmentation  # noqa: F401  (loaded here, not in a measured call)

    time.sleep(seconds)


def _superpixels(task: tuple[NDArray[np.uint8], int]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    image, count = task
    regions = slic_superpixels(image.transpose(1, 2, 0), count).astype(np.int16)
    return regions, region_graph(regions).edges


def _merge(task: tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None, Sequence[int], MergeCost]) -> NDArray[np.int32]:
    superpixels, points, boundary, ks, cost = task
    return merge_superpixels(superpixels, points, boundary, ks, cost=cost).labels.astype(np.int32)


def _batches(images: PreparedImages, size: int) -> list[list[int]]:
    """Indices of images of one shape together, at most ``size`` in a batch."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i in range(len(images)):
        groups.setdefault(images.size(i), []).append(i)
    return [group[s : s + size] for group in groups.values() for s in range(0, len(group), size)]


def segment_images(
    model: DeepNCuts,
    images: PreparedImages,
    *,
    method: str = "cluster",
    ks: Sequence[int] = DEFAULT_KS,
    batch_size: int = 8,
    seed: int = 0,
    precision: torch.dtype = torch.float32,
    workers: Workers | None = None,
    prepared: bool = False,
) -> Segmented:
    """Segment every image at its full size.

    Args:
        model: on the device to use; it is put into evaluation mode.
        images: decoded images.
        method: ``"cluster"`` (K-means and connected components, all on the device) or ``"merge"`` (hierarchy).
        ks: numbers of clusters, or of regions.
        batch_size: images of one size that go through the network together.
        seed: of K-means.
        precision: bfloat16 runs the network under autocast.
        workers: processes for superpixels and merging.
        prepared: merge the superpixels that were prepared with the images; otherwise they are computed anew, so that
            the time holds all the work.

    Returns:
        :class:`Segmented`.
    """
    if method not in ("cluster", "merge"):
        raise ConfigurationError(f"unknown method {method!r}; choose cluster or merge.")
    model.eval()
    device = next(model.parameters()).device
    workers = workers or Workers()
    half = torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == torch.bfloat16)
    batches = _batches(images, batch_size)
    pixels = [[images[i].image for i in batch] for batch in batches]
    started = time.perf_counter()
    labels: dict[str, NDArray[np.int32]] = {}
    if method == "cluster":
        for batch, parts in zip(batches, pixels, strict=True):
            with half:
                maps = model.cluster(_to(parts, device), ks, seed=seed).labels
            for i, one in zip(batch, maps.to(torch.int32).cpu().numpy(), strict=True):
                labels[images.ids[i]] = one
        return Segmented(labels, time.perf_counter() - started)

    if prepared:
        regions = iter([(images[i].superpixels, images[i].edges.astype(np.int64)) for batch in batches for i in batch])
    else:
        flat = [(part, model.superpixels) for parts in pixels for part in parts]
        regions = iter(workers.map(_superpixels, flat, 2))
    tasks, names = [], []
    for batch, parts in zip(batches, pixels, strict=True):
        here = [next(regions) for _ in parts]
        ids = pad_stack([one for one, _ in here], -1).to(device)
        edges = pad_stack([pairs for _, pairs in here], -1).to(device)
        with half:
            points, strength = model.region_points(_to(parts, device), ids, edges)
        coordinates = points.float().cpu().numpy()
        boundary = None if strength is None else strength.cpu().numpy()
        for j, (i, (one, pairs)) in enumerate(zip(batch, here, strict=True)):
            count = int(one.max()) + 1
            edge = None if boundary is None else boundary[j, : len(pairs)]
            tasks.append((one, coordinates[j, :count], edge, list(ks), model.cost))
            names.append(images.ids[i])
    for name, one in zip(names, workers.map(_merge, tasks, 1), strict=True):
        labels[name] = one
    return Segmented(labels, time.perf_counter() - started)


def _to(parts: Sequence[NDArray[np.uint8]], device: torch.device) -> Tensor:
    batch = torch.from_numpy(np.stack(parts))
    if device.type == "cuda":
        return batch.pin_memory().to(device, non_blocking=True).contiguous(memory_format=torch.channels_last)
    return batch
