"""Inverse roots as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from matbackprop.functional._inverse_root import check_damping, check_root, inverse_root
from matbackprop.nn._operator import Operator

__all__ = ["InverseRoot"]


class InverseRoot(Operator):
    """Inverse root of positive semidefinite matrices; see :func:`~matbackprop.inverse_root`.

    Args:
        p: the root, any number > 0.
        eps: damping, added to the eigenvalues.
        relative: multiply it by the largest eigenvalue.
        check: look at values: ``None`` on the CPU only, ``True`` always, ``False`` never.
        precision: dtype of the computation; float64 by default.

    Shape:
        ``(*b, n, n)`` to ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import InverseRoot
        >>> InverseRoot(4)(torch.eye(2) * 16).diagonal()
        tensor([0.5000, 0.5000])
    """

    def __init__(
        self,
        p: float,
        *,
        eps: float = 0.0,
        relative: bool = False,
        check: bool | None = None,
        precision: torch.dtype | None = None,
    ) -> None:
        check_root(p)
        check_damping(eps)
        super().__init__(inverse_root, p=p, eps=eps, relative=relative, check=check, precision=precision)

    def forward(self, a: Tensor) -> Tensor:
        """Return (A + εI)^(−1/p)."""
        return self.call(a)
