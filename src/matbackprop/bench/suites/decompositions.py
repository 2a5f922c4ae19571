"""The thin singular value decomposition, forward and forward + backward, at the sizes people ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from matbackprop.bench.suites.entry import Entry, Scale
from matbackprop.functional._svd import svd

_SIZES = ((512, 1024, 3), (210_000, 3, 3), (100, 36, 36), (100, 36, 256), (100, 256, 256), (32, 1024, 32))
_CPU_SIZES = ((32, 1024, 3), (2000, 3, 3), (8, 36, 36), (8, 36, 256), (2, 1024, 32))
_METHODS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "matbackprop": lambda x: tuple(svd(x)),
    "torch.linalg.svd": lambda x: tuple(torch.linalg.svd(x, full_matrices=False)),
}


def _build(
    method: str, shape: tuple[int, int, int], dtype: torch.dtype, backward: bool, device: torch.device
) -> Callable[[], Any]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype).requires_grad_(backward)
    call = _METHODS[method]
    if not backward:
        return lambda: call(x)
    with torch.no_grad():
        gradients = [torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).to(t) for t in call(x)]
    return lambda: torch.autograd.grad(call(x), x, gradients)


def svd_suite(device: torch.device, scale: Scale) -> Iterator[Entry]:
    """All three factors and their gradients, float32 and float64."""
    sizes = ((2, 4, 3),) if scale == "quick" else _SIZES if device.type == "cuda" else _CPU_SIZES
    for dtype in (torch.float32, torch.float64):
        short = str(dtype).removeprefix("torch.")
        for backward in (False, True):
            for shape in sizes:
                case = f"{short}, {'×'.join(map(str, shape))}, {'forward + backward' if backward else 'forward'}"
                for method in _METHODS:
                    yield Entry(case, method, partial(_build, method, shape, dtype, backward))
