"""Matrix functions as modules that store their options, which are documented with each function."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from matbackprop.divided_differences import power_function, resolve_function
from matbackprop.functional._eigh import eigh
from matbackprop.functional._generalized_eigh import generalized_eigh, generalized_matrix_function
from matbackprop.functional._inverse_root import check_damping, check_root, inverse_root
from matbackprop.functional._linear_solve import check_iterations, gaussian_crf, linear_solve
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


class EIG(Operator, of=eigh, checks=[check_ties]):
    """Eigendecomposition of symmetric matrices; see :func:`~matbackprop.eigh`.

    Shape:
        ``(*b, n, n)`` to ``(*b, n)`` and ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import EIG
        >>> values, vectors = EIG()(torch.diag(torch.tensor([2.0, 1.0])))
        >>> values
        tensor([1., 2.])
    """


class GeneralizedEigh(Operator, of=generalized_eigh, data=["a", "b"], checks=[check_ties]):
    """Eigendecomposition of a symmetric pencil; see :func:`~matbackprop.generalized_eigh`.

    Shape:
        ``(*b, n, n)`` twice to ``(*b, n)`` and ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import GeneralizedEigh
        >>> GeneralizedEigh()(torch.diag(torch.tensor([2.0, 1.0])), 2 * torch.eye(2)).eigenvalues
        tensor([0.5000, 1.0000])
    """


class GeneralizedMatrixFunction(
    Operator, of=generalized_matrix_function, data=["a", "b", "params"], checks=[resolve_function]
):
    """A function of a symmetric pencil; see :func:`~matbackprop.generalized_matrix_function`.

    Shape:
        ``(*b, n, n)`` twice to ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import GeneralizedMatrixFunction
        >>> GeneralizedMatrixFunction("sqrt")(torch.eye(2) * 8, torch.eye(2) * 2).diagonal()
        tensor([4., 4.])
    """


class TopkEigh(Operator, of=topk_eigh, data=["a", "params", "n", "generator"], checks=[check_ties]):
    """The k leading eigenpairs of symmetric matrices, dense or sparse; see :func:`~matbackprop.topk_eigh`.

    Shape:
        ``(*b, n, n)`` to ``(*b, k)`` and ``(*b, n, k)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import TopkEigh
        >>> TopkEigh(2)(torch.diag(torch.tensor([1.0, 5.0, 3.0]))).eigenvalues
        tensor([5., 3.])
    """


class TopkSubspace(Operator, of=topk_subspace, data=["a", "params", "n", "generator"]):
    """A basis of the leading eigenspace of a symmetric matrix; see :func:`~matbackprop.topk_subspace`.

    Shape:
        ``(n, n)`` to ``(n, k)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import TopkSubspace
        >>> TopkSubspace(1)(torch.diag(torch.tensor([1.0, 5.0, 3.0]))).flatten().round(decimals=4).abs()
        tensor([0., 1., 0.])
    """


class SVD(Operator, of=svd, checks=[check_ties]):
    """Singular value decomposition; see :func:`~matbackprop.svd`.

    Shape:
        ``(*b, m, n)`` to ``(*b, m, k)``, ``(*b, k)`` and ``(*b, k, n)`` with k = min(m, n).

    Example:
        >>> import torch
        >>> from matbackprop.nn import SVD
        >>> u, s, vh = SVD()(torch.diag(torch.tensor([2.0, 1.0])))
        >>> s
        tensor([2., 1.])
    """


class Polar(Operator, of=polar):
    """Polar decomposition; see :func:`~matbackprop.polar`.

    Shape:
        ``(*b, m, n)`` to ``(*b, m, n)`` and ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import Polar
        >>> Polar()(torch.diag(torch.tensor([2.0, -3.0]))).P
        tensor([[2., 0.],
                [0., 3.]])
    """


class ProjectRotation(Operator, of=project_rotation):
    """Nearest rotation; see :func:`~matbackprop.project_rotation`.

    Shape:
        ``(*b, n, n)`` to ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import ProjectRotation
        >>> ProjectRotation()(torch.eye(3) * 5).diagonal()
        tensor([1., 1., 1.])
    """


class Procrustes(Operator, of=procrustes, data=["x", "y", "weight"]):
    """Rotation between two sets of points; see :func:`~matbackprop.procrustes`.

    Shape:
        ``(*b, m, d)`` twice to ``(*b, d, d)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import Procrustes
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> Procrustes()(x, x).diagonal()
        tensor([1., 1.])
    """

    def forward(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return R with XR near Y."""
        return self.call(x, y, weight=weight)


class LowRank(Operator, of=low_rank, checks=[check_rank]):
    """Best approximation of a given rank; see :func:`~matbackprop.low_rank`.

    Shape:
        ``(*b, m, n)`` to ``(*b, m, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import LowRank
        >>> LowRank(1)(torch.diag(torch.tensor([2.0, 1.0]))).diagonal()
        tensor([2., 0.])
    """


class Projector(Operator, of=projector, checks=[check_rank_tolerance]):
    """Projector on the span of a matrix; see :func:`~matbackprop.projector`.

    Shape:
        ``(*b, m, n)`` to ``(*b, m, m)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import Projector
        >>> Projector()(torch.tensor([[1.0], [1.0]]))
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """


class SpectralProjector(Operator, of=spectral_projector, checks=[check_cut]):
    """Projector on the leading eigenvectors; see :func:`~matbackprop.spectral_projector`.

    Shape:
        ``(*b, n, n)`` to ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import SpectralProjector
        >>> SpectralProjector(rank=1)(torch.diag(torch.tensor([1.0, 2.0])))
        tensor([[0., 0.],
                [0., 1.]])
    """


class LinearSolve(Operator, of=linear_solve, data=["a", "b"]):
    """Solution of Ax = b; see :func:`~matbackprop.linear_solve`.

    Shape:
        ``(*b, n, n)`` and ``(*b, n)`` or ``(*b, n, r)`` to the shape of the right-hand side.

    Example:
        >>> import torch
        >>> from matbackprop.nn import LinearSolve
        >>> LinearSolve()(2 * torch.eye(2), torch.tensor([1.0, 3.0]))
        tensor([0.5000, 1.5000])
    """


class GaussianCRF(
    Operator, of=gaussian_crf, data=["mean", "confidence", "affinity", "features"], checks=[check_iterations]
):
    """Mode of a Gaussian random field; see :func:`~matbackprop.gaussian_crf`.

    Shape:
        mean ``(*b, m)`` or ``(*b, m, r)`` and confidence ``(*b, m)`` to the shape of mean; ``affinity=`` or
        ``features=`` is also passed in the call.

    Example:
        >>> import torch
        >>> from matbackprop.nn import GaussianCRF
        >>> y = torch.tensor([0.0, 1.0])
        >>> GaussianCRF()(y, torch.ones(2), features=torch.ones(2, 1))
        tensor([0.3333, 0.6667])
    """


class InverseRoot(Operator, of=inverse_root, data=["a"], checks=[check_root, check_damping]):
    """Inverse root of positive semidefinite matrices; see :func:`~matbackprop.inverse_root`.

    Shape:
        ``(*b, n, n)`` to ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import InverseRoot
        >>> InverseRoot(4)(torch.eye(2) * 16).diagonal()
        tensor([0.5000, 0.5000])
    """


class MatrixFunction(Operator, of=matrix_function, data=["a", "params"], checks=[resolve_function]):
    """A function of symmetric matrices; see :func:`~matbackprop.matrix_function`.

    For a trainable exponent use :class:`MatrixPower`. Parameters of a user-defined function are passed in the call,
    ``params=``.

    Shape:
        ``(*b, n, n)`` to ``(*b, n, n)``.

    Example:
        >>> import torch
        >>> from matbackprop.nn import MatrixFunction
        >>> MatrixFunction("exp")(torch.zeros(2, 2)).diagonal()
        tensor([1., 1.])
    """


class MatrixLog(Operator, of=matrix_log):
    """Logarithm of symmetric positive-definite matrices; see :func:`~matbackprop.matrix_log`.

    Example:
        >>> import torch
        >>> from matbackprop.nn import MatrixLog
        >>> MatrixLog()(torch.eye(2)).abs().max()
        tensor(0.)
    """


class MatrixSqrt(Operator, of=matrix_sqrt):
    """Square root of symmetric positive-semidefinite matrices; see :func:`~matbackprop.matrix_sqrt`.

    Example:
        >>> import torch
        >>> from matbackprop.nn import MatrixSqrt
        >>> MatrixSqrt()(torch.eye(2) * 4).diagonal()
        tensor([2., 2.])
    """


class MatrixInvSqrt(Operator, of=matrix_inv_sqrt):
    """Inverse square root of symmetric positive-definite matrices; see :func:`~matbackprop.matrix_inv_sqrt`.

    Example:
        >>> import torch
        >>> from matbackprop.nn import MatrixInvSqrt
        >>> MatrixInvSqrt()(torch.eye(2) * 4).diagonal()
        tensor([0.5000, 0.5000])
    """


class MatrixExp(Operator, of=matrix_exp):
    """Exponential of symmetric matrices; see :func:`~matbackprop.matrix_exp`.

    Example:
        >>> import torch
        >>> from matbackprop.nn import MatrixExp
        >>> MatrixExp()(torch.zeros(2, 2)).diagonal()
        tensor([1., 1.])
    """


class MatrixInverse(Operator, of=matrix_inverse):
    """Inverse of symmetric matrices; see :func:`~matbackprop.matrix_inverse`.

    Example:
        >>> import torch
        >>> from matbackprop.nn import MatrixInverse
        >>> MatrixInverse()(torch.eye(2) * 4).diagonal()
        tensor([0.2500, 0.2500])
    """


class MatrixClamp(Operator, of=matrix_clamp, checks=[check_least]):
    """Clamp the eigenvalues of symmetric matrices from below; see :func:`~matbackprop.matrix_clamp`.

    Example:
        >>> import torch
        >>> from matbackprop.nn import MatrixClamp
        >>> MatrixClamp(0.5)(torch.diag(torch.tensor([0.0, 2.0]))).diagonal()
        tensor([0.5000, 2.0000])
    """


class MatrixPower(Operator, of=matrix_function, data=["a", "params"]):
    """Power of symmetric matrices with a fixed or trainable exponent; see :func:`~matbackprop.matrix_power`.

    Args:
        exponent: the exponent, or its initial value.
        learn: whether it is a parameter. A fixed number accepts more matrices, see :func:`~matbackprop.matrix_power`.
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
