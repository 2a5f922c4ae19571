"""What the gradient explorer shows: the spectrum, errors against the gap, a training, and a table in words."""

from __future__ import annotations

import math
from html import escape
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from matbackprop.report.figures import GRID, INK, MUTED, PALETTE, figure, styled, svg
from matbackprop.serve.gradients import GAPS, STEPS, TIE, Training, eigenvalues, errors, gap_of, train

__all__ = ["explored", "gap_text"]

_WIDTH, _HEIGHT = 4.9, 3.1  # inches: legible at the width of a telephone


def gap_text(exponent: float) -> str:
    """``"10⁻⁸"``, or ``"0: a tie"``."""
    power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return "0: they are equal" if exponent <= TIE else f"10{power}"


def explored(spectrum: str, exponent: int, function: str, dtype: str) -> str:
    """Everything the page shows for one choice, as HTML."""
    found, trained = errors(spectrum, function, dtype), train(spectrum, exponent, function, dtype)
    here = {name: values[GAPS.index(exponent)] for name, values in found.items()}
    pictures = [
        _picture(_spectrum(spectrum, exponent), "The eight eigenvalues on a logarithmic axis; two of them move."),
        _table(here, trained),
        _picture(
            _errors(found, exponent), "The error of each method's gradient against the gap; the table has the numbers."
        ),
        _picture(_losses(trained), "The loss of a short training with each method; the table has the numbers."),
    ]
    return f'<div class="explorer">{"".join(pictures)}</div>'


def _picture(fig: Figure, words: str) -> str:
    drawing = svg(fig, prefix=words.split()[1])  # ids on one page must differ
    return f'<figure role="img" aria-label="{escape(words)}">{drawing}</figure>'


def _colours(names: list[str]) -> dict[str, str]:
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
def _errors(found: dict[str, list[float]], exponent: int) -> Figure:
    fig, (ax,) = figure(width=_WIDTH, height=_HEIGHT + 0.5)
    colours = _colours(list(found))
    ax.axvline(exponent, color=INK, linewidth=1, alpha=0.5)
    for name, values in found.items():
        y = np.array(values)
        lost = ~np.isfinite(y)
        ax.plot(GAPS, y, color=colours[name], label=name, marker="o", markersize=3)
        ax.plot(np.array(GAPS)[lost], np.full(lost.sum(), 10.0), "x", color=colours[name], markersize=5)
        if not lost[GAPS.index(exponent)]:
            ax.plot(exponent, y[GAPS.index(exponent)], "o", color=colours[name], markersize=8)
    if any(not math.isfinite(v) for values in found.values() for v in values):
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
    colours = _colours(list(trained))
    for name, run in trained.items():
        front: dict[str, Any] = {"zorder": 4, "linewidth": 2.6} if name == "matbackprop" else {}
        ax.plot(range(len(run.losses)), run.losses, color=colours[name], label=name, **front)
        if run.failed is not None:
            ax.plot(len(run.losses) - 1, run.losses[-1], "x", color=colours[name], markersize=11, markeredgewidth=2.5)
    ax.set(yscale="log", xlim=(-3, STEPS), title=f"Loss in {STEPS} steps of training from there", xlabel="step")
    ax.grid(color=GRID)
    _legend(ax)
    return fig


def _table(here: dict[str, float], trained: dict[str, Training]) -> str:
    rows = []
    for name, run in trained.items():
        error = f"{here[name]:.1e}" if math.isfinite(here[name]) else "NaN"
        ends = f"loss {run.losses[-1]:.1e}" if run.failed is None else f"NaN in step {run.failed}"
        colour = _colours(list(trained))[name]
        mark = f'<span class="mark" style="background:{colour}"></span>'
        rows.append(f'<tr><th scope="row">{mark}{escape(name)}</th><td>{error}</td><td>{ends}</td></tr>')
    head = '<tr><th scope="col">method</th><th scope="col">error here</th><th scope="col">training</th></tr>'
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def said(spectrum: str, exponent: int, function: str, dtype: str) -> str:
    """One sentence about the choice, for the eye and for screen readers."""
    here = {name: values[GAPS.index(exponent)] for name, values in errors(spectrum, function, dtype).items()}
    autograd, ours = here["torch.linalg.eigh + autograd"], here["matbackprop"]
    theirs = f"is off by {autograd:.0e}" if math.isfinite(autograd) else "is NaN"
    gap = "equal" if gap_of(exponent) == 0 else f"{gap_text(exponent)} apart"
    return f"With two eigenvalues {gap}, autograd through eigh {theirs}; matbackprop is off by {ours:.0e}."
