"""Leading eigenpairs and eigenspaces as modules."""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.functional._eigh import Eigenpairs
from matbackprop.functional._ties import Ties, check_ties
from matbackprop.functional._topk_eigh import topk_eigh
from matbackprop.functional._topk_subspace import topk_subspace
from matbackprop.nn._operator import Operator

__all__ = ["TopkEigh", "TopkSubspace"]


class TopkEigh(Operator):
    """The k leading eigenpairs of symmetric matrices, dense or sparse; see :func:`~matbackprop.topk_eigh`.

    Args:
        k: how many pairs.
        largest: the largest eigenvalues; otherwise the smallest.
        ties, tie_tol, broadening: what the gradient of the vectors does where eigenvalues inside the k coincide.
        tolerance: residuals to stop at.
        max_products: products with A before giving up.
        check: look at values: ``None`` on the CPU only, ``True`` always, ``False`` never.
        precision: dtype of the computation; float64 by default.

    Shape:
        ``(*b, n, n)`` to ``(*b, k)`` and ``(*b, n, k)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import TopkEigh
        >>> TopkEigh(2)(torch.diag(torch.tensor([1.0, 5.0, 3.0]))).eigenvalues
        tensor([5., 3.])
    """

    def __init__(
        self,
        k: int,
        *,
        largest: bool = True,
        ties: Ties = "raise",
        tie_tol: float | None = None,
        broadening: float = 1e-6,
        tolerance: float = 1e-11,
        max_products: int = 100_000,
        check: bool | None = None,
        precision: torch.dtype | None = None,
    ) -> None:
        check_ties(ties, tie_tol, broadening)
        super().__init__(
            topk_eigh,
            k=k,
            largest=largest,
            ties=ties,
            tie_tol=tie_tol,
            broadening=broadening,
            tolerance=tolerance,
            max_products=max_products,
            check=check,
            precision=precision,
        )

    def forward(self, a: Tensor) -> Eigenpairs:
        """Return eigenvalues and eigenvectors."""
        return self.call(a)


class TopkSubspace(Operator):
    """A basis of the leading eigenspace of a symmetric matrix; see :func:`~matbackprop.topk_subspace`.

    Args:
        k: its dimension.
        largest: that of the largest eigenvalues; otherwise of the smallest.
        tolerance: residuals to stop at.
        max_products: products with A before giving up.
        check: look at values: ``None`` on the CPU only, ``True`` always, ``False`` never.
        precision: dtype of the computation; float64 by default.

    Shape:
        ``(n, n)`` to ``(n, k)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import TopkSubspace
        >>> TopkSubspace(1)(torch.diag(torch.tensor([1.0, 5.0, 3.0]))).flatten().round(decimals=4).abs()
        tensor([0., 1., 0.])
    """

    def __init__(
        self,
        k: int,
        *,
        largest: bool = True,
        tolerance: float = 1e-11,
        max_products: int = 100_000,
        check: bool | None = None,
        precision: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            topk_subspace,
            k=k,
            largest=largest,
            tolerance=tolerance,
            max_products=max_products,
            check=check,
            precision=precision,
        )

    def forward(self, a: Tensor) -> Tensor:
        """Return the basis."""
        return self.call(a)
