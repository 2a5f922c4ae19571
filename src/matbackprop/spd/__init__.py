"""Geometry of symmetric positive definite matrices, and layers of networks on them.

Three metrics are available: ``"affine_invariant"``, ``"log_euclidean"`` and ``"bures_wasserstein"``. Functions take any
leading batch dimensions, real matrices and complex Hermitian ones, and mixtures of both.
"""

from matbackprop.spd._frechet import frechet_distance as frechet_distance
from matbackprop.spd._functions import batch_norm as batch_norm
from matbackprop.spd._functions import bimap as bimap
from matbackprop.spd._functions import distance as distance
from matbackprop.spd._functions import exp_map as exp_map
from matbackprop.spd._functions import geodesic as geodesic
from matbackprop.spd._functions import log_eig as log_eig
from matbackprop.spd._functions import log_map as log_map
from matbackprop.spd._functions import re_eig as re_eig
from matbackprop.spd._mean import mean as mean
from matbackprop.spd._modules import BatchNorm as BatchNorm
from matbackprop.spd._modules import BiMap as BiMap
from matbackprop.spd._modules import LogEig as LogEig
from matbackprop.spd._modules import ReEig as ReEig

__all__ = [name for name in dir() if not name.startswith("_")]
