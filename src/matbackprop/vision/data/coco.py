"""Read COCO-format files. Every entry is checked once: good ones become regions, bad ones problems.

Training (:mod:`matbackprop.vision.data.coco_regions`) and ``data check`` use the same two functions,
:func:`read_coco` for the annotation file and :func:`open_regions` for an image and its masks.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from matbackprop.errors import DataError, Problem, first_problems, needs
from matbackprop.vision.data.pictures import MAX_PIXELS, read_picture
from matbackprop.vision.files import read_json, show

T = TypeVar("T")
Box = tuple[float, float, float, float]
"""x, y, width and height in pixels."""
BAD_IMAGE = ("bad image entry", "missing image", "unreadable image")
"""Kinds of problems that exclude an image with all its regions."""

_TRACE = 1 << 24  # samples along a polygon's outline, which pycocotools holds in memory
_LARGEST = 1 << 30  # bytes of an annotation file; the largest official one has half as many
_ID = 1 << 63  # identifiers are stored in 64 bits


def coco_files(root: str | Path, split: str) -> tuple[Path, Path]:
    """Find the annotation file and the image folder of a split.

    Both the official layout (``annotations/instances_train2017.json`` with ``train2017/``) and the same without the
    year or with an ``images/`` folder in between are recognized; the split is ``"train"``, ``"val"`` or an official
    name such as ``"train2017"``.

    Raises:
        DataError: either is missing; the message lists the places that were tried.
    """
    root = Path(root)
    names = [split] if split[-1:].isdigit() else [split, f"{split}2017", f"{split}2014"]
    files = [root / "annotations" / f"instances_{name}.json" for name in names]
    folders = [root / part / name for name in names for part in ("images", ".")]
    annotations = next((p for p in files if p.is_file()), None)
    images = next((p for p in folders if p.is_dir()), None)
    if annotations is None:
        raise DataError(f"No annotations for split {split!r}. Looked for {', '.join(map(str, files))}.")
    if images is None:
        raise DataError(f"No images for split {split!r}. Looked for {', '.join(map(str, folders))}.")
    return annotations, images


@dataclass(frozen=True)
class Region:
    """One annotated object."""

    annotation_id: int
    label: int
    area: float
    box: Box | None
    segmentation: Any


@dataclass(frozen=True)
class ImageRegions:
    """The regions of one image; ``source`` is the annotation file."""

    image_id: int
    path: Path
    height: int
    width: int
    regions: list[Region]
    source: Path


@dataclass(frozen=True)
class RegionIndex:
    """All regions of an annotation file, and the skipped ones.

    Attributes:
        images: the images, sorted by id, each with its regions.
        categories: ``{"id": …, "name": …}`` sorted by id; a label is a position in this list.
        skipped: reason → number of annotations that were left out.
        unused: names of the categories without any region.
        problems: bad entries of the file and missing images.
        annotations: number of annotations in the file.
    """

    images: list[ImageRegions]
    categories: list[dict[str, Any]]
    skipped: dict[str, int]
    unused: list[str]
    problems: list[Problem] = field(default_factory=list)
    annotations: int = 0


class _Left(Exception):
    """An annotation is left out; the argument is the reason. It is not a problem."""


class _Bad(Exception):
    """An entry breaks the format; the arguments are the reason and the kind of the problem."""


@dataclass
class _Reader:
    """Reads one annotation file and collects problems."""

    file: Path
    problems: list[Problem] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def entries(self, what: str, kind: str, content: list[Any], read: Callable[[dict[str, Any]], T]) -> Iterator[T]:
        """Yield the entries of a list that ``read`` accepts."""
        seen: set[int] = set()
        for position, entry in enumerate(content):
            name = f"{what} number {position + 1} of the list"
            try:
                if not isinstance(entry, dict):
                    raise _Bad(f"is {show(entry)} instead of an object")
                identity = _integer(entry, "id")
                name = f"{what} {identity}"
                if identity in seen:
                    raise _Bad("is listed twice")
                seen.add(identity)
                yield read(entry)
            except _Left as left:
                self.skipped[str(left)] += 1
            except _Bad as bad:
                reason, kind_of = (*bad.args, kind)[:2]
                self.problems.append(Problem(self.file, f"{name} {reason}", kind_of))
                self.skipped.update([kind_of] if what == "annotation" else [])

    def image(self, entry: dict[str, Any], folder: Path) -> ImageRegions:
        name = entry.get("file_name")
        if not isinstance(name, str) or not name or "\0" in name:
            raise _Bad(f"has the file name {show(name)}")
        height, width = _integer(entry, "height"), _integer(entry, "width")
        if height < 1 or width < 1 or height * width > MAX_PIXELS:
            raise _Bad(f"has the size {height}×{width}; 1 to {MAX_PIXELS} pixels are read")
        return ImageRegions(entry["id"], folder / name, height, width, [], self.file)

    def annotation(
        self, entry: dict[str, Any], images: dict[int, ImageRegions], labels: dict[int, int]
    ) -> tuple[ImageRegions, Region]:
        category, owner = _integer(entry, "category_id"), _integer(entry, "image_id")
        crowd, segmentation = entry.get("iscrowd", 0), entry.get("segmentation")
        if not isinstance(crowd, int) or crowd not in (0, 1):
            raise _Bad(f"has iscrowd {show(crowd)} instead of 0 or 1")
        if category not in labels:
            raise _Bad(f"has the category {category}, which is not listed", "unknown category")
        if owner not in images:
            raise _Bad(f"belongs to the image {owner}, which is not listed", "unknown image")
        if crowd:
            raise _Left("crowd")
        area = _number(entry["area"]) if entry.get("area") is not None else -1.0
        if area is None:
            raise _Bad(f"has the area {show(entry['area'])} instead of a number")
        box = _box(entry.get("bbox"), images[owner])
        if segmentation is not None and not isinstance(segmentation, (list, dict)):
            raise _Bad(f"has the segmentation {show(segmentation)}; polygons or run lengths are needed")
        if not segmentation:
            raise _Left("empty mask")
        return images[owner], Region(entry["id"], labels[category], area, box, segmentation)


def read_coco(annotations: str | Path, images: str | Path, *, minimum_area: float = 0.0) -> RegionIndex:
    """Read and check a COCO-format file; a bad entry is left out and becomes a problem.

    Images without regions are listed too. Crowds, empty masks and regions below ``minimum_area``, in pixels of the
    original image, are left out and counted without being a problem.

    Raises:
        DataError: the file cannot be read, is not JSON, lacks one of its three lists, or has ambiguous categories.
    """
    annotations, images = Path(annotations), Path(images)
    content = _load(annotations)
    categories = _categories(annotations, content["categories"])
    reader = _Reader(annotations)
    listed = {
        one.image_id: one
        for one in reader.entries("image", "bad image entry", content["images"], lambda e: reader.image(e, images))
    }
    present = {p.path for p in os.scandir(images) if p.is_file()} if images.is_dir() else set()
    absent = {i for i, one in listed.items() if str(one.path) not in present and not os.path.isfile(one.path)}
    reader.problems += [Problem(listed[i].path, "is missing", "missing image") for i in absent]
    label_of = {c["id"]: i for i, c in enumerate(categories)}

    def annotation(entry: dict[str, Any]) -> tuple[ImageRegions, Region]:
        one, region = reader.annotation(entry, listed, label_of)
        if 0 <= region.area < minimum_area:
            raise _Left("below the minimum area")
        if one.image_id in absent:
            raise _Left("missing image")
        return one, region

    regions = list(reader.entries("annotation", "bad annotation", content["annotations"], annotation))
    for one, region in sorted(regions, key=lambda pair: pair[1].annotation_id):
        one.regions.append(region)
    used = {region.label for _, region in regions}
    return RegionIndex(
        images=[listed[i] for i in sorted(listed)],
        categories=categories,
        skipped=dict(reader.skipped),
        unused=[c["name"] for i, c in enumerate(categories) if i not in used],
        problems=reader.problems,
        annotations=len(content["annotations"]),
    )


def read_regions(
    annotations: str | Path,
    images: str | Path,
    *,
    minimum_area: float = 0.0,
    missing_images: Literal["raise", "skip"] = "raise",
) -> RegionIndex:
    """Read a COCO-format file for training: as :func:`read_coco`, but only images with regions.

    Raises:
        DataError: no region is left; or an image is missing or badly listed, unless ``missing_images="skip"``.
    """
    index = read_coco(annotations, images, minimum_area=minimum_area)
    bad = [p for p in index.problems if p.kind == "bad image entry"]
    if missing_images == "raise" and index.skipped.get("missing image"):
        bad += [p for p in index.problems if p.kind == "missing image"]
    if missing_images == "raise" and bad:
        raise DataError(
            f"{annotations}: {len(bad)} images cannot be used, the first: {first_problems(bad)}. Complete {images}, or "
            "pass missing_images='skip' to leave their regions out."
        )
    kept = [one for one in index.images if one.regions]
    if not kept:
        why = f" ({first_problems(index.problems, 2)})" if index.problems else ""
        raise DataError(f"{annotations} has no usable region; left out: {index.skipped or 'nothing'}{why}.")
    return replace(index, images=kept)


def _load(path: Path) -> dict[str, list[Any]]:
    content = read_json(path, limit=_LARGEST, what="a COCO instances file")
    for name in ("images", "annotations", "categories"):
        if not isinstance(content.get(name), list):
            raise DataError(f"{path} is not a COCO instances file: the list {name!r} is missing.")
    return content


def _categories(path: Path, entries: list[Any]) -> list[dict[str, Any]]:
    categories = {}
    for position, entry in enumerate(entries):
        if not isinstance(entry, dict) or not _is_id(entry.get("id")):
            raise DataError(f"{path}: category number {position + 1} has no integer 'id': {show(entry)}.")
        name = entry.get("name", entry["id"])
        if isinstance(name, (list, dict)) or name is None:
            raise DataError(f"{path}: category {entry['id']} has the name {show(name)}.")
        if entry["id"] in categories:
            raise DataError(f"{path} lists category id {entry['id']} more than once.")
        categories[entry["id"]] = {"id": entry["id"], "name": str(name)}
    return [categories[i] for i in sorted(categories)]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_ID <= value < _ID


def _integer(entry: dict[str, Any], name: str) -> int:
    if name not in entry:
        raise _Bad(f"has no {name}")
    if not _is_id(entry[name]):
        raise _Bad(f"has the {name} {show(entry[name])} instead of an integer")
    return int(entry[name])


def _number(value: Any) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e300 < value < 1e300:
        return None
    return float(value)


def _box(box: Any, image: ImageRegions) -> Box | None:
    if box is None:
        return None
    numbers = [_number(v) for v in box] if isinstance(box, list) else []
    if len(numbers) != 4 or None in numbers:
        raise _Bad(f"has the box {show(box)} instead of four numbers")
    x, y, width, height = (float(v) for v in numbers if v is not None)
    if width <= 0 or height <= 0:
        raise _Bad(f"has an empty box {show(box)}", "box outside the image")
    if x >= image.width or y >= image.height or x + width <= 0 or y + height <= 0:
        raise _Bad(
            f"has a box {show(box)} outside its image of {image.width} × {image.height}", "box outside the image"
        )
    return x, y, width, height


def open_regions(
    entry: ImageRegions,
) -> tuple[NDArray[np.uint8] | None, list[tuple[int, NDArray[np.uint8], tuple[slice, slice]]], list[Problem]]:
    """Read an image and decode its masks.

    Returns:
        RGB pixels (h, w, 3), or None if the image cannot be used; for each usable region its position, its mask
        (h, w) of zeros and ones and its window (see :func:`region_window`); and the problems, whose kind ``"empty
        mask"`` is harmless.
    """
    try:
        pixels = read_picture(entry.path).pixels
    except DataError as error:
        reason = str(error).removeprefix(f"{entry.path} ").rstrip(".")
        return None, [], [Problem(entry.path, f"cannot be decoded: {reason}", "unreadable image")]
    if pixels.shape[:2] != (entry.height, entry.width):
        size = f"has {pixels.shape[0]}×{pixels.shape[1]} pixels, the annotations say {entry.height}×{entry.width}"
        return None, [], [Problem(entry.path, size, "unreadable image")]
    usable, problems = [], []
    for position, region in enumerate(entry.regions):
        try:
            mask = decode_mask(region.segmentation, entry.height, entry.width)
        except DataError as error:
            problems.append(Problem(entry.source, f"annotation {region.annotation_id} {error}", "bad annotation"))
            continue
        window = region_window(mask, region.box)
        if window is None:
            problems.append(Problem(entry.source, f"annotation {region.annotation_id} has no pixel", "empty mask"))
        else:
            usable.append((position, mask, window))
    return pixels, usable, problems


def region_window(mask: NDArray[np.uint8], box: Box | None) -> tuple[slice, slice] | None:
    """Rows and columns of a region: its box clipped to the image, or the mask's bounding box; None if it is empty."""
    height, width = mask.shape
    if box is None:
        rows, columns = np.nonzero(mask)
        if rows.size == 0:
            return None
        top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
    elif not all(map(math.isfinite, box)):
        raise DataError(f"The box {box} is not finite.")
    else:
        left, top = math.floor(max(box[0], 0)), math.floor(max(box[1], 0))
        right, bottom = math.ceil(min(box[0] + box[2], width)), math.ceil(min(box[1] + box[3], height))
    if right <= left or bottom <= top:
        return None
    window = slice(top, bottom), slice(left, right)
    return window if mask[window].any() else None


def widened(window: tuple[slice, slice], margin: float, shape: tuple[int, int]) -> tuple[slice, slice]:
    """Enlarge a window by ``margin`` times its longest side on each side, clipped to an image of ``shape``.

    Example:
        >>> widened((slice(10, 20), slice(0, 4)), 0.5, (22, 30))
        (slice(5, 22, None), slice(0, 9, None))
    """
    more = round(margin * max(side.stop - side.start for side in window))
    rows, columns = (
        slice(max(side.start - more, 0), min(side.stop + more, size)) for side, size in zip(window, shape, strict=True)
    )
    return rows, columns


def decode_mask(segmentation: Any, height: int, width: int) -> NDArray[np.uint8]:
    """Decode polygons, compressed or uncompressed run lengths to a uint8 mask (height, width) of zeros and ones.

    Raises:
        DataError: it is none of the three, has another size than the image, or is damaged. The message continues a
            sentence that begins with the annotation.
    """
    if isinstance(segmentation, dict):
        runs = _run_lengths(segmentation, height, width)
        inside = (np.arange(len(runs)) % 2).astype(np.uint8)
        return np.ascontiguousarray(np.repeat(inside, runs).reshape(width, height).T)
    if not isinstance(segmentation, list):
        raise DataError(f"has the segmentation {show(segmentation)}; polygons or run lengths are needed")
    outlines = [p for p in segmentation if _check_polygon(p, height, width) >= 3]
    if not outlines:
        return np.zeros((height, width), np.uint8)
    with needs("COCO polygons need pycocotools", "'matbackprop[train]'"):
        from pycocotools import mask as coco_mask
    return np.asarray(coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(outlines, height, width))))


def _run_lengths(code: dict[str, Any], height: int, width: int) -> NDArray[np.int64]:
    size, counts = code.get("size"), code.get("counts")
    if not isinstance(size, list) or len(size) != 2 or not all(map(_is_id, size)):
        raise DataError(f"has run lengths of the size {show(size)} instead of [height, width]")
    if size != [height, width]:
        raise DataError(f"has a mask of {size[0]}×{size[1]} for an image of {height}×{width}")
    if isinstance(counts, str):
        runs = _decompress(counts)
    elif isinstance(counts, list) and all(map(_is_id, counts)):
        runs = np.asarray(counts, np.int64)
    else:
        raise DataError(f"has the run lengths {show(counts)} instead of a list of integers or a string")
    if (runs < 0).any() or (runs > height * width).any() or int(runs.sum()) != height * width:
        raise DataError(f"has run lengths that do not fill its {height}×{width} pixels")
    return runs


def _decompress(text: str) -> NDArray[np.int64]:
    """Run lengths of COCO's string: five bits per character, lowest first, each run less the one before the last.

    pycocotools corrupts memory when a string is damaged.
    """
    digits = np.array([ord(c) for c in text], np.int64) - 48
    ends = np.flatnonzero(digits & 32 == 0)
    lengths = np.diff(ends, prepend=-1)
    if digits.size == 0 or (digits < 0).any() or (digits > 63).any() or digits[-1] & 32 or lengths.max() > 8:
        raise DataError(f"has run lengths that cannot be decoded: {show(text)}")
    starts = ends - lengths + 1
    place = np.arange(len(digits)) - np.repeat(starts, lengths)
    runs = np.add.reduceat((digits & 31) << (5 * place), starts)
    runs -= (digits[ends] >> 4 & 1) << (5 * lengths)  # the sign
    runs[1::2] = np.cumsum(runs[1::2])
    runs[2::2] = np.cumsum(runs[2::2])
    return runs


def _check_polygon(polygon: Any, height: int, width: int) -> int:
    """Return the number of points."""
    if not isinstance(polygon, list) or len(polygon) % 2 or any(_number(v) is None for v in polygon):
        numbers = f"of {len(polygon)} numbers" if isinstance(polygon, list) else show(polygon)
        raise DataError(f"has a polygon {numbers}; pairs of finite numbers are needed")
    points = np.asarray(polygon, np.float64).reshape(-1, 2)
    # pycocotools samples the outline in steps of a fifth of a pixel and counts them in 32 bits.
    steps = 5 * np.abs(np.diff(points, axis=0, append=points[:1])).max(1, initial=0)
    if (np.abs(points) > 2 * max(height, width) + 1000).any() or steps.sum() + len(points) > _TRACE:
        raise DataError(f"has a polygon that is far outside its image of {width} × {height} or too long")
    return len(points)
