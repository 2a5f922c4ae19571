"""Interpolate between two covariance matrices.

Linear interpolation of the entries increases the determinant. Interpolation of the logarithms does not: the
determinant of exp((1 − t) log A + t log B) is the weighted geometric mean. The figure shows both.

    python examples/mean_of_ellipses.py [output.png]
"""

import sys
from pathlib import Path

import torch

import matbackprop
from matbackprop.vision.report.figures import PALETTE, figure, finish, styled


def ellipse(a: torch.Tensor, n: int = 120) -> torch.Tensor:
    """Points (2, n) of the ellipse xᵀA⁻¹x = 1."""
    angle = torch.linspace(0, 2 * torch.pi, n, dtype=a.dtype)
    return matbackprop.matrix_sqrt(a) @ torch.stack([angle.cos(), angle.sin()])


@styled
def main(output: Path) -> tuple[float, float]:
    """Draw the figure and return the determinants at t = ½ for entries and logarithms."""
    rotation = torch.tensor([[0.7, -0.7], [0.7, 0.7]], dtype=torch.float64)
    a = torch.diag(torch.tensor([4.0, 0.15], dtype=torch.float64))
    b = rotation @ torch.diag(torch.tensor([0.15, 4.0], dtype=torch.float64)) @ rotation.mT
    b = (b + b.mT) / 2
    log_a, log_b = matbackprop.matrix_log(a), matbackprop.matrix_log(b)
    fig, (ax,) = figure(width=8.6, height=2.5)
    half = []
    for row, title in enumerate(("entries", "logarithms")):
        for i, t in enumerate(torch.linspace(0, 1, 7, dtype=torch.float64)):
            straight = (1 - t) * a + t * b
            curved = matbackprop.matrix_exp((1 - t) * log_a + t * log_b)
            c = (straight, curved)[row]
            x, y = ellipse(c)
            ax.fill(x / 4.2 + i, y / 4.2 - 1.2 * row, color=PALETTE[row], alpha=0.25 + 0.1 * (i in (0, 6)), linewidth=0)
            ax.plot(x / 4.2 + i, y / 4.2 - 1.2 * row, color=PALETTE[row], linewidth=1.6)
            if i == 3:
                half.append(float(torch.linalg.det(c)))
        ax.text(-0.75, -1.2 * row, title, ha="right", va="center", fontsize=9.5)
    ax.set_aspect("equal")
    ax.set_axis_off()
    finish(fig, output)
    return half[0], half[1]


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "mean_of_ellipses.png"))
