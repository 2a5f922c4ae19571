"""Gradient explorer: compare gradients of g(A) as two eigenvalues approach each other.

Matrices are 8×8, so that the page updates while the slider moves. The reference is the formula of Daleckiĭ and Kreĭn
with 50 decimal digits, for the same rounded matrix.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from html import escape
from typing import Any, NamedTuple

import mpmath
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

import matbackprop
from matbackprop.errors import GaugeWarning
from matbackprop.vision.report.figures import INK, MUTED, PALETTE, figure, styled, svg

FUNCTIONS = ("log", "sqrt")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
EPS = 1e-4
TIE = -17
"""Exponent that represents a gap of zero."""
GAPS = tuple(range(TIE, 1))
"""Exponents of the relative gap between the two eigenvalues."""
SPECTRA = {
    "evenly spaced": (3.4, 1.0, 2.0, 3.0, 7.0, 8.0, 9.0),
    "from 10⁻³ to 10³": (1.0, 1e-3, 1e-2, 1e-1, 1e1, 1e2, 1e3),
    "four dead channels": (1.0, 0.25, 4.0, EPS, EPS, EPS, EPS),
    "whitened features": (3.0,) * 7,
}
"""Spectrum → p and six fixed eigenvalues; the eighth eigenvalue is p(1 + gap)."""
STEPS = 120
"""Training steps."""
_DIGITS = 50
_TERMS = 9


def _live(spectrum: str) -> int:
    return 8 - SPECTRA[spectrum].count(EPS)


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore the warning that the formulas of the paper are invalid for equal eigenvalues."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GaugeWarning)
        yield


def matrix(spectrum: str, exponent: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a symmetric matrix with the given spectrum, rounded to ``dtype``. Dead channels are decoupled."""
    gap = 0.0 if exponent == TIE else 10.0**exponent
    p, *others = SPECTRA[spectrum]
    values = torch.tensor([p, p * (1 + gap), *others], dtype=torch.float64)
    return _rotated(values[: _live(spectrum)], seed=1).to(dtype)


def _rotated(values: Tensor, seed: int) -> Tensor:
    """Return an 8×8 matrix with these eigenvalues in a random basis; dead channels have ε on the diagonal."""
    n = len(values)
    q, _ = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    a = EPS * torch.eye(8, dtype=torch.float64)
    a[:n, :n] = (q * values) @ q.mT
    return (a + a.mT) / 2


class _Taylor(torch.autograd.Function):
    """Eigendecomposition with 1/(λᵢ − λⱼ) ≈ Σ (λⱼ/λᵢ)ᵏ/λᵢ, k ≤ 9, in the backward pass: finite but biased at ties.

    Reference:
        Wang, Dang, Hu, Fua, Salzmann, "Robust Differentiable SVD", TPAMI 2021.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> tuple[Tensor, Tensor]:
        lam, u = torch.linalg.eigh(a)
        ctx.save_for_backward(lam, u)
        return lam, u

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        lam, u = ctx.saved_tensors
        g_lam, g_u = gradients
        high, low = torch.maximum(lam[:, None], lam), torch.minimum(lam[:, None], lam)
        series = sum((low / high) ** k for k in range(_TERMS + 1)) / high
        k = torch.sign(torch.arange(len(lam)) - torch.arange(len(lam))[:, None]) * series
        inner = k * (u.mT @ g_u)
        return u @ ((inner + inner.mT) / 2 + torch.diag(g_lam)) @ u.mT


def _composed(pair: tuple[Tensor, Tensor], function: str) -> Tensor:
    lam, u = pair
    return (u * getattr(torch, function)(lam)) @ u.mT


def isqrt(a: Tensor, steps: int = 5) -> Tensor:
    """Approximate the matrix square root by Newton–Schulz iterations on A/tr A, rescaled by √tr A.

    Y ← Y(3I − ZY)/2, Z ← (3I − ZY)Z/2 from Y = A/tr A, Z = I; Y converges to the square root.

    Reference:
        Li, Xie, Wang, Gao, "Towards Faster Training of Global Covariance Pooling Networks by Iterative Matrix Square
        Root Normalization", CVPR 2018, equations 2 to 5.
    """
    trace = a.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    y, z = a / trace, eye.expand_as(a)
    for _ in range(steps):
        middle = 0.5 * (3 * eye - z @ y)
        y, z = y @ middle, middle @ z
    return y * trace.sqrt()


METHODS: dict[str, Callable[[Tensor, str], Tensor]] = {
    "matbackprop": lambda a, g: getattr(matbackprop, f"matrix_{g}")(a, precision=a.dtype),
    "torch.linalg.eigh + autograd": lambda a, g: _composed(torch.linalg.eigh(a), g),
    "the paper's formulas": lambda a, g: _composed(matbackprop.eigh(a, ties="drop", precision=a.dtype), g),
    "Taylor series, 9 terms": lambda a, g: _composed(_Taylor.apply(a), g),
    "Newton–Schulz, 5 steps": lambda a, g: isqrt(a),
}
"""Method → g(A), differentiable, computed in the precision of A. The last method supports only the square root."""


def methods(function: str) -> list[str]:
    """Return the methods that support a function."""
    return [name for name in METHODS if function == "sqrt" or not name.startswith("Newton")]


def _direction() -> Tensor:
    g = torch.randn(8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return g + g.mT


def gradient(method: str, a: Tensor, function: str) -> Tensor:
    """Return the symmetric gradient of ⟨G, g(A)⟩ by one method; NaN if it fails."""
    leaf = a.clone().requires_grad_()
    with _quiet():
        (gradient,) = torch.autograd.grad(METHODS[method](leaf, function), leaf, _direction().to(a.dtype))
    return (gradient + gradient.mT) / 2


def truth(a: Tensor, function: str) -> NDArray[np.float64]:
    """Compute the gradient Q(Γ∘(QᵀGQ))Qᵀ, Γᵢⱼ = (g(λᵢ) − g(λⱼ))/(λᵢ − λⱼ) or g′ at ties, with 50 digits."""
    with mpmath.workdps(_DIGITS):
        g = getattr(mpmath, function)
        slope = {"log": lambda x: 1 / x, "sqrt": lambda x: 1 / (2 * mpmath.sqrt(x))}[function]
        lam, q = mpmath.eigsy(mpmath.matrix(a.double().tolist()))
        inner = q.T * mpmath.matrix(_direction().to(a.dtype).double().tolist()) * q
        for i, x in enumerate(lam):
            for j, y in enumerate(lam):
                tied = abs(x - y) <= mpmath.mpf(10) ** (-_DIGITS // 2) * x
                inner[i, j] *= slope(x) if tied else (g(x) - g(y)) / (x - y)
        return np.array((q * inner * q.T).tolist(), dtype=float)


@cache
def errors(spectrum: str, function: str, dtype: str) -> dict[str, list[float]]:
    """Return method → relative errors of its gradient at :data:`GAPS`; NaN for non-finite gradients."""
    out: dict[str, list[float]] = {name: [] for name in methods(function)}
    for exponent in GAPS:
        a = matrix(spectrum, exponent, DTYPES[dtype])
        exact = truth(a, function)
        for name, values in out.items():
            error = gradient(name, a, function).double().numpy() - exact
            values.append(float(np.linalg.norm(error) / np.linalg.norm(exact)))
    return out


class Training(NamedTuple):
    """Short training run with one method."""

    losses: list[float]
    """Loss of each step, up to the last finite one."""
    failed: int | None
    """First step with a non-finite gradient."""


@cache
def train(spectrum: str, exponent: int, function: str, dtype: str) -> dict[str, Training]:
    """Train features F by Adam so that g(FᵀF + εI) = g(T), with the mean squared error as loss.

    The Gram matrix of the initial features has the given spectrum. T has eigenvalues from ½ to 4 on live channels.
    """
    live = _live(spectrum)
    target = _rotated(torch.linspace(0.5, 4, live, dtype=torch.float64), seed=3)
    goal = getattr(matbackprop, f"matrix_{function}")(target).to(DTYPES[dtype])
    lam, u = torch.linalg.eigh(matrix(spectrum, exponent)[:live, :live])
    start = torch.zeros(8, 8, dtype=torch.float64)
    start[:live, :live] = (u * (lam - EPS).clamp_min(0).sqrt()) @ u.mT
    return {name: _train_one(name, start.to(DTYPES[dtype]), goal, function) for name in methods(function)}


def _train_one(method: str, start: Tensor, goal: Tensor, function: str) -> Training:
    f = start.clone().requires_grad_()
    eye = EPS * torch.eye(8, dtype=f.dtype)
    optimizer = torch.optim.Adam([f], lr=0.03)
    losses: list[float] = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        with _quiet():
            loss = (METHODS[method](f.mT @ f + eye, function) - goal).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
        if loss.isfinite():
            losses.append(loss.item())
        assert f.grad is not None
        if not loss.isfinite() or not f.grad.isfinite().all():
            return Training(losses, failed=step)
        optimizer.step()
    return Training(losses, failed=None)


def gap_text(exponent: int) -> str:
    """Format a gap, such as ``"10⁻⁸"``, or ``"0"`` at :data:`TIE`."""
    power = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return "0" if exponent == TIE else f"10{power}"


def explore(spectrum: str, exponent: int, function: str, dtype: str) -> tuple[str, str]:
    """Return a sentence and HTML with a table, the errors against the gap, and the losses of a training run."""
    measured, trained = errors(spectrum, function, dtype), train(spectrum, exponent, function, dtype)
    here = {name: values[GAPS.index(exponent)] for name, values in measured.items()}
    autograd = here["torch.linalg.eigh + autograd"]
    gap = "equal" if exponent == TIE else f"{gap_text(exponent)} apart"
    theirs = f"has a relative error of {autograd:.0e}" if math.isfinite(autograd) else "returns NaN"
    ours = f"the relative error of matbackprop is {here['matbackprop']:.0e}"
    sentence = f"Two eigenvalues are {gap}: autograd through eigh {theirs}; {ours}."
    parts = [
        _table(here, trained),
        _picture(_draw_errors(measured, exponent), "Error of the gradient of each method against the gap"),
        _picture(_draw_losses(trained), "Loss of a short training with each method"),
    ]
    return sentence, f'<div class="explorer">{"".join(parts)}</div>'


def _picture(fig: Figure, description: str) -> str:
    drawing = svg(fig, prefix=description.split()[0])  # ids on a page must be unique
    return f'<figure role="img" aria-label="{description}; the table has the numbers.">{drawing}</figure>'


@styled
def _draw_errors(measured: dict[str, list[float]], exponent: int) -> Figure:
    fig, (ax,) = figure(width=4.9, height=3.2)  # legible on a phone
    ax.axvline(exponent, color=INK, linewidth=1, alpha=0.5)
    for i, (values, color) in enumerate(zip(measured.values(), PALETTE, strict=False)):
        lost = ~np.isfinite(values)
        ax.plot(GAPS, values, color=color, linestyle=_dashes(i))
        ax.plot(np.array(GAPS)[lost], np.full(lost.sum(), 10.0), "x", color=color, markersize=5)
        if lost.any():
            ax.text(GAPS[-1], 30, "× NaN", ha="right", va="bottom", color=MUTED, fontsize=8.5)
    ticks = (TIE, -12, -8, -4, 0)
    ax.set_xticks(ticks, map(gap_text, ticks))
    ax.set(yscale="log", xlim=(TIE - 0.6, 0.6), ylim=(None, 200))
    ax.set(title="Relative error of the gradient", xlabel="relative gap of the pair")
    return fig


@styled
def _draw_losses(trained: dict[str, Training]) -> Figure:
    fig, (ax,) = figure(width=4.9, height=3.2)
    for i, (run, color) in enumerate(zip(trained.values(), PALETTE, strict=False)):
        ax.plot(run.losses, color=color, linestyle=_dashes(i))
        if run.failed is not None:
            ax.plot(len(run.losses) - 1, run.losses[-1], "x", color=color, markersize=11, markeredgewidth=2.5)
    ax.set(yscale="log", xlim=(-3, STEPS), title=f"Loss in {STEPS} steps of training", xlabel="step")
    return fig


def _dashes(i: int) -> tuple[int, tuple[int, int] | None]:
    return (3 * i, (3, 9)) if i else (0, None)  # shows all colors of coincident curves


def _table(here: dict[str, float], trained: dict[str, Training]) -> str:
    rows = []
    for (name, run), color in zip(trained.items(), PALETTE, strict=False):
        error = f"{here[name]:.1e}" if math.isfinite(here[name]) else "NaN"
        ends = f"loss {run.losses[-1]:.1e}" if run.failed is None else f"NaN in step {run.failed}"
        mark = f'<span class="mark" style="background:{color}"></span>'
        rows.append(f'<tr><th scope="row">{mark}{escape(name)}</th><td>{error}</td><td>{ends}</td></tr>')
    head = '<tr><th scope="col">method</th><th scope="col">relative error</th><th scope="col">training</th></tr>'
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
