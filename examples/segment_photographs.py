"""Segment sample photographs with the network in the package.

Each photograph is shown above its regions, drawn in their mean color.

    python examples/segment_photographs.py [output.jpg]
"""

import sys
from pathlib import Path

import numpy as np
import skimage.data
from PIL import Image
from skimage.color import label2rgb
from sklearn.datasets import load_sample_image

import matbackprop
from matbackprop.vision.inference.drawing import draw_boundaries

HEIGHT, GAP = 230, 6


def tile(pixels: np.ndarray) -> np.ndarray:
    """A photograph above its regions, at the figure's height."""
    picture = Image.fromarray(pixels)
    picture = picture.resize((round(picture.width * HEIGHT / picture.height), HEIGHT), Image.Resampling.LANCZOS)
    small = np.asarray(picture)
    segments = matbackprop.segment(pixels)
    labels = np.asarray(Image.fromarray(segments.labels()).resize(picture.size, Image.Resampling.NEAREST))
    regions = draw_boundaries(label2rgb(labels, small, kind="avg", bg_label=-1), labels, color=(255, 255, 255))
    return np.concatenate([small, np.full((GAP, small.shape[1], 3), 255, np.uint8), regions])


def main(output: Path) -> None:
    """Draw the figure."""
    photographs = [load_sample_image("china.jpg"), skimage.data.astronaut(), skimage.data.coffee()]
    photographs.append(load_sample_image("flower.jpg"))
    gap = np.full((2 * HEIGHT + GAP, GAP, 3), 255, np.uint8)
    parts = [part for photograph in photographs for part in (tile(photograph), gap)]
    Image.fromarray(np.concatenate(parts[:-1], 1)).save(output, quality=88)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "photographs.jpg"))
