"""Functions of symmetric matrices as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from matbackprop.divided_differences import power_function, resolve_function
from matbackprop.functional._matrix_clamp import check_least, matrix_clamp
from matbackprop.functional._matrix_function import FunctionLike, matrix_function
from matbackprop.nn._operator import Operator

__all__ = [
    "MatrixClamp",
    "MatrixExp",
    "MatrixFunction",
    "MatrixInvSqrt",
    "MatrixInverse",
    "MatrixLog",
    "MatrixPower",
    "MatrixSqrt",
]


class MatrixFunction(Operator):
    """A function of symmetric matrices; see :func:`~matbackprop.matrix_function`.

    Args:
        function: name, pair of callables or `~matbackprop.functional.SpectralFunction`.
        exponent: the exponent of ``"power"``; one that learns is :class:`MatrixPower`'s.
        check: look at values: ``None`` on the CPU only, ``True`` always, ``False`` never.
        precision: dtype of the computation; float64 by default.

    Shape:
        ``(*b, n, n)`` to ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import MatrixFunction
        >>> MatrixFunction("exp")(torch.zeros(2, 2)).diagonal()
        tensor([1., 1.])
    """

    def __init__(
        self,
        function: FunctionLike,
        *,
        exponent: float | None = None,
        check: bool | None = None,
        precision: torch.dtype | None = None,
    ) -> None:
        resolve_function(function, exponent)
        super().__init__(matrix_function, function=function, exponent=exponent, check=check, precision=precision)

    def forward(self, a: Tensor) -> Tensor:
        """Return g(A)."""
        return self.call(a)


class MatrixLog(MatrixFunction):
    """Logarithm of symmetric positive-definite matrices; see :func:`~matbackprop.matrix_log`.

    Example:
        >>> import torch
        >>> from matbackprop.nn import MatrixLog
        >>> MatrixLog()(torch.eye(2)).abs().max()
        tensor(0.)
    """

    def __init__(self, *, check: bool | None = None, precision: torch.dtype | None = None) -> None:
        super().__init__("log", check=check, precision=precision)


class MatrixSqrt(MatrixFunction):
    """Square root of symmetric positive-semidefinite matrices; see :func:`~matbackprop.matrix_sqrt`.

    Example:
        >>> import torch
        >>> from matbackprop.nn import MatrixSqrt
        >>> MatrixSqrt()(torch.eye(2) * 4).diagonal()
        tensor([2., 2.])
    """

    def __init__(self, *, check: bool | None = None, precision: torch.dtype | None = None) -> None:
        super().__init__("sqrt", check=check, precision=precision)


class MatrixInvSqrt(MatrixFunction):
    """Inverse square root of symmetric positive-definite matrices; see :func:`~matbackprop.matrix_inv_sqrt`.

    Example:
        >>> import torch
        >>> from matbackprop.nn import MatrixInvSqrt
        >>> MatrixInvSqrt()(torch.eye(2) * 4).diagonal()
        tensor([0.5000, 0.5000])
    """

    def __init__(self, *, check: bool | None = None, precision: torch.dtype | None = None) -> None:
        super().__init__("inv_sqrt", check=check, precision=precision)


class MatrixExp(MatrixFunction):
    """Exponential of symmetric matrices; see :func:`~matbackprop.matrix_exp`.

    Example:
        >>> import torch
        >>> from matbackprop.nn import MatrixExp
        >>> MatrixExp()(torch.zeros(2, 2)).diagonal()
        tensor([1., 1.])
    """

    def __init__(self, *, check: bool | None = None, precision: torch.dtype | None = None) -> None:
        super().__init__("exp", check=check, precision=precision)


class MatrixInverse(MatrixFunction):
    """Inverse of symmetric matrices; see :func:`~matbackprop.matrix_inverse`.

    Example:
        >>> import torch
        >>> from matbackprop.nn import MatrixInverse
        >>> MatrixInverse()(torch.eye(2) * 4).diagonal()
        tensor([0.2500, 0.2500])
    """

    def __init__(self, *, check: bool | None = None, precision: torch.dtype | None = None) -> None:
        super().__init__("inverse", check=check, precision=precision)


class MatrixPower(Operator):
    """Power of symmetric matrices whose exponent may learn; see :func:`~matbackprop.matrix_power`.

    Args:
        exponent: its value, at the start where it learns.
        learn: whether it is a parameter; otherwise it is a number, and matrices may be what
            :func:`~matbackprop.matrix_power` takes for it: any for a whole exponent, singular ones for ½.
        check: look at values: ``None`` on the CPU only, ``True`` always, ``False`` never.
        precision: dtype of the computation; float64 by default.

    Shape:
        ``(*b, n, n)`` to ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import MatrixPower
        >>> layer = MatrixPower(0.5)
        >>> layer(torch.eye(2) * 9).trace().backward()
        >>> layer.exponent.grad is not None
        True
    """

    def __init__(
        self,
        exponent: float = 0.5,
        *,
        learn: bool = True,
        check: bool | None = None,
        precision: torch.dtype | None = None,
    ) -> None:
        power_function(exponent)
        value = nn.Parameter(torch.tensor(float(exponent))) if learn else exponent
        super().__init__(matrix_function, function="power", exponent=value, check=check, precision=precision)
        self.learn = learn

    def forward(self, a: Tensor) -> Tensor:
        """Return A^p."""
        return self.call(a)


class MatrixClamp(Operator):
    """Symmetric matrices with eigenvalues of a least value; see :func:`~matbackprop.matrix_clamp`.

    Args:
        least: the least eigenvalue.
        check: look at values: ``None`` on the CPU only, ``True`` always, ``False`` never.
        precision: dtype of the computation; float64 by default.

    Shape:
        ``(*b, n, n)`` to ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import MatrixClamp
        >>> MatrixClamp(0.5)(torch.diag(torch.tensor([0.0, 2.0]))).diagonal()
        tensor([0.5000, 2.0000])
    """

    def __init__(self, least: float = 0.0, *, check: bool | None = None, precision: torch.dtype | None = None) -> None:
        check_least(least)
        super().__init__(matrix_clamp, least=least, check=check, precision=precision)

    def forward(self, a: Tensor) -> Tensor:
        """Return the matrices with their eigenvalues raised."""
        return self.call(a)
