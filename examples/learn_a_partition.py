"""Train features for a partition with normalized cuts.

A small convolutional network is trained on one photograph with the soft normalized-cut objective and a coarse
partition (table, saucer, cup, coffee). Its features are clustered before and after training.

    python examples/learn_a_partition.py [output.png]
"""

import sys
from pathlib import Path

import numpy as np
import skimage.data
import torch
from torch import nn

import matbackprop
from matbackprop.vision.report.figures import segmentation_grid
from matbackprop.vision.segmentation import SoftSpace, segment_features

SIZE = (50, 75)


def target() -> torch.Tensor:
    """A partition of the coffee photograph drawn with three ellipses: table 0, saucer 1, cup 2, coffee 3."""
    y, x = torch.meshgrid(torch.linspace(0, 1, SIZE[0]), torch.linspace(0, 1, SIZE[1]), indexing="ij")
    labels = torch.zeros(SIZE, dtype=torch.long)
    for label, (cx, cy, rx, ry) in enumerate(
        ((0.47, 0.58, 0.36, 0.42), (0.53, 0.36, 0.24, 0.34), (0.55, 0.27, 0.18, 0.2)), 1
    ):
        labels[((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2 < 1] = label
    return labels


def main(output: Path, steps: int = 150) -> tuple[float, float]:
    """Draw the figure and return the objective before and after training."""
    torch.manual_seed(0)
    photo = torch.from_numpy(skimage.data.coffee()).movedim(-1, 0)[None].float() / 255
    image = nn.functional.interpolate(photo, size=SIZE, mode="area")
    place = torch.stack(torch.meshgrid(*(torch.linspace(-1, 1, n) for n in SIZE), indexing="ij"))[None]
    network = nn.Sequential(
        nn.Conv2d(5, 32, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(32, 32, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(32, 12, 1),
        nn.ReLU(),
    )
    labels = target()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)

    def features() -> torch.Tensor:
        return network(torch.cat([image, place], 1))[0].movedim(0, -1)

    def segments() -> np.ndarray:
        return segment_features(features().detach(), [4], space=SoftSpace(), split=False).labels[0].numpy()

    before, objective = segments(), []
    for _ in range(steps):
        optimizer.zero_grad()
        j = matbackprop.normalized_cut_soft(features().flatten(0, 1), labels.flatten())
        j.backward()
        optimizer.step()
        objective.append(j.item())
    picture = image[0].movedim(0, -1).numpy()
    columns = ["Photograph", "Clusters before training", "Clusters after training", "Target"]
    segmentation_grid(columns, [[picture, before, segments(), labels.numpy()]], output, width=9)
    return objective[0], objective[-1]


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "learn_a_partition.png"))
