"""Inverse fourth roots, as used by Shampoo: time, and error in single precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.speed import peers
from benchmarks.speed.suites.entry import Entry, Scale
from matbackprop.functional._inverse_root import inverse_root as exact

_ORDERS = (128, 256, 512, 1024)
_ROOT, _EPS = 4, 1e-6
#: Kind of gradients, and their number as a multiple of the order.
_KINDS = {"decaying over 4 decades": 2.0, "of few gradients": 0.125}


@functools.lru_cache(maxsize=2)
def _statistics(kind: str, batch: int, n: int) -> Tensor:
    """GGᵀ of gradients whose entries shrink over two decades, in float32."""
    many = max(1, int(_KINDS[kind] * n))
    g = torch.randn(batch, n, many, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    g = g * torch.logspace(0, -2, n, dtype=torch.float64).unsqueeze(-1)
    return (g @ g.mT / many).float()


def _single(a: Tensor) -> Tensor:
    """By torch's eigendecomposition in float32, damped as in implementations of Shampoo."""
    values, vectors = torch.linalg.eigh(a)
    values = values - values[..., :1].clamp_max(0) + _EPS * values[..., -1:]
    return (vectors * values.pow(-1 / _ROOT).unsqueeze(-2)) @ vectors.mT


_METHODS: dict[str, Callable[[Tensor], Tensor]] = {
    "matbackprop": partial(exact, p=_ROOT, eps=_EPS, relative=True),
    "matbackprop, float32 inside": partial(exact, p=_ROOT, eps=_EPS, relative=True, precision=torch.float32),
    "torch.linalg.eigh in float32": _single,
    "coupled Newton in float32": partial(peers.coupled_newton, p=_ROOT, eps=_EPS),
}


def _build(
    method: Callable[[Tensor], Tensor], kind: str, batch: int, n: int, device: torch.device
) -> Callable[[], Tensor]:
    a = _statistics(kind, batch, n).to(device)
    return lambda: method(a)


@functools.lru_cache(maxsize=2)
def _reference(kind: str, n: int) -> Tensor:
    """The root of the same float32 matrix by LAPACK in float64."""
    values, vectors = torch.linalg.eigh(_statistics(kind, 1, n).double())
    values = values.clamp_min(0) + _EPS * values[..., -1:]
    return (vectors * values.pow(-1 / _ROOT).unsqueeze(-2)) @ vectors.mT


def _error(method: Callable[[Tensor], Tensor], kind: str, n: int, device: torch.device) -> Callable[[], float]:
    def run() -> float:
        root = method(_statistics(kind, 1, n).to(device)).double().cpu()
        return float((root - _reference(kind, n)).norm() / _reference(kind, n).norm())

    return run


def inverse_root(device: torch.device, scale: Scale) -> Iterator[Entry]:
    """Time of a batch of matrices, then the relative error of one, with a damping of 1e-6 of the largest eigenvalue."""
    batch = 2 if scale == "quick" else 16 if device.type == "cuda" else 1
    orders = (8,) if scale == "quick" else _ORDERS
    kind = next(iter(_KINDS))
    large = ((4, 1536),) if device.type == "cuda" and scale == "full" else ()
    for count, n in (*((batch, n) for n in orders), *large):
        for name, method in _METHODS.items():
            build = partial(_build, method, kind, count, n)
            yield Entry(f"inverse fourth root, {count}×{n}×{n}", name, build, parameters={"function": "time"})
    for kind in _KINDS:
        for n in orders:
            for name, method in _METHODS.items():
                case = f"relative error, statistics {kind}, order {n}"
                error = partial(_error, method, kind, n)
                yield Entry(case, name, error, kind="error", parameters={"function": "error"})
