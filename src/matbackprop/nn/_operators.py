"""Modules for functions; shapes and examples are documented with the function."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from matbackprop.divided_differences import power_function, resolve_function
from matbackprop.functional._eigh import eigh
from matbackprop.functional._generalized_eigh import generalized_eigh, generalized_matrix_function
from matbackprop.functional._inverse_root import check_damping, check_root, inverse_root
from matbackprop.functional._linear_solve import linear_solve
from matbackprop.functional._low_rank import check_rank, low_rank
from matbackprop.functional._matrix_clamp import check_least, matrix_clamp
from matbackprop.functional._matrix_function import (
    matrix_exp,
    matrix_function,
    matrix_inv_sqrt,
    matrix_inverse,
    matrix_log,
    matrix_sqrt,
)
from matbackprop.functional._polar import polar
from matbackprop.functional._procrustes import procrustes, project_rotation
from matbackprop.functional._projector import check_cut, projector, spectral_projector
from matbackprop.functional._svd import svd
from matbackprop.functional._ties import check_ties
from matbackprop.functional._topk import topk_eigh, topk_subspace
from matbackprop.nn._operator import Operator
from matbackprop.numerics import check_rank_tolerance


class EIG(Operator, of=eigh, checks=[check_ties]): ...


class GeneralizedEigh(Operator, of=generalized_eigh, data=["a", "b"], checks=[check_ties]): ...


class GeneralizedMatrixFunction(
    Operator, of=generalized_matrix_function, data=["a", "b", "params"], checks=[resolve_function]
): ...


class TopkEigh(Operator, of=topk_eigh, data=["a", "params", "n", "generator"], checks=[check_ties]): ...


class TopkSubspace(Operator, of=topk_subspace, data=["a", "params", "n", "generator"]): ...


class SVD(Operator, of=svd, checks=[check_ties]): ...


class Polar(Operator, of=polar): ...


class ProjectRotation(Operator, of=project_rotation): ...


class Procrustes(Operator, of=procrustes, data=["x", "y", "weight"]):
    """Rotation between two sets of points; see :func:`~matbackprop.procrustes`."""

    def forward(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        return self.call(x, y, weight=weight)


class LowRank(Operator, of=low_rank, checks=[check_rank]): ...


class Projector(Operator, of=projector, checks=[check_rank_tolerance]): ...


class SpectralProjector(Operator, of=spectral_projector, checks=[check_cut]): ...


class LinearSolve(Operator, of=linear_solve, data=["a", "b"]): ...


class InverseRoot(Operator, of=inverse_root, data=["a"], checks=[check_root, check_damping]): ...


class MatrixFunction(Operator, of=matrix_function, data=["a", "params"], checks=[resolve_function]):
    """Function of symmetric matrices; see :func:`~matbackprop.matrix_function`.

    For a trainable exponent use :class:`MatrixPower`. Pass parameters of a user-defined function in the call as
    ``params=``.
    """


class MatrixLog(Operator, of=matrix_log): ...


class MatrixSqrt(Operator, of=matrix_sqrt): ...


class MatrixInvSqrt(Operator, of=matrix_inv_sqrt): ...


class MatrixExp(Operator, of=matrix_exp): ...


class MatrixInverse(Operator, of=matrix_inverse): ...


class MatrixClamp(Operator, of=matrix_clamp, checks=[check_least]): ...


class MatrixPower(Operator, of=matrix_function, data=["a", "params"]):
    """Power of symmetric matrices with a fixed or trainable exponent; see :func:`~matbackprop.matrix_power`.

    Args:
        exponent: the exponent, or its initial value if trained.
        learn: whether the exponent is a parameter. Fixed exponents accept more matrices.
        check, precision: as in the function.

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
        super().__init__("power", exponent=value, check=check, precision=precision)
        self.learn = learn
