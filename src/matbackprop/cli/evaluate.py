"""``matbackprop evaluate segmentations`` and ``evaluate contours``: metrics of the Berkeley benchmark."""

from __future__ import annotations

import csv
import io
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from matbackprop.cli import optional
from matbackprop.errors import ConfigurationError, DataError
from matbackprop.vision.data.label_files import LABEL_SUFFIXES, index_label_files, read_contour_map, read_label_maps
from matbackprop.vision.devices import processors
from matbackprop.vision.files import atomic_write, counted
from matbackprop.vision.metrics import ImageScores, boundary_curve, contour_counts, f_measure, score_images, summarize
from matbackprop.vision.metrics.evaluation import boundary_scores, map_images
from matbackprop.vision.progress import track
from matbackprop.vision.report.tables import Table


@dataclass(kw_only=True)
class _Options:
    ground_truth: Path  #: Folder of human maps, one or several for each image.
    csv: Annotated[Path | None, optional("FILE")] = None  #: Also write one line per image to this file.
    tolerance: float = 0.0075  #: Maximum distance between matched boundary pixels, as a fraction of the image diagonal.
    thresholds: int = 99  #: Number of evenly spaced thresholds of contour maps.
    workers: int = 0  #: Number of processes; 0 uses one per processor if there are enough images.


@dataclass(kw_only=True)
class Config(_Options):
    """Score segmentations against human maps: covering, Rand index, variation of information, boundaries, objects.

    Both folders contain .mat (variables segs, groundTruth or ucm2), .png, .npz or .npy files, named after the
    image: 3063.mat, or 3063_1.png, 3063_2.png … for several maps of one image. Subfolders are also searched.
    """

    #: Folder of segmentations, one or several for each image.
    segmentations: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    boundary: bool = True  #: Also match boundaries, which takes most of the time.
    objects: bool = True  #: Also match objects and parts.
    numbered: Literal["auto", "yes", "no"] = "auto"  #: Whether name_1.png, name_2.png are maps of one image.


def main(config: Config) -> dict[str, Any]:
    """Evaluate segmentations and print a table; the document has full precision and one entry per image."""
    _check(config)
    segmentations, truth = _index(config)
    if len(truth) > len(segmentations):
        missing = counted(len(truth) - len(segmentations), "image")
        print(f"matbackprop: no segmentation of {missing} with human maps.", file=sys.stderr)
    read = partial(_read, thresholds=config.thresholds)
    scores = score_images(
        {name: partial(read, paths) for name, paths in segmentations.items()},
        {name: partial(read, truth[name]) for name in segmentations if name in truth},
        boundary=config.boundary,
        objects=config.objects,
        tolerance=config.tolerance,
        workers=_workers(config, len(segmentations)),
    )
    document = _document(list(track(scores, "Scoring images", len(segmentations))))
    _table(document).show()
    return _finish(config, document)


@dataclass(kw_only=True)
class ContourMapsConfig(_Options):
    """Score soft contour maps against human maps: boundary precision, recall and F-measure.

    Each contour map is a gray PNG (8 or 16 bits), or one array of strengths in [0, 1] in a .npy or .mat file, named
    after the image. It is thinned by non-maximum suppression, thresholded at evenly spaced levels, and matched.
    """

    #: Folder of contour maps, one for each image.
    contours: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]


def contours(config: ContourMapsConfig) -> dict[str, Any]:
    """Evaluate soft contour maps and print a table; the document has full precision and the curve."""
    _check(config)
    files = index_label_files(config.contours, numbered=False)
    truth = index_label_files(config.ground_truth, names=files)
    if not files:
        raise DataError(f"{config.contours} contains no contour map. Supported: .png, .npy, .mat.")
    scored = map_images(
        partial(_contour_counts, thresholds=config.thresholds, tolerance=config.tolerance),
        {name: partial(_read_contours, name, paths) for name, paths in files.items()},
        {name: partial(_read, paths, config.thresholds) for name, paths in truth.items()},
        _workers(config, len(files)),
    )
    counts = list(track(scored, "Scoring images", len(files)))
    levels = [(i + 1) / (config.thresholds + 1) for i in range(config.thresholds)]
    curve, scores = boundary_curve(counts), boundary_scores(counts)
    ods = curve.pop("ods")
    ods["threshold"] = ods.pop("level") / (config.thresholds + 1)
    Table(
        ["ODS", "OIS", "AP", "threshold", "precision", "recall"],
        [[*scores.values(), ods["threshold"], ods["precision"], ods["recall"]]],
        title=f"Boundary F-measure: {counted(len(files), 'image')}, {counted(config.thresholds, 'threshold')}",
        note="Threshold, precision and recall at ODS.",
        formats=dict.fromkeys(("ODS", "OIS", "AP", "precision", "recall"), ".6f") | {"threshold": ".4f"},
    ).show()
    curves = zip(files, (f_measure(count)[2] for count in counts), strict=True)
    document = {
        "images": len(files),
        "thresholds": config.thresholds,
        "scores": scores,
        "ods": ods,
        "curve": {"threshold": levels, **curve},
        "per_image": [{"id": n, "threshold": levels[int(f.argmax())], "boundary_f": float(f.max())} for n, f in curves],
    }
    return _finish(config, document)


def _read_contours(name: str, paths: list[Path]) -> Any:
    if len(paths) > 1:
        raise DataError(f"{name} has {len(paths)} contour maps. Keep one.")
    return read_contour_map(paths[0])


def _contour_counts(name: str, contours: Any, truth: list[Any], **options: Any) -> Any:
    return contour_counts(contours, truth, **options)


def _check(config: _Options) -> None:
    if config.thresholds < 1 or config.workers < 0 or not 0 <= config.tolerance <= 0.1:
        raise ConfigurationError(
            f"--thresholds is {config.thresholds}, --workers {config.workers}, --tolerance {config.tolerance}. "
            "Use at least 1 threshold, 0 or more workers and a tolerance from 0 to 0.1."
        )


def _workers(config: _Options, images: int) -> int:
    return config.workers or min(processors(), images // 8)  # starting a process takes a second or two


def _index(config: Config) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    folders = (config.segmentations, config.ground_truth)
    both = [index_label_files(folder, numbered=config.numbered != "no") for folder in folders]
    if config.numbered == "auto":
        plain = [index_label_files(folder, numbered=False) for folder in folders]
        if len(both[0]) < len(plain[0]) and plain[0].keys() == plain[1].keys():
            raise DataError(
                f"Both folders contain the same numbered names ({', '.join(list(plain[0])[:3])} …). Pass --numbered no "
                "if each is a separate image, --numbered yes if they are several maps of one image."
            )
    for folder, files in zip(folders, both, strict=True):
        if not files:
            raise DataError(f"{folder} contains no label map. Supported: {', '.join(LABEL_SUFFIXES)}.")
    return both[0], both[1]


def _read(paths: list[Path], thresholds: int) -> list[Any]:
    return [labels for path in paths for labels in read_label_maps(path, thresholds=thresholds)]


def _document(results: list[ImageScores]) -> dict[str, Any]:
    numbers = {len(result.covering) for result in results}
    counts = [result.boundary for result in results if result.boundary is not None]
    curve = {"boundary_curve": boundary_curve(counts)} if counts and len(numbers) == 1 else {}
    return {
        "images": len(results),
        "annotators": sum(len(result.best_covering) for result in results),
        "segmentations": numbers.pop() if len(numbers) == 1 else None,
        "scores": {name: None if math.isnan(value) else value for name, value in summarize(results).items()},
        **curve,
        "per_image": [result.row() for result in results],
    }


_MEASURES = {
    "covering": "covering",
    "pri": "Rand index (PRI)",
    "vi": "variation of information, bits",
    "boundary": "boundary F-measure",
    "objects": "objects and parts, F-measure",
}


def _table(document: dict[str, Any]) -> Table:
    scores, number = document["scores"], document["segmentations"]
    note = f"covering as in the paper, best (average): {scores['paper_best']:.6f} ({scores['paper_average']:.6f})"
    each = f"{counted(number or 0, 'segmentation')} each"
    if number is None:
        each = "differing numbers of segmentations"
        note += "\nODS needs the same number of segmentations for every image."
    scales = ("ODS", "OIS", "best")
    return Table(
        ["measure", *scales],
        [
            [title, *(scores.get(f"{stem}_{scale.lower()}") for scale in scales)]
            for stem, title in _MEASURES.items()
            if f"{stem}_ods" in scores
        ],
        title=f"{counted(document['images'], 'image')}, {each}, {counted(document['annotators'], 'human map')}",
        note=note,
        formats=dict.fromkeys(scales, ".6f"),
    )


def _finish(config: _Options, document: dict[str, Any]) -> dict[str, Any]:
    summary = f"{counted(document['images'], 'image')} scored"
    if config.csv is not None:
        summary += f" → {config.csv}"
        config.csv.parent.mkdir(parents=True, exist_ok=True)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, fieldnames=list(document["per_image"][0]))
        writer.writeheader()
        writer.writerows(document["per_image"])
        atomic_write(config.csv, text.getvalue())
    return {"summary": summary, **document}
