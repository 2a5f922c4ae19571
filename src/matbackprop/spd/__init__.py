"""Geometry of symmetric positive definite (SPD) matrices, and layers of SPD networks.

Three metrics are available: ``"affine_invariant"``, ``"log_euclidean"`` and ``"bures_wasserstein"``. Functions accept
leading batch dimensions and real or complex Hermitian matrices.

A matrix counts as positive definite if, after scaling to a unit diagonal, its smallest eigenvalue exceeds 4nε, where ε
is the rounding of the data (of float32 for half precision). The test does not depend on the units of the channels.
Other matrices raise DomainError, or return NaN if values are not checked.
"""

from matbackprop.spd._frechet import frechet_distance as frechet_distance
from matbackprop.spd._geometry import distance as distance
from matbackprop.spd._geometry import exp_map as exp_map
from matbackprop.spd._geometry import geodesic as geodesic
from matbackprop.spd._geometry import log_map as log_map
from matbackprop.spd._layers import batch_norm as batch_norm
from matbackprop.spd._layers import bimap as bimap
from matbackprop.spd._layers import log_eig as log_eig
from matbackprop.spd._layers import re_eig as re_eig
from matbackprop.spd._mean import mean as mean
from matbackprop.spd._modules import BatchNorm as BatchNorm
from matbackprop.spd._modules import BiMap as BiMap
from matbackprop.spd._modules import LogEig as LogEig
from matbackprop.spd._modules import ReEig as ReEig

__all__ = [name for name in dir() if not name.startswith("_")]
