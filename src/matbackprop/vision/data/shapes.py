"""Synthetic images of colored, textured shapes, to train all systems without data.

:func:`draw_regions` draws objects with boxes, masks and classes, like COCO. :func:`draw_segmentation` draws label maps
of several annotators who agree on some borders only, like BSDS. An image depends only on its seed and index.
:func:`write_shapes_coco` and :func:`write_shapes_bsds` write data sets in these layouts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from matbackprop.vision.segmentation import connected_components

#: Classes of objects. Outline, hue and texture depend on the class.
CLASSES = ("disc", "square", "triangle", "ring", "cross", "star")
OBJECTS = 4  #: Maximum number of objects in an image of :func:`draw_regions`.
ANNOTATORS = 3  #: Number of label maps of :func:`draw_segmentation`.
SIZE = (96, 128)  #: Default height and width.


class RegionsSample(NamedTuple):
    """Image (3, h, w) with objects: their visible parts (n, h, w) and indices (n,) into :data:`CLASSES`."""

    image: Tensor
    masks: Tensor
    labels: Tensor


class SegmentationSample(NamedTuple):
    """Image (3, h, w) with one label map (h, w) per annotator; every label, from 0, is one component."""

    image: Tensor
    segmentations: list[Tensor]


def draw_regions(index: int, *, seed: int = 0) -> RegionsSample:
    """Draw an image with one to four objects on a textured background."""
    draw = np.random.default_rng([seed, 1, index])
    size = h, w = SIZE
    image = _texture(draw, size, draw.uniform(0.3, 0.7, 3), amplitude=0.08)
    owner = np.zeros(size, np.int64)
    labels: list[int] = []
    for number in range(1, 1 + int(draw.integers(1, OBJECTS + 1))):
        label = int(draw.integers(len(CLASSES)))
        radius = draw.uniform(0.15, 0.3) * min(h, w)
        center = draw.uniform(radius, h - radius), draw.uniform(radius, w - radius)
        mask = _outline(CLASSES[label], size, center, radius, draw.uniform(0, 2 * np.pi))
        color = _hue((label + draw.normal(0, 0.6)) / len(CLASSES), draw.uniform(0.5, 0.9))
        pattern = _texture(draw, size, color, amplitude=0.2, period=3.0 + 1.5 * label)
        image[mask] = pattern[mask]
        owner[mask] = number
        labels.append(label)
    image += draw.normal(0, 0.02, image.shape)
    # Objects with fewer than 24 visible pixels are dropped.
    visible = [number for number in range(1, len(labels) + 1) if (owner == number).sum() >= 24]
    masks = np.stack([owner == number for number in visible])
    return RegionsSample(
        _to_bytes(image), torch.from_numpy(masks), torch.tensor([labels[number - 1] for number in visible])
    )


def draw_segmentation(index: int, *, seed: int = 0, size: tuple[int, int] = SIZE) -> SegmentationSample:
    """Draw an image of two areas with two to five shapes; the first of three annotators draws every region."""
    draw = np.random.default_rng([seed, 2, index])
    h, w = size
    y, x = np.mgrid[:h, :w]
    angle = draw.uniform(0, np.pi)
    side = (x - w / 2) * np.cos(angle) + (y - h / 2) * np.sin(angle) > draw.uniform(-0.2, 0.2) * min(h, w)
    labels = side.astype(np.int64)
    for number in range(2, 2 + int(draw.integers(2, 6))):
        radius = draw.uniform(0.12, 0.28) * min(h, w)
        center = draw.uniform(0, h), draw.uniform(0, w)
        kind = CLASSES[int(draw.integers(len(CLASSES)))]
        labels[_outline(kind, size, center, radius, draw.uniform(0, 2 * np.pi))] = number
    image = np.zeros((h, w, 3))
    for number in np.unique(labels):
        color = _hue(draw.uniform(), draw.uniform(0.3, 0.95))
        inside = labels == number
        image[inside] = _texture(draw, size, color, amplitude=0.1, period=draw.uniform(3, 9))[inside]
    image += draw.normal(0, 0.02, image.shape)
    maps = [labels]
    for annotator in range(1, ANNOTATORS):
        leaves_out = np.random.default_rng([seed, 3, index, annotator])
        maps.append(labels.copy())
        for number in np.unique(labels)[2:]:
            if leaves_out.uniform() < 0.25:
                maps[-1][labels == number] = 0
    parts = connected_components(torch.from_numpy(np.stack(maps)), connectivity=8)
    return SegmentationSample(_to_bytes(image), list(parts))


def _outline(kind: str, size: tuple[int, int], center: tuple[float, float], radius: float, angle: float) -> np.ndarray:
    y, x = np.mgrid[: size[0], : size[1]]
    dy, dx = y - center[0], x - center[1]
    u = (dx * np.cos(angle) + dy * np.sin(angle)) / radius
    v = (dy * np.cos(angle) - dx * np.sin(angle)) / radius
    r, phi = np.hypot(u, v), np.arctan2(v, u)
    if kind == "disc":
        return r <= 1
    if kind == "square":
        return np.maximum(abs(u), abs(v)) <= 0.85
    if kind == "triangle":
        return np.max([np.cos(t) * u + np.sin(t) * v for t in (0, 2 * np.pi / 3, 4 * np.pi / 3)], axis=0) <= 0.55
    if kind == "ring":
        return (r <= 1) & (r >= 0.5)
    if kind == "cross":
        return ((abs(u) <= 0.33) & (abs(v) <= 1)) | ((abs(v) <= 0.33) & (abs(u) <= 1))
    return r <= 0.65 + 0.35 * np.cos(5 * phi)  # star


def _texture(
    draw: np.random.Generator, size: tuple[int, int], color: Any, *, amplitude: float, period: float = 24.0
) -> np.ndarray:
    """Return an image (h, w, 3) of one color with stripes of random direction; the period is in pixels."""
    y, x = np.mgrid[: size[0], : size[1]]
    angle, phase = draw.uniform(0, np.pi, 2)
    wave = np.sin((x * np.cos(angle) + y * np.sin(angle)) * (2 * np.pi / period) + 2 * phase)
    return np.asarray(color) * (1 + amplitude * wave[..., None])


def _hue(hue: float, value: float) -> np.ndarray:
    """Return the RGB color of a hue in [0, 1) (periodic) and a brightness."""
    return value * (0.5 + 0.5 * np.cos(2 * np.pi * (hue - np.array([0.0, 1 / 3, 2 / 3]))))


def _to_bytes(image: np.ndarray) -> Tensor:
    return torch.from_numpy((image.clip(0, 1) * 255).round().astype(np.uint8).transpose(2, 0, 1).copy())


def write_shapes_coco(folder: str | Path, *, train: int, val: int, seed: int = 0) -> Path:
    """Write images of :func:`draw_regions` as a COCO data set with run-length encoded masks, and return its folder."""
    from pycocotools import mask as coco

    folder = Path(folder)
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    categories = [{"id": i + 1, "name": name, "supercategory": "shape"} for i, name in enumerate(CLASSES)]
    for number, (split, length) in enumerate((("train", train), ("val", val))):
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        (folder / "images" / split).mkdir(parents=True, exist_ok=True)
        for index in range(length):
            sample = draw_regions(index, seed=2 * seed + number)
            identity = number * 1_000_000 + index + 1
            name = f"{identity:012d}.png"
            _write_image(folder / "images" / split / name, sample.image)
            images.append({"id": identity, "file_name": name, "height": SIZE[0], "width": SIZE[1]})
            for mask, label in zip(sample.masks, sample.labels, strict=True):
                code = coco.encode(np.asfortranarray(mask.numpy().astype(np.uint8)))
                annotations.append(
                    {
                        "id": number * 10_000_000 + len(annotations) + 1,
                        "image_id": identity,
                        "category_id": int(label) + 1,
                        "bbox": coco.toBbox(code).tolist(),
                        "area": int(mask.sum()),
                        "iscrowd": 0,
                        "segmentation": {"size": list(SIZE), "counts": code["counts"].decode("ascii")},
                    }
                )
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return folder


def write_shapes_bsds(folder: str | Path, *, train: int, val: int, seed: int = 0, size: tuple[int, int] = SIZE) -> Path:
    """Write images of :func:`draw_segmentation` in the layout of BSDS500 and return the folder."""
    from scipy import io

    folder = Path(folder)
    for number, (split, length) in enumerate((("train", train), ("val", val))):
        images, truth = folder / "data" / "images" / split, folder / "data" / "groundTruth" / split
        images.mkdir(parents=True, exist_ok=True)
        truth.mkdir(parents=True, exist_ok=True)
        for index in range(length):
            sample = draw_segmentation(index, seed=2 * seed + number, size=size)
            name = f"{number * 100_000 + index + 1:06d}"
            _write_image(images / f"{name}.jpg", sample.image)
            cells = np.empty((1, ANNOTATORS), object)
            for a, labels in enumerate(sample.segmentations):
                cells[0, a] = {"Segmentation": (labels + 1).numpy().astype(np.uint16)}
            io.savemat(truth / f"{name}.mat", {"groundTruth": cells}, do_compression=True)
    return folder


def _write_image(path: Path, image: Tensor) -> None:
    from PIL import Image

    options: dict[str, Any] = {"quality": 97, "subsampling": 0} if path.suffix == ".jpg" else {}
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(path, **options)
