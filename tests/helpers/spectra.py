"""Symmetric matrices whose spectra are hard for an eigensolver, and measures of its error."""

import torch
from torch import Tensor


def with_spectrum(values: Tensor, generator: torch.Generator) -> Tensor:
    """Matrices with given eigenvalues (batch, n) and random eigenvectors, in float64."""
    n = values.shape[-1]
    q, _ = torch.linalg.qr(torch.randn(*values.shape, n, generator=generator, dtype=torch.float64))
    a = (q * values.unsqueeze(-2)) @ q.mT
    return (a + a.mT) / 2


def hard_spectra(n: int, batch: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Name → (batch, n, n): usual, tied, clustered, rank-deficient, graded and nearly scalar matrices."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator, dtype=torch.float64)

    def gram(f: Tensor) -> Tensor:
        return f @ f.mT

    wide = n * 3 // 2
    uniform = torch.rand(batch, n, generator=generator, dtype=torch.float64)
    near = uniform.clone()
    near[:, : n // 3] = 0.5 + 1e-9 * torch.arange(n // 3, dtype=torch.float64)
    repeated = normal(n, wide).relu()
    repeated[:, n // 2 :] = repeated[:, : n - n // 2].clone()
    decay = torch.logspace(0, -4, wide, dtype=torch.float64)
    noise = normal(n, n)
    return {
        "ReLU features": gram(normal(n, wide).relu()),
        "indefinite": noise + noise.mT,
        "rank-deficient": gram(normal(n, max(n // 3, 1))),
        "repeated rows": gram(repeated),
        "decaying features": gram(normal(n, wide).relu() * decay),
        "graded": with_spectrum(torch.logspace(-8, 0, n, dtype=torch.float64).expand(batch, n), generator),
        "ties": with_spectrum((uniform * 4).floor(), generator),
        "pairs": with_spectrum(torch.arange(n, dtype=torch.float64).div(2).floor().expand(batch, n), generator),
        "cluster of 1e-9": with_spectrum(near, generator),
        "identity and noise": torch.eye(n, dtype=torch.float64) + 1e-9 * (noise + noise.mT),
        "identity": torch.eye(n, dtype=torch.float64).repeat(batch, 1, 1),
        "zero": torch.zeros(batch, n, n, dtype=torch.float64),
        "one": torch.ones(batch, n, n, dtype=torch.float64),
        "diagonal": torch.diag_embed(uniform),
        "Wilkinson": _tridiagonal((torch.arange(n, dtype=torch.float64) - (n - 1) / 2).abs(), 1.0, batch),
        "Laplacian": _tridiagonal(torch.full((n,), 2.0, dtype=torch.float64), -1.0, batch),
    }


def _tridiagonal(diagonal: Tensor, beside: float, batch: int) -> Tensor:
    off = torch.full((len(diagonal) - 1,), beside, dtype=torch.float64)
    return (diagonal.diag() + off.diag(1) + off.diag(-1)).repeat(batch, 1, 1)


def defects(a: Tensor, values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Largest entries of AU − UΛ, relative to the largest eigenvalue, and of UᵀU − I."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    largest = values.abs().amax(-1).clamp_min(torch.finfo(a.dtype).tiny)
    residual = (a @ vectors - vectors * values.unsqueeze(-2)).abs().amax((-2, -1)) / largest
    return residual, (vectors.mT @ vectors - eye).abs().amax((-2, -1))


def lapack_ratios(a: Tensor, values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """‖A − UΛUᵀ‖/(n·eps·‖A‖), ‖I − UUᵀ‖/(n·eps) and max|λ − λ_LAPACK|/(n·eps·‖A‖), in the 1-norm.

    The first two are the ratios that LAPACK's own suite tests (xSYT21), with a threshold of 50.
    """
    n = a.shape[-1]
    ulp = n * torch.finfo(a.dtype).eps
    size = torch.linalg.matrix_norm(a, 1).clamp_min(torch.finfo(a.dtype).tiny)
    residual = torch.linalg.matrix_norm(a - (vectors * values.unsqueeze(-2)) @ vectors.mT, 1)
    defect = torch.linalg.matrix_norm(torch.eye(n, dtype=a.dtype) - vectors @ vectors.mT, 1)
    moved = (values - torch.linalg.eigvalsh(a)).abs().amax(-1)
    return residual / (ulp * size), defect / ulp, moved / (ulp * size)
