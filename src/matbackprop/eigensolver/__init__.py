"""The one batched symmetric eigensolver that every operator calls, and the route it takes."""

import torch
from torch import Tensor

__all__ = ["batched_eigh", "route"]


def batched_eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigendecomposition of symmetric matrices, A = U diag(λ) Uᵀ, not differentiable.

    Args:
        a: symmetric matrices ``(*batch, n, n)``, float32 or float64.

    Returns:
        Ascending eigenvalues ``(*batch, n)`` and eigenvectors ``(*batch, n, n)`` in columns.
    """
    values, vectors = torch.linalg.eigh(a)
    return values, vectors


def route(device: Tensor | torch.device | str, dtype: torch.dtype | None = None, n: int = 0, batch: int = 0) -> str:
    """Name of the route that ``batched_eigh`` takes for such matrices."""
    return "torch"
