"""Batched symmetric eigensolver and singular value decomposition, used by every operator."""

from matbackprop.solvers.eigh import batched_eigh, route
from matbackprop.solvers.svd import batched_svd

__all__ = ["batched_eigh", "batched_svd", "route"]
