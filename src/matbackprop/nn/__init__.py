"""The operators as modules of the same names; they store arguments and call :mod:`matbackprop.functional`."""

from matbackprop.nn.decomposition import EIG, SVD
from matbackprop.nn.linear_solve import GaussianCRF, LinearSolve
from matbackprop.nn.matrix_function import (
    MatrixExp,
    MatrixFunction,
    MatrixInverse,
    MatrixInvSqrt,
    MatrixLog,
    MatrixPower,
    MatrixSqrt,
)
from matbackprop.nn.normalized_cut import NormalizedCutLoss
from matbackprop.nn.projector import Projector, SpectralProjector
from matbackprop.nn.second_order_pool import SecondOrderPool

__all__ = [
    "EIG",
    "SVD",
    "GaussianCRF",
    "LinearSolve",
    "MatrixExp",
    "MatrixFunction",
    "MatrixInvSqrt",
    "MatrixInverse",
    "MatrixLog",
    "MatrixPower",
    "MatrixSqrt",
    "NormalizedCutLoss",
    "Projector",
    "SecondOrderPool",
    "SpectralProjector",
]
