"""Gradient of log A at nearly repeated eigenvalues.

A has twelve eigenvalues near 3 whose gaps shrink to rounding error. The figure compares autograd through
``torch.linalg.eigh`` with ``matrix_log``. The reference is the power series of log(A/3).

    python examples/degenerate_gradients.py [output.png]
"""

import sys
from pathlib import Path

import torch

import matbackprop
from matbackprop.vision.report.figures import lines

N = 12


def through_eigh(a: torch.Tensor) -> torch.Tensor:
    """log A by ``eigh``, differentiated by autograd."""
    lam, u = torch.linalg.eigh(a)
    return (u * lam.log().unsqueeze(-2)) @ u.mT


def by_series(a: torch.Tensor, terms: int = 60) -> torch.Tensor:
    """log A − log 3 = Σ (−1)ᵏ⁺¹ (A/3 − I)ᵏ/k near 3I, without division by a gap."""
    e = a / 3 - torch.eye(N, dtype=a.dtype)
    power, total = e, torch.zeros_like(a)
    for k in range(1, terms):
        total = total - (-1) ** k * power / k
        power = power @ e
    return total


def gradient(function, a: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """The symmetric part of d⟨direction, function(A)⟩/dA."""
    leaf = a.clone().requires_grad_()
    (found,) = torch.autograd.grad(function(leaf), leaf, direction)
    return (found + found.mT) / 2


def main(output: Path) -> tuple[float, float]:
    """Draw the figure and return the largest error of each method (``inf`` for NaN)."""
    generator = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(N, N, generator=generator, dtype=torch.float64))
    direction = torch.randn(N, N, generator=generator, dtype=torch.float64)
    gaps = torch.logspace(-16, -2, 29, dtype=torch.float64)
    errors: dict[str, list[float]] = {"eigh + autograd": [], "matrix_log": []}
    for gap in gaps:
        a = (q * (3 + gap * torch.arange(N))) @ q.mT
        a = (a + a.mT) / 2
        truth = gradient(by_series, a, direction)
        for name, function in zip(errors, (through_eigh, matbackprop.matrix_log), strict=True):
            errors[name].append(float((gradient(function, a, direction) - truth).norm() / truth.norm()))
    drawn = {name: (gaps.numpy(), values) for name, values in errors.items()}
    lines(
        drawn,
        output,
        title="Gradient of log A at nearly repeated eigenvalues",
        xlabel="gap between neighboring eigenvalues",
        ylabel="relative error",
        log="xy",
        emphasis="matrix_log",
    )
    worst = [max(float("inf") if v != v else v for v in values) for values in errors.values()]
    return worst[0], worst[1]


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "degenerate_gradients.png"))
