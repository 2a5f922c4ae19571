"""Read COCO-format annotation files (:func:`read_coco`), images and masks (:func:`open_regions`).

Valid entries become regions; invalid entries are reported as problems.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from matbackprop.errors import DataError, Problem, first_problems
from matbackprop.vision.data.pictures import MAX_PIXELS, read_picture
from matbackprop.vision.files import read_json, show

Box = tuple[float, float, float, float]  #: x, y, width and height in pixels.
BAD_IMAGE = "bad image"  #: Kind of the problems that exclude an image with all its regions.

_TRACE = 1 << 24  # samples along the outline of a polygon, which pycocotools keeps in memory
_LARGEST = 1 << 30  # bytes of an annotation file; the largest official file has half as many
_ID = 1 << 63  # identifiers are stored in 64 bits


def coco_files(root: str | Path, split: str) -> tuple[Path, Path]:
    """Find the annotation file and the image folder of a split such as ``"train"`` or ``"train2017"``.

    The official layout is ``annotations/instances_train2017.json`` with ``train2017/``. The year can be omitted, and
    image folders can be in ``images/``.
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


class Region(NamedTuple):
    """Annotated object."""

    annotation_id: int
    label: int
    area: float | None
    box: Box | None
    segmentation: Any


class ImageRegions(NamedTuple):
    """Regions of one image; ``source`` is the annotation file."""

    image_id: int
    path: Path
    height: int
    width: int
    regions: list[Region]
    source: Path


class RegionIndex(NamedTuple):
    """Regions of an annotation file.

    Images and ``categories`` (``{"id": …, "name": …}``) are sorted by id; a label is an index into ``categories``.
    ``skipped`` counts crowds and empty masks, and ``annotations`` is the number of all annotations.
    """

    images: list[ImageRegions]
    categories: list[dict[str, Any]]
    problems: list[Problem]
    skipped: Counter[str]
    annotations: int


class OpenedImage(NamedTuple):
    """RGB pixels (h, w, 3) of an image, its usable regions with masks (h, w) and windows, and its bad annotations.

    ``empty`` is the number of regions without a pixel.
    """

    pixels: NDArray[np.uint8]
    usable: list[tuple[Region, NDArray[np.uint8], tuple[slice, slice]]]
    problems: list[Problem]
    empty: int


# Entries of the file. Other fields are ignored.
_Id = Annotated[int, Field(strict=True, ge=-_ID, lt=_ID)]
_Side = Annotated[int, Field(strict=True, ge=1, le=MAX_PIXELS)]
_Number = Annotated[float, Field(strict=True, gt=-1e300, lt=1e300)]


class _ImageEntry(TypedDict):
    id: _Id
    file_name: Annotated[str, Field(pattern=r"^[^\x00]+$")]
    height: _Side
    width: _Side


class _AnnotationEntry(TypedDict):
    id: _Id
    image_id: _Id
    category_id: _Id
    iscrowd: NotRequired[Literal[0, 1]]
    area: NotRequired[_Number | None]
    bbox: NotRequired[tuple[_Number, _Number, _Number, _Number] | None]
    segmentation: NotRequired[list[Any] | dict[str, Any] | None]


class _CategoryEntry(TypedDict):
    id: _Id
    name: NotRequired[str | int]


class _RunLengths(TypedDict):
    size: tuple[_Id, _Id]
    counts: str | list[_Id]


_RUN_LENGTHS: TypeAdapter[_RunLengths] = TypeAdapter(_RunLengths)
_POLYGONS: TypeAdapter[list[list[float]]] = TypeAdapter(list[list[_Number]])


def read_coco(annotations: str | Path, images: str | Path) -> RegionIndex:
    """Read and validate a COCO-format file. Invalid entries are skipped and reported as problems.

    Images without regions are included. Crowds and empty masks are skipped and counted, but not reported as problems.

    Raises:
        DataError: the file cannot be read, is not JSON, lacks one of its three lists, or has ambiguous categories.
    """
    file, folder = Path(annotations), Path(images)
    content = read_json(file, limit=_LARGEST, what="a COCO instances file")
    for name in ("images", "annotations", "categories"):
        if not isinstance(content.get(name), list):
            raise DataError(f"{file} is not a COCO instances file: the list {name!r} is missing.")
    problems: list[Problem] = []
    listed = sorted(_entries(file, "category", _CategoryEntry, content, problems), key=lambda entry: entry["id"])
    categories = [{"id": entry["id"], "name": str(entry.get("name", entry["id"]))} for entry in listed]
    if problems:
        raise DataError(f"{first_problems(problems)}. Categories need different integer ids and a name.")
    labels = {category["id"]: label for label, category in enumerate(categories)}
    found: dict[int, ImageRegions] = {}
    for entry in _entries(file, "image", _ImageEntry, content, problems):
        path = folder / entry["file_name"]
        found[entry["id"]] = ImageRegions(entry["id"], path, entry["height"], entry["width"], [], file)
        if not os.path.isfile(path):
            problems.append(Problem(path, "is missing", BAD_IMAGE))
    skipped: Counter[str] = Counter()
    good = _entries(file, "annotation", _AnnotationEntry, content, problems)
    for entry in sorted(good, key=lambda entry: entry["id"]):
        image, label = found.get(entry["image_id"]), labels.get(entry["category_id"])
        if reason := _exclusion(entry, image, label):
            problems.append(Problem(file, f"annotation {entry['id']} {reason}"))
        elif entry.get("iscrowd") or not entry.get("segmentation"):
            skipped["crowd" if entry.get("iscrowd") else "empty mask"] += 1
        elif image is not None and label is not None:
            region = Region(entry["id"], label, entry.get("area"), entry.get("bbox"), entry["segmentation"])
            image.regions.append(region)
    return RegionIndex([found[i] for i in sorted(found)], categories, problems, skipped, len(content["annotations"]))


def _entries(file: Path, what: str, kind: Any, content: dict[str, Any], problems: list[Problem]) -> Iterator[Any]:
    """Yield the valid entries of a list and append the others to ``problems``."""
    check = TypeAdapter(kind).validate_python
    seen: set[int] = set()
    for number, entry in enumerate(content["categories" if what == "category" else f"{what}s"], 1):
        name = f"{what} number {number} of the list"
        try:
            valid = check(entry)
            if valid["id"] not in seen:
                seen.add(valid["id"])
                yield valid
                continue
            name, reason = f"{what} {valid['id']}", "is listed twice"
        except ValidationError as error:
            reason = _reason(entry, error)
            if not any(problem["loc"][:1] in ((), ("id",)) for problem in error.errors()):
                name = f"{what} {entry['id']}"
        problems.append(Problem(file, f"{name} {reason}", BAD_IMAGE if what == "image" else "bad entry"))


def _reason(entry: Any, error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return f"is {show(entry)}. An object is needed"
    name = str(first["loc"][0])
    return f"has the {name} {show(entry[name])}. {first['msg']}" if name in entry else f"has no {name}"


def _exclusion(entry: _AnnotationEntry, image: ImageRegions | None, label: int | None) -> str:
    """Return the reason why an annotation is not a region, if any."""
    if label is None:
        return f"has the category {entry['category_id']}, which is not listed"
    if image is None:
        return f"belongs to the image {entry['image_id']}, which is not listed"
    x, y, width, height = entry.get("bbox") or (0, 0, image.width, image.height)
    if min(width, height) <= 0 or not (-width < x < image.width and -height < y < image.height):
        return f"has the box {show(entry.get('bbox'))} in an image of {image.width} × {image.height}"
    return ""


def open_regions(entry: ImageRegions) -> OpenedImage:
    """Read an image and decode its masks, or raise DataError if the image cannot be used."""
    pixels = read_picture(entry.path).pixels
    if pixels.shape[:2] != (entry.height, entry.width):
        size = f"{pixels.shape[0]}×{pixels.shape[1]} pixels, but the annotations specify {entry.height}×{entry.width}"
        raise DataError(f"{entry.path} has {size}. Correct {entry.source}.")
    usable, problems, empty = [], [], 0
    for region in entry.regions:
        try:
            mask = decode_mask(region.segmentation, entry.height, entry.width)
        except DataError as error:
            problems.append(Problem(entry.source, f"annotation {region.annotation_id} {error}"))
            continue
        if window := region_window(mask, region.box):
            usable.append((region, mask, window))
        else:
            empty += 1
    return OpenedImage(pixels, usable, problems, empty)


def region_window(mask: NDArray[np.uint8], box: Box | None) -> tuple[slice, slice] | None:
    """Return the rows and columns of the clipped box, or of the mask if there is no box; None if empty."""
    height, width = mask.shape
    if box is None:
        rows, columns = np.nonzero(mask)
        if rows.size == 0:
            return None
        top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
    elif not all(map(math.isfinite, box)):
        raise DataError(f"The box {box} is not finite. Use numbers of pixels.")
    else:
        left, top = math.floor(max(box[0], 0)), math.floor(max(box[1], 0))
        right, bottom = math.ceil(min(box[0] + box[2], width)), math.ceil(min(box[1] + box[3], height))
    if right <= left or bottom <= top:
        return None
    window = slice(top, bottom), slice(left, right)
    return window if mask[window].any() else None


def decode_mask(segmentation: Any, height: int, width: int) -> NDArray[np.uint8]:
    """Decode polygons, compressed or uncompressed run lengths to a uint8 mask (height, width) of zeros and ones.

    Errors do not name the annotation.
    """
    try:
        if isinstance(segmentation, dict):
            runs = _run_lengths(_RUN_LENGTHS.validate_python(segmentation), height, width)
            inside = (np.arange(len(runs)) % 2).astype(np.uint8)
            return np.ascontiguousarray(np.repeat(inside, runs).reshape(width, height).T)
        polygons = _POLYGONS.validate_python(segmentation)
    except ValidationError as error:
        kind = "run lengths" if isinstance(segmentation, dict) else "polygons"
        raise DataError(f"has {kind} {show(segmentation)}. {error.errors()[0]['msg']}") from None
    outlines = [p for p in polygons if _check_polygon(p, height, width) >= 3]
    if not outlines:
        return np.zeros((height, width), np.uint8)
    from pycocotools import mask as coco_mask

    return np.asarray(coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(outlines, height, width))))


def _run_lengths(code: _RunLengths, height: int, width: int) -> NDArray[np.int64]:
    if code["size"] != (height, width):
        raise DataError(f"has a mask of {'×'.join(map(str, code['size']))} for an image of {height}×{width}")
    counts = code["counts"]
    runs = _decompress(counts) if isinstance(counts, str) else np.asarray(counts, np.int64)
    if (runs < 0).any() or (runs > height * width).any() or int(runs.sum()) != height * width:
        raise DataError(f"has run lengths that do not fill its {height}×{width} pixels")
    return runs


def _decompress(text: str) -> NDArray[np.int64]:
    """Decode compressed run lengths: five bits per character, lowest first; each run is relative to the one two before.

    pycocotools is not used because it corrupts memory if a string is invalid.
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


def _check_polygon(polygon: list[float], height: int, width: int) -> int:
    """Return the number of points."""
    if len(polygon) % 2:
        raise DataError(f"has a polygon of {len(polygon)} numbers. Pairs of coordinates are needed")
    points = np.asarray(polygon).reshape(-1, 2)
    # pycocotools samples the outline in steps of a fifth of a pixel and counts them in 32 bits.
    steps = 5 * np.abs(np.diff(points, axis=0, append=points[:1])).max(1, initial=0)
    if (np.abs(points) > 2 * max(height, width) + 1000).any() or steps.sum() + len(points) > _TRACE:
        raise DataError(f"has a polygon that is far outside its image of {width} × {height} or too long")
    return len(points)
