"""Batches of decompositions with all factors, at common sizes: SVD, eigh, polar decomposition and square root."""

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

_SIZES = ((512, 1024, 3), (210_000, 3, 3), (100, 36, 36), (100, 36, 256), (100, 256, 256), (32, 1024, 32))
_CPU_SIZES = ((32, 1024, 3), (2000, 3, 3), (8, 36, 36), (8, 36, 256), (2, 1024, 32))
_TINY = (2, 3, 4, 8)  # orders of large batches
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
    quick, many = scale == "quick", 210_000 if device.type == "cuda" else 2000
    shapes: tuple[Shape, ...] = ((2, 4, 3),) if quick else _SIZES if device.type == "cuda" else _CPU_SIZES
    square = ((2, 3, 3),) if quick else tuple(shape for shape in shapes if shape[1] == shape[2])
    tiny = ((2, 2, 2),) if quick else tuple((many, n, n) for n in _TINY)
    sizes = {"SVD": shapes, "eigh": tiny, "polar": shapes, "square root": square}
    for dtype in (torch.float32, torch.float64):
        for what, methods in _METHODS.items():
            for shape in sizes[what]:
                for backward in (False, True):
                    size = "×".join(map(str, shape))
                    case = f"{what}, {str(dtype)[6:]}, {size}, {'forward + backward' if backward else 'forward'}"
                    for method, call in methods.items():
                        build = partial(_build, call, what, shape, dtype, backward)
                        yield Entry(case, method, build, parameters={"function": what})
