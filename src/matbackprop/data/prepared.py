"""Segmentation images decoded once: pixels, superpixels and labels in one memory-mapped cache, ready for a GPU.

Training and testing touch no image file, no .mat file and no superpixel algorithm after the first time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from matbackprop.data.bsds import BSDS, labels_to_grid
from matbackprop.data.cache import cache_key, open_cache, remove_cache, write_cache
from matbackprop.errors import ConfigurationError, DataError, ShapeError
from matbackprop.processes import parallel_map
from matbackprop.progress import track
from matbackprop.spectral.superpixels import region_graph, slic_superpixels

log = logging.getLogger("matbackprop")

_FEW = 32  # below this many images starting processes costs more than they save
STRIDES = (8, 16)
"""Strides of the grids that human maps are brought to: those of the paper's feature maps."""


@dataclass(frozen=True)
class PreparedImage:
    """One image as training and testing need it.

    Attributes:
        id: its name.
        image: (3, h, w) uint8.
        superpixels: (h, w) int16, numbered from 0.
        labels: (a, S) int16, for each annotator the region that holds most of each superpixel.
        areas: (S,) int32 pixels of the superpixels.
        edges: (E, 2) int16 pairs i < j of superpixels that touch.
        grids: stride → (a, round(h/stride), round(w/stride)) int16, the region that holds most of each cell.
    """

    id: str
    image: NDArray[np.uint8]
    superpixels: NDArray[np.int16]
    labels: NDArray[np.int16]
    areas: NDArray[np.int32]
    edges: NDArray[np.int16]
    grids: dict[int, NDArray[np.int16]]


def majority_labels(superpixels: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.int16]:
    """For each superpixel the label that most of its pixels carry.

    Example:
        >>> majority_labels(np.array([[0, 0, 0, 1]]), np.array([[5, 5, 2, 2]])).tolist()
        [5, 2]
    """
    count, high = int(superpixels.max()) + 1, int(labels.max()) + 1
    codes = superpixels.ravel().astype(np.int64) * high + labels.ravel()
    return np.bincount(codes, minlength=count * high).reshape(count, high).argmax(1).astype(np.int16)


def in_16_bits(superpixels: NDArray[Any]) -> NDArray[np.int16]:
    """Superpixels as int16; raises ConfigurationError where there are too many of them."""
    if superpixels.max() > np.iinfo(np.int16).max:
        raise ConfigurationError(f"{superpixels.max() + 1} superpixels are more than 32768; ask for fewer.")
    return superpixels.astype(np.int16)


def prepare_image(sample: Any, superpixels: int = 600) -> PreparedImage:
    """Compute superpixels and labels of one sample.

    Args:
        sample: with ``id``, ``image`` (3, h, w) uint8 and ``segmentations``, a list of (h, w) integer maps; the list is
            empty for an image without ground truth.
        superpixels: about how many.

    Raises:
        ShapeError: a label map has another size than the image.
    """
    image = np.ascontiguousarray(np.asarray(sample.image, dtype=np.uint8))
    size = (image.shape[1], image.shape[2])
    maps = [np.asarray(s) for s in sample.segmentations]
    for number, one in enumerate(maps):
        if one.shape != size:
            raise ShapeError(
                f"image {sample.id!r} has {size[0]}×{size[1]} pixels, but its label map {number + 1} has shape "
                f"{one.shape}; check that both belong together."
            )
    regions = in_16_bits(slic_superpixels(image.transpose(1, 2, 0), superpixels))
    graph = region_graph(regions)
    areas = graph.areas.astype(np.int32)
    labels = np.empty((len(maps), len(areas)), np.int16)
    for a, one in enumerate(maps):
        labels[a] = majority_labels(regions, one)
    grids = {}
    for stride in STRIDES:
        grid = _grid(*size, stride)
        cells = [np.asarray(labels_to_grid(torch.as_tensor(one.astype(np.int64)), grid)) for one in maps]
        grids[stride] = np.stack(cells).astype(np.int16) if cells else np.empty((0, *grid), np.int16)
    return PreparedImage(sample.id, image, regions, labels, areas, graph.edges.astype(np.int16), grids)


def _prepare(task: tuple[BSDS, int, int]) -> PreparedImage:
    data, index, superpixels = task
    return prepare_image(data[index], superpixels)


def _grid(height: int, width: int, stride: int) -> tuple[int, int]:
    return max(1, round(height / stride)), max(1, round(width / stride))


def _shapes(row: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of an image's arrays, by the names that the cache gives them, from its row of the table."""
    size, count, annotators = (row["height"], row["width"]), row["superpixels"], row["annotators"]
    shapes = {"image": (3, *size), "superpixels": size, "labels": (annotators, count), "areas": (count,)}
    grids = {f"grid{stride}": (annotators, *_grid(*size, stride)) for stride in STRIDES}
    return {**shapes, "edges": (row["edges"], 2), **grids}


class PreparedImages(Sequence[PreparedImage]):
    """A sequence of :class:`PreparedImage` over memory-mapped arrays.

    Args:
        arrays: flat arrays ``image``, ``superpixels``, ``labels``, ``areas``, ``edges`` and ``grid<stride>``.
        table: for each image its id, height, width, numbers of superpixels, annotators and edges.
        starts: for each image where its part of each array begins; None where the images follow each other.
    """

    def __init__(
        self, arrays: dict[str, NDArray[Any]], table: list[dict[str, Any]], starts: list[dict[str, int]] | None = None
    ) -> None:
        self.arrays, self.table = arrays, table
        self.ids = [row["id"] for row in table]
        if starts is None:
            starts, place = [], dict.fromkeys(arrays, 0)
            for row in table:
                starts.append(place)
                place = {name: place[name] + math.prod(shape) for name, shape in _shapes(row).items()}
        self.starts = starts

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.subset(range(*index.indices(len(self))))
        row, start = self.table[index], self.starts[index]
        parts = {
            name: np.asarray(self.arrays[name][start[name] : start[name] + math.prod(shape)]).reshape(shape)
            for name, shape in _shapes(row).items()
        }
        grids = {stride: parts.pop(f"grid{stride}") for stride in STRIDES}
        return PreparedImage(row["id"], **parts, grids=grids)

    def __iter__(self) -> Iterator[PreparedImage]:
        return (self[i] for i in range(len(self)))

    def subset(self, indices: Sequence[int]) -> PreparedImages:
        """A view on some of the images."""
        return PreparedImages(self.arrays, [self.table[i] for i in indices], [self.starts[i] for i in indices])

    def size(self, index: int) -> tuple[int, int]:
        """Height and width of an image, without reading it."""
        return self.table[index]["height"], self.table[index]["width"]


def prepare_images(data: BSDS, folder: Path, *, superpixels: int = 600, workers: int = 0) -> PreparedImages:
    """Prepare a data set once, in ``workers`` processes, and open its cache.

    Its files, with sizes and times, and the number of superpixels key the cache.
    """
    if len(data) == 0:
        raise DataError("the data set holds no image; check the folder and the split.")
    files = [
        (str(file), file.stat().st_size, file.stat().st_mtime_ns) for name in data.ids for file in data.files(name)
    ]
    key = cache_key(
        {"kind": "segmentation", "version": 3, "ids": list(data.ids), "files": files, "superpixels": superpixels,
         "strides": list(STRIDES)}
    )  # fmt: skip
    path = Path(folder) / f"segmentation-{key}"
    try:
        cache = open_cache(path)
    except DataError as error:
        if path.exists():
            log.warning("%s It is made again now.", error)
            remove_cache(path)
        tasks = [(data, i, superpixels) for i in range(len(data))]
        # One by one, so that progress is seen, and a signal waits for no more than one image per process.
        prepared = parallel_map(_prepare, tasks, workers if len(tasks) >= _FEW else 0)
        images = list(track(prepared, "Preparing images", len(tasks)))
        write_cache(path, _flatten(images), {"table": [_row(one) for one in images]})
        cache = open_cache(path)
    return PreparedImages(cache.arrays, cache.meta["table"])


def _row(one: PreparedImage) -> dict[str, Any]:
    return {
        "id": one.id,
        "height": int(one.image.shape[1]),
        "width": int(one.image.shape[2]),
        "superpixels": len(one.areas),
        "annotators": len(one.labels),
        "edges": len(one.edges),
    }


def _flatten(images: Sequence[PreparedImage]) -> dict[str, NDArray[Any]]:
    arrays = {name: np.concatenate([getattr(i, name).ravel() for i in images])
              for name in ("image", "superpixels", "labels", "areas", "edges")}  # fmt: skip
    for stride in STRIDES:
        arrays[f"grid{stride}"] = np.concatenate([i.grids[stride].ravel() for i in images])
    return arrays


def collect(images: Sequence[PreparedImage]) -> PreparedImages:
    """Hold prepared images in memory instead of a cache."""
    return PreparedImages(_flatten(images), [_row(one) for one in images])


def pad_stack(parts: Sequence[NDArray[Any]], fill: int, multiple: int = 1) -> Tensor:
    """Stack arrays of different shapes (…) into one tensor, filled up behind; the last two sides to a multiple."""
    shape = [max(p.shape[d] for p in parts) for d in range(parts[0].ndim)]
    for d in (-2, -1):
        shape[d] = -(-shape[d] // multiple) * multiple
    out = np.full((len(parts), *shape), fill, dtype=parts[0].dtype)
    for i, part in enumerate(parts):
        place: tuple[Any, ...] = (i, *(slice(0, n) for n in part.shape))
        out[place] = part
    return torch.from_numpy(out)
