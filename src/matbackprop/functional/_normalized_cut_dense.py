"""The normalized-cut objectives as the paper defines them, F → W → (M, Ω) → (Π_M, Π_Ω) → J, with m×m matrices.

They are the references that the thin forms of ``_normalized_cut.py`` are tested against, and a
way to follow the paper layer by layer. They cost O(m³) time and O(m²) memory, and take one image without ignored rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.functional._affinity import affinity, normalized_affinity
from matbackprop.functional._projector import projector

__all__ = ["normalized_cut_j1_dense", "normalized_cut_j2_dense", "normalized_cut_soft_dense"]


def _region_matrix(labels: Tensor, dtype: torch.dtype) -> Tensor:
    _, index = torch.unique(labels, return_inverse=True)
    return torch.nn.functional.one_hot(index).to(dtype)


def normalized_cut_j1_dense(f: Tensor, labels: Tensor, lam: Tensor | None = None, rank_tol: float = 1e-9) -> Tensor:
    """J₁ = ½‖Π_M − Π_Ω‖² through the dense layers.

    Args:
        f: features ``(m, d)``, float64, with positive degrees.
        labels: region numbers ``(m,)``, none ignored.
        lam: Λ ``(d, d)``; the identity when absent.
        rank_tol: relative size of an eigenvalue of M that counts as zero.

    Returns:
        The objective, a scalar.

    Example:
        >>> import torch
        >>> from matbackprop.functional._normalized_cut_dense import normalized_cut_j1_dense
        >>> labels = torch.tensor([0, 0, 1])
        >>> f = torch.nn.functional.one_hot(labels).double()
        >>> bool(normalized_cut_j1_dense(f, labels) < 1e-12)
        True
    """
    m, omega = normalized_affinity(affinity(f, lam), labels)
    return 0.5 * (projector(m, rank_tol=rank_tol) - projector(omega, rank_tol=rank_tol)).square().sum()


def normalized_cut_j2_dense(f: Tensor, labels: Tensor, rank_tol: float = 1e-9) -> Tensor:
    """J₂ = ½‖Π_W − Π_Ψ‖² through the dense layers.

    Args:
        f: features ``(m, d)``, float64.
        labels: region numbers ``(m,)``, none ignored.
        rank_tol: relative size of an eigenvalue of W that counts as zero.

    Returns:
        The objective, a scalar.

    Example:
        >>> import torch
        >>> from matbackprop.functional._normalized_cut_dense import normalized_cut_j2_dense
        >>> bool(normalized_cut_j2_dense(torch.eye(2).double(), torch.tensor([0, 1])) < 1e-12)
        True
    """
    e = _region_matrix(labels, f.dtype)
    psi = (e / e.sum(0)) @ e.mT
    return 0.5 * (projector(affinity(f), rank_tol=rank_tol) - psi).square().sum()


def normalized_cut_soft_dense(f: Tensor, labels: Tensor, ridge: float = 0.3) -> Tensor:
    """½‖Π_λ − Π_Ψ‖² with Π_λ = F(FᵀF + (λ/d)I)⁻¹Fᵀ of features scaled to unit trace.

    Args:
        f: features ``(m, d)``, float64.
        labels: region numbers ``(m,)``, none ignored.
        ridge: λ.

    Returns:
        The objective, a scalar.

    Example:
        >>> import torch
        >>> from matbackprop.functional._normalized_cut_dense import normalized_cut_soft_dense
        >>> value = normalized_cut_soft_dense(torch.eye(2).double(), torch.tensor([0, 1]), ridge=1.0)
        >>> round(float(value), 6)  # both singular values become one half
        0.25
    """
    e = _region_matrix(labels, f.dtype)
    psi = (e / e.sum(0)) @ e.mT
    f = f / f.square().sum().sqrt()
    eye = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
    soft = f @ torch.linalg.solve(f.mT @ f + (ridge / f.shape[-1]) * eye, f.mT)
    return 0.5 * (soft - psi).square().sum()
