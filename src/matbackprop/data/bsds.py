"""Berkeley segmentation data: images with the maps of several annotators, their splits, grids and augmentation."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from matbackprop.data.label_files import index_label_files, read_label_maps
from matbackprop.errors import ConfigurationError, DataError, LabelError, ShapeError
from matbackprop.metrics.regions import compact_labels

__all__ = ["BSDS", "BSDSSample", "Jitter", "augment", "labels_to_grid", "read_image", "tuning_split"]

_IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".tif", ".tiff", ".webp")

# BSDS300's parts by name, where only BSDS500's folders are there.
_PARTS = {"bsds300-train": "train", "bsds300-test": "val"}


@dataclass
class BSDSSample:
    """One image with its human maps.

    Attributes:
        id: name of the image.
        image: RGB, uint8 ``(3, h, w)``.
        segmentations: one map for each annotator, int64 ``(h, w)``, labels from 0 without gaps.
    """

    id: str
    image: Tensor
    segmentations: list[Tensor]


class BSDS(Dataset[BSDSSample]):
    """Images with human segmentations in the layout of BSDS500, BSDS300, or your own files in the same layout.

    BSDS500 and your own: ``[data/]images/<split>/<id>.jpg`` and ``[data/]groundTruth/<split>/<id>.mat``; instead of
    ``.mat`` also ``<id>.png``, several annotators as ``<id>_1.png``, ``<id>_2.png`` …, or ``.npz``.
    BSDS300: ``images/{train,test}/<id>.jpg`` and ``human/color/<annotator>/<id>.seg``.
    The splits ``"bsds300-train"`` and ``"bsds300-test"`` are found in both: BSDS300's parts are ``train`` and ``val``
    of BSDS500.

    Args:
        root: the folder that holds ``images`` (or ``data/images``, or ``BSDS500/data/images``).
        split: ``"train"``, ``"val"``, ``"test"``, ``"bsds300-train"``, ``"bsds300-test"`` or the name of your own
            folder.
        ids: only these images, in this order; all of the split by default.

    Attributes:
        ids: names of the images, in the order of the data set.

    Raises:
        DataError: a folder is missing, images have no human map, or asked-for images are not there. A file that turns
            out damaged, or a map of another size than its image, raises when it is read.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> root = Path(tempfile.mkdtemp())
        >>> for kind in ("images", "groundTruth"):
        ...     (root / kind / "train").mkdir(parents=True)
        >>> Image.new("RGB", (6, 4)).save(root / "images/train/pond.png")
        >>> for i in (1, 2):
        ...     Image.new("L", (6, 4), i).save(root / f"groundTruth/train/pond_{i}.png")
        >>> data = BSDS(root, "train")
        >>> data.ids, data[0].image.shape, len(data[0].segmentations)
        (['pond'], torch.Size([3, 4, 6]), 2)

    Reference: Martin, Fowlkes, Tal, Malik, ICCV 2001 (BSDS300); Arbelaez, Maire, Fowlkes, Malik, PAMI 2011 (BSDS500).
    """

    def __init__(self, root: str | Path, split: str = "train", *, ids: Sequence[str] | None = None) -> None:
        self.root = _find_root(Path(root))
        self.split = split
        bsds300 = (self.root / "human").is_dir() and not (self.root / "groundTruth").is_dir()
        if bsds300:
            folder = {"bsds300-train": "train", "bsds300-test": "test"}.get(split, split)
        else:
            folder = _PARTS.get(split, split)
        self._images = _index_images(self.root / "images" / folder, split)
        if bsds300:
            colour = self.root / "human" / "color"
            truth = colour if colour.is_dir() else self.root / "human"
        else:
            truth = self.root / "groundTruth" / folder
        self._truth = index_label_files(truth, names=self._images)
        if ids is not None:
            absent = [name for name in ids if name not in self._images]
            if absent:
                raise DataError(
                    f"{_listed(absent)} not in the split {split!r} of {self.root}; it has {len(self._images)} images"
                )
            self._images = {name: self._images[name] for name in ids}
        without = [name for name in self._images if name not in self._truth]
        if without:
            raise DataError(f"no human map under {truth} for {_listed(without)}; add it or remove the image")
        self.ids: Sequence[str] = list(self._images)

    def __len__(self) -> int:
        return len(self._images)

    def __iter__(self) -> Iterator[BSDSSample]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> BSDSSample:
        name = self.ids[index]
        image = self.image(name)
        segmentations = self.segmentations(name)
        for number, labels in enumerate(segmentations, 1):
            if labels.shape != image.shape[1:]:
                height, width = image.shape[1:]
                turned = " (transposed)" if labels.shape == (width, height) else ""
                raise DataError(
                    f"{name}: human map {number} has size {labels.shape[0]}×{labels.shape[1]}{turned}, "
                    f"but the image {height}×{width}; they must agree"
                )
        return BSDSSample(name, image, segmentations)

    def image(self, name: str) -> Tensor:
        """The image of a name, uint8 ``(3, h, w)``."""
        return read_image(self._images[name])

    def segmentations(self, name: str) -> list[Tensor]:
        """The human maps of a name, int64 ``(h, w)`` each, labels from 0 without gaps."""
        maps = [labels for path in self._truth[name] for labels in read_label_maps(path)]
        return [torch.from_numpy(compact_labels(labels)[0]) for labels in maps]


def _find_root(root: Path) -> Path:
    for candidate in (root, root / "data", root / "BSDS500" / "data", root / "BSDS500", root / "BSDS300"):
        if (candidate / "images").is_dir():
            return candidate
    raise DataError(
        f"{root} has no folder 'images', 'data/images' or 'BSDS500/data/images'; give the data set's own folder"
    )


def _index_images(folder: Path, split: str) -> dict[str, Path]:
    if not folder.is_dir():
        others = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())
        raise DataError(
            f"{folder} does not exist, so there is no split {split!r}; there are {', '.join(others) or 'none'}"
        )
    images: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in _IMAGES:
            if path.stem in images:
                raise DataError(f"{path} and {images[path.stem]} have the same name; keep one")
            images[path.stem] = path
    if not images:
        raise DataError(f"{folder} holds no image; the kinds that can be read are {', '.join(_IMAGES)}")
    return images


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return f"{len(names)} images ({shown}, …)" if len(names) > 5 else shown


def read_image(path: str | Path) -> Tensor:
    """An image file as RGB.

    Args:
        path: any picture that Pillow reads; grey and palette pictures become RGB, transparency is dropped.

    Returns:
        uint8 ``(3, h, w)``.

    Raises:
        DataError: the file is missing, damaged, or no picture.
    """
    from PIL import Image

    try:
        with Image.open(path) as picture:
            array = np.array(picture.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path} cannot be read as a picture ({error}); is it damaged?") from error
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


FOLDS = 5
"""Parts that the training images can be divided into, each held out in its turn."""


def tuning_split(ids: Sequence[str], fold: int = 0) -> tuple[list[str], list[str]]:
    """Hold every fifth image out for choosing settings, so that the test images are never looked at.

    Args:
        ids: names of training images in any order.
        fold: which fifth, 0 to 4.

    Returns:
        Names to train on and names held out: of the sorted names, in fold 0 the first, sixth, eleventh … are held out.

    Example:
        >>> tuning_split(["c", "a", "b", "f", "e", "d"])
        (['b', 'c', 'd', 'e'], ['a', 'f'])
    """
    if not 0 <= fold < FOLDS:
        raise ConfigurationError(f"fold is {fold}; it must be one of 0 to {FOLDS - 1}.")
    ordered = sorted(ids)
    held = ordered[fold::FOLDS]
    return [name for name in ordered if name not in set(held)], held


def labels_to_grid(labels: Tensor, grid: tuple[int, int]) -> Tensor:
    """Bring a label map to another grid: each cell takes the label that covers the largest part of its area.

    Cells and pixels may cut each other anywhere; areas are counted exactly in whole numbers, and of labels with equal
    area the smallest wins. Regions smaller than half a cell vanish, whatever pixel happens to lie at the centre of
    the cell.

    Args:
        labels: integers ``(h, w)``; negative ones are labels like the others.
        grid: height and width of the result, finer or coarser.

    Returns:
        int64 ``grid``, on the device of the labels.

    Raises:
        ShapeError: not a map, or an empty map or grid.
        LabelError: labels that are not integers.

    Example:
        >>> labels_to_grid(torch.tensor([[0, 0, 0, 1, 1, 2]]), (1, 2))
        tensor([[0, 1]])
    """
    if labels.ndim != 2 or labels.numel() == 0 or len(grid) != 2 or min(grid) < 1:
        raise ShapeError(
            f"labels {tuple(labels.shape)} to the grid {tuple(grid)}: both are (height, width) and not empty"
        )
    if labels.dtype.is_floating_point or labels.dtype.is_complex:
        raise LabelError(f"labels are {labels.dtype}; integers are needed")
    values, compact = torch.unique(labels.cpu(), return_inverse=True)
    count = len(values)
    (cell_row, pixel_row, row_length), (cell_column, pixel_column, column_length) = (
        _pieces(size, cells) for size, cells in zip(labels.shape, grid, strict=True)
    )
    result = torch.empty(grid, dtype=torch.int64)
    # Rows of cells are taken in blocks, so that the table cells × labels stays small.
    block = max(1, (1 << 22) // (grid[1] * count))
    for start in range(0, grid[0], block):
        rows = (cell_row >= start) & (cell_row < start + block)
        height = min(block, grid[0] - start)
        inside = compact[pixel_row[rows]][:, pixel_column]
        cells = (cell_row[rows] - start)[:, None] * grid[1] + cell_column
        areas = (row_length[rows][:, None] * column_length).double()  # exact: areas stay far below 2⁵³
        table = torch.bincount((cells * count + inside).ravel(), areas.ravel(), minlength=height * grid[1] * count)
        result[start : start + height] = values[table.view(height, grid[1], count).argmax(-1)]
    return result.to(labels.device)


def _pieces(size: int, cells: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut a line at the borders of ``size`` pixels and of ``cells`` cells: cell, pixel and length of each piece."""
    borders = torch.unique(torch.cat([torch.arange(size + 1) * cells, torch.arange(cells + 1) * size]))
    starts, lengths = borders[:-1], borders.diff()
    return starts // size, starts // cells, lengths


@dataclass(frozen=True)
class Jitter:
    """How far ``augment`` may change a sample.

    Attributes:
        flip: probability of a mirror image.
        scale: smallest and largest factor of size, drawn evenly in the logarithm.
        brightness: colours are multiplied by 1 ± this.
        contrast: the distance from the mean grey is multiplied by 1 ± this.
        saturation: the distance from the pixel's own grey is multiplied by 1 ± this.
        hue: colours are turned by at most ± this share of the colour circle.
    """

    flip: float = 0.5
    scale: tuple[float, float] = (0.7, 1.2)
    brightness: float = 0.2
    contrast: float = 0.2
    saturation: float = 0.2
    hue: float = 0.03


def augment(sample: BSDSSample, generator: torch.Generator, jitter: Jitter | None = None) -> BSDSSample:
    """Mirror, scale and recolour an image at random, its human maps moving along.

    Images are scaled with antialiased bilinear interpolation, label maps by taking the label at the centre of each
    new pixel, so that every label stays a label.

    Args:
        sample: the image and its maps.
        generator: the source of randomness, on the CPU; the same state gives the same result.
        jitter: how far to go; the defaults of ``Jitter`` by default.

    Returns:
        A new sample; maps are numbered anew where scaling lost a region.

    Example:
        >>> sample = BSDSSample("a", torch.zeros(3, 20, 30, dtype=torch.uint8), [torch.zeros(20, 30, dtype=torch.long)])
        >>> new = augment(sample, torch.Generator().manual_seed(0))
        >>> new.image.shape[1:] == new.segmentations[0].shape
        True
    """
    jitter = jitter or Jitter()
    # All numbers are drawn first and always, so that one option does not change what the others draw.
    draw = torch.rand(6, generator=generator, dtype=torch.float64).tolist()
    image, maps = sample.image, sample.segmentations
    if draw[0] < jitter.flip:
        image, maps = image.flip(-1), [labels.flip(-1) for labels in maps]
    low, high = jitter.scale
    if not 0 < low <= high:
        raise ShapeError(f"the scale goes from {low} to {high}; two positive factors in this order are needed")
    factor = low * (high / low) ** draw[1]
    size = tuple(max(1, round(side * factor)) for side in image.shape[1:])
    colours = image.float() / 255
    if size != tuple(image.shape[1:]):
        colours = F.interpolate(colours[None], size=size, mode="bilinear", antialias=True)[0]
        maps = [_resize_labels(labels, size) for labels in maps]
    brightness, contrast, saturation = (
        1 + strength * (2 * value - 1)
        for strength, value in zip((jitter.brightness, jitter.contrast, jitter.saturation), draw[2:5], strict=True)
    )
    colours = _recolour(colours, brightness, contrast, saturation, jitter.hue * (2 * draw[5] - 1))
    return BSDSSample(sample.id, (colours.clamp(0, 1) * 255).round().byte(), maps)


def _resize_labels(labels: Tensor, size: tuple[int, ...]) -> Tensor:
    # Labels stay below 2²⁴, where float32 counts exactly.
    resized = F.interpolate(labels[None, None].float(), size=size, mode="nearest-exact")[0, 0].long()
    return torch.unique(resized, return_inverse=True)[1]


# Rec. 601 luma and the two chroma axes, in which a change of hue is a rotation.
_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]], dtype=torch.float64)


def _recolour(colours: Tensor, brightness: float, contrast: float, saturation: float, hue: float) -> Tensor:
    angle = torch.tensor(2 * torch.pi * hue, dtype=torch.float64)
    turn = torch.eye(3, dtype=torch.float64)
    turn[1, 1] = turn[2, 2] = saturation * angle.cos()
    turn[1, 2], turn[2, 1] = -saturation * angle.sin(), saturation * angle.sin()
    matrix = (torch.linalg.inv(_YIQ) @ turn @ _YIQ).to(colours.dtype) * brightness
    colours = torch.einsum("ij,jhw->ihw", matrix, colours)
    grey = (_YIQ[0].to(colours.dtype)[:, None, None] * colours).sum(0).mean()
    return grey + contrast * (colours - grey)
