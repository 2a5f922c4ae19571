"""Decompositions with all factors at common sizes: SVD, eigh, polar decomposition, nearest rotation and square root."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import matbackprop
from benchmarks.speed import peers
from benchmarks.speed.suites.entry import Entry, Scale

Shape = tuple[int, int, int]
Method = Callable[[Tensor], tuple[Tensor, ...]]

_TALL = ((512, 1024, 3), (210_000, 3, 3), (100, 36, 36), (100, 36, 256), (100, 256, 256), (32, 1024, 32))
_MILLION = ((1_000_000, 3, 3),)
_LONG = (
    *((1, 100_000, k) for k in (3, 16, 32, 64)),
    *((1, 2000, 16), (1, 5000, 16), (8, 20_000, 32), (60, 8000, 20), (2, 1500, 1500)),
)
_TINY = tuple((210_000, n, n) for n in (2, 3, 4, 8))
_SMALL = ((50_000, 12, 12), (4096, 24, 24), (2000, 40, 40), (1000, 48, 48))
_LARGE = ((1, 768, 768), (1, 1024, 1024), (4, 1024, 1024), (4, 1500, 1500), (2, 2048, 2048), (1, 4096, 4096))
_SIZES = {
    "SVD": (*_MILLION, *_TALL, *_LONG),
    "eigh": (*_TINY, *_SMALL, *_LARGE),
    "polar": (*_MILLION, *_TALL),
    "rotation": _MILLION,
    "Procrustes": _MILLION,
    "square root": ((210_000, 3, 3), (100, 36, 36), (100, 256, 256)),
}
_CPU_TALL = ((32, 1024, 3), (2000, 3, 3), (8, 36, 36), (8, 36, 256), (2, 1024, 32))
_CPU_SIZES = {
    "SVD": _CPU_TALL,
    "eigh": tuple((2000, n, n) for n in (2, 3, 4, 8)),
    "polar": _CPU_TALL,
    "rotation": ((2000, 3, 3),),
    "Procrustes": ((2000, 3, 3),),
    "square root": ((2000, 3, 3), (8, 36, 36)),
}


def _polar_by_svd(x: Tensor) -> tuple[Tensor, ...]:
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh, (vh.mT * s.unsqueeze(-2)) @ vh


def _rotation_by_svd(x: Tensor) -> tuple[Tensor, ...]:
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    signs = torch.cat([torch.ones_like(x[..., 0, 1:]), torch.linalg.det(u @ vh).unsqueeze(-1)], -1)
    return ((u * signs.unsqueeze(-2)) @ vh,)


def _target(x: Tensor) -> Tensor:
    """Points to align with."""
    return x.detach().roll(1, -1)


_METHODS: dict[str, dict[str, Method]] = {
    "SVD": {
        "matbackprop": lambda x: tuple(matbackprop.svd(x)),
        "torch.linalg": lambda x: tuple(torch.linalg.svd(x, full_matrices=False)),
    },
    "eigh": {
        "matbackprop": lambda x: tuple(matbackprop.eigh(x)),
        "torch.linalg": lambda x: tuple(torch.linalg.eigh(x)),
    },
    "polar": {
        "matbackprop": lambda x: tuple(matbackprop.polar(x)),
        "torch.linalg": lambda x: tuple(peers.torch_linalg("polar")(x)),
        "torch.linalg.svd": _polar_by_svd,
    },
    "rotation": {
        "matbackprop": lambda x: (matbackprop.project_rotation(x),),
        "torch.linalg.svd": _rotation_by_svd,
    },
    "Procrustes": {
        "matbackprop": lambda x: (matbackprop.procrustes(x, _target(x)),),
        "torch.linalg.svd": lambda x: _rotation_by_svd(x.mT @ _target(x)),
    },
    "square root": {
        "matbackprop": lambda x: (matbackprop.matrix_sqrt(x),),
        "torch.linalg": lambda x: (peers.torch_linalg("matrix_sqrth")(x),),
    },
}


def _matrices(what: str, shape: Shape) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if what == "square root":
        return x @ x.mT + torch.eye(shape[-1])
    return x + x.mT if what == "eigh" else x


def _build(
    call: Method, what: str, shape: Shape, dtype: torch.dtype, backward: bool, device: torch.device
) -> Callable[[], Any]:
    x = _matrices(what, shape).to(device, dtype).requires_grad_(backward)
    if not backward:
        return lambda: call(x)
    with torch.no_grad():
        gradients = [torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).to(t) for t in call(x)]
    return lambda: torch.autograd.grad(call(x), x, gradients)


def decompositions(device: torch.device, scale: Scale) -> Iterator[Entry]:
    """Forward, and forward + backward through all factors, in float32 and float64."""
    sizes: dict[str, tuple[Shape, ...]] = _SIZES if device.type == "cuda" else _CPU_SIZES
    for dtype in (torch.float32, torch.float64):
        for what, methods in _METHODS.items():
            for shape in ((2, 3, 3),) if scale == "quick" else sizes[what]:
                for backward in (False, True):
                    size = "×".join(map(str, shape))
                    case = f"{what}, {str(dtype)[6:]}, {size}, {'forward + backward' if backward else 'forward'}"
                    for method, call in methods.items():
                        build = partial(_build, call, what, shape, dtype, backward)
                        yield Entry(case, method, build, parameters={"function": what})
