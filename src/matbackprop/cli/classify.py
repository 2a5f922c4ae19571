"""``matbackprop classify IMAGE…``: classify images or their regions."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro

from matbackprop.cli import optional
from matbackprop.errors import ConfigurationError, DataError, ShapeError
from matbackprop.vision.data.pictures import find_pictures, read_mask, read_picture
from matbackprop.vision.files import counted, printable
from matbackprop.vision.progress import track


@dataclass
class Config:
    """Classify images or their regions. Without boxes, masks or regions, each image is one region.

    An image that cannot be read is reported and skipped; the exit code is then 1, and 2 if no image could be read.
    """

    #: Images, folders of images, or patterns such as 'holiday/*.jpg'.
    images: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE ...", help_behavior_hint="(required)")
    ]
    #: box: the small network for COCO's 80 classes in the package. Or the folder of a trained model, a run folder
    #: of 'matbackprop train o2p', or owner/name on the Hugging Face hub.
    model: str = "box"
    #: Boxes x,y,width,height in pixels, for a single image.
    boxes: Annotated[tuple[str, ...], optional("BOX ...")] = ()
    #: Mask images of the size of a single image, nonzero inside the region. One per box if both are given.
    masks: Annotated[tuple[Path, ...], optional("FILE ...")] = ()
    #: COCO file with annotated regions of the images, matched by file name.
    regions: Annotated[Path | None, optional("FILE")] = None
    top: int = 3  #: Number of classes to print for each region.
    device: Literal["auto", "cpu", "cuda"] = "auto"  #: Device to use; auto selects CUDA if available.


class _Regions(NamedTuple):
    boxes: list[tuple[float, float, float, float]] | None = None
    masks: list[np.ndarray] | None = None
    annotated: list[str] | None = None


def main(config: Config) -> dict[str, Any]:
    """Classify the images and print the most likely classes of each region."""
    from matbackprop.vision.inference import load_classifier

    if config.top < 1:
        raise ConfigurationError(f"--top must be at least 1, got {config.top}.")
    if config.regions is not None and (config.boxes or config.masks):
        raise ConfigurationError("--regions cannot be combined with --boxes and --masks. Remove them.")
    paths = find_pictures(config.images)
    if len(paths) > 1 and (config.boxes or config.masks):
        raise ConfigurationError(f"--boxes and --masks need a single image; {len(paths)} were given. Use --regions.")
    boxes, masks = [_box(text) for text in config.boxes], [read_mask(path) for path in config.masks]
    given = _Regions(boxes or None, masks or None)
    find = _annotated(config.regions, paths) if config.regions else lambda _: given
    model = load_classifier(config.model, config.device)
    images: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for path in track(paths, "Classifying images", len(paths)):
        try:
            images.append({"image": path, "regions": _classify(path, find(path), model, config.top)})
        except DataError as error:
            if len(paths) == 1:
                raise
            skipped.append({"image": path, "reason": str(error)})
            print(f"matbackprop: skipped: {printable(str(error))}", file=sys.stderr)
    count = sum(len(image["regions"]) for image in images)
    return {
        "summary": f"{counted(count, 'region')} of {counted(len(images), 'image')} classified",
        "exit_code": 0 if not skipped else 1 if images else 2,
        "images": images,
        "skipped": skipped,
    }


def _classify(path: Path, regions: _Regions, model: Any, top: int) -> list[dict[str, Any]]:
    from matbackprop.vision.inference import name_regions

    try:
        named = name_regions(model, read_picture(path).pixels, regions.boxes, regions.masks)
    except ShapeError as error:
        raise ShapeError(f"{path}: {error}") from error
    entries = []
    for i, classes in enumerate(named):
        best = [{"name": name, "probability": round(p, 4)} for name, p in list(classes.items())[:top]]
        entry: dict[str, Any] = {"classes": best}
        words = [str(path)] if regions == _Regions() else [f"{path}, region {i}"]
        if regions.boxes is not None:
            entry["box"] = list(regions.boxes[i])
            words.append(f"at {','.join(f'{v:g}' for v in entry['box'])}")
        if regions.annotated is not None:
            entry["annotated"] = regions.annotated[i]
            words.append(f"(annotated: {entry['annotated']})")
        entries.append(entry)
        classes_text = ", ".join(f"{c['name']} {c['probability']:.2f}" for c in best)
        print(printable(f"{' '.join(words)}: {classes_text}"))
    return entries


def _annotated(file: Path, paths: list[Path]) -> Any:
    from matbackprop.vision.data.coco import open_regions, read_coco

    index = read_coco(file, paths[0].parent)
    entries = {entry.path.name: entry for entry in index.images}

    def find(path: Path) -> _Regions:
        entry = entries.get(path.name)
        if entry is None or not entry.regions:
            raise DataError(f"{file} has no regions of {path.name}. Check the file names.")
        opened = open_regions(entry)
        for problem in opened.problems:
            print(f"matbackprop: skipped: {printable(str(problem))}", file=sys.stderr)
        regions = [region for region, _, _ in opened.usable]
        boxes = [region.box for region in regions if region.box is not None]
        names = [index.categories[region.label]["name"] for region in regions]
        masks = [mask for _, mask, _ in opened.usable]
        return _Regions(boxes if len(boxes) == len(regions) else None, masks, names)

    return find


def _box(text: str) -> tuple[float, float, float, float]:
    try:
        x, y, width, height = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigurationError(f"The box {text!r} must be x,y,width,height, for example 10,20,100,50.") from None
    return x, y, width, height
