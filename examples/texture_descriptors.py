"""Describe textures by second-order pooling.

Patches of three photographs (brick, grass, gravel) are described by the log-covariance and by the mean of simple filter
responses. The figure shows both descriptors on their two leading principal axes.

    python examples/texture_descriptors.py [output.png]
"""

import sys
from pathlib import Path

import skimage.data
import torch

import matbackprop
from matbackprop.vision.report.figures import PALETTE, figure, finish, styled

TEXTURES = ("brick", "grass", "gravel")


def patches(name: str, count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Draw ``count`` random square patches of a texture, (count, 1, size, size) in [0, 1]."""
    image = torch.from_numpy(getattr(skimage.data, name)()).double() / 255
    corners = torch.randint(0, image.shape[0] - size, (count, 2), generator=generator)
    return torch.stack([image[r : r + size, c : c + size] for r, c in corners.tolist()]).unsqueeze(1)


def responses(images: torch.Tensor) -> torch.Tensor:
    """Filter responses as features (count, pixels, channels): brightness, two slopes and their sizes, curvature."""
    dx = torch.tensor([[[[-0.5, 0.0, 0.5]]]], dtype=images.dtype)
    conv = torch.nn.functional.conv2d
    x = conv(images, dx, padding="same")
    y = conv(images, dx.mT, padding="same")
    xx, yy = conv(x, dx, padding="same"), conv(y, dx.mT, padding="same")
    maps = torch.cat([images, x, y, x.abs(), y.abs(), xx, yy], 1)[..., 2:-2, 2:-2]
    return maps.flatten(2).mT


def principal(points: torch.Tensor) -> torch.Tensor:
    """The two leading principal coordinates of the rows."""
    centered = points - points.mean(0)
    u, s, _ = matbackprop.svd(centered)
    return u[:, :2] * s[:2]


@styled
def main(output: Path) -> float:
    """Draw the figure and return the accuracy of the nearest log-covariance."""
    generator = torch.Generator().manual_seed(0)
    count = 60
    images = torch.cat([patches(name, count, 48, generator) for name in TEXTURES])
    kind = torch.arange(len(TEXTURES)).repeat_interleave(count)
    f = responses(images)
    pooled = matbackprop.second_order_pool(f / f.shape[-2] ** 0.5, eps=1e-5, center=True)
    descriptors = {"mean": f.mean(1), "log-covariance": matbackprop.vectorize_symmetric(pooled)}

    fig, axes = figure(1, 2, width=8.4, height=3.8)
    accuracies = []
    for ax, (title, points) in zip(axes, descriptors.items(), strict=True):
        distance = torch.cdist(points, points)
        distance.fill_diagonal_(float("inf"))
        accuracies.append(float((kind[distance.argmin(1)] == kind).double().mean()))
        place = principal(points)
        for i, name in enumerate(TEXTURES):
            ax.scatter(*place[kind == i].T, s=16, color=PALETTE[i], label=name, alpha=0.85, linewidths=0)
        ax.set_title(f"{title}: 1-NN accuracy {100 * accuracies[-1]:.0f} %")
        ax.set_xlabel("first principal axis")
    axes[0].set_ylabel("second principal axis")
    axes[1].legend(loc="best")
    finish(fig, output)
    return accuracies[-1]


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "texture_descriptors.png"))
