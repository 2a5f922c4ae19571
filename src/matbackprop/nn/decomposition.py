"""The decomposition layers of the paper as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from matbackprop.functional._eigh import eigh
from matbackprop.functional._svd import svd
from matbackprop.functional._ties import Ties

__all__ = ["EIG", "SVD"]


class EIG(nn.Module):
    """Eigendecomposition of symmetric matrices; see :func:`~matbackprop.eigh`.

    Args:
        ties: ``"raise"``, ``"drop"`` or ``"broaden"``.
        tie_tol: share of the largest |λ| below which two eigenvalues coincide.
        broadening: width of ``"broaden"`` as a share of the largest |λ|.
        check: look at values: ``None`` without waiting for a GPU, ``True`` always, ``False`` never.
        precision: dtype of the computation; float64 by default.

    Shape:
        ``(*b, n, n)`` to ``(*b, n)`` and ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import EIG
        >>> values, vectors = EIG()(torch.diag(torch.tensor([2.0, 1.0])))
        >>> values
        tensor([1., 2.])
    """

    def __init__(
        self,
        *,
        ties: Ties = "raise",
        tie_tol: float | None = None,
        broadening: float = 1e-6,
        check: bool | None = None,
        precision: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ties: Ties = ties
        self.tie_tol = tie_tol
        self.broadening = broadening
        self.check = check
        self.precision = precision

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return eigenvalues and eigenvectors."""
        return eigh(
            a,
            ties=self.ties,
            tie_tol=self.tie_tol,
            broadening=self.broadening,
            check=self.check,
            precision=self.precision,
        )

    def extra_repr(self) -> str:
        """The arguments, for ``print(module)``."""
        return f"ties={self.ties!r}"


class SVD(nn.Module):
    """Singular value decomposition; see :func:`~matbackprop.svd`.

    Args:
        full_matrices: whether U and V are square.
        ties: ``"raise"``, ``"drop"`` or ``"broaden"``.
        tie_tol: share of the largest σ below which a gap is zero.
        broadening: width of ``"broaden"`` as a share of the largest σ.
        check: look at values: ``None`` without waiting for a GPU, ``True`` always, ``False`` never.
        precision: dtype of the computation; float64 by default.

    Shape:
        ``(*b, m, n)`` to ``(*b, m, k)``, ``(*b, k)`` and ``(*b, k, n)`` with k = min(m, n).

    Example:
        >>> import torch
        >>> from matbackprop.nn import SVD
        >>> u, s, vh = SVD()(torch.diag(torch.tensor([2.0, 1.0])))
        >>> s
        tensor([2., 1.])
    """

    def __init__(
        self,
        full_matrices: bool = False,
        *,
        ties: Ties = "raise",
        tie_tol: float | None = None,
        broadening: float = 1e-6,
        check: bool | None = None,
        precision: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.full_matrices = full_matrices
        self.ties: Ties = ties
        self.tie_tol = tie_tol
        self.broadening = broadening
        self.check = check
        self.precision = precision

    def forward(self, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return U, σ and Vᵀ."""
        return svd(
            a,
            self.full_matrices,
            ties=self.ties,
            tie_tol=self.tie_tol,
            broadening=self.broadening,
            check=self.check,
            precision=self.precision,
        )

    def extra_repr(self) -> str:
        """The arguments, for ``print(module)``."""
        return f"full_matrices={self.full_matrices}, ties={self.ties!r}"
