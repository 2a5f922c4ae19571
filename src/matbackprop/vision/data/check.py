"""Check every file of a data set with the readers used in training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from matbackprop.errors import DataError, Problem
from matbackprop.vision.data.bsds import find_root, find_split, read_sample
from matbackprop.vision.data.coco import coco_files, open_regions, read_coco
from matbackprop.vision.files import as_problem
from matbackprop.vision.progress import track

T = TypeVar("T")


@dataclass
class CheckResult:
    """Result of :func:`check_dataset`."""

    layout: str  #: ``"bsds"`` or ``"coco"``.
    counts: dict[str, int] = field(default_factory=dict)  #: Numbers of images, annotations and so on, by split.
    problems: list[Problem] = field(default_factory=list)  #: Bad files.


def find_layout(root: str | Path) -> str:
    """Return ``"coco"`` or ``"bsds"``. Raise DataError if the folder is missing or has neither layout."""
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"{root} is not a folder. Pass the folder of a data set in the layout of BSDS or COCO.")
    if list((root / "annotations").glob("instances_*.json")):
        return "coco"
    if any((base / "groundTruth").is_dir() for base in (root, root / "data", root / "BSDS500" / "data")):
        return "bsds"
    raise DataError(
        f"{root} is not a data set. Layout for segmentation, with SPLIT train and val: images/SPLIT/NAME.jpg and label "
        "maps groundTruth/SPLIT/NAME.png (several annotators: NAME_1.png, NAME_2.png; or one NAME.mat). Layout for "
        "regions: images/SPLIT/*.jpg and annotations/instances_SPLIT.json."
    )


def check_dataset(root: str | Path) -> CheckResult:
    """Detect the layout of a data set and call :func:`check_bsds` or :func:`check_coco`."""
    return {"bsds": check_bsds, "coco": check_coco}[find_layout(root)](Path(root))


def _read_all(
    result: CheckResult, read: Callable[..., T], tasks: list[tuple[Any, ...]], files: list[list[Path]], title: str
) -> Iterator[T]:
    """Yield ``read(*task)`` for each task. Errors are problems of the file, of those of the task, that they name."""

    def try_reading(task: tuple[Any, ...], paths: list[Path]) -> T | Problem:
        try:
            return read(*task)
        except DataError as error:
            return as_problem(next((path for path in paths if str(error).startswith(str(path))), paths[0]), error)

    with ThreadPoolExecutor(4) as pool:
        for found in track(pool.map(try_reading, tasks, files), title, len(tasks)):
            if isinstance(found, Problem):
                result.problems.append(found)
            else:
                yield found


def check_bsds(root: Path) -> CheckResult:
    """Read all images and human maps of a folder in the layout of BSDS500.

    Unreadable files, images without maps, maps without images, and maps of the wrong size are reported as problems.
    """
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
        paths = [[image, *maps] for _, image, maps in tasks]
        samples = _read_all(result, read_sample, tasks, paths, f"Checking {folder.name}")
        result.counts[f"{folder.name} segmentations"] = sum(len(sample.segmentations) for sample in samples)
    result.problems += [Problem(path, "has no image") for path in seen if path not in used]
    if not result.counts:
        result.problems.append(Problem(base / "images", "contains no folder of images"))
    return result


def check_coco(root: Path) -> CheckResult:
    """Read all images and annotations of a folder in the COCO layout. Crowds and empty masks are only counted."""
    result = CheckResult("coco")
    categories: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((root / "annotations").glob("instances_*.json")):
        split = file.stem.removeprefix("instances_")
        try:
            categories[split] = _check_annotations(result, root, file, split)
        except DataError as error:
            result.problems.append(as_problem(file, error))
    if not categories:
        result.problems.append(Problem(root / "annotations", "contains no readable instances_*.json"))
    if any(c != next(iter(categories.values())) for c in categories.values()):
        reason = f"the splits {', '.join(categories)} have different categories"
        result.problems.append(Problem(root / "annotations", reason))
    return result


def _check_annotations(result: CheckResult, root: Path, file: Path, split: str) -> list[dict[str, Any]]:
    """Add the findings of one annotation file and its images to ``result``, and return the categories."""
    index = read_coco(file, coco_files(root, split)[1])
    result.counts[f"{split} images"] = len(index.images)
    result.counts[f"{split} annotations"] = index.annotations
    result.problems += index.problems
    missing = {problem.path for problem in index.problems}
    skipped = Counter(index.skipped)
    there = [one for one in index.images if one.path not in missing]
    tasks, paths = [(one,) for one in there], [[one.path] for one in there]
    for opened in _read_all(result, open_regions, tasks, paths, f"Checking {split}"):
        result.problems += opened.problems
        skipped["empty mask"] += opened.empty
    if not any(one.regions for one in index.images):
        result.problems.append(Problem(file, "has no usable region"))
    for kind, count in skipped.items():
        if count:
            result.counts[f"{split} annotations skipped in training ({kind})"] = count
    return index.categories
