"""The batched eigendecomposition and the matrix logarithm over matrix orders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.speed import peers
from benchmarks.speed.suites.entry import Entry, Scale
from benchmarks.speed.suites.pooling import Factory, forward_backward
from matbackprop.functional._matrix_function import matrix_function
from matbackprop.solvers import batched_eigh

_ORDERS = (16, 32, 36, 64, 128, 169, 256, 512)
_CPU_ORDERS = (16, 36, 64, 169)
_LARGEST_LOG = 256


@functools.lru_cache(maxsize=1)  # shared by all methods, because they are slow to generate
def _matrices(batch: int, n: int) -> Tensor:
    x = torch.randn(batch, n, 2 * n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    return x @ x.mT / (2 * n) + 0.01 * torch.eye(n, dtype=torch.float64)


def _jax_eigh(a: Tensor) -> Callable[[], Any]:
    jax = peers.need_jax()
    kind = "gpu" if a.device.type == "cuda" else "cpu"
    x = jax.device_put(a.cpu().numpy(), jax.devices(kind)[0])
    compiled = jax.jit(jax.numpy.linalg.eigh)
    return lambda: jax.block_until_ready(compiled(x))


def _log(factory: Factory, a: Tensor) -> Callable[[], Any]:
    return forward_backward(factory(), a)


_METHODS: dict[str, dict[str, Callable[[Tensor], Callable[[], Any]]]] = {
    "eigh": {
        "matbackprop": lambda a: lambda: batched_eigh(a),
        "torch.linalg.eigh": lambda a: lambda: torch.linalg.eigh(a),
        "jax": _jax_eigh,
    },
    "log": {
        "matbackprop": partial(_log, lambda: lambda a: matrix_function(a, "log")),
        **{name: partial(_log, partial(factory, "log")) for name, factory in peers.MATRIX_FUNCTIONS.items()},
    },
}


def _build(
    method: Callable[[Tensor], Callable[[], Any]], batch: int, n: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], Any]:
    return method(_matrices(batch, n).to(device, dtype, copy=True))


def functions(device: torch.device, scale: Scale) -> Iterator[Entry]:
    """Eigendecomposition in float32 and float64, then log forward + backward in float32."""
    batch = 2 if scale == "quick" else 100 if device.type == "cuda" else 16
    orders = (8,) if scale == "quick" else _ORDERS if device.type == "cuda" else _CPU_ORDERS
    small = tuple(n for n in orders if n <= _LARGEST_LOG)
    for title, function, dtype, sizes in (
        ("eigendecomposition", "eigh", torch.float32, orders),
        ("eigendecomposition", "eigh", torch.float64, orders),
        ("matrix log forward + backward", "log", torch.float32, small),
    ):
        short = str(dtype).removeprefix("torch.")
        for n in sizes:
            for name, method in _METHODS[function].items():
                parameters: dict[str, float | str] = {"batch": batch, "n": n, "dtype": short, "function": function}
                build = partial(_build, method, batch, n, dtype)
                yield Entry(f"{title}, {short}, {batch}×{n}×{n}", name, build, parameters=parameters)
