"""Verifies data sets file by file and names each bad one."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from matbackprop.errors import DataError, MissingExtraError

__all__ = ["CheckResult", "Problem", "check_bsds", "check_coco", "check_dataset", "find_layout"]

IMAGES = (".jpg", ".jpeg", ".png")
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Problem:
    """A bad file and what is wrong with it."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass
class CheckResult:
    """What a check found.

    Attributes:
        layout: ``"bsds"`` or ``"coco"``.
        counts: how many images, annotations and so on were read, by split.
        problems: bad files.
        notes: what is worth knowing and does no harm.
    """

    layout: str
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.problems


def find_layout(root: str | Path) -> str:
    """Return ``"coco"`` or ``"bsds"`` for a folder.

    Raises:
        DataError: the folder is missing or has neither layout.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"there is no folder {root}; give the folder of a data set in BSDS's or COCO's layout.")
    if list((root / "annotations").glob("instances_*.json")):
        return "coco"
    if (root / "data" / "groundTruth").is_dir() or (root / "groundTruth").is_dir() or (root / "human").is_dir():
        return "bsds"
    raise DataError(
        f"{root} has neither COCO's layout (annotations/instances_*.json, images/) nor BSDS's "
        "(data/images/, data/groundTruth/, or images/, human/)."
    )


def check_dataset(root: str | Path, *, threads: int = 4, progress: Callable[[int], None] | None = None) -> CheckResult:
    """Check a data set of either layout; see :func:`check_bsds` and :func:`check_coco`."""
    return {"bsds": check_bsds, "coco": check_coco}[find_layout(root)](root, threads=threads, progress=progress)


# ----------------------------------------------------------------------------------------------------------------- BSDS


def check_bsds(root: str | Path, *, threads: int = 4, progress: Callable[[int], None] | None = None) -> CheckResult:
    """Read every image and every human segmentation of a BSDS500 or BSDS300 folder and compare their sizes.

    Args:
        root: the folder with ``data/images`` and ``data/groundTruth`` (or ``images`` and ``human``).
        threads: files read at once.
        progress: called with the number of images done.

    Returns:
        Counts and problems: images that cannot be decoded, images without segmentations, segmentations without images,
        damaged ones, and those of another size.
    """
    root = Path(root)
    base = root / "data" if (root / "data").is_dir() else root
    result = CheckResult("bsds")
    if (base / "human").is_dir() and not (base / "groundTruth").is_dir():
        return _check_bsds300(base, result, threads, progress)
    for split in SPLITS:
        images = _by_stem((base / "images" / split).glob("*"), IMAGES)
        truths = _by_stem((base / "groundTruth" / split).glob("*"), (".mat", ".png", ".npz", ".npy"))
        if not images and not truths:
            continue
        for name in sorted(set(images) - set(truths)):
            result.problems.append(Problem(images[name], "there is no human segmentation of it"))
        for name in sorted(set(truths) - set(images)):
            result.problems.append(Problem(truths[name], "there is no image of it"))
        pairs = [(images[n], [truths[n]]) for n in sorted(set(images) & set(truths))]
        result.counts[f"{split} images"] = len(images)
        result.counts[f"{split} segmentations"] = _check_pairs(pairs, result, threads, progress)
    if not result.counts:
        result.problems.append(Problem(base, "there are no images in images/{train,val,test}"))
    return result


def _check_bsds300(
    base: Path, result: CheckResult, threads: int, progress: Callable[[int], None] | None
) -> CheckResult:
    truths: dict[str, list[Path]] = {}
    for path in sorted((base / "human").rglob("*.seg")):
        truths.setdefault(path.stem, []).append(path)
    seen: set[str] = set()
    for split in SPLITS:
        images = _by_stem((base / "images" / split).glob("*"), IMAGES)
        if not images:
            continue
        seen |= set(images)
        for name in sorted(set(images) - set(truths)):
            result.problems.append(Problem(images[name], "there is no human segmentation of it"))
        pairs = [(images[n], truths[n]) for n in sorted(set(images) & set(truths))]
        result.counts[f"{split} images"] = len(images)
        result.counts[f"{split} segmentations"] = _check_pairs(pairs, result, threads, progress)
    for name in sorted(set(truths) - seen):
        result.problems += [Problem(path, "there is no image of it") for path in truths[name]]
    if not seen:
        result.problems.append(Problem(base, "there are no images in images/{train,val,test}"))
    return result


def _check_pairs(
    pairs: list[tuple[Path, list[Path]]], result: CheckResult, threads: int, progress: Callable[[int], None] | None
) -> int:
    """Compare images with their segmentations; return how many segmentations were read."""
    from matbackprop.data.label_files import read_label_maps

    def one(pair: tuple[Path, list[Path]]) -> tuple[int, list[Problem]]:
        image, files = pair
        size, problem = _image_size(image)
        problems = [problem] if problem else []
        count = 0
        for file in files:
            try:
                maps = read_label_maps(file)
            except Exception as error:
                problems.append(Problem(file, f"cannot be read: {error}"))
                continue
            if not maps:
                problems.append(Problem(file, "holds no segmentation"))
            for number, labels in enumerate(maps):
                count += 1
                if size is not None and labels.shape != size:
                    problems.append(
                        Problem(file, f"segmentation {number} has {labels.shape}, the image {size} (height, width)")
                    )
        return count, problems

    total = 0
    for done, (count, problems) in enumerate(_in_threads(one, pairs, threads), start=1):
        total += count
        result.problems += problems
        if progress is not None:
            progress(done)
    return total


# ----------------------------------------------------------------------------------------------------------------- COCO


def check_coco(root: str | Path, *, threads: int = 4, progress: Callable[[int], None] | None = None) -> CheckResult:
    """Read every image and every annotation of a folder in COCO's layout.

    Args:
        root: the folder with ``annotations/instances_<split>.json`` and ``images/<split>``.
        threads: files read at once.
        progress: called with the number of images done.

    Returns:
        Counts and problems: JSON that is damaged, images that are missing, cannot be decoded or have another size than
        the annotations say, annotations of unknown images or categories, boxes that are empty or outside the image,
        masks that cannot be decoded or have another size, and identifiers given twice. Crowds, empty masks and unused
        categories are noted.
    """
    root = Path(root)
    result = CheckResult("coco")
    categories: dict[str, list[tuple[int, str]]] = {}
    for file in sorted((root / "annotations").glob("instances_*.json")):
        split = file.stem.removeprefix("instances_")
        try:
            content = json.loads(file.read_text())
            images, annotations, kinds = content["images"], content["annotations"], content["categories"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            result.problems.append(Problem(file, f"cannot be read: {type(error).__name__} {error}"))
            continue
        categories[split] = sorted((k["id"], k["name"]) for k in kinds)
        result.counts[f"{split} images"] = len(images)
        result.counts[f"{split} annotations"] = len(annotations)
        _check_annotations(file, images, annotations, kinds, result)
        _check_coco_images(_image_folder(root, split), images, result, threads, progress)
    if not categories:
        result.problems.append(Problem(root / "annotations", "there is no readable instances_*.json"))
    if len({json.dumps(c) for c in categories.values()}) > 1:
        result.problems.append(
            Problem(root / "annotations", f"the splits {', '.join(categories)} have different categories")
        )
    return result


def _image_folder(root: Path, split: str) -> Path:
    """Return where a split's images are: images/<split>, or <split> as COCO's archives have it."""
    for folder in (root / "images" / split, root / split):
        if folder.is_dir():
            return folder
    return root / "images" / split


def _check_annotations(
    file: Path, images: list[Any], annotations: list[Any], kinds: list[Any], result: CheckResult
) -> None:
    sizes = {i.get("id"): (i.get("height"), i.get("width")) for i in images}
    known = {k.get("id") for k in kinds}
    crowds = empty = 0
    used: Counter[Any] = Counter()
    for what, entries in (("image", images), ("annotation", annotations), ("category", kinds)):
        twice = [i for i, n in Counter(e.get("id") for e in entries).items() if n > 1]
        if twice:
            result.problems.append(Problem(file, f"{what} id given twice: {', '.join(map(str, twice[:5]))}"))

    def bad(annotation: Any, reason: str) -> None:
        result.problems.append(Problem(file, f"annotation {annotation.get('id')} {reason}"))

    for annotation in annotations:
        image, category = annotation.get("image_id"), annotation.get("category_id")
        used[category] += 1
        if image not in sizes:
            bad(annotation, f"belongs to the image {image}, which is not listed")
            continue
        if category not in known:
            bad(annotation, f"has the category {category}, which is not listed")
        if annotation.get("iscrowd"):
            crowds += 1
            continue
        box = annotation.get("bbox")
        height, width = sizes[image]
        if not _is_box(box):
            bad(annotation, f"has the box {box}")
        elif box[2] <= 0 or box[3] <= 0:
            bad(annotation, f"has an empty box {box}")
        elif box[0] >= width or box[1] >= height or box[0] + box[2] <= 0 or box[1] + box[3] <= 0:
            bad(annotation, f"has a box {box} outside its image of {width} × {height}")
        reason, is_empty = _mask_problem(annotation.get("segmentation"), height, width)
        empty += is_empty
        if reason:
            bad(annotation, reason)
    name = file.name
    if crowds:
        result.notes.append(f"{name}: {crowds} crowds, which training leaves out")
    if empty:
        result.notes.append(f"{name}: {empty} empty masks, which training leaves out")
    unused = [k["name"] for k in kinds if not used[k.get("id")]]
    if unused:
        result.notes.append(f"{name}: {len(unused)} categories without an annotation: {', '.join(unused[:8])}")


def _is_box(box: Any) -> bool:
    return (
        isinstance(box, list) and len(box) == 4 and all(isinstance(v, (int, float)) and math.isfinite(v) for v in box)
    )


def _mask_problem(segmentation: Any, height: int, width: int) -> tuple[str | None, bool]:
    """Return what is wrong with a mask, and whether it is empty."""
    try:
        from pycocotools import mask as coco
    except ImportError:
        raise MissingExtraError("checking COCO masks needs pycocotools: pip install 'matbackprop[train]'.") from None
    if not segmentation:
        return None, True
    try:
        if isinstance(segmentation, dict):
            code = segmentation
            if isinstance(code["counts"], list):
                code = coco.frPyObjects(code, *code["size"])
            if tuple(code["size"]) != (height, width):
                return f"has a mask of {tuple(code['size'])} for an image of ({height}, {width})", False
        else:
            for polygon in segmentation:
                if len(polygon) < 6 or len(polygon) % 2 or not np.isfinite(polygon).all():
                    return f"has a polygon of {len(polygon)} numbers", False
            code = coco.merge(coco.frPyObjects(segmentation, height, width))
        return None, int(coco.area(code)) == 0
    except Exception as error:
        return f"has a mask that cannot be decoded: {type(error).__name__} {error}", False


def _check_coco_images(
    folder: Path, images: list[Any], result: CheckResult, threads: int, progress: Callable[[int], None] | None
) -> None:
    def one(entry: Any) -> Problem | None:
        path = folder / str(entry.get("file_name"))
        if not path.is_file():
            return Problem(path, "is missing")
        size, problem = _image_size(path)
        wanted = (entry.get("height"), entry.get("width"))
        if problem is None and size != wanted:
            return Problem(path, f"has {size}, the annotations say {wanted} (height, width)")
        return problem

    for done, problem in enumerate(_in_threads(one, images, threads), start=1):
        if problem is not None:
            result.problems.append(problem)
        if progress is not None:
            progress(done)


# --------------------------------------------------------------------------------------------------------------- common


def _by_stem(paths: Iterable[Path], suffixes: tuple[str, ...]) -> dict[str, Path]:
    return {p.stem: p for p in paths if p.suffix.lower() in suffixes and not p.name.startswith(".")}


def _image_size(path: Path) -> tuple[tuple[int, int] | None, Problem | None]:
    """Decode an image completely and return its height and width, or what is wrong with it."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("reading images needs Pillow: pip install 'matbackprop[metrics]'.") from None
    try:
        with Image.open(path) as image:
            image.load()
            return (image.height, image.width), None
    except Exception as error:
        return None, Problem(path, f"cannot be decoded: {error}")


def _in_threads(function: Callable[[Any], Any], items: list[Any], threads: int) -> Iterable[Any]:
    if threads <= 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(function, items)
