"""Modules for the operators of :mod:`matbackprop.functional`.

The constructor takes the options of the function; calling the module takes its tensors:

    >>> import torch
    >>> from matbackprop import nn
    >>> nn.TopkEigh(2)(torch.diag(torch.tensor([1.0, 5.0, 3.0]))).eigenvalues
    tensor([5., 3.])
"""

from matbackprop.nn._export import for_export as for_export
from matbackprop.nn._normalized_cut import NormalizedCutLoss as NormalizedCutLoss
from matbackprop.nn._operators import EIG as EIG
from matbackprop.nn._operators import SVD as SVD
from matbackprop.nn._operators import GeneralizedEigh as GeneralizedEigh
from matbackprop.nn._operators import GeneralizedMatrixFunction as GeneralizedMatrixFunction
from matbackprop.nn._operators import InverseRoot as InverseRoot
from matbackprop.nn._operators import LinearSolve as LinearSolve
from matbackprop.nn._operators import LowRank as LowRank
from matbackprop.nn._operators import MatrixClamp as MatrixClamp
from matbackprop.nn._operators import MatrixExp as MatrixExp
from matbackprop.nn._operators import MatrixFunction as MatrixFunction
from matbackprop.nn._operators import MatrixInverse as MatrixInverse
from matbackprop.nn._operators import MatrixInvSqrt as MatrixInvSqrt
from matbackprop.nn._operators import MatrixLog as MatrixLog
from matbackprop.nn._operators import MatrixPower as MatrixPower
from matbackprop.nn._operators import MatrixSqrt as MatrixSqrt
from matbackprop.nn._operators import Polar as Polar
from matbackprop.nn._operators import Procrustes as Procrustes
from matbackprop.nn._operators import Projector as Projector
from matbackprop.nn._operators import ProjectRotation as ProjectRotation
from matbackprop.nn._operators import SpectralProjector as SpectralProjector
from matbackprop.nn._operators import TopkEigh as TopkEigh
from matbackprop.nn._operators import TopkSubspace as TopkSubspace
from matbackprop.nn._replace_pool import replace_pool as replace_pool
from matbackprop.nn._second_order_head import SecondOrderHead as SecondOrderHead
from matbackprop.nn._second_order_pool import SecondOrderPool as SecondOrderPool
from matbackprop.nn._second_order_pool import SecondOrderPool2d as SecondOrderPool2d
from matbackprop.nn._whitening import Whitening as Whitening

__all__ = [name for name in dir() if not name.startswith("_")]
