"""Berkeley segmentation data sets (BSDS): images with label maps of several annotators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from matbackprop.errors import DataError, Problem, first_problems
from matbackprop.vision.data.label_files import index_label_files, read_label_maps
from matbackprop.vision.data.pictures import find_pictures, read_picture
from matbackprop.vision.metrics.regions import compact_labels
from matbackprop.vision.progress import track


@dataclass
class BSDSSample:
    """Image with its human label maps ("human maps")."""

    id: str  #: Image name.
    image: Tensor  #: RGB, uint8 ``(3, h, w)``.
    segmentations: list[Tensor]  #: One map per annotator, int64 ``(h, w)``, with consecutive labels from 0.


class BSDS(Dataset[BSDSSample]):
    """Images with human segmentations in the layout of BSDS500.

    Files are ``[data/]images/<split>/<id>.jpg`` and ``[data/]groundTruth/<split>/<id>.mat``. Maps can also be
    ``<id>.png``, ``<id>.npz``, or ``<id>_1.png``, ``<id>_2.png`` … for several annotators. The training and test images
    of BSDS300 are the splits ``train`` and ``val``.

    Args:
        root: folder that contains ``images`` (or ``data/images``, or ``BSDS500/data/images``).
        split: ``"train"``, ``"val"``, ``"test"`` or the name of another folder.
        ids: names of the images to use, in this order; by default all images of the split.

    Raises:
        DataError: a folder is missing, images have no human map, or images in ``ids`` are missing. Corrupted files and
            maps whose size differs from the image raise this error when they are read.

    Reference: Arbelaez, Maire, Fowlkes, Malik, PAMI 2011.
    """

    def __init__(self, root: str | Path, split: str = "train", *, ids: Sequence[str] | None = None) -> None:
        self.root = find_root(root)
        self.split = split
        files = find_split(self.root, split)
        self._images, self._truth = files.images, files.truth
        if ids is not None:
            absent = [name for name in ids if name not in self._images]
            if absent:
                raise DataError(
                    f"{len(absent)} images ({', '.join(absent[:5])}) are not among the {len(self._images)} images of "
                    f"split {split!r} in {self.root}. Check ids."
                )
            self._images = {name: self._images[name] for name in ids}
        wrong = [p for p in files.problems if p.path in self._images.values()]
        if wrong:
            raise DataError(f"{first_problems(wrong)}. Add the missing files, or remove the image.")
        self.ids: Sequence[str] = list(self._images)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> BSDSSample:
        name = self.ids[index]
        return read_sample(name, self._images[name], self._truth[name])

    def __iter__(self) -> Iterator[BSDSSample]:
        return map(self.__getitem__, range(len(self)))

    def segmentations(self, name: str) -> list[Tensor]:
        """Return the human maps of an image, int64 ``(h, w)`` each, with consecutive labels from 0."""
        return [labels for path in self._truth[name] for labels in _read_maps(path)]


def _read_maps(path: Path) -> list[Tensor]:
    return [torch.from_numpy(compact_labels(labels)[0]) for labels in read_label_maps(path)]


class SplitFiles(NamedTuple):
    """The files of a split by image name, and the problems found."""

    images: dict[str, Path]
    truth: dict[str, list[Path]]
    problems: list[Problem]


def find_root(root: str | Path) -> Path:
    """Return the folder that contains ``images``: ``root`` or one of its known subfolders."""
    root = Path(root)
    for candidate in (root, root / "data", root / "BSDS500" / "data", root / "BSDS500"):
        if (candidate / "images").is_dir():
            return candidate
    raise DataError(f"{root} has no folder 'images', 'data/images' or 'BSDS500/data/images'. Choose another folder.")


def find_split(root: Path, split: str) -> SplitFiles:
    """Find the images of a split and their human maps in a folder returned by :func:`find_root`.

    Images without a human map and duplicate names are problems; the first of several duplicates is kept.
    """
    folder = root / "images" / split
    if not folder.is_dir():
        others = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())
        raise DataError(f"Split {split!r} was not found: no {folder}. Available: {', '.join(others) or 'none'}.")
    images: dict[str, Path] = {}
    problems = []
    for path in find_pictures([folder]):
        first = images.setdefault(path.stem, path)
        if first is not path:
            problems.append(Problem(first, f"has the same name as {path}. Keep one"))
    truth_folder = root / "groundTruth" / split
    truth = index_label_files(truth_folder, names=images)
    problems += [
        Problem(path, f"has no human map {name}.png, {name}_1.png or {name}.mat in {truth_folder}")
        for name, path in images.items()
        if name not in truth
    ]
    return SplitFiles(images, truth, problems)


def read_sample(name: str, image: Path, truth: Sequence[Path]) -> BSDSSample:
    """Read an image with its human maps, or raise DataError."""
    pixels = torch.from_numpy(read_picture(image).pixels).permute(2, 0, 1).contiguous()
    maps: list[Tensor] = []
    for path in truth:
        for number, labels in enumerate(_read_maps(path), 1):
            if labels.shape != pixels.shape[1:]:
                sizes = ["×".join(map(str, shape)) for shape in (labels.shape, pixels.shape[1:])]
                raise DataError(f"{path}: human map {number} has size {sizes[0]}, but the image has size {sizes[1]}.")
            maps.append(labels)
    return BSDSSample(name, pixels, maps)


FOLDS = 5  #: Number of folds of the training images for cross-validation.


def tuning_split(ids: Sequence[str], fold: int = 0) -> tuple[list[str], list[str]]:
    """Return training names and held-out names, so that test images are not used for tuning.

    Of the sorted names, fold i holds out those at positions i, i + 5, i + 10, ….

    Example:
        >>> tuning_split(["c", "a", "b", "f", "e", "d"])
        (['b', 'c', 'd', 'e'], ['a', 'f'])
    """
    ordered = sorted(ids)
    held = ordered[fold::FOLDS]
    return [name for name in ordered if name not in set(held)], held


def labels_to_grid(labels: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resample a label map (h, w) to another grid by the majority label of each cell, weighted by area.

    The sizes need not divide each other. Areas are exact; ties are resolved to the smallest label.

    Example:
        >>> labels_to_grid(torch.tensor([[0, 0, 0, 1, 1, 2]]), (1, 2))
        tensor([[0, 1]])
    """
    values, compact = torch.unique(labels.cpu(), return_inverse=True)
    count = len(values)
    (cell_row, pixel_row, row_length), (cell_column, pixel_column, column_length) = (
        _pieces(size, cells) for size, cells in zip(labels.shape, grid, strict=True)
    )
    inside = compact[pixel_row][:, pixel_column]
    cells = cell_row[:, None] * grid[1] + cell_column
    areas = (row_length[:, None] * column_length).double()  # exact: areas are far below 2⁵³
    table = torch.bincount((cells * count + inside).ravel(), areas.ravel(), minlength=grid[0] * grid[1] * count)
    return values[table.view(*grid, count).argmax(-1)].to(labels.device)


def _pieces(size: int, cells: int) -> tuple[Tensor, Tensor, Tensor]:
    """Intersect ``size`` pixels with ``cells`` cells along a line: cell, pixel and length of each piece."""
    borders = torch.unique(torch.cat([torch.arange(size + 1) * cells, torch.arange(cells + 1) * size]))
    starts, lengths = borders[:-1], borders.diff()
    return starts // size, starts // cells, lengths


@dataclass(frozen=True)
class PreparedImage:
    """Image (3, h, w) with its human maps on a grid (a, round(h/stride), round(w/stride)).

    A cell has the majority label of its pixels.
    """

    id: str
    image: NDArray[np.uint8]
    grid: NDArray[np.int16]


def prepare_image(sample: BSDSSample, stride: int) -> PreparedImage:
    """Resample the human maps of one sample to the grid of a stride."""
    height, width = (max(1, round(side / stride)) for side in sample.image.shape[1:])
    grid = np.empty((len(sample.segmentations), height, width), np.int16)
    for cells, labels in zip(grid, sample.segmentations, strict=True):
        cells[:] = labels_to_grid(labels, (height, width))
    return PreparedImage(sample.id, sample.image.numpy(), grid)


def prepare_images(data: BSDS, stride: int) -> list[PreparedImage]:
    """Read all images with their human maps on the grid of a stride."""
    return [prepare_image(sample, stride) for sample in track(data, "Preparing images")]


def pad_stack(parts: Sequence[NDArray[Any]], fill: int, multiple: int = 1) -> Tensor:
    """Stack arrays of different shapes, padded at the end. The last two sides are padded to a multiple."""
    shape = [max(p.shape[d] for p in parts) for d in range(parts[0].ndim)]
    for d in (-2, -1):
        shape[d] = -(-shape[d] // multiple) * multiple
    out = np.full((len(parts), *shape), fill, dtype=parts[0].dtype)
    for i, part in enumerate(parts):
        out[i][tuple(slice(0, n) for n in part.shape)] = part
    return torch.from_numpy(out)
