"""Batches of singular value and eigendecompositions with all factors, at common sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed.suites.entry import Entry, Scale
from matbackprop.functional._eigh import eigh
from matbackprop.functional._svd import svd

Shape = tuple[int, int, int]
Method = Callable[[Tensor], tuple[Tensor, ...]]

_SIZES = ((512, 1024, 3), (210_000, 3, 3), (100, 36, 36), (100, 36, 256), (100, 256, 256), (32, 1024, 32))
_CPU_SIZES = ((32, 1024, 3), (2000, 3, 3), (8, 36, 36), (8, 36, 256), (2, 1024, 32))
_TINY = (2, 3, 4, 8)  # orders of large batches
_SVD: dict[str, Method] = {
    "matbackprop": lambda x: tuple(svd(x)),
    "torch.linalg": lambda x: tuple(torch.linalg.svd(x, full_matrices=False)),
}
_EIGH: dict[str, Method] = {
    "matbackprop": lambda x: tuple(eigh(x)),
    "torch.linalg": lambda x: tuple(torch.linalg.eigh(x)),
}


def _build(
    call: Method, shape: Shape, dtype: torch.dtype, backward: bool, symmetric: bool, device: torch.device
) -> Callable[[], Any]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x = (x + x.mT if symmetric else x).requires_grad_(backward)
    if not backward:
        return lambda: call(x)
    with torch.no_grad():
        gradients = [torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).to(t) for t in call(x)]
    return lambda: torch.autograd.grad(call(x), x, gradients)


def _entries(what: str, methods: dict[str, Method], shape: Shape, dtype: torch.dtype) -> Iterator[Entry]:
    for backward in (False, True):
        size = "×".join(map(str, shape))
        case = f"{what}, {str(dtype)[6:]}, {size}, {'forward + backward' if backward else 'forward'}"
        for method, call in methods.items():
            build = partial(_build, call, shape, dtype, backward, methods is _EIGH)
            yield Entry(case, method, build, parameters={"function": what})


def decompositions(device: torch.device, scale: Scale) -> Iterator[Entry]:
    """Forward, and forward + backward through all factors, in float32 and float64."""
    quick, many = scale == "quick", 210_000 if device.type == "cuda" else 2000
    for dtype in (torch.float32, torch.float64):
        for shape in ((2, 4, 3),) if quick else _SIZES if device.type == "cuda" else _CPU_SIZES:
            yield from _entries("SVD", _SVD, shape, dtype)
        for n in (2,) if quick else _TINY:
            yield from _entries("eigh", _EIGH, (2 if quick else many, n, n), dtype)
