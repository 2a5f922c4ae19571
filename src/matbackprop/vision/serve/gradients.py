"""The gradient explorer: compare methods of differentiating g(A) as two eigenvalues approach each other.

Matrices are 8×8, so that the page updates while the slider moves. The reference is the formula of Daleckiĭ and Kreĭn in
50 decimal digits, for the same rounded matrix.
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
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

import matbackprop
from matbackprop.errors import GaugeWarning
from matbackprop.vision.report.figures import GRID, INK, MUTED, PALETTE, figure, styled, svg

FUNCTIONS = ("log", "sqrt")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
EPS = 1e-4
TIE = -17
"""Exponent that represents a gap of zero."""
GAPS = tuple(range(TIE, 1))
"""Exponents of the relative gap between the two eigenvalues that move."""
SPECTRA = {
    "evenly spaced": (1.0, 2.0, 3.0, 7.0, 8.0, 9.0),
    "from 10⁻³ to 10³": (1e-3, 1e-2, 1e-1, 1e1, 1e2, 1e3),
    "four dead channels": (0.25, 4.0, EPS, EPS, EPS, EPS),
    "whitened features": (3.0,) * 6,
}
"""Spectrum → the six fixed eigenvalues; the two others are p and p(1 + gap)."""
_PAIR = {"evenly spaced": 3.4, "from 10⁻³ to 10³": 1.0, "four dead channels": 1.0, "whitened features": 3.0}
STEPS = 120
"""Training steps."""
_DIGITS = 50
_TERMS = 9


def gap_of(exponent: float) -> float:
    """The relative gap of a slider's position: 10^exponent, and 0 at :data:`TIE`."""
    return 0.0 if exponent <= TIE else 10.0**exponent


def eigenvalues(spectrum: str, exponent: float) -> list[float]:
    """The eight eigenvalues, the two that move first."""
    base = _PAIR[spectrum]
    return [base, base * (1 + gap_of(exponent)), *SPECTRA[spectrum]]


def _rotation(n: int, seed: int = 1) -> Tensor:
    return torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]


def _live(spectrum: str) -> int:
    return 8 - SPECTRA[spectrum].count(EPS)


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore the warning that the paper's formulas do not hold at ties, which is shown here on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GaugeWarning)
        yield


def matrix(spectrum: str, exponent: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """A symmetric matrix with these eigenvalues, rounded to ``dtype``. Dead channels stay exactly decoupled.

    Example:
        >>> torch.linalg.eigvalsh(matrix("evenly spaced", 0)).round(decimals=2).tolist()
        [1.0, 2.0, 3.0, 3.4, 6.8, 7.0, 8.0, 9.0]
    """
    values = torch.tensor(eigenvalues(spectrum, exponent), dtype=torch.float64)
    live = _live(spectrum)
    q = _rotation(live)
    a = torch.diag(values)
    a[:live, :live] = (q * values[:live]) @ q.mT
    return ((a + a.mT) / 2).to(dtype)


class _Taylor(torch.autograd.Function):
    """Eigendecomposition whose backward pass has Σ (λⱼ/λᵢ)ᵏ/λᵢ, k ≤ 9, for 1/(λᵢ − λⱼ): finite and biased at ties.

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
    """Matrix square root by Newton–Schulz steps on A/tr A, post-compensated by √tr A; approximate.

    Y ← Y(3I − ZY)/2, Z ← (3I − ZY)Z/2 from Y = A/tr A, Z = I; Y tends to the root.

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
"""Method → g(A), differentiable, computed in the precision of A. The last one is a square root only."""


def methods(function: str) -> list[str]:
    """Return the methods that support a function."""
    return [name for name in METHODS if function == "sqrt" or not name.startswith("Newton")]


def _direction(n: int = 8) -> Tensor:
    g = torch.randn(n, n, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return g + g.mT


def gradient(method: str, a: Tensor, function: str) -> Tensor:
    """Return the symmetric gradient of ⟨G, g(A)⟩ by one method; NaN if it fails."""
    leaf = a.clone().requires_grad_()
    with _quiet():
        (gradient,) = torch.autograd.grad(METHODS[method](leaf, function), leaf, _direction().to(a.dtype))
    return (gradient + gradient.mT) / 2


def truth(a: Tensor, function: str) -> NDArray[np.float64]:
    """The same gradient in 50 digits: Q(Γ∘(QᵀGQ))Qᵀ with the quotients (g(λᵢ) − g(λⱼ))/(λᵢ − λⱼ), g′ at ties."""
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
    """Method → relative error of its gradient at each of :data:`GAPS`; NaN if it is not finite."""
    out: dict[str, list[float]] = {name: [] for name in methods(function)}
    for exponent in GAPS:
        a = matrix(spectrum, exponent, DTYPES[dtype])
        exact = truth(a, function)
        for name, values in out.items():
            error = gradient(name, a, function).double().numpy() - exact
            values.append(float(np.linalg.norm(error) / np.linalg.norm(exact)))
    return out


class Training(NamedTuple):
    """A short training with one method.

    Attributes:
        losses: one per step, up to the last that is finite.
        failed: the first step with a gradient that is not finite; None if there is none.
    """

    losses: list[float]
    failed: int | None


@cache
def train(spectrum: str, exponent: int, function: str, dtype: str) -> dict[str, Training]:
    """Train features F with g(FᵀF + εI) = g(T) by Adam, from features whose Gram matrix has the chosen spectrum.

    T is a matrix with eigenvalues from ½ to 4; channels that are dead stay dead. The loss is the mean squared error.
    """
    kind = DTYPES[dtype]
    start = matrix(spectrum, exponent)
    live = _live(spectrum)
    target = EPS * torch.eye(8, dtype=torch.float64)
    q = _rotation(live, seed=3)
    target[:live, :live] = (q * torch.linspace(0.5, 4, live, dtype=torch.float64)) @ q.mT
    goal = getattr(matbackprop, f"matrix_{function}")((target + target.mT) / 2).to(kind)
    eye = EPS * torch.eye(8, dtype=kind)
    f0 = torch.zeros_like(start)
    lam, u = torch.linalg.eigh(start[:live, :live])
    f0[:live, :live] = (u * (lam - EPS).clamp_min(0).sqrt()) @ u.mT
    out = {}
    for name in methods(function):
        f = f0.to(kind, copy=True).requires_grad_()
        optimizer = torch.optim.Adam([f], lr=0.03)
        losses: list[float] = []
        failed = None
        for step in range(STEPS):
            optimizer.zero_grad()
            with _quiet():
                loss = (METHODS[name](f.mT @ f + eye, function) - goal).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
            assert f.grad is not None
            losses.append(loss.item())
            if not math.isfinite(losses[-1]) or not f.grad.isfinite().all():
                failed = step + 1
                break
            optimizer.step()
        out[name] = Training([x for x in losses if math.isfinite(x)], failed)
    return out


_WIDTH, _HEIGHT = 4.9, 3.1  # inches: legible on a phone


def gap_text(exponent: float) -> str:
    """``"10⁻⁸"``, or ``"0: a tie"``."""
    power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return "0: they are equal" if exponent <= TIE else f"10{power}"


def explored(spectrum: str, exponent: int, function: str, dtype: str) -> str:
    """Return the HTML for one choice."""
    measured, trained = errors(spectrum, function, dtype), train(spectrum, exponent, function, dtype)
    here = {name: values[GAPS.index(exponent)] for name, values in measured.items()}
    pictures = [
        _picture(_spectrum(spectrum, exponent), "The eight eigenvalues on a logarithmic axis; two of them move."),
        _table(here, trained),
        _picture(
            _errors(measured, exponent),
            "The error of each method's gradient against the gap; the table has the numbers.",
        ),
        _picture(_losses(trained), "The loss of a short training with each method; the table has the numbers."),
    ]
    return f'<div class="explorer">{"".join(pictures)}</div>'


def _picture(fig: Figure, words: str) -> str:
    drawing = svg(fig, prefix=words.split()[1])  # ids on one page must differ
    return f'<figure role="img" aria-label="{escape(words)}">{drawing}</figure>'


def _colors(names: list[str]) -> dict[str, str]:
    return dict(zip(names, PALETTE, strict=False))


def _legend(ax: Axes) -> None:
    ax.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.2), ncols=2, handlelength=1.2, columnspacing=1.2)


@styled
def _spectrum(spectrum: str, exponent: int) -> Figure:
    fig, (ax,) = figure(width=_WIDTH, height=1.6)
    moving, staying = eigenvalues(spectrum, exponent)[:2], eigenvalues(spectrum, exponent)[2:]
    ax.scatter(staying, np.zeros(len(staying)), s=70, color=MUTED, alpha=0.55, linewidths=0)
    ax.scatter(moving, np.zeros(2), s=110, color=PALETTE[1], alpha=0.75, linewidths=0)
    values = moving + staying
    ax.set(
        xscale="log", xlim=(min(values) / 2, max(values) * 2), yticks=[], title="The eigenvalues: the orange pair moves"
    )
    ax.spines["left"].set_visible(False)
    return fig


@styled
def _errors(measured: dict[str, list[float]], exponent: int) -> Figure:
    fig, (ax,) = figure(width=_WIDTH, height=_HEIGHT + 0.5)
    colors = _colors(list(measured))
    ax.axvline(exponent, color=INK, linewidth=1, alpha=0.5)
    for name, values in measured.items():
        y = np.array(values)
        lost = ~np.isfinite(y)
        ax.plot(GAPS, y, color=colors[name], label=name, marker="o", markersize=3)
        ax.plot(np.array(GAPS)[lost], np.full(lost.sum(), 10.0), "x", color=colors[name], markersize=5)
        if not lost[GAPS.index(exponent)]:
            ax.plot(exponent, y[GAPS.index(exponent)], "o", color=colors[name], markersize=8)
    if any(not math.isfinite(v) for values in measured.values() for v in values):
        ax.text(GAPS[-1], 30, "× NaN", ha="right", va="bottom", color=MUTED, fontsize=8.5)
    ticks = [TIE, -12, -8, -4, 0]
    ax.set(yscale="log", xlim=(TIE - 0.6, 0.6), title="Relative error of the gradient", xlabel="gap of the pair")
    ax.set_xticks(ticks, ["0", *(gap_text(t) for t in ticks[1:])])
    ax.set_ylim(None, 200)
    _legend(ax)
    return fig


@styled
def _losses(trained: dict[str, Training]) -> Figure:
    fig, (ax,) = figure(width=_WIDTH, height=_HEIGHT + 0.5)
    colors = _colors(list(trained))
    for name, run in trained.items():
        front: dict[str, Any] = {"zorder": 4, "linewidth": 2.6} if name == "matbackprop" else {}
        ax.plot(range(len(run.losses)), run.losses, color=colors[name], label=name, **front)
        if run.failed is not None:
            ax.plot(len(run.losses) - 1, run.losses[-1], "x", color=colors[name], markersize=11, markeredgewidth=2.5)
    ax.set(yscale="log", xlim=(-3, STEPS), title=f"Loss in {STEPS} steps of training from there", xlabel="step")
    ax.grid(color=GRID)
    _legend(ax)
    return fig


def _table(here: dict[str, float], trained: dict[str, Training]) -> str:
    rows = []
    for name, run in trained.items():
        error = f"{here[name]:.1e}" if math.isfinite(here[name]) else "NaN"
        ends = f"loss {run.losses[-1]:.1e}" if run.failed is None else f"NaN in step {run.failed}"
        color = _colors(list(trained))[name]
        mark = f'<span class="mark" style="background:{color}"></span>'
        rows.append(f'<tr><th scope="row">{mark}{escape(name)}</th><td>{error}</td><td>{ends}</td></tr>')
    head = '<tr><th scope="col">method</th><th scope="col">error here</th><th scope="col">training</th></tr>'
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def said(spectrum: str, exponent: int, function: str, dtype: str) -> str:
    """Return one sentence about the choice, also for screen readers."""
    here = {name: values[GAPS.index(exponent)] for name, values in errors(spectrum, function, dtype).items()}
    autograd, ours = here["torch.linalg.eigh + autograd"], here["matbackprop"]
    theirs = f"is off by {autograd:.0e}" if math.isfinite(autograd) else "is NaN"
    gap = "equal" if gap_of(exponent) == 0 else f"{gap_text(exponent)} apart"
    return f"With two eigenvalues {gap}, autograd through eigh {theirs}; matbackprop is off by {ours:.0e}."
