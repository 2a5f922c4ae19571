"""The one batched symmetric eigensolver that every operator calls, and the route it takes."""

from matbackprop.eigensolver.batched import batched_eigh, route

__all__ = ["batched_eigh", "route"]
