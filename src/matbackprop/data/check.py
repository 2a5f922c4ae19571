"""Verifies data sets file by file: reads all of them with the readers of training and shows what those complain of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matbackprop.data.problems import Problem
from matbackprop.errors import DataError

__all__ = ["CheckResult", "check_bsds", "check_coco", "check_dataset", "find_layout"]


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


_TRUTH = ("groundTruth", "human")


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
    if any((base / name).is_dir() for base in (root, root / "data", root / "BSDS500" / "data") for name in _TRUTH):
        return "bsds"
    raise DataError(
        f"{root} has neither COCO's layout (annotations/instances_*.json, images/) nor BSDS's "
        "(data/images/, data/groundTruth/, or images/, human/)."
    )


def check_dataset(root: str | Path, *, threads: int = 4, progress: Callable[[int], None] | None = None) -> CheckResult:
    """Check a data set of either layout; see :func:`check_bsds` and :func:`check_coco`."""
    return {"bsds": check_bsds, "coco": check_coco}[find_layout(root)](root, threads=threads, progress=progress)


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
    from matbackprop.data.bsds import find_root, find_split, read_sample

    base = find_root(root)
    result = CheckResult("bsds")
    used: set[Path] = set()
    seen: dict[Path, None] = {}
    for folder in sorted(p for p in (base / "images").iterdir() if p.is_dir()):
        try:
            files = find_split(base, folder.name)
        except DataError as error:
            result.problems.append(Problem(folder, str(error)))
            continue
        names = [name for name in files.images if name in files.truth]
        seen |= dict.fromkeys(path for paths in files.truth.values() for path in paths)
        used |= {path for name in names for path in files.truth[name]}
        result.problems += files.problems
        result.counts[f"{folder.name} images"] = len(files.images)
        tasks = [(name, files.images[name], files.truth[name]) for name in names]
        count = 0
        for done, (sample, problems) in enumerate(_in_threads(lambda task: read_sample(*task), tasks, threads), 1):
            count += len(sample.segmentations) if sample else 0
            result.problems += problems
            if progress is not None:
                progress(done)
        result.counts[f"{folder.name} segmentations"] = count
    result.problems += [Problem(path, "there is no image of it") for path in seen if path not in used]
    if not result.counts:
        result.problems.append(Problem(base / "images", "there is no folder of images in it"))
    return result


def check_coco(root: str | Path, *, threads: int = 4, progress: Callable[[int], None] | None = None) -> CheckResult:
    """Read every image and every annotation of a folder in COCO's layout.

    Args:
        root: the folder with ``annotations/instances_<split>.json`` and ``images/<split>``.
        threads: files read at once.
        progress: called with the number of images done.

    Returns:
        Counts and the problems that :func:`~matbackprop.data.coco.read_coco` and
        :func:`~matbackprop.data.coco.open_regions` find. Crowds, empty masks and unused categories are noted.
    """
    from matbackprop.data.coco import coco_files, open_regions, read_coco

    root = Path(root)
    result = CheckResult("coco")
    categories: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((root / "annotations").glob("instances_*.json")):
        split = file.stem.removeprefix("instances_")
        try:
            index = read_coco(file, coco_files(root, split)[1])
        except DataError as error:
            result.problems.append(Problem(file, f"cannot be read: {error}"))
            continue
        categories[split] = index.categories
        result.counts[f"{split} images"] = len(index.images)
        result.counts[f"{split} annotations"] = index.annotations
        result.problems += index.problems
        missing = {p.path for p in index.problems if p.kind == "missing image"}
        left_out = Counter(index.skipped)
        there = [one for one in index.images if one.path not in missing]
        for done, (_, _, problems) in enumerate(_in_threads(open_regions, there, threads), 1):
            left_out["empty mask"] += sum(p.kind == "empty mask" for p in problems)
            result.problems += [p for p in problems if p.kind != "empty mask"]
            if progress is not None:
                progress(done)
        if not any(one.regions for one in index.images):
            result.problems.append(Problem(file, "gives no region at all"))
        for kind, plural in (("crowd", "crowds"), ("empty mask", "empty masks")):
            if left_out[kind]:
                result.notes.append(f"{file.name}: {left_out[kind]} {plural}, which training leaves out")
        if index.unused:
            names = ", ".join(index.unused[:8])
            result.notes.append(f"{file.name}: {len(index.unused)} categories without a region: {names}")
    if not categories:
        result.problems.append(Problem(root / "annotations", "there is no readable instances_*.json"))
    if any(c != next(iter(categories.values())) for c in categories.values()):
        reason = f"the splits {', '.join(categories)} have different categories"
        result.problems.append(Problem(root / "annotations", reason))
    return result


def _in_threads(function: Callable[[Any], Any], items: list[Any], threads: int) -> Iterable[Any]:
    if threads <= 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(function, items)
