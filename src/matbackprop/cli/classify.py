"""``matbackprop classify IMAGE``: name the objects in regions of an image with a trained classifier."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from matbackprop.errors import ConfigurationError, DataError, ShapeError
from matbackprop.vision.data.pictures import read_mask, read_picture


@dataclass
class Config:
    """Name the objects in regions of an image. Without boxes, masks or regions the whole image is one region."""

    image: Annotated[Path, tyro.conf.Positional]
    """The picture."""
    model: str = "box"
    (
        "box: the small network for COCO's 80 classes that comes with the package. Or the folder of a trained "
        "model, a run folder of 'matbackprop train o2p', or owner/name on the Hugging Face hub."
    )
    boxes: tuple[str, ...] = ()
    """Boxes as x,y,width,height in pixels."""
    masks: tuple[Path, ...] = ()
    """Pictures of the image's size, nonzero inside the region; one for each box where boxes are given too."""
    regions: Path | None = None
    """COCO-format file with annotations of the image (looked up by its file name): classify all of them."""
    top: int = 3
    """Classes to print for each region."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""


def main(config: Config) -> dict[str, Any]:
    """Classify and print."""
    from matbackprop.vision.inference import load_classifier, name_regions

    if config.top < 1:
        raise ConfigurationError(f"--top {config.top}: at least one class is printed.")
    image = read_picture(config.image).pixels
    boxes, masks, truth = _regions(config)
    try:
        named = name_regions(load_classifier(config.model, config.device), image, boxes, masks)
    except ShapeError as error:
        raise ShapeError(f"{config.image}: {error}") from error
    regions: list[dict[str, Any]] = []
    for i, classes in enumerate(named):
        best = list(classes.items())[: config.top]
        entry: dict[str, Any] = {"classes": [{"name": name, "probability": round(p, 4)} for name, p in best]}
        if boxes is not None:
            entry["box"] = list(boxes[i])
        if truth:
            entry["annotated"] = truth[i]
        regions.append(entry)
        said = ", ".join(f"{c['name']} {c['probability']:.2f}" for c in entry["classes"])
        place = f" at {','.join(f'{v:g}' for v in entry['box'])}" if "box" in entry else ""
        annotated = f" (annotated: {entry['annotated']})" if "annotated" in entry else ""
        print(f"region {i}{place}: {said}{annotated}")
    count = f"{len(regions)} region{'' if len(regions) == 1 else 's'}"
    return {"summary": f"{count} of {config.image} named", "image": config.image, "regions": regions}


def _regions(
    config: Config,
) -> tuple[list[tuple[float, float, float, float]] | None, list[np.ndarray] | None, list[str]]:
    """Boxes, masks and, from a COCO file, the annotated classes."""
    from matbackprop.vision.data.coco import open_regions, read_regions

    if config.regions is not None:
        if config.boxes or config.masks:
            raise ConfigurationError("--regions already says where the regions are; leave --boxes and --masks out.")
        index = read_regions(config.regions, config.image.parent, missing_images="skip")
        entry = next((e for e in index.images if e.path.name == config.image.name), None)
        if entry is None:
            raise DataError(f"{config.regions} has no regions of {config.image.name}.")
        pixels, usable, problems = open_regions(entry)
        if pixels is None:
            raise DataError(str(problems[0]))
        for problem in problems:
            print(f"left out: {problem}", file=sys.stderr)
        regions = [entry.regions[i] for i, _, _ in usable]
        boxes = None if any(r.box is None for r in regions) else [r.box for r in regions if r.box is not None]
        return boxes, [mask for _, mask, _ in usable], [index.categories[r.label]["name"] for r in regions]
    pictures = [read_mask(path) for path in config.masks] or None
    for path, mask in zip(config.masks, pictures or [], strict=True):
        if not mask.any():
            raise DataError(f"{path} marks no region: all of its pixels are black or transparent.")
    return [_box(text) for text in config.boxes] or None, pictures, []


def _box(text: str) -> tuple[float, float, float, float]:
    try:
        x, y, width, height = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigurationError(f"the box {text!r} must be x,y,width,height, for example 10,20,100,50.") from None
    return x, y, width, height
