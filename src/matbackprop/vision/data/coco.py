"""Read COCO-format annotation files (:func:`read_coco`), images and masks (:func:`open_regions`).

Valid entries become regions; invalid entries are reported as problems.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from matbackprop.errors import DataError, Problem, first_problems, needs
from matbackprop.vision.data.pictures import MAX_PIXELS, read_picture
from matbackprop.vision.files import read_json, show

Box = tuple[float, float, float, float]
"""x, y, width and height in pixels."""
BAD_IMAGE = ("bad image entry", "missing image", "unreadable image")
"""Kinds of problems that exclude an image with all its regions."""

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


@dataclass(frozen=True)
class Region:
    """Annotated object."""

    annotation_id: int
    label: int
    area: float
    box: Box | None
    segmentation: Any


@dataclass(frozen=True)
class ImageRegions:
    """Regions of one image; ``source`` is the annotation file."""

    image_id: int
    path: Path
    height: int
    width: int
    regions: list[Region]
    source: Path


@dataclass(frozen=True)
class RegionIndex:
    """Regions of an annotation file.

    Images and ``categories`` (``{"id": …, "name": …}``) are sorted by id; a label is an index into ``categories``.
    ``skipped`` counts the skipped annotations by reason, ``unused`` names the categories without any region.
    """

    images: list[ImageRegions]
    categories: list[dict[str, Any]]
    skipped: dict[str, int]
    unused: list[str]
    problems: list[Problem] = field(default_factory=list)
    annotations: int = 0


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
    categories = _categories(file, content["categories"])
    problems: list[Problem] = []
    found = {
        entry["id"]: ImageRegions(entry["id"], folder / entry["file_name"], entry["height"], entry["width"], [], file)
        for entry in _entries(file, "image", _ImageEntry, content["images"], problems)
    }
    missing = _missing_images(folder, found)
    problems += [Problem(found[i].path, "is missing", "missing image") for i in missing]
    good: list[_AnnotationEntry] = list(
        _entries(file, "annotation", _AnnotationEntry, content["annotations"], problems)
    )
    skipped = Counter({"bad annotation": sum(p.kind == "bad annotation" for p in problems)})
    labels = {c["id"]: i for i, c in enumerate(categories)}
    for entry in sorted(good, key=lambda entry: entry["id"]):
        kind, reason = _exclusion(entry, found.get(entry["image_id"]), labels)
        if not kind and entry["image_id"] in missing:
            kind = "missing image"
        if reason:
            problems.append(Problem(file, f"annotation {entry['id']} {reason}", kind))
        if kind:
            skipped[kind] += 1
            continue
        area, label = entry.get("area"), labels[entry["category_id"]]
        region = Region(entry["id"], label, -1.0 if area is None else area, entry.get("bbox"), entry["segmentation"])
        found[entry["image_id"]].regions.append(region)
    used = {region.label for image in found.values() for region in image.regions}
    return RegionIndex(
        images=[found[i] for i in sorted(found)],
        categories=categories,
        skipped={kind: count for kind, count in skipped.items() if count},
        unused=[c["name"] for i, c in enumerate(categories) if i not in used],
        problems=problems,
        annotations=len(content["annotations"]),
    )


def _entries(file: Path, what: str, kind: Any, entries: list[Any], problems: list[Problem]) -> Iterator[Any]:
    """Yield the valid entries of a list and append the others to ``problems``."""
    check = TypeAdapter(kind).validate_python
    seen: set[int] = set()
    for number, entry in enumerate(entries, 1):
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
        problems.append(
            Problem(file, f"{name} {reason}", "bad annotation" if what == "annotation" else f"bad {what} entry")
        )


def _reason(entry: Any, error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return f"is {show(entry)}. An object is needed"
    name = str(first["loc"][0])
    return f"has the {name} {show(entry[name])}. {first['msg']}" if name in entry else f"has no {name}"


def _missing_images(folder: Path, images: dict[int, ImageRegions]) -> set[int]:
    # One scan of the folder is faster than one query per image.
    present = {entry.path for entry in os.scandir(folder) if entry.is_file()} if folder.is_dir() else set()
    return {i for i, one in images.items() if str(one.path) not in present and not os.path.isfile(one.path)}


def _exclusion(entry: _AnnotationEntry, image: ImageRegions | None, labels: dict[int, int]) -> tuple[str, str]:
    """Return the kind of exclusion and, for problems, the reason; empty strings for a valid region."""
    box = entry.get("bbox")
    if entry["category_id"] not in labels:
        return "unknown category", f"has the category {entry['category_id']}, which is not listed"
    if image is None:
        return "unknown image", f"belongs to the image {entry['image_id']}, which is not listed"
    if entry.get("iscrowd"):
        return "crowd", ""
    if box is not None:
        x, y, width, height = box
        if min(width, height) <= 0 or not (-width < x < image.width and -height < y < image.height):
            reason = f"has the box {show(box)} in an image of {image.width} × {image.height}"
            return "box outside the image", reason
    if not entry.get("segmentation"):
        return "empty mask", ""
    return "", ""


def read_regions(
    annotations: str | Path, images: str | Path, *, missing_images: Literal["raise", "skip"] = "raise"
) -> RegionIndex:
    """Read a COCO-format file with :func:`read_coco` and drop images without regions.

    Missing images and images with an invalid entry raise DataError, unless ``missing_images="skip"``.
    """
    index = read_coco(annotations, images)
    bad = [p for p in index.problems if p.kind == "bad image entry"]
    if missing_images == "raise" and index.skipped.get("missing image"):
        bad += [p for p in index.problems if p.kind == "missing image"]
    if missing_images == "raise" and bad:
        raise DataError(
            f"{annotations}: {len(bad)} images cannot be used, the first: {first_problems(bad)}. Complete {images}, or "
            "pass missing_images='skip' to skip their regions."
        )
    kept = [one for one in index.images if one.regions]
    if not kept:
        why = f" ({first_problems(index.problems, 2)})" if index.problems else ""
        raise DataError(f"{annotations} has no usable region. Skipped: {index.skipped or 'none'}{why}.")
    return replace(index, images=kept)


def _categories(file: Path, entries: list[Any]) -> list[dict[str, Any]]:
    problems: list[Problem] = []
    valid = list(_entries(file, "category", _CategoryEntry, entries, problems))
    if problems:
        raise DataError(f"{first_problems(problems)}. Categories need different integer ids and a name.")
    return [{"id": c["id"], "name": str(c.get("name", c["id"]))} for c in sorted(valid, key=lambda c: c["id"])]


def open_regions(
    entry: ImageRegions,
) -> tuple[NDArray[np.uint8] | None, list[tuple[int, NDArray[np.uint8], tuple[slice, slice]]], list[Problem]]:
    """Read an image and decode its masks.

    Returns:
        RGB pixels (h, w, 3), or None if the image cannot be used; index, mask (h, w) and window of each usable region;
        and the problems, of which those of the kind ``"empty mask"`` can be ignored.
    """
    try:
        pixels = read_picture(entry.path).pixels
    except DataError as error:
        reason = str(error).removeprefix(f"{entry.path} ").rstrip(".")
        return None, [], [Problem(entry.path, f"cannot be decoded: {reason}", "unreadable image")]
    if pixels.shape[:2] != (entry.height, entry.width):
        size = (
            f"has {pixels.shape[0]}×{pixels.shape[1]} pixels, but the annotations specify {entry.height}×{entry.width}"
        )
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
    with needs("COCO polygons need pycocotools", "'matbackprop[train]'"):
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
