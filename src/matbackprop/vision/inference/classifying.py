"""Classify regions of an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from matbackprop.errors import DataError, ShapeError
from matbackprop.vision.data.coco import Box, region_window
from matbackprop.vision.data.coco_regions import crop_region, pad_crops, place_regions
from matbackprop.vision.inference.loading import BOX, load_classifier
from matbackprop.vision.inference.segmenting import Segments, read_input
from matbackprop.vision.models.deep_o2p import RegionClassifier


def classify(
    x: Any, regions: Any = None, *, model: RegionClassifier | str | Path = BOX, device: str = "auto"
) -> list[dict[str, float]]:
    """Classify regions of an image.

    Args:
        x: a file, a Pillow image, or an array or tensor, as in :func:`matbackprop.segment`.
        regions: a result of :func:`matbackprop.segment`; a label map (h, w) with one region per label from 0; a list
            of boxes (x, y, width, height) in pixels; or a list of masks (h, w), nonzero inside the region. None for
            the whole image.
        model: a trained classifier or its name (see :func:`load_classifier`). Default: the classifier in the package.
        device: device of a model that is loaded by name: ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Returns:
        Class name → probability for each region, most likely first.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> network = RegionClassifier(2, names=["cup", "plate"], head="o2p", canvas=67, reduce=4)
        >>> image = np.zeros((40, 60, 3), np.uint8)
        >>> [sorted(region) for region in classify(image, [(0, 0, 30, 40), (30, 0, 30, 40)], model=network)]
        [['cup', 'plate'], ['cup', 'plate']]
    """
    boxes, masks = _boxes_or_masks(regions)
    if isinstance(model, (str, Path)):
        model = load_classifier(model, device)
    return name_regions(model, read_input(x)[0].pixels, boxes, masks)


def _boxes_or_masks(regions: Any) -> tuple[list[Box] | None, list[np.ndarray] | None]:
    if regions is None:
        return None, None
    if isinstance(regions, Segments):
        regions = regions.labels()
    if isinstance(regions, (list, tuple)) and all(np.shape(one) == (4,) for one in regions):
        return [(float(x), float(y), float(width), float(height)) for x, y, width, height in regions], None
    if isinstance(regions, (np.ndarray, Tensor)):
        array = np.asarray(regions)
        if array.ndim == 2 and array.dtype.kind in "iu":
            return None, [array == label for label in np.unique(array) if label >= 0]
        regions = [array] if array.ndim == 2 else list(array)
    if isinstance(regions, (list, tuple)) and all(np.ndim(one) == 2 for one in regions):
        return None, [np.asarray(one) for one in regions]
    kind = f"shape {tuple(regions.shape)}" if hasattr(regions, "shape") else type(regions).__name__
    raise ShapeError(
        "regions must be a result of segment(), an integer label map (h, w), a list of boxes (x, y, width, height), "
        f"or a list of masks (h, w), got {kind}. Pass a classifier as model=…."
    )


def name_regions(
    model: RegionClassifier,
    image: np.ndarray,
    boxes: Sequence[Box] | None = None,
    masks: Sequence[np.ndarray | None] | None = None,
) -> list[dict[str, float]]:
    """Return class name → probability of each region, most likely first; see :func:`classify_regions`."""
    probabilities = classify_regions(model, image, boxes, masks)
    names = model.names or [str(i) for i in range(probabilities.shape[1])]
    return [dict(sorted(zip(names, row, strict=True), key=lambda pair: -pair[1])) for row in probabilities.tolist()]


@torch.no_grad()
def classify_regions(
    model: RegionClassifier,
    image: np.ndarray,
    boxes: Sequence[Box] | None = None,
    masks: Sequence[np.ndarray | None] | None = None,
) -> Tensor:
    """Compute the class probabilities of regions of an image.

    Args:
        model: a trained classifier.
        image: uint8 RGB (h, w, 3).
        boxes: x, y, width and height of each region in pixels. None for the bounding boxes of the masks, or, without
            masks, for the whole image.
        masks: (h, w) arrays, nonzero inside the region; None for the whole box.

    Returns:
        float32 (n, classes) on the CPU; each row sums to one.

    Raises:
        ShapeError: a mask has the wrong shape, or boxes and masks differ in number.
        DataError: a region is empty or outside the image.
    """
    height, width = image.shape[:2]
    if boxes is None and masks is None:
        boxes = [(0.0, 0.0, float(width), float(height))]
    count = len(boxes) if boxes is not None else len(masks or [])
    if boxes is not None and masks is not None and len(boxes) != len(masks):
        raise ShapeError(f"There are {len(boxes)} boxes and {len(masks)} masks. Pass one mask (or None) per box.")
    crops = []
    for i in range(count):
        mask = None if masks is None else masks[i]
        inside = np.ones((height, width), np.uint8) if mask is None else (np.asarray(mask) != 0).astype(np.uint8)
        if inside.shape != (height, width):
            raise ShapeError(f"mask {i} must have the shape of the image, {(height, width)}, got {inside.shape}.")
        window = region_window(inside, None if boxes is None else boxes[i])
        if window is None:
            raise DataError(f"Region {i} is empty or outside the image of {width}×{height} pixels. Leave it out.")
        crops.append(crop_region(image, inside, window, side=model.side, margin=model.margin))
    store, sizes = pad_crops(crops, model.side)
    device = next(model.parameters()).device
    model.eval()
    results = []
    for start in range(0, count, 100):
        part, shape = (torch.from_numpy(array[start : start + 100]).to(device) for array in (store, sizes))
        placement = torch.zeros(len(part), 3, dtype=torch.long, device=device)
        how: dict[str, Any] = {"canvas": model.canvas, "background": model.background}
        pictures, inside = place_regions(part, shape, placement, **how)
        results.append(model(pictures, inside).float().softmax(-1).cpu())
    return torch.cat(results) if results else torch.zeros(0, model.classifier.out_features)
