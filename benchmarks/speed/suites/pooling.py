"""Second-order pooling, forward and backward: features of a 6×6 and a 13×13 grid, and the sizes of newer networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed import peers
from benchmarks.speed.suites.entry import Entry, Scale, captured
from matbackprop.functional._second_order_pool import second_order_pool

Factory = Callable[[], Callable[[Tensor], Tensor]]

EPS = 1e-3
_SIZES = ((36, 256), (169, 256), (36, 64), (169, 64))
_WIDE = 256
_NEWER = (
    *((64, m, d) for m, d in ((196, 256), (784, 256), (1024, 512), (196, 384), (196, 768), (49, 2048))),
    (4, 1600, 1500),
)  # on a GPU
_PREPARED = ((64, 49, 512), (256, 16, 128))  # on a GPU, with weights and with centering
_CAPTURED = (("log", 36, 256), ("sqrt", 36, 256))
_ISQRT = "iSQRT, 5 steps (approximate)"
_TF32 = "iSQRT, 5 steps in TF32 (approximate)"


def features(batch: int, m: int, d: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """ReLU features, the same on every device."""
    generator = torch.Generator().manual_seed(m * 1000 + d)
    return torch.randn(batch, m, d, generator=generator).relu().to(device, dtype)


def forward_backward(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Any]:
    """A call of the function and of its gradient for a fixed random gradient of the result."""
    x = x.detach().requires_grad_()
    with torch.no_grad():
        shape = function(x[:1]).shape[1:]
    cotangent = torch.randn(x.shape[0], *shape, generator=torch.Generator().manual_seed(1)).to(x)
    return lambda: torch.autograd.grad(function(x), x, cotangent)


def pool_methods(name: str) -> dict[str, Factory]:
    """Methods for pooling with g = log or sqrt."""
    methods: dict[str, Factory] = {
        "matbackprop": lambda: partial(second_order_pool, eps=EPS, function=name),
        "torch.linalg.svd + autograd": lambda: peers.svd_pool(name, EPS),
    }
    for method, factory in peers.MATRIX_FUNCTIONS.items():
        methods[method] = partial(_pool_with, factory, name)
    if name == "sqrt":
        methods[_ISQRT] = lambda: peers.pool_with(peers.isqrt, EPS)
        methods[_TF32] = lambda: peers.in_tf32(peers.pool_with(peers.isqrt, EPS))
    return methods


def _pool_with(factory: Callable[[str], Callable[[Tensor], Tensor]], name: str) -> Callable[[Tensor], Tensor]:
    return peers.pool_with(factory(name), EPS)


def _build(factory: Factory, batch: int, m: int, d: int, device: torch.device) -> Callable[[], Any]:
    return forward_backward(factory(), features(batch, m, d, device))


def _build_prepared(
    weighted: bool, center: bool, batch: int, m: int, d: int, device: torch.device
) -> Callable[[], Any]:
    """Square-root pooling of weighted or centered features."""
    weight = torch.ones(batch, m, device=device) if weighted else None

    def pool(x: Tensor) -> Tensor:
        return second_order_pool(
            x, eps=EPS, function="sqrt", weight=weight if weight is None else weight[: len(x)], center=center
        )

    return forward_backward(pool, features(batch, m, d, device))


def _build_captured(factory: Factory, batch: int, m: int, d: int, device: torch.device) -> Callable[[], Any]:
    """The same call, captured once and replayed as a CUDA graph."""
    return captured(_build(factory, batch, m, d, device))


def pooling(device: torch.device, scale: Scale) -> Iterator[Entry]:
    """Log and square-root pooling, forward + backward, float32 in and out."""
    batch = 2 if scale == "quick" else 100 if device.type == "cuda" else 8
    for m, d in ((9, 16),) if scale == "quick" else _SIZES:
        for name in ("log", "sqrt") if d == _WIDE or scale == "quick" else ("log",):
            for method, factory in pool_methods(name).items():
                yield _entry(name, (batch, m, d), method, partial(_build, factory, batch, m, d))
    if device.type != "cuda" or scale != "full":
        return
    for size in _NEWER:
        for method in ("matbackprop", _ISQRT, _TF32):
            yield _entry("sqrt", size, method, partial(_build, pool_methods("sqrt")[method], *size))
    for size in _PREPARED:
        for method, weighted, center in (
            ("matbackprop", False, False),
            ("matbackprop, weighted", True, False),
            ("matbackprop, centered", False, True),
        ):
            yield _entry("sqrt", size, method, partial(_build_prepared, weighted, center, *size), ", prepared")
    # Last, because a failed capture may leave the device in a bad state.
    for name, m, d in _CAPTURED:
        for method in ("matbackprop", *([_ISQRT] if name == "sqrt" else []), "torch.linalg.eigh + autograd"):
            build = partial(_build_captured, pool_methods(name)[method], batch, m, d)
            yield _entry(name, (batch, m, d), method, build, ", replayed from a CUDA graph")


def _entry(name: str, size: tuple[int, int, int], method: str, build: Any, remark: str = "") -> Entry:
    return Entry(f"{name}, {'×'.join(map(str, size))}{remark}", method, build, parameters={"function": name})
