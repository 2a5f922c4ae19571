"""Matrices and feature maps at which gradients of other implementations fail."""

import torch
from torch import Tensor

# Eigenvalues of symmetric positive-definite matrices.
SPECTRA = {
    "separated": (0.5, 1.2, 2.1, 3.4),
    "repeated": (1.0, 1.0, 2.0, 2.0),
    "identity": (1.5, 1.5, 1.5, 1.5),
    "near_repeated": (1.0, 1.0 + 1e-9, 1.0 + 1e-6, 2.0),
    "ill_conditioned": (1e-3, 1.0, 1e3, 1e6),
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthogonal(n: int, *batch: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random orthogonal matrices ``(*batch, n, n)``, unitary for a complex dtype."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.linalg.qr(torch.randn(*batch, n, n, generator=generator(seed), dtype=wide))[0].to(dtype)


def to_complex(a: Tensor) -> Tensor:
    """QAQᴴ with random unitary Q: complex matrices ``(*batch, m, n)`` of the same singular values.

    Symmetric ones become Hermitian, of the same eigenvalues.
    """
    left, right = (orthogonal(n, seed=21, dtype=torch.complex128) for n in a.shape[-2:])
    return left @ a.to(torch.complex128) @ right.mH


def symmetric(spectrum: str | tuple[float, ...], *batch: int, seed: int = 0) -> Tensor:
    """Symmetric matrices with the given eigenvalues, exactly symmetric, float64."""
    values = torch.tensor(SPECTRA[spectrum] if isinstance(spectrum, str) else spectrum, dtype=torch.float64)
    q = orthogonal(len(values), *batch, seed=seed)
    a = (q * values) @ q.mT
    return 0.5 * (a + a.mT)


def with_singular_values(m: int, d: int, values: tuple[float, ...] | Tensor, *batch: int, seed: int = 0) -> Tensor:
    """m×d matrices with the given min(m, d) singular values, float64."""
    k = min(m, d)
    values = torch.as_tensor(values, dtype=torch.float64)
    left = orthogonal(m, *batch, seed=seed)[..., :k]
    right = orthogonal(d, *batch, seed=seed + 1)[..., :k]
    return (left * values) @ right.mT


def relu_features(m: int, d: int, *batch: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Features as a convolutional network produces them."""
    return torch.randn(*batch, m, d, generator=generator(seed), dtype=torch.float64).relu().to(dtype)


def dead_and_duplicate(m: int, d: int, *batch: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """ReLU features with a quarter of the channels dead and a third of the rows equal to others."""
    f = relu_features(m, d, *batch, seed=seed, dtype=dtype)
    f[..., ::4] = 0
    f[..., m - m // 3 :, :] = f[..., : m // 3, :]
    return f


def clustered(m: int, d: int, *batch: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """All singular values within 1e-9 of each other."""
    k = min(m, d)
    spread = 1 + 1e-9 * torch.rand(k, generator=generator(seed + 7), dtype=torch.float64)
    return with_singular_values(m, d, spread, *batch, seed=seed).to(dtype)


def large(m: int, d: int, *batch: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """ReLU features scaled so that the largest eigenvalue of FᵀF is 1e6."""
    f = relu_features(m, d, *batch, seed=seed)
    return (f * (1e3 / torch.linalg.matrix_norm(f, 2)[..., None, None])).to(dtype)


def rank_deficient(m: int, d: int, rank: int, *batch: int, seed: int = 0) -> Tensor:
    left = torch.randn(*batch, m, rank, generator=generator(seed), dtype=torch.float64)
    right = torch.randn(*batch, rank, d, generator=generator(seed + 1), dtype=torch.float64)
    return left @ right


FEATURES = {"relu": relu_features, "dead_and_duplicate": dead_and_duplicate, "clustered": clustered, "large": large}
