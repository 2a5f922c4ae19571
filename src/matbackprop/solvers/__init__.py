"""The solvers that every operator uses: batched symmetric eigenproblems and singular values, and their routes."""

from matbackprop.solvers.eigh import batched_eigh, route
from matbackprop.solvers.svd import batched_svd

__all__ = ["batched_eigh", "batched_svd", "route"]
