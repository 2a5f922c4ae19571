"""Measure errors of values and gradients against high-precision references: ``python -m benchmarks accuracy``.

Writes the tables of the page on numerical stability, docs/_generated/stability_*.md, and
docs/_static/stability_gap.png, in a few minutes on a CPU. The references are those of tests/helpers: 80-bit floating
point for pooling, definitions with 75 digits for the table of all operators. They share no code with the package.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import matbackprop
from benchmarks.program import ROOT
from benchmarks.speed import peers
from helpers import accuracy as operators
from helpers.reference import log_gradient_longdouble, longdouble_svd, pool_longdouble
from matbackprop.vision.report.figures import lines
from matbackprop.vision.report.tables import Table

EPS = 1e-3
Longdouble = NDArray[Any]  # of longdouble


def j2_gradient(f: Longdouble, labels: NDArray[np.int64]) -> Longdouble:
    """∂J₂/∂F = −2(Π_Ψ − Π_F Π_Ψ)(Fᵀ)⁺ in 80 bits, from F = U diag(s) Vᵀ."""
    u, s, v = longdouble_svd(f)
    hot = (labels[:, None] == np.arange(labels.max() + 1)).astype(np.longdouble)
    psi = hot @ ((hot / hot.sum(0)).T @ ((u / s) @ v.T))
    return -2 * (psi - u @ (u.T @ psi))


Method = Callable[[Tensor], Tensor]


def _peer(factory: Callable[[str], Method], function: str) -> Method:
    return peers.pool_with(factory(function), EPS)


def _ours(function: str, **options: Any) -> Method:
    return partial(matbackprop.second_order_pool, eps=EPS, function=function, **options)


METHODS: dict[str, Callable[[str], Method]] = {
    "`torch.linalg.eigh` + autograd": partial(_peer, peers.eigh_function),
    "`torch.linalg.svd` + autograd": partial(peers.svd_pool, eps=EPS),
    "the paper's SVD route": partial(_ours, method="svd", check=False),
    "the paper's EIG route": partial(_ours, method="eig", check=False),
    "spd_learn": partial(_peer, peers.spd_learn_function),
    "geoopt": partial(_peer, peers.geoopt_function),
    "**`second_order_pool`**": _ours,
}


def error(got: Tensor, want: Longdouble) -> float | str:
    """‖got − want‖/‖want‖, or the fraction of nonfinite entries."""
    bad = 1 - float(torch.isfinite(got).double().mean())
    if bad:
        return f"NaN {100 * bad:.0f} %"
    size = np.linalg.norm(want.astype(np.float64))
    gap = float(np.linalg.norm((got.detach().double().numpy() - want).astype(np.float64)))
    return float(gap / size) if size else gap


def short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1e}"


def measure(method: Method, f: Tensor, grad: Tensor) -> tuple[Tensor, Tensor] | str:
    """Value and gradient of one method, or the name of its error."""
    leaf = f.clone().requires_grad_()
    try:
        value = method(leaf)
        (slope,) = torch.autograd.grad(value, leaf, grad)
    except Exception as problem:  # a method that raises is reported, not hidden
        return type(problem).__name__
    return value, slope


def relu(m: int, d: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, d, generator=generator, dtype=torch.float64).relu()


def with_singular_values(m: int, d: int, s: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    u, _ = torch.linalg.qr(torch.randn(m, m, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    k = min(m, d)
    return (u[:, :k] * s) @ v[:, :k].mT


def dead_and_double(m: int, d: int) -> Tensor:
    f = relu(m, d)
    f[:, ::3] = 0
    f[1::2] = f[::2]
    return f


def outlier(m: int, d: int, dimension: int) -> Tensor:
    f = relu(m, d)
    f.select(dimension, 0).mul_(1e7)
    return f


CASES: dict[str, Tensor] = {
    "36×64": relu(36, 64),
    "169×64": relu(169, 64),
    "36×256": relu(36, 256),
    "169×256": relu(169, 256),
}
STRESS: dict[str, Tensor] = {
    "dead channels, double rows": dead_and_double(36, 64),
    "σ within 1e-9": with_singular_values(36, 64, 3 + 1e-9 * torch.linspace(0, 1, 36, dtype=torch.float64)),
    "λmax = 1e6": relu(36, 64) * (1e3 / torch.linalg.matrix_norm(relu(36, 64), 2)),
    "κ(F) = 1e5": with_singular_values(36, 64, torch.logspace(-2, 3, 36, dtype=torch.float64)),
    "a channel × 1e7": outlier(36, 64, 1),
    "a row × 1e7": outlier(64, 36, 0),
    "F = 0": torch.zeros(36, 64, dtype=torch.float64),
}


def pooling_table(cases: dict[str, Tensor], function: str, what: str) -> Table:
    """Errors of every method in every case, a cell for float32 / float64 input."""
    rows: dict[str, list[str]] = {name: [name] for name in METHODS}
    for f in cases.values():
        cells: dict[str, list[str]] = {name: [] for name in METHODS}
        for dtype in (torch.float32, torch.float64):
            data = f.to(dtype)
            generator = torch.Generator().manual_seed(7)
            grad = torch.randn(f.shape[1], f.shape[1], generator=generator, dtype=dtype)
            value, slope = pool_longdouble(data.numpy(), grad.numpy(), EPS, function)
            for name, method in METHODS.items():
                got = measure(method(function), data, grad)
                if isinstance(got, str):
                    cells[name].append(got)
                else:
                    cells[name].append(short(error(got[1], slope) if what == "gradient" else error(got[0], value)))
        for name, pair in cells.items():
            rows[name].append(" / ".join(pair))
    return Table(["float32 / float64", *cases], list(rows.values()))


def ncut_table() -> Table:
    """The gradient of J₂ for 600 cells, 20 channels and 12 regions, at growing condition numbers of F."""
    m, d, k = 600, 20, 12
    labels = torch.arange(m) * k // m
    hot = torch.nn.functional.one_hot(labels)
    rows: list[list[str]] = []
    for name, condition in (("ReLU features", 0.0), ("κ(F) = 1e2", 1e2), ("κ(F) = 1e4", 1e4)):
        f = relu(m, d, 3)
        if condition:
            f = with_singular_values(m, d, torch.logspace(0, -float(np.log10(condition)), d, dtype=torch.float64))
        ours, theirs = [], []
        for dtype in (torch.float32, torch.float64):
            leaf = f.to(dtype).requires_grad_()
            (got,) = torch.autograd.grad(matbackprop.normalized_cut_j2(leaf, labels), leaf)
            want = j2_gradient(leaf.detach().numpy(), labels.numpy())
            dense = leaf.detach().clone().requires_grad_()
            basis = torch.linalg.svd(dense, full_matrices=False)[0]
            psi = (hot.to(dtype) / hot.sum(0)) @ hot.mT.to(dtype)
            (auto,) = torch.autograd.grad(0.5 * (basis @ basis.mT - psi).square().sum(), dense)
            theirs.append(short(error(auto, want)))
            ours.append(short(error(got, want)))
        rows.append([name, " / ".join(theirs), " / ".join(ours)])
    return Table(["float32 / float64", "dense projector from `svd` + autograd", "**`normalized_cut_j2`**"], rows)


def operator_table() -> Table:
    """The gradient of every operator at matrices of order 4, against definitions with many digits."""
    rows = []
    for row in operators.ROWS:
        cells = []
        for kind in operators.CASES:
            pair = [operators.gradient_error(row, kind, dtype) for dtype in (torch.float32, torch.float64)]
            cells.append(
                "no gradient" if None in pair else " / ".join(short(value) for value in pair if value is not None)
            )
        rows.append([row.name, *("no gradient" if "none" in cell else cell for cell in cells)])
        print(rows[-1], flush=True)
    return Table(["float32 / float64", *operators.CASES], rows)


def gap_series(gaps: NDArray[np.float64]) -> dict[str, list[float]]:
    """Errors of the gradient of log at a spectrum with relative gaps, float64, for each method."""
    functions: dict[str, Method] = {
        "eigh + autograd": peers.eigh_function("log"),
        "geoopt": peers.geoopt_function("log"),
        "spd_learn": peers.spd_learn_function("log"),
        "matrix_log": matbackprop.matrix_log,
    }
    n, generator = 12, torch.Generator().manual_seed(5)
    series: dict[str, list[float]] = {name: [] for name in functions}
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    grad = torch.randn(n, n, generator=generator, dtype=torch.float64)
    for gap in gaps:
        a = (q * (3 + gap * torch.arange(n, dtype=torch.float64))) @ q.mT
        a = (a + a.mT) / 2
        want = log_gradient_longdouble(a.numpy(), grad.numpy())
        for name, function in functions.items():
            leaf = a.clone().requires_grad_()
            (got,) = torch.autograd.grad(function(leaf), leaf, grad)
            found = error((got + got.mT) / 2, want)
            series[name].append(float("nan") if isinstance(found, str) else max(found, 1e-17))
    return series


@dataclass
class Config:
    """Write the tables and the figure of the page on numerical stability."""


def main(config: Config) -> dict[str, Any]:
    """Write all tables and the figure."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tables = {
        f"{what}_{function}_{name}": pooling_table(cases, function, what)
        for what, function in (("gradient", "log"), ("gradient", "sqrt"), ("value", "log"))
        for name, cases in (("plain", CASES), ("stress", STRESS))
    }
    tables |= {"ncuts": ncut_table(), "operators": operator_table()}
    packages = ", ".join(f"{p} {metadata.version(p)}" for p in ("torch", "numpy", "spd_learn", "geoopt"))
    texts = {name: table.markdown() for name, table in tables.items()}
    texts["versions"] = (
        f"Measured with Python {platform.python_version()}, {packages}, on {platform.machine()}, one thread."
    )
    for name, text in texts.items():
        (ROOT / "docs" / "_generated" / f"stability_{name}.md").write_text(text.rstrip() + "\n")
    gaps = np.logspace(-16, 0, 33)
    lines(
        {name: (gaps, values) for name, values in gap_series(gaps).items()},
        ROOT / "docs" / "_static" / "stability_gap.png",
        title="Gradient of log A, float64, n = 12",
        xlabel="gap between neighboring eigenvalues (relative)",
        ylabel="relative error of dL/dA",
        log="xy",
        emphasis="matrix_log",
    )
    return {"summary": f"{len(texts)} tables and a figure written to {ROOT / 'docs'}"}
