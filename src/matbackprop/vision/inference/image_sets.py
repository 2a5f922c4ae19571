"""Segmenting whole sets of images with a network: batches by size, clustering on the device, merging in processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from matbackprop.errors import ConfigurationError
from matbackprop.vision.data.bsds import PreparedImages, in_16_bits, pad_stack
from matbackprop.vision.models.deep_ncuts import DeepNCuts, default_ks
from matbackprop.vision.segmentation import MergeCost, merge_regions, region_graph, slic_superpixels
from matbackprop.vision.segmentation.superpixels import RegionGraph, assign_superpixels, connect_superpixels, works_on
from matbackprop.vision.workers import Workers


class Segmented(NamedTuple):
    """Segmentations of a set of images.

    Attributes:
        labels: id → (n, h, w) int32 label maps.
        seconds: wall time from decoded images in memory to all label maps in memory.
    """

    labels: dict[str, NDArray[np.int32]]
    seconds: float


def warm(workers: Workers) -> None:
    """Wait until every process is up, so that starting them is in nobody's measured time."""
    if workers.count > 1:
        list(workers.map(_rest, [0.5] * workers.count))


def _rest(seconds: float) -> None:
    import skimage.segmentation  # noqa: F401  (loaded here, not in a measured call)

    time.sleep(seconds)


class _Regions(NamedTuple):
    """What crosses from one process to another: superpixels (h, w) and their graph, without its pairs of pixels."""

    superpixels: NDArray[np.int16]
    graph: RegionGraph


def _graph_of(superpixels: NDArray[np.int16]) -> _Regions:
    return _Regions(superpixels, region_graph(superpixels)._replace(pairs=np.empty(0, np.int64)))


def _superpixels(image: NDArray[np.uint8], count: int) -> _Regions:
    return _graph_of(in_16_bits(slic_superpixels(image.transpose(1, 2, 0), count)))


def _connected(assigned: NDArray[np.int32], image: NDArray[np.uint8], count: int) -> _Regions:
    return _graph_of(in_16_bits(connect_superpixels(assigned, image.transpose(1, 2, 0), count)))


def _levels(
    points: NDArray[Any],
    graph: RegionGraph,
    boundary: NDArray[Any] | None,
    colours: NDArray[Any],
    ks: Sequence[int],
    cost: MergeCost,
) -> NDArray[np.int32]:
    return merge_regions(points, graph, boundary, colours=colours, cost=cost).levels(ks).astype(np.int32)


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
    ks: Sequence[int] | None = None,
    space: str | None = None,
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
        ks: numbers of clusters, or of regions; None for the method's default.
        space: where to cluster, ``"ncut"`` or ``"soft"``; None for the model's own.
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
    ks = default_ks(method) if ks is None else ks
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
                maps = model.cluster(_to(parts, device), ks, seed=seed, space=space).labels
            for i, one in zip(batch, maps.to(torch.int32).cpu().numpy(), strict=True):
                labels[images.ids[i]] = one
        return Segmented(labels, time.perf_counter() - started)

    # Nothing waits for more than it needs: while the network sees one batch, processes find the superpixels of the next
    # ones, and then merge those whose points have come.
    regions = []
    for batch, parts in zip(batches, pixels, strict=True):
        if prepared:
            regions.append([workers.submit(_graph_of, images[i].superpixels) for i in batch])
        else:
            regions.append(_find_superpixels(parts, model.superpixels, device, workers))
    merging: list[tuple[str, NDArray[np.int16], Future[NDArray[np.int32]]]] = []
    for batch, parts, futures in zip(batches, pixels, regions, strict=True):
        here: list[_Regions] = [future.result() for future in futures]
        ids = pad_stack([one.superpixels for one in here], -1).to(device)
        edges = pad_stack([one.graph.edges for one in here], -1).to(device)
        with half:
            on_regions = model.region_points(_to(parts, device), ids, edges)
        points, colours = on_regions.points.float().cpu().numpy(), on_regions.colours.cpu().numpy()
        boundary = None if on_regions.strength is None else on_regions.strength.cpu().numpy()
        for j, (i, (superpixels, graph)) in enumerate(zip(batch, here, strict=True)):
            count = len(graph.areas)
            edge = None if boundary is None else boundary[j, : len(graph.edges)]
            rows = (points[j, :count], graph, edge, colours[j, :count])
            levels = workers.submit(_levels, *rows, list(ks), model.cost)
            merging.append((images.ids[i], superpixels, levels))
    # Label maps are made here: they are a hundred times as large as the levels.
    labels = {name: np.take(levels.result(), superpixels, axis=1) for name, superpixels, levels in merging}
    return Segmented(labels, time.perf_counter() - started)


def _find_superpixels(
    parts: Sequence[NDArray[np.uint8]], count: int, device: torch.device, workers: Workers
) -> list[Future[Any]]:
    """Begin to find the superpixels of images of one size, on the device as far as that can be."""
    batch = _to(parts, device)
    if not works_on(batch, count):
        return [workers.submit(_superpixels, part, count) for part in parts]
    assigned = assign_superpixels(batch, count).to(torch.int32).cpu().numpy()
    return [workers.submit(_connected, one, part, count) for one, part in zip(assigned, parts, strict=True)]


def _to(parts: Sequence[NDArray[np.uint8]], device: torch.device) -> Tensor:
    batch = torch.from_numpy(np.stack(parts))
    if device.type == "cuda":
        return batch.pin_memory().to(device, non_blocking=True)
    return batch
