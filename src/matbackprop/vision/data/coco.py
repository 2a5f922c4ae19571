"""COCO-format files: every entry is checked once; what is good becomes a region, what is bad a problem with a name.

Training (:mod:`matbackprop.vision.data.coco_regions`) and ``data check`` read through the same two functions,
:func:`read_coco` for the annotation file and :func:`open_regions` for an image and its masks.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from matbackprop.errors import DataError, Problem, first_problems, needs
from matbackprop.vision.data.pictures import MAX_PIXELS, read_picture
from matbackprop.vision.files import read_json, show

Box = tuple[float, float, float, float]
"""x, y, width and height in pixels."""
BAD_IMAGE = ("bad image entry", "missing image", "unreadable image")
"""Kinds of problems that cost an image with all its regions."""

_TRACE = 1 << 24  # samples along a polygon's outline, which pycocotools holds in memory all at once
_LARGEST = 1 << 30  # bytes of an annotation file; the largest official one has half as many
_ID = 1 << 63  # identifiers are stored in 64 bits


def coco_files(root: str | Path, split: str) -> tuple[Path, Path]:
    """Find the annotation file and the image folder of a split.

    Both the official layout (``annotations/instances_train2017.json`` with ``train2017/``) and the same without the
    year or with an ``images/`` folder in between are recognised; the split is ``"train"``, ``"val"`` or an official
    name such as ``"train2017"``. Where either is missing, DataError lists the places that were tried.
    """
    root = Path(root)
    names = [split] if split[-1:].isdigit() else [split, f"{split}2017", f"{split}2014"]
    files = [root / "annotations" / f"instances_{name}.json" for name in names]
    folders = [root / part / name for name in names for part in ("images", ".")]
    annotations = next((p for p in files if p.is_file()), None)
    images = next((p for p in folders if p.is_dir()), None)
    if annotations is None:
        raise DataError(f"no annotations for split {split!r}; looked for {', '.join(map(str, files))}.")
    if images is None:
        raise DataError(f"no images for split {split!r}; looked for {', '.join(map(str, folders))}.")
    return annotations, images


@dataclass(frozen=True)
class Region:
    """One annotated object: where it is, what it is and how its mask is written."""

    annotation_id: int
    label: int
    area: float
    box: Box | None
    segmentation: Any


@dataclass(frozen=True)
class ImageRegions:
    """The regions of one image; ``source`` is the annotation file that names them."""

    image_id: int
    path: Path
    height: int
    width: int
    regions: list[Region]
    source: Path


@dataclass(frozen=True)
class RegionIndex:
    """All regions that an annotation file names, and what was left out.

    Attributes:
        images: the images, sorted by id, each with its regions.
        categories: ``{"id": …, "name": …}`` sorted by id; a label is a position in this list.
        skipped: reason → how many annotations were left out for it.
        unused: names of the categories without any region.
        problems: bad entries of the file and missing images.
        annotations: how many annotations the file lists.
    """

    images: list[ImageRegions]
    categories: list[dict[str, Any]]
    skipped: dict[str, int]
    unused: list[str]
    problems: list[Problem] = field(default_factory=list)
    annotations: int = 0


# ------------------------------------------------------------------------------------------------------------- the file


class _BadEntry(Exception):
    """An entry of the file breaks the format; the arguments are the reason and the kind of the problem."""


def read_coco(annotations: str | Path, images: str | Path, *, minimum_area: float = 0.0) -> RegionIndex:
    """Read and check a COCO-format file; a bad entry is left out and becomes a problem.

    Images without regions are listed too. Crowds, empty masks and regions below ``minimum_area``, in pixels of the
    original image, are left out and counted without being a problem.

    Raises:
        DataError: the file cannot be read, is not JSON, lacks one of its three lists, or its categories are not to be
            told apart.
    """
    annotations, images = Path(annotations), Path(images)
    content = _load(annotations)
    categories = _categories(annotations, content["categories"])
    problems: list[Problem] = []
    skipped: Counter[str] = Counter()

    def entries(what: str, read: Callable[[dict[str, Any]], Any]) -> Iterator[Any]:
        seen: set[int] = set()
        for position, entry in enumerate(content[f"{what}s"]):
            name = f"{what} number {position + 1} of the list"
            kind = "bad image entry" if what == "image" else "bad annotation"
            try:
                if not isinstance(entry, dict):
                    raise _BadEntry(f"is {show(entry)} instead of an object", kind)
                identity = _integer(entry, "id", kind)
                name = f"{what} {identity}"
                if identity in seen:
                    raise _BadEntry(f"is listed twice: {what} id given twice", kind)
                seen.add(identity)
                item = read(entry)
            except _BadEntry as bad:
                reason, kind = bad.args
                problems.append(Problem(annotations, f"{name} {reason}", kind))
                skipped.update([kind] if what == "annotation" else [])
                continue
            if item is not None:
                yield item

    def image(entry: dict[str, Any]) -> ImageRegions:
        kind = "bad image entry"
        name = entry.get("file_name")
        if not isinstance(name, str) or not name or "\0" in name:
            raise _BadEntry(f"has the file name {show(name)}", kind)
        height, width = (_integer(entry, side, kind) for side in ("height", "width"))
        if height < 1 or width < 1 or height * width > MAX_PIXELS:
            raise _BadEntry(f"has the size {height}×{width}; 1 to {MAX_PIXELS} pixels are read", kind)
        return ImageRegions(entry["id"], images / name, height, width, [], annotations)

    listed = {one.image_id: one for one in entries("image", image)}
    label_of = {c["id"]: i for i, c in enumerate(categories)}
    present = {p.path for p in os.scandir(images) if p.is_file()} if images.is_dir() else set()
    absent = {i for i, one in listed.items() if str(one.path) not in present and not os.path.isfile(one.path)}
    problems += [Problem(listed[i].path, "is missing", "missing image") for i in absent]

    def annotation(entry: dict[str, Any]) -> tuple[ImageRegions, Region] | None:
        kind = "bad annotation"
        category, owner = _integer(entry, "category_id", kind), _integer(entry, "image_id", kind)
        crowd, segmentation = entry.get("iscrowd", 0), entry.get("segmentation")
        if not isinstance(crowd, int) or crowd not in (0, 1):
            raise _BadEntry(f"has iscrowd {show(crowd)} instead of 0 or 1", kind)
        if category not in label_of:
            raise _BadEntry(f"has the category {category}, which is not listed", "unknown category")
        if owner not in listed:
            raise _BadEntry(f"belongs to the image {owner}, which is not listed", "unknown image")
        if crowd:
            skipped["crowd"] += 1
            return None
        area = _number(entry["area"]) if entry.get("area") is not None else -1.0
        box = _box(entry.get("bbox"), listed[owner])
        if area is None:
            raise _BadEntry(f"has the area {show(entry['area'])} instead of a number", kind)
        if segmentation is not None and not isinstance(segmentation, (list, dict)):
            raise _BadEntry(f"has the segmentation {show(segmentation)}; polygons or run lengths are needed", kind)
        reasons = {
            "empty mask": not segmentation,
            "below the minimum area": 0 <= area < minimum_area,
            "missing image": owner in absent,
        }
        for reason, applies in reasons.items():
            if applies:
                skipped[reason] += 1
                return None
        return listed[owner], Region(entry["id"], label_of[category], area, box, segmentation)

    regions = list(entries("annotation", annotation))
    for one, region in sorted(regions, key=lambda pair: pair[1].annotation_id):
        one.regions.append(region)
    used = {region.label for _, region in regions}
    return RegionIndex(
        images=[listed[i] for i in sorted(listed)],
        categories=categories,
        skipped=dict(skipped),
        unused=[c["name"] for i, c in enumerate(categories) if i not in used],
        problems=problems,
        annotations=len(content["annotations"]),
    )


def read_regions(
    annotations: str | Path,
    images: str | Path,
    *,
    minimum_area: float = 0.0,
    missing_images: Literal["raise", "skip"] = "raise",
) -> RegionIndex:
    """Read a COCO-format file to train on it: as :func:`read_coco`, with images that have regions only.

    Images that do not exist or are wrongly listed raise DataError, or are left out (``missing_images="skip"``); it is
    also raised where no region is left.
    """
    index = read_coco(annotations, images, minimum_area=minimum_area)
    wrong = [p for p in index.problems if p.kind == "bad image entry"]
    lost = sorted({p.path.name for p in index.problems if p.kind == "missing image"})
    if missing_images == "raise" and wrong:
        raise DataError(f"{first_problems(wrong)}. Fix the file, or pass missing_images='skip' to leave them out.")
    if missing_images == "raise" and index.skipped.get("missing image"):
        raise DataError(
            f"{len(lost)} image files named in {annotations} are not in {images}, the first: {', '.join(lost[:5])}; "
            f"complete the folder, or pass missing_images='skip' to leave their {index.skipped['missing image']} "
            f"regions out."
        )
    kept = [one for one in index.images if one.regions]
    if not kept:
        why = f" ({first_problems(index.problems, 2)})" if index.problems else ""
        raise DataError(f"{annotations} gives no region at all; left out: {index.skipped or 'nothing'}{why}.")
    return replace(index, images=kept)


def _load(path: Path) -> dict[str, list[Any]]:
    content = read_json(path, limit=_LARGEST, what="a COCO instances file")
    for name in ("images", "annotations", "categories"):
        if not isinstance(content.get(name), list):
            raise DataError(
                f"{path} is not a COCO instances file: it has no list {name!r}; an object with the lists 'images', "
                "'annotations' and 'categories' is needed."
            )
    return content


def _categories(path: Path, entries: list[Any]) -> list[dict[str, Any]]:
    categories = []
    for position, entry in enumerate(entries):
        if not isinstance(entry, dict) or not _is_id(entry.get("id")):
            raise DataError(f"{path}: category number {position + 1} has no integer 'id': {show(entry)}.")
        name = entry.get("name", entry["id"])
        if isinstance(name, (list, dict)) or name is None:
            raise DataError(f"{path}: category {entry['id']} has the name {show(name)}.")
        categories.append({"id": entry["id"], "name": str(name)})
    twice = [i for i, n in Counter(c["id"] for c in categories).items() if n > 1]
    if twice:
        raise DataError(f"{path} lists category id {twice[0]} more than once.")
    return sorted(categories, key=lambda c: c["id"])


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_ID <= value < _ID


def _integer(entry: dict[str, Any], name: str, kind: str) -> int:
    if name not in entry:
        raise _BadEntry(f"has no {name}", kind)
    if not _is_id(entry[name]):
        raise _BadEntry(f"has the {name} {show(entry[name])} instead of an integer", kind)
    return int(entry[name])


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e300 < value < 1e300:
        return None
    return float(value)


def _box(box: Any, image: ImageRegions) -> Box | None:
    if box is None:
        return None
    numbers = [_number(v) for v in box] if isinstance(box, list) else []
    if len(numbers) != 4 or None in numbers:
        raise _BadEntry(f"has the box {show(box)} instead of four numbers", "bad annotation")
    x, y, width, height = (float(v) for v in numbers if v is not None)
    if width <= 0 or height <= 0:
        raise _BadEntry(f"has an empty box {show(box)}", "box outside the image")
    if x >= image.width or y >= image.height or x + width <= 0 or y + height <= 0:
        place = f"outside its image of {image.width} × {image.height}"
        raise _BadEntry(f"has a box {show(box)} {place}", "box outside the image")
    return x, y, width, height


# ----------------------------------------------------------------------------------------------------- images and masks


def open_regions(
    entry: ImageRegions,
) -> tuple[NDArray[np.uint8] | None, list[tuple[int, NDArray[np.uint8], tuple[slice, slice]]], list[Problem]]:
    """Read an image and decode its masks.

    Returns:
        The RGB pixels (h, w, 3), or None for an image that cannot be used; for each region that can be used its
        position, its mask (h, w) of zeros and ones and its window (see :func:`region_window`); and the problems,
        whose kind ``"empty mask"`` is harmless.
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
    """Rows and columns of a region: its box clipped to the image, or its mask's own; None where nothing is inside."""
    height, width = mask.shape
    if box is None:
        rows, columns = np.nonzero(mask)
        if rows.size == 0:
            return None
        top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
    elif not all(map(math.isfinite, box)):
        raise DataError(f"the box {box} is not made of finite numbers.")
    else:
        left, top = math.floor(max(box[0], 0)), math.floor(max(box[1], 0))
        right, bottom = math.ceil(min(box[0] + box[2], width)), math.ceil(min(box[1] + box[3], height))
    if right <= left or bottom <= top:
        return None
    window = slice(top, bottom), slice(left, right)
    return window if mask[window].any() else None


def widened(window: tuple[slice, slice], margin: float, shape: tuple[int, int]) -> tuple[slice, slice]:
    """A window with ``margin`` times its longest side more on each side, as far as the image of ``shape`` reaches.

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
        DataError: it is none of the three, has another size than the image, run lengths that do not fill the image, or
            a polygon that is not made of finite numbers or lies far outside the image. The message continues a
            sentence that begins with what is decoded.
    """
    if isinstance(segmentation, dict):
        return _from_run_lengths(segmentation, height, width)
    if isinstance(segmentation, list):
        return _from_polygons(segmentation, height, width)
    raise DataError(f"has the segmentation {show(segmentation)}; polygons or run lengths are needed")


def _from_run_lengths(code: dict[str, Any], height: int, width: int) -> NDArray[np.uint8]:
    size, counts = code.get("size"), code.get("counts")
    if not isinstance(size, list) or len(size) != 2 or not all(map(_is_id, size)):
        raise DataError(f"has run lengths of the size {show(size)} instead of [height, width]")
    if tuple(size) != (height, width):
        raise DataError(f"has a mask of {size[0]}×{size[1]} for an image of {height}×{width}")
    if isinstance(counts, str):
        counts = _uncompress(counts)
    elif not isinstance(counts, list) or not all(_is_id(c) for c in counts):
        raise DataError(f"has the run lengths {show(counts)} instead of a list of integers or a string")
    runs = np.asarray(counts, np.int64)
    if (runs < 0).any() or (runs > height * width).any() or int(runs.sum()) != height * width:
        raise DataError(f"has run lengths that do not fill its {height}×{width} pixels")
    inside = (np.arange(len(runs)) % 2).astype(np.uint8)
    return np.ascontiguousarray(np.repeat(inside, runs).reshape(width, height).T)


def _uncompress(text: str) -> NDArray[np.int64]:
    """Run lengths from COCO's string: five bits per character, lowest first, each run less the one before the last."""
    digits = np.array([ord(c) for c in text], np.int64) - 48
    if digits.size == 0 or (digits < 0).any() or (digits > 63).any() or digits[-1] & 32:
        raise DataError(f"has run lengths that cannot be decoded: {show(text)}")
    ends = np.flatnonzero(digits & 32 == 0)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 8:  # 40 bits
        raise DataError(f"has run lengths that cannot be decoded: {show(text)}")
    place = np.arange(len(digits)) - np.repeat(starts, lengths)
    runs = np.add.reduceat((digits & 31) << (5 * place), starts)
    runs -= (digits[ends] >> 4 & 1) << (5 * lengths)  # the sign
    runs[1::2] = np.cumsum(runs[1::2])
    runs[2::2] = np.cumsum(runs[2::2])
    return runs


def _from_polygons(polygons: list[Any], height: int, width: int) -> NDArray[np.uint8]:
    with needs("COCO's polygons need pycocotools", "'matbackprop[train]'"):
        from pycocotools import mask as coco_mask
    outlines = []
    for polygon in polygons:
        if not isinstance(polygon, list) or len(polygon) % 2 or any(_number(v) is None for v in polygon):
            numbers = f"of {len(polygon)} numbers" if isinstance(polygon, list) else show(polygon)
            raise DataError(f"has a polygon {numbers}; pairs of finite numbers are needed")
        points = np.asarray(polygon, np.float64).reshape(-1, 2)
        # pycocotools walks along the outline in steps of a fifth of a pixel and counts them in 32 bits.
        steps = 5 * np.abs(np.diff(points, axis=0, append=points[:1])).max(1, initial=0)
        if (np.abs(points) > 2 * max(height, width) + 1000).any() or steps.sum() + len(points) > _TRACE:
            raise DataError(f"has a polygon that lies far outside its image of {width} × {height} or has no end")
        if len(points) >= 3:  # fewer enclose nothing
            outlines.append(polygon)
    if not outlines:
        return np.zeros((height, width), np.uint8)
    return np.asarray(coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(outlines, height, width))))
