"""Train two networks with correlated outputs by deep canonical correlation analysis.

The loss is the negative sum of the canonical correlations of the outputs. This sum is the nuclear
norm of the cross-covariance of the whitened outputs. Two outputs of the first network are
initialized to zero, like dead units, so that eigenvalues of its covariance coincide. With the usual
implementation by ``torch.linalg.eigh``, the gradient is then NaN after one step. The gradient of
``whiten`` is exact.

    python examples/deep_cca.py [output.png]

Andrew, Arora, Bilmes, Livescu, Deep canonical correlation analysis, ICML 2013.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import matbackprop
from matbackprop.vision.report.figures import lines

EPS = 1e-3


def views(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two noisy views (n, 12) of three hidden variables."""
    fixed = torch.Generator().manual_seed(0)
    mixing = [torch.randn(3, 12, generator=fixed) for _ in range(2)]
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, 3, generator=draw)
    x, y = (hidden.abs() @ mixing[0]).sin(), (hidden.square() @ mixing[1]).tanh()
    return x + 0.1 * torch.randn(n, 12, generator=draw), y + 0.1 * torch.randn(n, 12, generator=draw)


def network(dead: int) -> nn.Sequential:
    """An encoder with eight outputs, the first of which are initialized to zero."""
    last = nn.Linear(48, 8)
    with torch.no_grad():
        last.weight[:dead] = 0
        last.bias[:dead] = 0
    return nn.Sequential(nn.Linear(12, 48), nn.ReLU(), last)


def by_eigh(x: Tensor) -> Tensor:
    """The usual implementation."""
    x = x - x.mean(0)
    values, vectors = torch.linalg.eigh(x.mT @ x / len(x) + EPS * torch.eye(x.shape[1]))
    return x @ (vectors * values.rsqrt()) @ vectors.mT


def by_whiten(x: Tensor) -> Tensor:
    return matbackprop.whiten(x, eps=EPS)


def correlation(x: Tensor, y: Tensor, white: Callable[[Tensor], Tensor]) -> Tensor:
    """The sum of the canonical correlations."""
    return torch.linalg.matrix_norm(white(x).mT @ white(y) / len(x), "nuc")


def train(white: Callable[[Tensor], Tensor], steps: int) -> list[float]:
    """Train, and return the sum of correlations of new data after each step, up to the first NaN."""
    torch.manual_seed(0)
    (x, y), (new_x, new_y) = views(500, 1), views(500, 2)
    one, other = network(dead=2), network(dead=0)
    optimizer = torch.optim.Adam([*one.parameters(), *other.parameters()], lr=3e-3)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        (-correlation(one(x), other(y), white)).backward()
        optimizer.step()
        with torch.no_grad():
            outputs = one(new_x), other(new_y)
        if not all(bool(out.isfinite().all()) for out in outputs):
            return [*found, float("nan")]
        found.append(float(correlation(*outputs, by_whiten)))
    return found


def main(output: Path, steps: int = 200) -> tuple[list[float], list[float], float]:
    """Draw the figure and return the correlations by step of both implementations, and of the data themselves."""
    usual, ours = train(by_eigh, steps), train(by_whiten, steps)
    linear = float(correlation(*views(500, 2), by_whiten))
    lines(
        {
            "whiten": (list(range(1, steps + 1, 10)), ours[::10]),
            "linear CCA": ([1, steps], [linear, linear]),
        },
        output,
        title=f"Deep CCA: with eigh and autograd the networks are NaN after step {len(usual)}",
        xlabel="step",
        ylabel="sum of canonical correlations",
        emphasis="whiten",
    )
    return usual, ours, linear


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "deep_cca.png"))
