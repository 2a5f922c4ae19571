"""Object regions of COCO-format files: cropped once, cached on disk, and assembled into batches on the device.

:func:`cache_regions` crops the bounding box of every region, resizes it to a longest side of 200 pixels, and stores
color and mask as four bytes per pixel in a memory-mapped array. :func:`place_regions` shifts regions on a canvas of
227×227 pixels, flips, masks and normalizes them. Placements depend only on seed and epoch, so that a resumed run uses
the same batches.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from matbackprop.errors import DataError, Problem, first_problems
from matbackprop.vision.configuration import Background
from matbackprop.vision.data.cache import cache_key
from matbackprop.vision.data.coco import BAD_IMAGE, ImageRegions, RegionIndex, open_regions, read_coco
from matbackprop.vision.data.pictures import IMAGENET_MEAN, IMAGENET_STD
from matbackprop.vision.devices import processors
from matbackprop.vision.files import atomic_folder, read_json
from matbackprop.vision.progress import track
from matbackprop.vision.workers import parallel_map

_log = logging.getLogger(__name__)

_ROW = np.dtype(
    [("size", np.int64, 2), ("label", np.int64), ("area", np.float64), ("image", np.int64), ("annotation", np.int64)]
)  # columns of the table in a cache


def crop_region(
    image: np.ndarray, mask: np.ndarray, window: tuple[slice, slice], *, side: int, margin: float = 0.0
) -> NDArray[np.uint8]:
    """Crop a window of an RGB image (h, w, 3) and its mask (h, w), and resize it to a longest side of ``side``.

    ``margin`` is a border around the window, as a fraction of its longest side.

    Returns:
        uint8 (h', w', 4): red, green, blue, and the fraction of the pixel inside the region in 255ths.
    """
    from PIL import Image

    more = round(margin * max(part.stop - part.start for part in window))
    rows, columns = (slice(max(part.start - more, 0), part.stop + more) for part in window)
    inside = np.ascontiguousarray(mask[rows, columns])
    height, width = inside.shape
    scale = side / max(height, width)
    size = (max(round(width * scale), 1), max(round(height * scale), 1))
    out = np.empty((size[1], size[0], 4), np.uint8)
    crop = Image.fromarray(np.ascontiguousarray(image[rows, columns]))
    out[..., :3] = np.asarray(crop.resize(size, Image.Resampling.BILINEAR))
    cover = Image.fromarray(inside * np.uint8(255))
    out[..., 3] = np.asarray(cover.resize(size, Image.Resampling.BILINEAR))
    return out


def pad_crops(crops: Sequence[NDArray[np.uint8]], side: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Put crops of :func:`crop_region` into the upper left corners of an array (n, side, side, 4); also their sizes."""
    pixels = np.zeros((len(crops), side, side, 4), np.uint8)
    for one, crop in zip(pixels, crops, strict=True):
        one[: crop.shape[0], : crop.shape[1]] = crop
    return pixels, np.array([crop.shape[:2] for crop in crops], np.int64).reshape(-1, 2)


class Regions:
    """Cropped regions in a cache of :func:`cache_regions`.

    Attributes:
        pixels: uint8 (n, side, side, 4), memory-mapped: red, green, blue, and fraction inside the mask. The region is
            in the upper left corner.
        sizes: int64 (n, 2), height and width of the region in ``pixels``.
        labels: int64 (n,), indices into ``categories``.
        areas: float64 (n,), area in the original image, in pixels.
        categories: ``{"id": …, "name": …}``, sorted by id.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            meta = read_json(path / "meta.json", limit=1 << 28)
            self.categories: list[dict[str, Any]] = meta["categories"]
            table = np.load(path / "table.npy", allow_pickle=False)
            self.sizes, self.labels, self.areas, self.image_ids, self.annotation_ids = (
                np.ascontiguousarray(table[name]) for name in _ROW.fields or ()
            )
            shape = (len(table), meta["side"], meta["side"], 4)
            self.pixels: np.ndarray = np.memmap(path / "pixels.bin", np.uint8, "r", shape=shape)
        except (DataError, OSError, ValueError, LookupError, TypeError, EOFError) as error:
            raise DataError(f"The cache {path} is damaged ({error}). Remove the folder to rebuild it.") from error

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> list[str]:
        """Names of the categories, in the order of the labels."""
        return [c["name"] for c in self.categories]


class _CroppedImage(NamedTuple):
    """Crops of the usable regions of one image, and the bad annotations."""

    pixels: NDArray[np.uint8]
    table: np.ndarray
    problems: list[Problem]


def _crop_image(task: tuple[ImageRegions, int, float]) -> _CroppedImage:
    entry, side, margin = task
    image, usable, problems, _ = open_regions(entry)
    crops = [crop_region(image, mask, window, side=side, margin=margin) for _, mask, window in usable]
    pixels, sizes = pad_crops(crops, side)
    table = np.zeros(len(usable), _ROW)
    for row, (region, mask, _) in enumerate(usable):
        area = mask.sum() if region.area is None else region.area
        table[row] = sizes[row], region.label, area, entry.image_id, region.annotation_id
    return _CroppedImage(pixels, table, problems)


def _crop_all(images: list[ImageRegions], side: int, margin: float) -> Iterator[_CroppedImage]:
    tasks = [(entry, side, margin) for entry in images]
    return parallel_map(_crop_image, tasks, processors() if len(tasks) >= 32 else 0)


def cache_regions(
    annotations: str | Path, images: str | Path, folder: str | Path, *, side: int, margin: float = 0.0
) -> Regions:
    """Crop all regions in parallel, or open the cache ``folder/regions-<hash>`` if it exists.

    ``side`` and ``margin`` are those of :func:`crop_region`. Bad annotations are skipped with a warning.

    Raises:
        DataError: an image is missing, unreadable or of another size than annotated, or no region is usable.
    """
    stat = Path(annotations).stat()
    key = cache_key(
        {
            "version": 6,
            "file": [Path(annotations).name, stat.st_size, stat.st_mtime_ns],
            "images": str(Path(images).resolve()),
            "crop": [side, margin],
        }
    )
    path = Path(folder) / f"regions-{key}"
    if not path.exists():
        index = read_coco(annotations, images)
        with_regions = [entry for entry in index.images if entry.regions]
        unused = {entry.path for entry in index.images} - {entry.path for entry in with_regions}
        if bad := [p for p in index.problems if p.kind == BAD_IMAGE and p.path not in unused]:
            raise DataError(f"{annotations}: {len(bad)} images cannot be used: {first_problems(bad)}.")
        crops = track(_crop_all(with_regions, side, margin), "Cropping regions", len(with_regions))
        with atomic_folder(path) as scratch:
            _write_regions(scratch, side, Path(annotations), index, crops)
    return Regions(path)


def _write_regions(
    folder: Path, side: int, annotations: Path, index: RegionIndex, crops: Iterable[_CroppedImage]
) -> None:
    problems, tables = list(index.problems), [np.zeros(0, _ROW)]
    with (folder / "pixels.bin").open("wb") as pixels:
        for cropped in crops:
            problems += cropped.problems
            pixels.write(cropped.pixels.tobytes())
            tables.append(cropped.table)
        os.fsync(pixels.fileno())
    table = np.concatenate(tables)
    if not len(table):
        raise DataError(f"{annotations} has no usable region. {first_problems(problems, 2)}")
    np.save(folder / "table.npy", table)
    (folder / "meta.json").write_text(json.dumps({"side": side, "categories": index.categories}))
    if problems:
        _log.warning("Skipped %d invalid entries of %s: %s", len(problems), annotations, first_problems(problems, 3))


def hold_out_images(image_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hold out the regions of every fifth image, in the order of ids.

    Example:
        >>> fit, held_out = hold_out_images(np.array([7, 7, 8, 9, 3, 5]))
        >>> fit.tolist(), held_out.tolist()
        ([0, 1, 2, 4, 5], [3])
    """
    held_out = np.isin(image_ids, np.unique(image_ids)[4::5])
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def draw_placements(count: int, *, seed: int, epoch: int, jitter: int, flip: bool) -> np.ndarray:
    """Draw shifts down and right of at most ``jitter`` pixels, and flips, int64 (count, 3), from (seed, epoch)."""
    draw = np.random.default_rng([seed, epoch])
    shifts = draw.integers(-jitter, jitter + 1, (count, 2))
    return np.concatenate([shifts, draw.integers(0, 2 if flip else 1, (count, 1))], axis=1)


@functools.lru_cache(maxsize=16)
def _normalization(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return scale and offset to normalize bytes, cached on the device to avoid a synchronization."""
    mean, deviation = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
    return (1 / (255 * deviation)).to(device), (mean / deviation).to(device)


def place_regions(
    pixels: Tensor,
    sizes: Tensor,
    placement: Tensor,
    *,
    canvas: int,
    background: Background = "keep",
) -> tuple[Tensor, Tensor]:
    """Place regions on the canvas, flip, mask and normalize them, on their device.

    Args:
        pixels: uint8 (b, side, side, 4), as in :class:`Regions`.
        sizes: int64 (b, 2), height and width of the regions.
        placement: int64 (b, 3), shift down, shift right, flip.
        canvas: side of the output.
        background: ``"keep"`` keeps the pixels around the object; ``"mask"`` replaces them with the mean color.

    Returns:
        Images (b, 3, canvas, canvas) in channels-last memory, normalized with ImageNet statistics and zero outside the
        box of the region; and the fraction of each pixel inside the mask (b, canvas, canvas).
    """
    device = pixels.device
    words = pixels.view(torch.int32).squeeze(-1)  # one per pixel
    batch = torch.arange(len(words), device=device)
    ticks = torch.arange(canvas, device=device)
    # Position of every canvas pixel in the region. Before the shift, region and canvas have the same center.
    corner = (canvas - sizes) // 2 + placement[:, :2]
    rows = ticks - corner[:, :1]
    columns = ticks - corner[:, 1:]
    inside_rows = (rows >= 0) & (rows < sizes[:, :1])
    inside_columns = (columns >= 0) & (columns < sizes[:, 1:])
    inside = inside_rows[:, :, None] & inside_columns[:, None, :]
    columns = torch.where(placement[:, 2:] > 0, sizes[:, 1:] - 1 - columns, columns)
    last = words.shape[-1] - 1
    raw = words[batch[:, None, None], rows.clamp(0, last)[:, :, None], columns.clamp(0, last)[:, None, :]]
    pixels = torch.where(inside, raw, 0).unsqueeze(-1).view(torch.uint8)  # (b, canvas, canvas, 4)
    mask = pixels[..., 3].float() / 255
    weight = mask if background == "mask" else inside.float()
    scale, shift = _normalization(device)
    image = (pixels[..., :3] * scale - shift) * weight.unsqueeze(-1)
    return image.permute(0, 3, 1, 2), mask


class FetchedRegions(NamedTuple):
    """Regions (b,) of a batch: classes (b,), pixels (b, side, side, 4), sizes (b, 2) and placements (b, 3)."""

    regions: Tensor
    target: Tensor
    pixels: Tensor
    sizes: Tensor
    placement: Tensor


class ImageBatch(NamedTuple):
    """Network input of regions (b,): classes (b,), normalized images, and fractions of pixels inside the regions."""

    regions: Tensor
    target: Tensor
    image: Tensor
    mask: Tensor


def place_batch(batch: FetchedRegions, canvas: int, background: Background) -> ImageBatch:
    """Compute images and masks with :func:`place_regions` on the device of the batch."""
    placed = place_regions(batch.pixels, batch.sizes, batch.placement, canvas=canvas, background=background)
    return ImageBatch(batch.regions, batch.target, *placed)


class RegionSource:
    """Batches of regions for a loader. Item i is region ``positions[i]``; see :func:`draw_placements`."""

    def __init__(
        self, regions: Regions, positions: np.ndarray, *, seed: int = 0, jitter: int = 0, flip: bool = False
    ) -> None:
        self.regions, self.positions = regions, np.asarray(positions)
        # Threads read batches of one epoch, and then of the next.
        self._placements = functools.lru_cache(2)(
            lambda epoch: draw_placements(len(positions), seed=seed, epoch=epoch, jitter=jitter, flip=flip)
        )

    def __len__(self) -> int:
        return len(self.positions)

    def fetch(self, indices: Tensor, epoch: int) -> FetchedRegions:
        """Read the items ``indices`` of an epoch."""
        items, regions = np.asarray(indices), self.regions
        index = self.positions[items]
        placements = self._placements(epoch)[items]
        parts = index, regions.labels[index], np.asarray(regions.pixels[index]), regions.sizes[index], placements
        return FetchedRegions(*map(torch.from_numpy, parts))
