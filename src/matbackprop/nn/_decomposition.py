"""The decomposition layers of the paper as modules."""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.functional._eigh import Eigenpairs, eigh
from matbackprop.functional._generalized_eigh import generalized_eigh
from matbackprop.functional._svd import SingularTriples, svd
from matbackprop.functional._ties import Ties, check_ties
from matbackprop.nn._operator import Operator

__all__ = ["EIG", "SVD", "GeneralizedEigh"]


class EIG(Operator):
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
        check_ties(ties, tie_tol, broadening)
        super().__init__(eigh, ties=ties, tie_tol=tie_tol, broadening=broadening, check=check, precision=precision)

    def forward(self, a: Tensor) -> Eigenpairs:
        """Return eigenvalues and eigenvectors."""
        return self.call(a)


class SVD(Operator):
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
        check_ties(ties, tie_tol, broadening)
        super().__init__(
            svd,
            full_matrices=full_matrices,
            ties=ties,
            tie_tol=tie_tol,
            broadening=broadening,
            check=check,
            precision=precision,
        )

    def forward(self, a: Tensor) -> SingularTriples:
        """Return U, σ and Vᵀ."""
        return self.call(a)


class GeneralizedEigh(Operator):
    """Eigendecomposition of a symmetric pencil; see :func:`~matbackprop.generalized_eigh`.

    Args:
        ties: ``"raise"``, ``"drop"`` or ``"broaden"``.
        tie_tol: share of the largest |λ| below which two eigenvalues coincide.
        broadening: width of ``"broaden"`` as a share of the largest |λ|.
        check: look at values: ``None`` without waiting for a GPU, ``True`` always, ``False`` never.
        precision: dtype of the computation; float64 by default.

    Shape:
        ``(*b, n, n)`` twice to ``(*b, n)`` and ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import GeneralizedEigh
        >>> GeneralizedEigh()(torch.diag(torch.tensor([2.0, 1.0])), 2 * torch.eye(2)).eigenvalues
        tensor([0.5000, 1.0000])
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
        check_ties(ties, tie_tol, broadening)
        super().__init__(
            generalized_eigh, ties=ties, tie_tol=tie_tol, broadening=broadening, check=check, precision=precision
        )

    def forward(self, a: Tensor, b: Tensor) -> Eigenpairs:
        """Return eigenvalues and eigenvectors."""
        return self.call(a, b)
