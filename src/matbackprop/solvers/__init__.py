"""The solvers that every operator uses: the batched symmetric eigensolver and the route it takes."""

from matbackprop.solvers.eigh import batched_eigh, route

__all__ = ["batched_eigh", "route"]
