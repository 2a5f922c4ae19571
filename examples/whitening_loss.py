"""Train an encoder without labels by a whitening loss (W-MSE).

The loss is the distance between the embeddings of two noisy views of each point. Without whitening the encoder becomes
constant. Whitened embeddings have covariance I and cannot collapse. Initially the embeddings are nearly on a line. The
covariance is then almost singular, and Cholesky factors and gradients of eigenvectors are unstable. The gradient of
``whiten`` is exact.

    python examples/whitening_loss.py [output.png]

Ermolov, Siarohin, Sangineto, Sebe, Whitening for self-supervised representation learning, ICML 2021.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import matbackprop
from matbackprop.vision.report.figures import lines

CLASSES = 6


def points(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points (n, 24) of six classes, eight signal channels and sixteen with larger noise, and their classes."""
    centers = torch.randn(CLASSES, 8, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (n,), generator=draw)
    signal = centers[labels] + 0.2 * torch.randn(n, 8, generator=draw)
    return torch.cat([signal, 2 * torch.randn(n, 16, generator=draw)], 1), labels


def view(x: Tensor) -> Tensor:
    """A random view: small noise on the signal, new values of the other channels."""
    return torch.cat([x[:, :8] + 0.2 * torch.randn(len(x), 8), 2 * torch.randn(len(x), 16)], 1)


def loss(one: Tensor, other: Tensor, whitened: bool) -> Tensor:
    z = torch.cat([one, other])
    if whitened:
        z = matbackprop.whiten(z, eps=1e-4)
    return nn.functional.mse_loss(*z.chunk(2))


@torch.no_grad()
def accuracy(encoder: nn.Module) -> float:
    """Fraction of new points whose nearest neighbor in the embedding has the same class."""
    x, labels = points(600, 2)
    z = encoder(x)
    nearest = torch.cdist(z, z).fill_diagonal_(torch.inf).argmin(1)
    return float((labels[nearest] == labels).float().mean())


def train(whitened: bool, steps: int) -> list[float]:
    """Train, and return the accuracy every ten steps."""
    torch.manual_seed(0)
    x, _ = points(600, 1)
    encoder = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 8))
    with torch.no_grad():
        encoder[2].weight.copy_(1e-3 * encoder[2].weight + encoder[2].weight[:1])  # embeddings start nearly on a line
    optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    found = [accuracy(encoder)]
    for step in range(steps):
        optimizer.zero_grad()
        loss(encoder(view(x)), encoder(view(x)), whitened).backward()
        optimizer.step()
        if step % 10 == 9:
            found.append(accuracy(encoder))
    return found


def main(output: Path, steps: int = 200) -> tuple[list[float], list[float]]:
    """Draw the figure and return the accuracies by step with and without whitening."""
    ours, plain = train(True, steps), train(False, steps)
    grid = list(range(0, steps + 1, 10))
    lines(
        {"whitened": (grid, ours), "without whitening": (grid, plain)},
        output,
        title="Training without labels",
        xlabel="step",
        ylabel="nearest neighbors of the same class",
        emphasis="whitened",
    )
    return ours, plain


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "whitening_loss.png"))
