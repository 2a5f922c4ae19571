"""Polar factors, rotations and approximations of low rank as modules."""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.functional._low_rank import check_rank, low_rank
from matbackprop.functional._polar import PolarFactors, polar
from matbackprop.functional._procrustes import procrustes, project_rotation
from matbackprop.nn._operator import Operator

__all__ = ["LowRank", "Polar", "Procrustes", "ProjectRotation"]


class Polar(Operator):
    """Polar decomposition; see :func:`~matbackprop.polar`.

    Args:
        check: look at values: ``None`` on the CPU only, ``True`` always, ``False`` never.
        precision: dtype of the computation; float64 by default.

    Shape:
        ``(*b, m, n)`` to ``(*b, m, n)`` and ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import Polar
        >>> Polar()(torch.diag(torch.tensor([2.0, -3.0]))).P
        tensor([[2., 0.],
                [0., 3.]])
    """

    def __init__(self, *, check: bool | None = None, precision: torch.dtype | None = None) -> None:
        super().__init__(polar, check=check, precision=precision)

    def forward(self, a: Tensor) -> PolarFactors:
        """Return the orthonormal and the positive factor."""
        return self.call(a)


class ProjectRotation(Operator):
    """Nearest rotation; see :func:`~matbackprop.project_rotation`.

    Args:
        check: look at values: ``None`` on the CPU only, ``True`` always, ``False`` never.
        precision: dtype of the computation; float64 by default.

    Shape:
        ``(*b, n, n)`` to ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import ProjectRotation
        >>> ProjectRotation()(torch.eye(3) * 5).diagonal()
        tensor([1., 1., 1.])
    """

    def __init__(self, *, check: bool | None = None, precision: torch.dtype | None = None) -> None:
        super().__init__(project_rotation, check=check, precision=precision)

    def forward(self, a: Tensor) -> Tensor:
        """Return the rotation."""
        return self.call(a)


class Procrustes(Operator):
    """Rotation between two sets of points; see :func:`~matbackprop.procrustes`.

    Args:
        reflection: allow reflections.
        check: look at values: ``None`` on the CPU only, ``True`` always, ``False`` never.
        precision: dtype of the computation; float64 by default.

    Shape:
        ``(*b, m, d)`` twice to ``(*b, d, d)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import Procrustes
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> Procrustes()(x, x).diagonal()
        tensor([1., 1.])
    """

    def __init__(
        self, *, reflection: bool = False, check: bool | None = None, precision: torch.dtype | None = None
    ) -> None:
        super().__init__(procrustes, reflection=reflection, check=check, precision=precision)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return R with XR near Y."""
        return self.call(x, y, weight=weight)


class LowRank(Operator):
    """Best approximation of a given rank; see :func:`~matbackprop.low_rank`.

    Args:
        rank: k ≥ 0.
        check: look at values: ``None`` on the CPU only, ``True`` always, ``False`` never.
        precision: dtype of the computation; float64 by default.

    Shape:
        ``(*b, m, n)`` to ``(*b, m, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import LowRank
        >>> LowRank(1)(torch.diag(torch.tensor([2.0, 1.0]))).diagonal()
        tensor([2., 0.])
    """

    def __init__(self, rank: int, *, check: bool | None = None, precision: torch.dtype | None = None) -> None:
        check_rank(rank)
        super().__init__(low_rank, rank=rank, check=check, precision=precision)

    def forward(self, a: Tensor) -> Tensor:
        """Return A_k."""
        return self.call(a)
