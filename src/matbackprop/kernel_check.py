"""Compare each CUDA kernel with its fallback on a device; ``matbackprop doctor`` prints the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop import functional as mb
from matbackprop.cuda import kernels
from matbackprop.numerics import symmetrize
from matbackprop.solvers import batched_svd

_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


class Case(NamedTuple):
    """An input for which the kernels of one source run."""

    source: str
    function: Callable[[Tensor], Tensor]  # its result does not depend on signs of vectors
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    gradient: bool = True  # whether the gradient is also compared


class Comparison(NamedTuple):
    """Relative difference between a kernel and its fallback."""

    name: str  # the source, and the shape and dtype of the input
    error: float  # of values or gradients, whichever is larger; NaN if one of them failed
    right: bool  # whether the error is at most the tolerance
    message: str = ""  # of a failure


def _rebuilt_eigh(x: Tensor) -> Tensor:
    values, vectors = mb.eigh(symmetrize(x))
    return (vectors * values.sin().unsqueeze(-2)) @ vectors.mT


def _rebuilt_svd(x: Tensor) -> Tensor:
    u, s, vh = mb.svd(x)
    return (u * s.sin().unsqueeze(-2)) @ vh


def _singular(x: Tensor) -> Tensor:
    """Vectors of a matrix with an outlier and without full rank."""
    x = torch.cat([1e6 * x[..., :1], x[..., 1:-1], x[..., 1:2]], -1)
    u, s, vh = batched_svd(x)
    k = s.shape[-1]
    return torch.cat([(u * s.unsqueeze(-2)) @ vh / 1e6, (u.mT @ u)[..., :k, :k], (vh @ vh.mT)[..., :k, :k]], -2)


def _polar(x: Tensor) -> Tensor:
    return torch.cat(tuple(mb.polar(x)), -2)


def _log(x: Tensor) -> Tensor:
    return mb.matrix_log(x @ x.mT + torch.eye(x.shape[-2], dtype=x.dtype, device=x.device))


def _weighted_pool(x: Tensor) -> Tensor:
    weight = torch.linspace(0.1, 1, x.shape[-2], device=x.device).expand(x.shape[:-1])
    return mb.second_order_pool(x, weight=weight, center=True)


CASES = [
    Case("jacobi.cu", _rebuilt_eigh, (3, 12, 12)),
    Case("jacobi.cu", _rebuilt_eigh, (3, 13, 13), torch.float64),
    Case("tridiagonal.cu", _rebuilt_eigh, (2, 100, 100), torch.float64),
    Case("svd.cu", _rebuilt_svd, (3, 20, 8)),
    Case("svd.cu", _rebuilt_svd, (3, 8, 20), torch.float64),
    Case("tiny.cu", _rebuilt_svd, (50, 3, 3)),
    Case("tiny.cu", _polar, (50, 4, 3)),
    Case("separate.cu", _singular, (2, 90, 80), torch.float64, gradient=False),
    Case("pool.cu", mb.second_order_pool, (4, 10, 30)),
    Case("pool.cu", mb.second_order_pool, (4, 30, 10)),
    Case("pool_prepare.cu", _weighted_pool, (4, 30, 10)),
    Case("matrix_function.cu", _log, (4, 16, 20)),
]


def _results(case: Case, x: Tensor, enabled: bool) -> list[Tensor]:
    with kernels(enabled):
        x = x.clone().requires_grad_(case.gradient)
        value = case.function(x)
        if not case.gradient:
            return [value]
        weight = torch.linspace(-1, 1, value.numel(), dtype=value.dtype, device=value.device).reshape(value.shape)
        return [value.detach(), *torch.autograd.grad(value, x, weight)]


def compare_kernels(device: torch.device | str, cases: list[Case] | None = None) -> list[Comparison]:
    """Compute each case with kernels and with their fallbacks, and compare values and gradients.

    On the CPU no kernel runs, and all differences are zero.
    """
    comparisons = []
    for case in CASES if cases is None else cases:
        dtype = str(case.dtype).removeprefix("torch.")
        name = f"{case.source} {'×'.join(map(str, case.shape))} {dtype}"
        x = torch.randn(case.shape, generator=torch.Generator().manual_seed(0), dtype=case.dtype).to(device)
        try:
            pairs = zip(_results(case, x, True), _results(case, x, False), strict=True)
            error = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        except RuntimeError as failure:
            comparisons.append(Comparison(name, float("nan"), False, str(failure)))
        else:
            comparisons.append(Comparison(name, error, error <= _TOLERANCE[case.dtype]))
    return comparisons
