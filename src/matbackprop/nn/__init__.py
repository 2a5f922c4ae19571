"""The operators as modules of the same names; they store arguments and call :mod:`matbackprop.functional`."""

from matbackprop.nn._decomposition import EIG as EIG
from matbackprop.nn._decomposition import SVD as SVD
from matbackprop.nn._decomposition import GeneralizedEigh as GeneralizedEigh
from matbackprop.nn._inverse_root import InverseRoot as InverseRoot
from matbackprop.nn._linear_solve import GaussianCRF as GaussianCRF
from matbackprop.nn._linear_solve import LinearSolve as LinearSolve
from matbackprop.nn._matrix_function import MatrixClamp as MatrixClamp
from matbackprop.nn._matrix_function import MatrixExp as MatrixExp
from matbackprop.nn._matrix_function import MatrixFunction as MatrixFunction
from matbackprop.nn._matrix_function import MatrixInverse as MatrixInverse
from matbackprop.nn._matrix_function import MatrixInvSqrt as MatrixInvSqrt
from matbackprop.nn._matrix_function import MatrixLog as MatrixLog
from matbackprop.nn._matrix_function import MatrixPower as MatrixPower
from matbackprop.nn._matrix_function import MatrixSqrt as MatrixSqrt
from matbackprop.nn._normalized_cut import NormalizedCutLoss as NormalizedCutLoss
from matbackprop.nn._polar import LowRank as LowRank
from matbackprop.nn._polar import Polar as Polar
from matbackprop.nn._polar import Procrustes as Procrustes
from matbackprop.nn._polar import ProjectRotation as ProjectRotation
from matbackprop.nn._projector import Projector as Projector
from matbackprop.nn._projector import SpectralProjector as SpectralProjector
from matbackprop.nn._second_order_head import SecondOrderHead as SecondOrderHead
from matbackprop.nn._second_order_head import SecondOrderPool2d as SecondOrderPool2d
from matbackprop.nn._second_order_head import replace_pool as replace_pool
from matbackprop.nn._second_order_pool import SecondOrderPool as SecondOrderPool
from matbackprop.nn._topk_eigh import TopkEigh as TopkEigh
from matbackprop.nn._topk_eigh import TopkSubspace as TopkSubspace
from matbackprop.nn._whitening import Whitening as Whitening

__all__ = [name for name in dir() if not name.startswith("_")]
