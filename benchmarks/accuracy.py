"""Measure errors of values and gradients against references of high precision: ``python -m benchmarks accuracy``.

Writes the tables of the page on numerical stability, docs/_generated/stability_*.md, and
docs/_static/stability_gap.png, in a few minutes on a CPU.

The reference of pooling is computed in 80-bit floating point (numpy's longdouble) by one-sided Jacobi rotations on F
itself, which give small singular values to high relative accuracy, and by the closed forms of the divided differences.
The table of all operators uses definitions with 75 digits (tests/helpers/accuracy.py). Neither shares code with the
package.
"""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import matbackprop
from matbackprop.vision.report.figures import lines
from matbackprop.vision.report.tables import Table

HERE = Path(__file__).parents[1] / "docs"
EPS = 1e-3
Longdouble = NDArray[Any]  # of longdouble


# ------------------------------------------------------------------------------------------------------- the reference


def rounds(n: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Rounds of disjoint pairs of n vectors that contain every pair once (a round-robin tournament)."""
    players = list(range(n + n % 2))
    out = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = [(a, b) for a, b in zip(players[:half], reversed(players[half:]), strict=True) if max(a, b) < n]
        out.append((np.array([a for a, _ in pairs]), np.array([b for _, b in pairs])))
        players = [players[0], players[-1], *players[1:-1]]
    return out


def thin_svd(f: Longdouble) -> tuple[Longdouble, Longdouble, Longdouble]:
    """F = U diag(s) Vᵀ by one-sided Jacobi on the shorter side; columns with s = 0 are left out."""
    if f.shape[0] > f.shape[1]:
        v, s, u = thin_svd(f.T)
        return u, s, v
    rows, turn = f.copy(), np.eye(f.shape[0], dtype=np.longdouble)
    eps = np.finfo(np.longdouble).eps
    for _ in range(60):
        worst = 0.0
        for p, q in rounds(len(rows)):
            a, b = rows[p], rows[q]
            alpha, beta, gamma = (a * a).sum(1), (b * b).sum(1), (a * b).sum(1)
            scale = np.sqrt(alpha * beta)
            off = np.abs(gamma) > eps * scale
            worst = max(worst, float(np.max(np.abs(gamma[off]) / scale[off], initial=0)))
            safe = np.where(off, gamma, 1)
            zeta = (beta - alpha) / (2 * safe)
            t = np.where(zeta >= 0, 1, -1) / (np.abs(zeta) + np.sqrt(1 + zeta * zeta))
            t = np.where(off, t, 0)
            c = 1 / np.sqrt(1 + t * t)
            s = c * t
            rows[p], rows[q] = c[:, None] * a - s[:, None] * b, s[:, None] * a + c[:, None] * b
            ta, tb = turn[p].copy(), turn[q].copy()
            turn[p], turn[q] = c[:, None] * ta - s[:, None] * tb, s[:, None] * ta + c[:, None] * tb
        if worst < 4 * eps:
            break
    else:
        raise RuntimeError(f"Jacobi rotations did not converge: {worst:.2g} left")
    s = np.sqrt((rows * rows).sum(1))
    keep = s > 0
    return turn[keep].T, s[keep], (rows[keep] / s[keep, None]).T


def divided_log(a: Longdouble, b: Longdouble) -> Longdouble:
    """(log a − log b)/(a − b), and 1/a if a = b."""
    gap = a - b
    same = gap == 0
    return np.where(same, 1 / a, np.log1p(np.where(same, 0, gap) / b) / np.where(same, 1, gap))


def divided_sqrt(a: Longdouble, b: Longdouble) -> Longdouble:
    """(√a − √b)/(a − b) = 1/(√a + √b)."""
    return 1 / (np.sqrt(a) + np.sqrt(b))


FUNCTIONS = {"log": (np.log, divided_log), "sqrt": (np.sqrt, divided_sqrt)}


def reference_pool(f: Longdouble, grad: Longdouble, function: str) -> tuple[Longdouble, Longdouble]:
    """C = g(FᵀF + εI) and dL/dF for the incoming gradient ``grad``, in 80-bit precision."""
    g, divided = FUNCTIONS[function]
    eps: Any = np.longdouble(EPS)
    sym = (grad + grad.T) / 2
    d = f.shape[1]
    if not np.any(f):
        return np.eye(d, dtype=np.longdouble) * g(eps), np.zeros_like(f)
    u, s, v = thin_svd(f)
    lam: Any = s * s + eps
    value: Any = g(eps) * np.eye(d, dtype=np.longdouble) + (v * (s * s * divided(lam, eps))) @ v.T
    inner = v.T @ sym
    within = inner @ v
    outside = inner - within @ v.T
    gamma = divided(lam[:, None], lam[None, :])
    slope = 2 * (u * s) @ ((gamma * within) @ v.T + divided(lam, eps)[:, None] * outside)
    return value, slope


def reference_j2(f: Longdouble, labels: NDArray[np.int64]) -> Longdouble:
    """∂J₂/∂F = −2(Π_Ψ − Π_F Π_Ψ)(Fᵀ)⁺ in 80 bits, from F = U diag(s) Vᵀ."""
    u, s, v = thin_svd(f)
    hot = (labels[:, None] == np.arange(labels.max() + 1)).astype(np.longdouble)
    mean = hot / hot.sum(0)
    pseudo = (u / s) @ v.T
    psi = hot @ (mean.T @ pseudo)
    return -2 * (psi - u @ (u.T @ psi))


# --------------------------------------------------------------------------------------------------------- the methods


def gram(f: Tensor) -> Tensor:
    return f.mT @ f + EPS * torch.eye(f.shape[-1], dtype=f.dtype)


def by_eigh(f: Tensor, function: str) -> Tensor:
    lam, u = torch.linalg.eigh(gram(f))
    return (u * getattr(lam, function)().unsqueeze(-2)) @ u.mT


def by_svd(f: Tensor, function: str) -> Tensor:
    _, s, vh = torch.linalg.svd(f, full_matrices=False)
    g = getattr(torch, function)
    base = g(torch.tensor(EPS, dtype=f.dtype))
    return base * torch.eye(f.shape[-1], dtype=f.dtype) + (vh.mT * (g(s * s + EPS) - base)) @ vh


def by_spd_learn(f: Tensor, function: str) -> Tensor:
    from spd_learn import functional

    return {"log": functional.matrix_log, "sqrt": functional.matrix_sqrt}[function].apply(gram(f))


def by_geoopt(f: Tensor, function: str) -> Tensor:
    from geoopt import linalg

    return {"log": linalg.sym_logm, "sqrt": linalg.sym_sqrtm}[function](gram(f))


def by_paper(route: Literal["svd", "eig"]) -> Callable[[Tensor, str], Tensor]:
    def run(f: Tensor, function: str) -> Tensor:
        return matbackprop.second_order_pool(f, eps=EPS, function=function, method=route, check=False)

    return run


def by_us(f: Tensor, function: str) -> Tensor:
    return matbackprop.second_order_pool(f, eps=EPS, function=function)


METHODS: dict[str, Callable[[Tensor, str], Tensor]] = {
    "`torch.linalg.eigh` + autograd": by_eigh,
    "`torch.linalg.svd` + autograd": by_svd,
    "the paper's SVD route": by_paper("svd"),
    "the paper's EIG route": by_paper("eig"),
    "spd_learn": by_spd_learn,
    "geoopt": by_geoopt,
    "**`second_order_pool`**": by_us,
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


def measure(
    method: Callable[[Tensor, str], Tensor], f: Tensor, grad: Tensor, function: str
) -> tuple[Tensor, Tensor] | str:
    """Value and gradient of one method, or the name of its error."""
    leaf = f.clone().requires_grad_()
    try:
        value = method(leaf, function)
        (slope,) = torch.autograd.grad(value, leaf, grad)
    except Exception as problem:  # a method that raises is reported, not hidden
        return type(problem).__name__
    return value, slope


# ----------------------------------------------------------------------------------------------------------- the cases


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
            value, slope = reference_pool(
                data.numpy().astype(np.longdouble), grad.numpy().astype(np.longdouble), function
            )
            for name, method in METHODS.items():
                got = measure(method, data, grad, function)
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
            want = reference_j2(leaf.detach().numpy().astype(np.longdouble), labels.numpy())
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
    sys.path.insert(0, str(HERE.parent / "tests"))
    from helpers.accuracy import CASES as KINDS
    from helpers.accuracy import ROWS, gradient_error

    rows = []
    for row in ROWS:
        cells = []
        for kind in KINDS:
            pair = [gradient_error(row, kind, dtype) for dtype in (torch.float32, torch.float64)]
            cells.append(" / ".join("none" if value is None else short(value) for value in pair))
        rows.append([row.name, *("no gradient" if "none" in cell else cell for cell in cells)])
        print(rows[-1], flush=True)
    return Table(["float32 / float64", *KINDS], rows)


def gap_figure(path: Path) -> None:
    """The gradient of log at a spectrum with relative gaps δ, float64."""
    from geoopt import linalg
    from spd_learn import functional

    def eigh_log(a: Tensor) -> Tensor:
        lam, u = torch.linalg.eigh(a)
        return (u * lam.log().unsqueeze(-2)) @ u.mT

    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "eigh + autograd": eigh_log,
        "geoopt": linalg.sym_logm,
        "spd_learn": functional.matrix_log.apply,
        "matrix_log": matbackprop.matrix_log,
    }
    n, gaps = 12, np.logspace(-16, 0, 33)
    series: dict[str, list[float]] = {name: [] for name in functions}
    generator = torch.Generator().manual_seed(5)
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    grad = torch.randn(n, n, generator=generator, dtype=torch.float64)
    sym = ((grad + grad.mT) / 2).numpy().astype(np.longdouble)
    for gap in gaps:
        a = (q * (3 + gap * torch.arange(n, dtype=torch.float64))) @ q.mT
        a = (a + a.mT) / 2
        # A is symmetric and positive definite, so its singular values are its eigenvalues.
        u, s, _ = thin_svd(a.numpy().astype(np.longdouble))
        want = u @ (divided_log(s[:, None], s[None, :]) * (u.T @ sym @ u)) @ u.T
        for name, function in functions.items():
            leaf = a.clone().requires_grad_()
            (got,) = torch.autograd.grad(function(leaf), leaf, grad)
            found = error((got + got.mT) / 2, want)
            series[name].append(float("nan") if isinstance(found, str) else max(found, 1e-17))
    lines(
        {name: (gaps, values) for name, values in series.items()},
        path,
        title="Gradient of log A, float64, n = 12",
        xlabel="gap between neighboring eigenvalues (relative)",
        ylabel="relative error of dL/dA",
        log="xy",
        emphasis="matrix_log",
    )


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    out = HERE / "_generated"
    for what, function in (("gradient", "log"), ("gradient", "sqrt"), ("value", "log")):
        for name, cases in (("plain", CASES), ("stress", STRESS)):
            table = pooling_table(cases, function, what)
            (out / f"stability_{what}_{function}_{name}.md").write_text(table.markdown().rstrip() + "\n")
            print(f"{what} of {function}, {name}\n{table.markdown()}\n", flush=True)
    table = ncut_table()
    (out / "stability_ncuts.md").write_text(table.markdown().rstrip() + "\n")
    print(table.markdown())
    (out / "stability_operators.md").write_text(operator_table().markdown().rstrip() + "\n")
    gap_figure(HERE / "_static" / "stability_gap.png")
    packages = ", ".join(f"{p} {metadata.version(p)}" for p in ("torch", "numpy", "spd_learn", "geoopt"))
    said = f"Measured with Python {platform.python_version()}, {packages}, on {platform.machine()}, one thread.\n"
    (out / "stability_versions.md").write_text(said)
