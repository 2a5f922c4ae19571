"""Polar decompositions of matrices of at most 16 entries: one kernel forward and one backward (``tiny.cu``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop.cuda.fallback import call_kernels, kernels_may_take
from matbackprop.cuda.svd import MAX_TINY, TINY, TINY_THREADS

Pair = tuple[Tensor, Tensor]


def takes(a: Tensor) -> bool:
    """Return whether the kernels decompose matrices ``(*batch, m, n)``: float64, m ≥ n, at most 16 entries."""
    m, n = a.shape[-2:]
    return a.dtype == torch.float64 and m >= n and m * n <= MAX_TINY and kernels_may_take(a)


def _launch(name: str, a: Tensor, *arguments: Tensor | float) -> None:
    m, n = a.shape[-2:]
    count = a.numel() // (m * n)
    kernels = TINY.on(a.get_device(), K=n, L=m, IN="double")
    given = (x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)
    kernels.launch(name, (-(-count // TINY_THREADS),), TINY_THREADS, 0, (*given, count))


class Polar(NamedTuple):
    """Q and P of A = QP. NaN if Q is not unique, unless ``tolerance`` is negative."""

    rotation: bool  # whether det Q = 1, with the last eigenvalue of P negative if det A is
    tolerance: float  # fraction of the largest singular value up to which a sum that divides counts as zero
    general: Callable[[Tensor], Pair]

    def forward(self, a: Tensor) -> tuple[Pair, tuple[Tensor]]:
        m, n = a.shape[-2:]
        q, p = torch.empty_like(a), a.new_empty(*a.shape[:-2], n, n)
        factors = a.new_empty(n * (m + n + 1), a.numel() // (m * n))
        _launch("polar_tiny", a, a, q, p, factors, self.tolerance, int(self.rotation))
        return (q, p), (factors,)

    def gradient(self, g_q: Tensor, g_p: Tensor, a: Tensor, factors: Tensor) -> Tensor:
        out = torch.empty_like(a)
        _launch("polar_tiny_adjoint", a, factors, g_q, g_p, out)
        return out


def polar(a: Tensor, rotation: bool, tolerance: float, general: Callable[[Tensor], Pair]) -> Pair:
    """Q and P of matrices for which :func:`takes` holds; ``general`` computes them in torch operations."""
    pair: Pair = call_kernels(a, Polar(rotation, tolerance, general))
    return pair
