"""Linear systems and Gaussian random fields as modules."""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.functional._linear_solve import check_iterations, gaussian_crf, linear_solve
from matbackprop.nn._operator import Operator

__all__ = ["GaussianCRF", "LinearSolve"]


class LinearSolve(Operator):
    """Solution of Ax = b; see :func:`~matbackprop.linear_solve`.

    Args:
        symmetric: A is symmetric positive definite.
        precision: dtype of the computation; float64 by default.
        check: look at values: ``None`` on the CPU only, ``True`` always, ``False`` never.

    Shape:
        ``(*b, n, n)`` and ``(*b, n)`` or ``(*b, n, r)`` to the shape of the right-hand side.

    Example:
        >>> import torch
        >>> from matbackprop.nn import LinearSolve
        >>> LinearSolve()(2 * torch.eye(2), torch.tensor([1.0, 3.0]))
        tensor([0.5000, 1.5000])
    """

    def __init__(
        self, *, symmetric: bool = True, precision: torch.dtype | None = None, check: bool | None = None
    ) -> None:
        super().__init__(linear_solve, symmetric=symmetric, precision=precision, check=check)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return A⁻¹b."""
        return self.call(a, b)


class GaussianCRF(Operator):
    """Mode of a Gaussian random field; see :func:`~matbackprop.gaussian_crf`.

    Args:
        tolerance: relative residual of the conjugate gradients that solve the field given by features.
        max_iterations: of the conjugate gradients; ten times the number of values by default.
        precision: dtype of the computation; float64 by default.
        check: look at values: ``None`` on the CPU only, ``True`` always, ``False`` never.

    Shape:
        mean ``(*b, m)`` or ``(*b, m, r)`` and confidence ``(*b, m)`` to the shape of mean.

    Example:
        >>> import torch
        >>> from matbackprop.nn import GaussianCRF
        >>> y = torch.tensor([0.0, 1.0])
        >>> GaussianCRF()(y, torch.ones(2), features=torch.ones(2, 1))
        tensor([0.3333, 0.6667])
    """

    def __init__(
        self,
        *,
        tolerance: float = 1e-10,
        max_iterations: int | None = None,
        precision: torch.dtype | None = None,
        check: bool | None = None,
    ) -> None:
        check_iterations(tolerance, max_iterations)
        super().__init__(
            gaussian_crf, tolerance=tolerance, max_iterations=max_iterations, precision=precision, check=check
        )

    def forward(
        self, mean: Tensor, confidence: Tensor, *, affinity: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        """Return the mode of the field with the given means, confidences and affinity or features."""
        return self.call(mean, confidence, affinity=affinity, features=features)
