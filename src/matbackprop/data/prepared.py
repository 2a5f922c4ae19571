"""Segmentation images decoded once: pixels, superpixels and labels in one memory-mapped cache, ready for a GPU.

Training and testing touch no image file, no .mat file and no superpixel algorithm after the first time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from matbackprop.data.bsds import labels_to_grid
from matbackprop.data.cache import cache_key, open_cache, remove_cache, write_cache
from matbackprop.errors import ConfigurationError, DataError, ShapeError
from matbackprop.processes import parallel_map
from matbackprop.progress import track
from matbackprop.spectral.superpixels import region_graph, slic_superpixels

__all__ = ["LabelledImages", "PreparedImage", "PreparedImages", "prepare_image", "prepare_images"]

log = logging.getLogger("matbackprop")

_FEW = 32  # below this many images starting processes costs more than they save
STRIDES = (8, 16)
"""Strides of the grids that human maps are brought to: those of the paper's feature maps."""


class LabelledImages(Protocol):
    """A data set of images with human maps, such as :class:`matbackprop.data.bsds.BSDS`."""

    ids: Sequence[str]

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def files(self, name: str) -> list[Path]:
        """The files that an image is read from."""
        ...


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


def prepare_image(sample: Any, superpixels: int = 600, strides: Sequence[int] = STRIDES) -> PreparedImage:
    """Compute superpixels and labels of one sample.

    Args:
        sample: with ``id``, ``image`` (3, h, w) uint8 and ``segmentations``, a list of (h, w) integer maps; the list is
            empty for an image without ground truth.
        superpixels: about how many.
        strides: of the grids.

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
    for stride in strides:
        grid = (max(1, round(size[0] / stride)), max(1, round(size[1] / stride)))
        cells = [np.asarray(labels_to_grid(torch.as_tensor(one.astype(np.int64)), grid)) for one in maps]
        grids[stride] = np.stack(cells).astype(np.int16) if cells else np.empty((0, *grid), np.int16)
    return PreparedImage(sample.id, image, regions, labels, areas, graph.edges.astype(np.int16), grids)


def _prepare(task: tuple[LabelledImages, int, int]) -> PreparedImage:
    data, index, superpixels = task
    return prepare_image(data[index], superpixels)


class PreparedImages(Sequence[PreparedImage]):
    """A sequence of :class:`PreparedImage` over memory-mapped arrays.

    Args:
        arrays: flat arrays ``image``, ``superpixels``, ``labels``, ``areas``, ``edges`` and ``grid<stride>``.
        table: for each image its id, height, width, numbers of superpixels, annotators and edges.
    """

    def __init__(self, arrays: dict[str, NDArray[Any]], table: Sequence[dict[str, Any]]) -> None:
        self.arrays = arrays
        self.table = list(table)
        self.ids = [row["id"] for row in self.table]
        counts = {
            "image": [3 * r["height"] * r["width"] for r in self.table],
            "superpixels": [r["height"] * r["width"] for r in self.table],
            "labels": [r["annotators"] * r["superpixels"] for r in self.table],
            "areas": [r["superpixels"] for r in self.table],
            "edges": [2 * r["edges"] for r in self.table],
        }
        for stride in STRIDES:
            counts[f"grid{stride}"] = [r["annotators"] * int(np.prod(self.grid(r, stride))) for r in self.table]
        self._offsets = {name: np.concatenate([[0], np.cumsum(sizes)]).astype(int) for name, sizes in counts.items()}

    @staticmethod
    def grid(row: dict[str, Any], stride: int) -> tuple[int, int]:
        """The grid of ``stride`` of a row of the table."""
        return max(1, round(row["height"] / stride)), max(1, round(row["width"] / stride))

    def __len__(self) -> int:
        return len(self.table)

    def _part(self, name: str, index: int) -> NDArray[Any]:
        offsets = self._offsets[name]
        return np.asarray(self.arrays[name][offsets[index] : offsets[index + 1]])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.subset(range(*index.indices(len(self))))
        row = self.table[index]
        index = index % len(self)
        size, count, annotators = (row["height"], row["width"]), row["superpixels"], row["annotators"]
        return PreparedImage(
            row["id"],
            self._part("image", index).reshape(3, *size),
            self._part("superpixels", index).reshape(size),
            self._part("labels", index).reshape(annotators, count),
            self._part("areas", index),
            self._part("edges", index).reshape(-1, 2),
            {s: self._part(f"grid{s}", index).reshape(annotators, *self.grid(row, s)) for s in STRIDES},
        )

    def __iter__(self) -> Iterator[PreparedImage]:
        return (self[i] for i in range(len(self)))

    def subset(self, indices: Sequence[int]) -> PreparedSubset:
        """A view on some of the images."""
        return PreparedSubset(self, list(indices))

    def size(self, index: int) -> tuple[int, int]:
        """Height and width of an image, without reading it."""
        return self.table[index]["height"], self.table[index]["width"]


class PreparedSubset(PreparedImages):
    """Some images of a :class:`PreparedImages`."""

    def __init__(self, parent: PreparedImages, indices: list[int]) -> None:
        self.parent, self.indices = parent, indices
        self.table = [parent.table[i] for i in indices]
        self.ids = [row["id"] for row in self.table]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.subset(range(*index.indices(len(self))))
        return self.parent[self.indices[index]]


def prepare_images(data: LabelledImages, folder: Path, *, superpixels: int = 600, workers: int = 0) -> PreparedImages:
    """Prepare a data set once and open its cache.

    Args:
        data: images with human maps. Their files, with sizes and times, and the arguments here key the cache.
        folder: where caches live.
        superpixels: about how many for each image.
        workers: processes; 0 for this one.

    Raises:
        DataError: the data set is empty.
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
