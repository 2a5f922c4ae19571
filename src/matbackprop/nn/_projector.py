"""Projectors as modules."""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.functional._projector import check_cut, projector, spectral_projector
from matbackprop.nn._operator import Operator
from matbackprop.numerics import rank_tolerance

__all__ = ["Projector", "SpectralProjector"]


class Projector(Operator):
    """Projector on the span of a matrix; see :func:`~matbackprop.projector`.

    Args:
        symmetric: the matrices are symmetric, and so is their gradient.
        rank_tol: relative rank tolerance, or the dtype whose precision the data carry.
        precision: dtype of the computation; float64 by default.
        check: look at values: ``None`` on the CPU only, ``True`` always, ``False`` never.

    Shape:
        ``(*b, m, n)`` to ``(*b, m, m)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import Projector
        >>> Projector()(torch.tensor([[1.0], [1.0]]))
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """

    def __init__(
        self,
        *,
        symmetric: bool = False,
        rank_tol: float | torch.dtype | None = None,
        precision: torch.dtype | None = None,
        check: bool | None = None,
    ) -> None:
        rank_tolerance(torch.float64, torch.float64, rank_tol)
        super().__init__(projector, symmetric=symmetric, rank_tol=rank_tol, precision=precision, check=check)

    def forward(self, a: Tensor) -> Tensor:
        """Return Π_A."""
        return self.call(a)


class SpectralProjector(Operator):
    """Projector on the leading eigenvectors; see :func:`~matbackprop.spectral_projector`.

    Args:
        rank: how many eigenvectors; give this or ``threshold``.
        threshold: keep the eigenvalues above it.
        precision: dtype of the computation; float64 by default.
        check: look at values: ``None`` on the CPU only, ``True`` always, ``False`` never.

    Shape:
        ``(*b, n, n)`` to ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import SpectralProjector
        >>> SpectralProjector(rank=1)(torch.diag(torch.tensor([1.0, 2.0])))
        tensor([[0., 0.],
                [0., 1.]])
    """

    def __init__(
        self,
        *,
        rank: int | None = None,
        threshold: float | None = None,
        precision: torch.dtype | None = None,
        check: bool | None = None,
    ) -> None:
        check_cut(rank, threshold)
        super().__init__(spectral_projector, rank=rank, threshold=threshold, precision=precision, check=check)

    def forward(self, a: Tensor) -> Tensor:
        """Return the projector on the leading eigenvectors of A."""
        return self.call(a)
