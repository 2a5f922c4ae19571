"""Thresholds for the refinement of eigendecompositions of Gram matrices.

Computed eigenvalues of XXᵀ have an absolute error of u·λ_max. Eigenvalues far below λ_max, and their vectors, must be
recomputed from X (:mod:`matbackprop.solvers.gram`). The constants are also compiled into the CUDA sources.
"""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop._torch import values_checkable

# Indexed by ``fine``: True for float64 digits, False for float32 digits.
SPREAD = {True: 1e3, False: 1e6}
"""λ_max/λ up to which an eigenvalue of a Gram matrix, and its vector, is accurate, with a margin of two digits."""
SVD_SPREAD = 1e7
"""σ_max/σ_min up to which LAPACK's SVD in float64 has float32 digits, with a margin of two digits."""
OVERLAP = {True: 1e-12, False: 2e-8}
"""Largest |yᵢ·yⱼ|/√(λᵢλⱼ) that pooling accepts between rows of Y = QᵀX."""
SVD_OVERLAP = {True: 2e-14, False: 1e-9}
"""The same between singular vectors."""
KERNEL_OVERLAP = {True: 4e-15, False: 1e-9}
"""The same in the kernels of ``svd.cu``."""
SAFE_RATIO = 1e17
"""Overlaps are about λ_max/λ_min · 1e-17. If λ_max/λ_min is below SAFE_RATIO times a limit, no row is inspected."""
LEVEL = 1e-4
"""Rows whose squared norm is within this factor of the largest are separated by one decomposition."""
SMALL_ANGLE = 1e-4
"""Largest angle that a Newton step rotates by."""
SEPARATED = 1e-14
"""Overlap of two rows that ``separate.cu`` does not rotate further."""
ORTHOGONAL = 1e-15
"""The same in ``tiny.cu``."""
NOISE = torch.finfo(torch.float64).eps
"""Noise floor in float64: a singular value up to NOISE · max(m, n) · σ_max is rounding error."""

_EDGE = 0.25  # eigenvalues below this fraction of a rank tolerance are zero regardless of rounding
ALIGNED_TOL = 1e-3
"""Rank tolerance of a Gram matrix whose eigenvalues are all 1 or 0 up to rounding."""


def noise_floor(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> float:
    """Relative size up to which singular values of matrices of this shape are rounding error."""
    return max(shape[-2:]) * torch.finfo(dtype).eps


def ill_determined(values: Tensor, fine: bool = True, *, shift: float = 0.0, tol: float | None = None) -> Tensor:
    """Return which Gram matrices ``(*batch,)`` with ascending eigenvalues ``(*batch, n)`` are too inaccurate.

    Args:
        values: the eigenvalues.
        fine: whether float64 accuracy is required instead of float32.
        shift: number added to the eigenvalues before use.
        tol: fraction of the largest eigenvalue below which others count as zero.
    """
    top = values[..., -1:]
    lost = values + shift < top / SPREAD[fine]
    if tol is not None:
        lost = lost & (values > _EDGE * tol * top)
    return lost.any(-1)


def refinement_needed(lost: Tensor) -> bool:
    """Return whether any Gram matrix is inaccurate and must be refined.

    Return True if values cannot be read without synchronization (vmap, torch.func, torch.compile, CUDA), because the
    refined computation is correct for every matrix.
    """
    return not (lost.is_cpu and values_checkable(lost)) or bool(lost.any())
