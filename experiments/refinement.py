"""Borders of a 12-megapixel photograph: enlarged label maps, and label maps refined at full resolution.

The photograph is synthetic, so the true borders are known. The figure shows a detail of both.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import distance_transform_edt, gaussian_filter, zoom

from matbackprop.vision.files import atomic_file
from matbackprop.vision.inference import load_segmenter, segment_photograph
from matbackprop.vision.inference.drawing import border_pixels, draw_boundaries
from matbackprop.vision.segmentation.refine import enlarge_labels

NEAR = 30  #: Borders farther than this many pixels from a true border are false, not imprecise, and are excluded.
CENTER, RADIUS = (0.45, 0.45), 0.3  #: Of the disk, in heights of the photograph.


@dataclass
class Config:
    """Compare enlarged and refined borders of a large synthetic photograph."""

    #: Figure to write: a detail with enlarged borders (left) and with refined ones (right).
    out: Path = Path("docs/_static/refinement.png")
    size: tuple[int, int] = (3000, 4000)  #: Height and width of the photograph.
    model: str = "box"  #: The segmenter; none for image gradients.


def main(config: Config) -> dict[str, Any]:
    """Segment, measure both maps, and write the figure."""
    photograph, truth = generate_photograph(config.size)
    model = None if config.model == "none" else load_segmenter(config.model, "cpu")
    result = segment_photograph(photograph, model)
    started = time.perf_counter()
    refined = result.labels()
    seconds = time.perf_counter() - started
    enlarged = enlarge_labels(result.small_labels(), config.size)
    distance = distance_transform_edt(~border_pixels(truth))
    errors = [float(d[d <= NEAR].mean()) for d in (distance[border_pixels(labels)] for labels in (enlarged, refined))]
    row, column = (
        round(config.size[0] * (c + RADIUS * sign * 0.5**0.5)) for c, sign in zip(CENTER, (-1, 1), strict=True)
    )
    half = config.size[0] // 25
    detail = slice(row - half, row + half), slice(column - half, column + half)  # the upper right of the disk
    pictures = [draw_boundaries(photograph[detail], labels[detail], width=2) for labels in (enlarged, refined)]
    config.out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(config.out) as file:
        gap = np.full((2 * half, 8, 3), 255, np.uint8)
        joined = Image.fromarray(np.concatenate([pictures[0], gap, pictures[1]], 1))
        joined.resize((2 * joined.width, 2 * joined.height), Image.Resampling.NEAREST).quantize(64).save(file, "PNG")
    summary = (
        f"mean distance of borders from the true ones: {errors[0]:.2f} pixels enlarged, {errors[1]:.2f} refined in "
        f"{seconds:.1f} s → {config.out}"
    )
    return {"summary": summary, "enlarged": errors[0], "refined": errors[1], "seconds": seconds}


def generate_photograph(size: tuple[int, int]) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """A disk, a wavy horizon and a tilted square with soft texture and noise, and their true regions."""
    draw = np.random.default_rng(0)
    y, x = (axis.astype(np.float32) / size[0] for axis in np.ogrid[: size[0], : size[1]])
    truth = np.where(y > 0.75 + 0.03 * np.sin(9 * x), 1, 0).astype(np.int32)
    truth[np.abs(x + y - 1.5) + np.abs(x - y - 0.6) < 0.4] = 2
    truth[(y - CENTER[0]) ** 2 + (x - CENTER[1]) ** 2 < RADIUS**2] = 3
    colors = np.array([[110, 150, 190], [70, 110, 60], [190, 170, 120], [150, 60, 50]], np.float32)
    coarse = gaussian_filter(draw.normal(0, 1, (size[0] // 20, size[1] // 20)), 2).astype(np.float32)
    texture = zoom(coarse * (10 / coarse.std()), (size[0] / coarse.shape[0], size[1] / coarse.shape[1]), order=1)
    photograph = np.empty((*size, 3), np.uint8)
    for channel in range(3):
        noise = draw.standard_normal(size, dtype=np.float32) * 8
        soft = gaussian_filter(colors[truth, channel], 1.5)  # the lens
        photograph[..., channel] = np.clip(soft + texture + noise, 0, 255)
    return photograph, truth
