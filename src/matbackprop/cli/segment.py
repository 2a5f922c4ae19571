"""``matbackprop segment IMAGE…``: segment photographs."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from matbackprop.cli import optional
from matbackprop.errors import ConfigurationError, DataError
from matbackprop.vision.data.pictures import find_pictures
from matbackprop.vision.files import atomic_write, counted, printable
from matbackprop.vision.inference.export import Format, merge_coco, output_files
from matbackprop.vision.progress import track

if TYPE_CHECKING:
    import torch

    from matbackprop.vision.inference import Segments
    from matbackprop.vision.workers import Workers


@dataclass
class Config:
    """Segment photographs and write label maps, contour maps, images with borders, and exports.

    Images whose results exist are skipped, so that an interrupted command can be rerun. An image that cannot be
    read is reported and skipped; the exit code is then 1, and 2 if no image could be read.
    """

    #: Images, folders of images, or patterns such as 'holiday/*.jpg'. Images of more than 8 bits are rescaled by their
    #: range.
    images: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE ...", help_behavior_hint="(required)")
    ]
    out: Path = Path("segments")  #: Folder for the results.
    overwrite: bool = False  #: Replace existing results; by default they are kept.
    #: box: the contour network in the package. box/small: a faster, less accurate one. none: the gradient of the image
    #: instead of a network. Or the folder of a trained model, a run folder of 'matbackprop train contours' or 'train
    #: ncuts', or owner/name on the Hugging Face hub.
    model: str = "box"
    #: Contour strength, 0 to 1, below which regions are merged in the PNG files. Default: the threshold stored with the
    #: model.
    threshold: Annotated[float | None, optional("FLOAT")] = None
    k: Annotated[int | None, optional("INT")] = None  #: Number of regions in the PNG files instead of a threshold.
    #: Numbers of regions in the npz file, or of clusters with a model of 'train ncuts'. Default: eight numbers.
    ks: Annotated[tuple[int, ...] | None, optional("INT ...")] = None
    #: Files to write. png: label map, colors, borders. npz: all levels and the tree of merges. ucm2: the hierarchy as
    #: an ultrametric contour map for the Berkeley benchmark's tools. coco: JSON with exact masks, and coco.json for all
    #: images. svg: one path per region. labelme: polygons. contours: strength of each pixel, as PNG.
    format: tuple[Format, ...] = ("png", "npz", "ucm2")
    #: Maximum length of the longer side. Larger photographs are reduced to it, and their borders are then refined.
    side: int = 512
    #: Average contours over these image scales. 0.75 1 1.4 is more accurate and slower.
    scales: tuple[float, ...] = (1.0,)
    mirror: bool = False  #: Also average contours over mirror images, which doubles the time of the network.
    device: Literal["auto", "cpu", "cuda"] = "auto"  #: Device to use; auto selects CUDA if available.


def _save(config: Config, formats: tuple[Any, ...], result: Segments, stem: str) -> dict[str, Any]:
    """Write the results of an image and return its entry in the document."""
    if config.threshold is not None:
        result = result.at(config.threshold)
    files = result.save(config.out, config.k, formats=formats, stem=stem)
    return {
        "shown": result.count(config.k),
        "threshold": None if config.k or result.hierarchy is None else result.threshold,
        "regions": [result.count(k) for k in result.ks],
        "note": result.note,
        "seconds": round(result.seconds, 3),
        **{name: file.as_posix() for name, file in files.items()},
    }


def main(config: Config) -> dict[str, Any]:
    """Segment the images, write the results and print one line per image."""
    from matbackprop.vision.devices import choose_device
    from matbackprop.vision.inference.image_sets import start_workers

    if config.k is not None and config.k < 1:
        raise ConfigurationError(f"--k must be at least 1, got {config.k}.")
    if config.threshold is not None and not 0 <= config.threshold <= 1:
        raise ConfigurationError(f"--threshold must be from 0 to 1, got {config.threshold}.")
    if config.threshold is not None and config.k is not None:
        raise ConfigurationError("--threshold cannot be combined with --k. Remove one.")
    paths = find_pictures(config.images)
    device = choose_device(config.device)
    with start_workers(device, 0 if config.model == "none" else len(paths)) as pool:  # while the model is loaded
        return _segment(config, paths, device, pool)


def _segment(config: Config, paths: list[Path], device: torch.device, pool: Workers) -> dict[str, Any]:
    from matbackprop.vision.inference.image_sets import segment_files
    from matbackprop.vision.inference.loading import load_segmenter
    from matbackprop.vision.inference.segmenting import check_options
    from matbackprop.vision.models.contours import ContourNet

    model: Any = None if config.model == "none" else load_segmenter(config.model, device.type)
    options: dict[str, Any] = {"side": config.side, "scales": config.scales, "mirror": config.mirror}
    ks, formats = check_options(model, config.ks, **options), config.format
    if not isinstance(model, ContourNet | None):
        formats = tuple(name for name in formats if name not in ("ucm2", "contours"))  # clusters are not nested
        ks = ks if config.k is None else tuple(sorted({*ks, config.k}))
    save = partial(_save, config, formats)

    jobs = list(zip(paths, _stems(paths), strict=True))
    outputs = {job: output_files(config.out, job[1], formats) for job in jobs}
    kept = {job for job in jobs if not config.overwrite and all(file.exists() for file in outputs[job].values())}
    left = [job for job in jobs if job not in kept]
    results = segment_files(left, model, save, ks=ks, pool=pool, **options)
    entries, skipped = _print_results(track(results, "Segmenting images", len(left)), len(paths))
    if "coco" in formats and len(entries) + len(kept) > 1:
        files = {Path(entry["coco"]) for entry in entries} | {outputs[job]["coco"] for job in kept}
        atomic_write(config.out / "coco.json", json.dumps(merge_coco(sorted(files))))
    if kept:
        print(f"matbackprop: kept results of {counted(len(kept), 'image')}. Use --overwrite to redo.", file=sys.stderr)
    order = {path.as_posix(): number for number, path in enumerate(paths)}
    return {
        "summary": f"{counted(len(entries), 'image')} segmented → {config.out}",
        "exit_code": 0 if not skipped else 1 if entries or kept else 2,
        "network": model is not None,
        "ks": ks,
        "images": sorted(entries, key=lambda entry: order[entry["image"]]),
        "kept": [job[0].as_posix() for job in jobs if job in kept],
        "skipped": skipped,
    }


_Results = Iterable[tuple[Path, dict[str, Any] | DataError]]


def _print_results(results: _Results, images: int) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    entries: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    for path, entry in results:
        if isinstance(entry, DataError):
            if images == 1 and not entries:
                raise entry
            skipped.append({"image": path.as_posix(), "reason": str(entry)})
            print(f"matbackprop: skipped: {printable(str(entry))}", file=sys.stderr)
            continue
        entries.append({"image": path.as_posix(), **entry})
        words = filter(None, [counted(entry["shown"], "region"), entry["note"], f"{entry['seconds']:.2f} s"])
        file = entry.get("overlay", list(entry.values())[-1])
        print(printable(f"{path}: {', '.join(words)} → {file}"))
    if skipped:
        print(f"matbackprop: {len(skipped)} of {counted(images, 'image')} skipped.", file=sys.stderr)
    return entries, skipped


def _stems(paths: Iterable[Path]) -> list[str]:
    """Return different stems for the results of the paths; repeated stems are numbered."""
    repeated: Counter[str] = Counter()
    stems: dict[str, None] = {}
    for path in paths:
        stem = path.stem
        while stem in stems:
            repeated[path.stem] += 1
            stem = f"{path.stem}-{repeated[path.stem] + 1}"
        stems[stem] = None
    return list(stems)
