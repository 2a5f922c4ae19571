"""Error of gradients against an 80-bit reference: pooling on hard features, matrix log against the eigengap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.speed.suites.entry import Entry, Scale
from benchmarks.speed.suites.functions import log_methods
from benchmarks.speed.suites.pooling import EPS, Factory, pool_methods
from helpers.reference import log_gradient_longdouble, pool_longdouble

_GAPS = (1.0, 1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12, 1e-14, 0.0)
_ORDER = 8
_KINDS = ("ReLU features", "dead channels, equal rows", "clustered within 1e-9", "λmax = 1e6")


def _hard_features(kind: str, m: int, d: int) -> NDArray[np.float64]:
    generator = np.random.default_rng(m + d)
    f = np.maximum(generator.standard_normal((m, d)), 0)
    if kind == "dead channels, equal rows":
        f[:, : d // 4] = 0
        f[m // 2 :] = f[: m - m // 2]
    elif kind == "clustered within 1e-9":
        u, _, vh = np.linalg.svd(f, full_matrices=False)
        f = (u * (1 + 1e-9 * generator.random(m))) @ vh
    elif kind == "λmax = 1e6":
        u, _, vh = np.linalg.svd(f, full_matrices=False)
        f = (u * np.geomspace(1e3, 1e-2, m)) @ vh
    return f.astype(np.float32).astype(np.float64)


def _tied_matrix(gap: float) -> NDArray[np.float64]:
    """A symmetric matrix with eigenvalues 2, 2 + gap and others well apart, its entries rounded to float64.

    Without a gap it is diagonal, so that rounding does not separate the eigenvalues.
    """
    generator = np.random.default_rng(7)
    q, _ = np.linalg.qr(generator.standard_normal((_ORDER, _ORDER)))
    q = q if gap else np.eye(_ORDER)
    values = np.concatenate([[2.0, 2.0 + gap], 4.0 + np.arange(_ORDER - 2)])
    a = (q * values) @ q.T
    return (a + a.T) / 2


def _relative(gradient: Tensor, reference: NDArray[np.longdouble]) -> float:
    difference = gradient.double().cpu().numpy().astype(np.longdouble) - reference
    return float(np.linalg.norm(difference.astype(np.float64)) / np.linalg.norm(reference.astype(np.float64)))


def _error(
    function: Factory,
    x: NDArray[np.float64],
    g: NDArray[np.float64],
    dtype: torch.dtype,
    reference: Callable[[], NDArray[np.longdouble]],
) -> Callable[[torch.device], Callable[[], float]]:
    def build(device: torch.device) -> Callable[[], float]:
        compute = function()

        def run() -> float:
            point = torch.from_numpy(x).to(device, dtype).unsqueeze(0).requires_grad_()
            (gradient,) = torch.autograd.grad(compute(point), point, torch.from_numpy(g).to(device, dtype).unsqueeze(0))
            return _relative(gradient[0], reference())

        return run

    return build


def gradient_error(device: torch.device, scale: Scale) -> Iterator[Entry]:
    """Gradients of log pooling in float32 and float64 on four kinds of features, and of log near a tie in float64."""
    m, d = (5, 8) if scale == "quick" else (36, 64)
    g = np.random.default_rng(3).standard_normal((d, d)).astype(np.float32).astype(np.float64)
    for kind in _KINDS[:2] if scale == "quick" else _KINDS:
        f = _hard_features(kind, m, d)
        reference = functools.cache(lambda f=f: pool_longdouble(f, g, EPS, "log")[1])
        for dtype in (torch.float32, torch.float64):
            short = str(dtype).removeprefix("torch.")
            for method, factory in pool_methods("log").items():
                yield Entry(
                    f"pooling {m}×{d}, {kind}, {short}",
                    method,
                    _error(factory, f, g, dtype, reference),
                    kind="error",
                    parameters={"dtype": short, "kind": kind},
                )
    h = np.random.default_rng(5).standard_normal((_ORDER, _ORDER))
    for gap in _GAPS[::4] if scale == "quick" else _GAPS:
        a = _tied_matrix(gap)
        reference = functools.cache(partial(log_gradient_longdouble, a, h))
        for method, factory in log_methods().items():
            yield Entry(
                f"matrix log, eigengap {gap:.0e}",
                method,
                _error(factory, a, (h + h.T) / 2, torch.float64, reference),
                kind="error",
                parameters={"gap": gap, "dtype": "float64"},
            )
