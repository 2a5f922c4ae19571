"""Synthetic images of colored, textured shapes, on which both systems can be trained without data.

:class:`ShapesRegions` has objects with boxes, masks and classes, like COCO; :class:`ShapesSegmentation` has label maps
by several annotators who agree on some borders only, like BSDS. :func:`write_shapes_coco` and
:func:`write_shapes_bsds` write them in the layouts of those data sets.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from matbackprop.errors import ConfigurationError, needs
from matbackprop.vision.segmentation import connected_components

Sample = TypeVar("Sample")

CLASSES = ("disc", "square", "triangle", "ring", "cross", "star")
"""Classes of objects. Outline, hue and texture depend on the class."""
OBJECTS = 4
"""Largest number of objects in an image of regions."""
ANNOTATORS = 3
"""Number of label maps of an image to segment."""


@dataclass(frozen=True)
class ShapesRegionsSample:
    """One image with objects.

    Attributes:
        image: uint8 (3, h, w).
        masks: bool (n, h, w), the visible part of each object.
        boxes: float32 (n, 4): x, y, width, height of each mask, as COCO has them.
        labels: int64 (n,), indices into :data:`CLASSES`.
    """

    image: Tensor
    masks: Tensor
    boxes: Tensor
    labels: Tensor


@dataclass(frozen=True)
class ShapesSegmentationSample:
    """One image with label maps.

    Attributes:
        image: uint8 (3, h, w).
        segmentations: int64 (h, w) each, labels from 0, one map per annotator; every label is one connected component.
    """

    image: Tensor
    segmentations: list[Tensor]


class _Shapes(ABC, Generic[Sample]):
    """``length`` images of a height and width, of which image i depends on (seed, i) only."""

    def __init__(self, length: int, *, size: tuple[int, int] = (96, 128), seed: int = 0) -> None:
        if length < 1 or min(size) < 32:
            raise ConfigurationError(
                f"length is {length} and size {size}; use at least 1 image and 32 pixels per side."
            )
        self.length, self.size, self.seed = length, size, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self._draw(index)

    @abstractmethod
    def _draw(self, index: int) -> Sample:
        """Draw an image."""


class ShapesRegions(_Shapes[ShapesRegionsSample]):
    """Images with one to four objects on a textured background.

    Example:
        >>> sample = ShapesRegions(4, seed=0)[1]
        >>> sample.image.shape, sample.masks.shape[1:]
        (torch.Size([3, 96, 128]), torch.Size([96, 128]))
    """

    def _draw(self, index: int) -> ShapesRegionsSample:
        draw = np.random.default_rng([self.seed, 1, index])
        h, w = self.size
        image = _texture(draw, self.size, draw.uniform(0.3, 0.7, 3), amplitude=0.08)
        owner = np.zeros(self.size, np.int64)
        labels: list[int] = []
        for number in range(1, 1 + int(draw.integers(1, OBJECTS + 1))):
            label = int(draw.integers(len(CLASSES)))
            radius = draw.uniform(0.15, 0.3) * min(h, w)
            center = draw.uniform(radius, h - radius), draw.uniform(radius, w - radius)
            mask = _outline(CLASSES[label], self.size, center, radius, draw.uniform(0, 2 * np.pi))
            color = _hue((label + draw.normal(0, 0.6)) / len(CLASSES), draw.uniform(0.5, 0.9))
            pattern = _texture(draw, self.size, color, amplitude=0.2, period=3.0 + 1.5 * label)
            image[mask] = pattern[mask]
            owner[mask] = number
            labels.append(label)
        image += draw.normal(0, 0.02, image.shape)
        # Objects with less than 24 visible pixels are dropped.
        visible = [i for i in range(len(labels)) if (owner == i + 1).sum() >= 24]
        masks = np.stack([owner == i + 1 for i in visible])
        return ShapesRegionsSample(
            _to_bytes(image),
            torch.from_numpy(masks),
            torch.tensor([_box(mask) for mask in masks], dtype=torch.float32),
            torch.tensor([labels[i] for i in visible], dtype=torch.int64),
        )


class ShapesSegmentation(_Shapes[ShapesSegmentationSample]):
    """Images of two areas with two to five shapes, and three label maps.

    The first annotator draws every region; the others leave some out.

    Example:
        >>> sample = ShapesSegmentation(2)[0]
        >>> len(sample.segmentations), sample.segmentations[0].shape
        (3, torch.Size([96, 128]))
    """

    def _draw(self, index: int) -> ShapesSegmentationSample:
        draw = np.random.default_rng([self.seed, 2, index])
        h, w = self.size
        y, x = np.mgrid[:h, :w]
        angle = draw.uniform(0, np.pi)
        side = (x - w / 2) * np.cos(angle) + (y - h / 2) * np.sin(angle) > draw.uniform(-0.2, 0.2) * min(h, w)
        labels = side.astype(np.int64)
        for number in range(2, 2 + int(draw.integers(2, 6))):
            radius = draw.uniform(0.12, 0.28) * min(h, w)
            center = draw.uniform(0, h), draw.uniform(0, w)
            kind = CLASSES[int(draw.integers(len(CLASSES)))]
            labels[_outline(kind, self.size, center, radius, draw.uniform(0, 2 * np.pi))] = number
        image = np.zeros((h, w, 3))
        for number in np.unique(labels):
            color = _hue(draw.uniform(), draw.uniform(0.3, 0.95))
            inside = labels == number
            image[inside] = _texture(draw, self.size, color, amplitude=0.1, period=draw.uniform(3, 9))[inside]
        image += draw.normal(0, 0.02, image.shape)
        maps = [labels] + [self._merged(labels, index, a) for a in range(1, ANNOTATORS)]
        parts = connected_components(torch.from_numpy(np.stack(maps)), connectivity=8)
        return ShapesSegmentationSample(_to_bytes(image), list(parts))

    def _merged(self, labels: np.ndarray, index: int, annotator: int) -> np.ndarray:
        """Remove each shape with probability 1/4."""
        draw = np.random.default_rng([self.seed, 3, index, annotator])
        out = labels.copy()
        for number in np.unique(labels)[2:]:
            if draw.uniform() < 0.25:
                out[labels == number] = 0
        return out


# -------------------------------------------------------------------------------------------------------------- drawing


def _outline(kind: str, size: tuple[int, int], center: tuple[float, float], radius: float, angle: float) -> np.ndarray:
    """Return the bool mask (h, w) of a shape."""
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
    """Return an image (h, w, 3) of one color with stripes of a period in pixels and a random direction."""
    y, x = np.mgrid[: size[0], : size[1]]
    angle, phase = draw.uniform(0, np.pi, 2)
    wave = np.sin((x * np.cos(angle) + y * np.sin(angle)) * (2 * np.pi / period) + 2 * phase)
    return np.asarray(color) * (1 + amplitude * wave[..., None])


def _hue(hue: float, value: float) -> np.ndarray:
    """Return the RGB color of a hue in [0, 1) (periodic) and a brightness."""
    return value * (0.5 + 0.5 * np.cos(2 * np.pi * (hue - np.array([0.0, 1 / 3, 2 / 3]))))


def _to_bytes(image: np.ndarray) -> Tensor:
    return torch.from_numpy((image.clip(0, 1) * 255).round().astype(np.uint8).transpose(2, 0, 1).copy())


def _box(mask: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1] - columns[0] + 1), int(rows[-1] - rows[0] + 1)


# -------------------------------------------------------------------------------------------------------------- writing


def write_shapes_coco(folder: str | Path, *, train: int, val: int, seed: int = 0) -> Path:
    """Write :class:`ShapesRegions` as a COCO data set and return its folder.

    ``images/{train,val}/*.png`` and ``annotations/instances_{train,val}.json`` with masks as run-length codes.
    """
    with needs("writing COCO masks needs pycocotools", "'matbackprop[train]'"):
        from pycocotools import mask as coco
    folder = Path(folder)
    categories = [{"id": i + 1, "name": name, "supercategory": "shape"} for i, name in enumerate(CLASSES)]
    for number, (split, length) in enumerate((("train", train), ("val", val))):
        data = ShapesRegions(length, seed=2 * seed + number)
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        (folder / "images" / split).mkdir(parents=True, exist_ok=True)
        for index, sample in enumerate(data[i] for i in range(length)):
            identity = number * 1_000_000 + index + 1
            name = f"{identity:012d}.png"
            _write_image(folder / "images" / split / name, sample.image)
            images.append({"id": identity, "file_name": name, "height": data.size[0], "width": data.size[1]})
            for mask, box, label in zip(sample.masks, sample.boxes, sample.labels, strict=True):
                code = coco.encode(np.asfortranarray(mask.numpy().astype(np.uint8)))
                annotations.append(
                    {
                        "id": number * 10_000_000 + len(annotations) + 1,
                        "image_id": identity,
                        "category_id": int(label) + 1,
                        "bbox": box.tolist(),
                        "area": int(mask.sum()),
                        "iscrowd": 0,
                        "segmentation": {"size": list(data.size), "counts": code["counts"].decode("ascii")},
                    }
                )
        (folder / "annotations").mkdir(exist_ok=True)
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return folder


def write_shapes_bsds(
    folder: str | Path, *, train: int, val: int, seed: int = 0, size: tuple[int, int] = (96, 128)
) -> Path:
    """Write :class:`ShapesSegmentation` in the layout of BSDS500 and return its folder.

    ``data/images/{train,val}/*.jpg`` and ``data/groundTruth/{train,val}/*.mat`` (labels from 1, a cell per person).
    """
    from scipy import io

    folder = Path(folder)
    for number, (split, length) in enumerate((("train", train), ("val", val))):
        data = ShapesSegmentation(length, size=size, seed=2 * seed + number)
        images, truth = folder / "data" / "images" / split, folder / "data" / "groundTruth" / split
        images.mkdir(parents=True, exist_ok=True)
        truth.mkdir(parents=True, exist_ok=True)
        for index, sample in enumerate(data[i] for i in range(length)):
            identity = f"{number * 100_000 + index + 1:06d}"
            _write_image(images / f"{identity}.jpg", sample.image)
            cells = np.empty((1, ANNOTATORS), object)
            for a, labels in enumerate(sample.segmentations):
                cells[0, a] = {"Segmentation": (labels + 1).numpy().astype(np.uint16), "Boundaries": _borders(labels)}
            io.savemat(truth / f"{identity}.mat", {"groundTruth": cells}, do_compression=True)
    return folder


def _borders(labels: Tensor) -> np.ndarray:
    """Return 1 where the right or lower neighbor has another label."""
    out = torch.zeros(labels.shape, dtype=torch.bool)
    out[:, :-1] |= labels[:, :-1] != labels[:, 1:]
    out[:-1] |= labels[:-1] != labels[1:]
    return out.numpy().astype(np.uint8)


def _write_image(path: Path, image: Tensor) -> None:
    with needs("writing images needs Pillow", "'matbackprop[metrics]'"):
        from PIL import Image
    options: dict[str, Any] = {"quality": 97, "subsampling": 0} if path.suffix == ".jpg" else {}
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(path, **options)
