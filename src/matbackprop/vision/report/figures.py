"""Figures of a run: curves, a confusion matrix, and grids of images.

The functions take plain arrays, write a file if ``path`` is given and return the matplotlib figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray
from scipy.ndimage import uniform_filter1d

from matbackprop.vision.files import atomic_file, is_number
from matbackprop.vision.inference.drawing import WHITE, as_rgb, draw_boundaries, paint_labels

#: Eight hues in drawing order, distinguishable on light and dark pages and with color blindness.
PALETTE = ("#2f7de1", "#e2711d", "#2a9d6f", "#8b5fd3", "#d1495b", "#1798b5", "#b8901f", "#7c8491")

INK = "#1d2025"
MUTED = "#6b7280"
GRID = "#e3e6ea"
SURFACE = "#ffffff"

_FONTS = ("Inter", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans")
_RC: Any = {
    # Missing glyphs fall back to the next font only if families are listed. DejaVu Sans is included in matplotlib and
    # has all Greek letters and mathematical symbols.
    "font.family": [name for name in _FONTS if name in font_manager.get_font_names()],
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=PALETTE),
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "svg.hashsalt": "matbackprop",
    "figure.facecolor": SURFACE,
    "savefig.facecolor": SURFACE,
    "figure.constrained_layout.use": True,
}

styled = mpl.rc_context(_RC)  #: Decorator that applies the shared style instead of the settings of the user.


@styled
def figure(
    rows: int = 1,
    columns: int = 1,
    *,
    width: float = 6.4,
    height: float = 3.6,
    height_ratios: Sequence[float] | None = None,
) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``width`` × ``height`` inches and its ``rows`` × ``columns`` axes, row by row."""
    fig = Figure(figsize=(width, height))
    return fig, list(fig.subplots(rows, columns, squeeze=False, height_ratios=height_ratios).ravel())


@styled
def finish(fig: Figure, path: str | Path | None) -> Figure:
    """Write ``fig`` to ``path``, if given, and return it. The folder is created, and the suffix selects the format."""
    if path is not None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # No date, so that files are reproducible.
        metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
        with atomic_file(path) as file:
            fig.savefig(file, format=path.suffix[1:], dpi=144, metadata=metadata)
    return fig


_STAGES = ("train", "val", "test")
_BOOKKEEPING = ("step", "epoch", "time")


def curve_panels(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Group the names in rows of ``metrics.jsonl`` into panels, title → names.

    Training and validation values of one quantity share a panel. The loss is first, followed by validation metrics,
    other training metrics, other groups such as ``layer``, the learning rate and the speed.

    Example:
        >>> curve_panels([{"step": 1, "train/loss": 2.0, "layer/rank": 4}, {"step": 2, "val/loss": 1.5}])
        {'loss': ['train/loss', 'val/loss'], 'layer rank': ['layer/rank']}
    """
    panels: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for row in metrics for name, value in row.items() if is_number(value)):
        if name not in _BOOKKEEPING:
            stage, _, rest = name.partition("/")
            title = (rest if stage in _STAGES and rest else name).replace("/", " ").replace("_", " ")
            panels.setdefault(title, []).append(name)

    def rank(title: str) -> int:
        if title in ("loss", "learning rate", "steps per second"):
            return 0 if title == "loss" else 4
        stages = {name.partition("/")[0] for name in panels[title]}
        return 1 if stages & {"val", "test"} else 2 if "train" in stages else 3

    return {title: panels[title] for title in sorted(panels, key=rank)}


@styled
def curves(
    metrics: Sequence[Mapping[str, Any]],
    path: str | Path | None = None,
    *,
    panels: Mapping[str, Sequence[str]] | None = None,
) -> Figure:
    """Draw the curves of the rows of ``metrics.jsonl``, one panel per quantity.

    ``panels`` maps titles to names; by default it is all of :func:`curve_panels`. Long curves are drawn faintly with
    their running mean on top. A panel whose values span more than a factor of 300 has a logarithmic axis. Missing and
    null values (metrics that were not finite) are skipped.
    """
    chosen = {title: list(names) for title, names in (panels or curve_panels(metrics)).items()}
    columns = min(3, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    fig, axes = figure(rows, columns, width=3.5 * columns + 0.3, height=2.5 * rows + 0.1)
    for ax, (title, names) in zip(axes, chosen.items(), strict=False):
        _panel(ax, title, names, metrics)
    for ax in axes[len(chosen) :]:
        ax.set_visible(False)
    return finish(fig, path)


def _panel(ax: Axes, title: str, names: Sequence[str], metrics: Sequence[Mapping[str, Any]]) -> None:
    drawn = []
    for name, color in zip(names, PALETTE * len(names), strict=False):
        points = [(row.get("step", i), row[name]) for i, row in enumerate(metrics) if row.get(name) is not None]
        x, y = np.array(points, dtype=np.float64).reshape(-1, 2).T
        stage = name.partition("/")[0]
        label = stage if stage in _STAGES else name
        if len(y) > 150:
            ax.plot(x, y, color=color, alpha=0.22, linewidth=0.8)
            ax.plot(x, uniform_filter1d(y, len(y) // 100 * 2 + 1, mode="nearest"), color=color, label=label)
        else:
            ax.plot(x, y, color=color, label=label, marker="o" if len(y) <= 30 else None, markersize=3.5)
        drawn.append(y)
    values = np.concatenate(drawn)
    finite = values[np.isfinite(values)]
    if finite.size and finite.min() > 0 and finite.max() / finite.min() > 300:
        ax.set_yscale("log")
    if len(names) > 1:  # above the curves, next to the title
        ax.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=len(names), borderaxespad=0)
    ax.set(title=title, xlabel="step")
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))


@styled
def lines(
    series: Mapping[str, tuple[ArrayLike, ArrayLike]],
    path: str | Path | None = None,
    *,
    title: str = "",
    xlabel: str = "",
    ylabel: str = "",
    log: str = "",
    emphasis: str | None = None,
) -> Figure:
    """Draw named lines (x, y) with a legend next to the plot.

    ``log`` names the logarithmic axes: ``""``, ``"x"``, ``"y"`` or ``"xy"``. The line ``emphasis`` is drawn thicker.
    """
    fig, (ax,) = figure(width=7.0, height=3.8)
    for (name, (px, py)), color in zip(series.items(), PALETTE * len(series), strict=False):
        weight = {"linewidth": 2.6, "zorder": 3} if name == emphasis else {"linewidth": 1.6, "zorder": 2}
        ax.plot(np.asarray(px), np.asarray(py), color=color, label=name, marker="o", **weight)  # type: ignore[arg-type]
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel, **{f"{axis}scale": "log" for axis in log})
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return finish(fig, path)


@styled
def confusion_matrix(counts: ArrayLike, names: Sequence[str], path: str | Path | None = None) -> Figure:
    """Draw counts (k, k) of true classes (rows) and predictions (columns) as fractions of their rows."""
    array = np.asarray(counts, dtype=np.float64)
    k = len(names)
    fraction = array / np.maximum(array.sum(1, keepdims=True), 1)
    side = float(np.clip(0.42 * k + 1.2, 3.4, 12.0))
    fig, (ax,) = figure(width=side + 0.9, height=side)
    image = ax.imshow(fraction, cmap="Blues", vmin=0, vmax=1)
    size = float(np.clip(130 / k, 3.5, 8.5))
    ax.set_xticks(range(k), names, rotation=90 if k > 6 else 30, ha="center" if k > 6 else "right", fontsize=size)
    ax.set_yticks(range(k), names, fontsize=size)
    ax.grid(False)
    for side_name in ("left", "bottom"):
        ax.spines[side_name].set_visible(False)
    if k <= 16:
        for i, j in np.ndindex(k, k):
            if array[i, j]:
                color = "white" if fraction[i, j] > 0.55 else INK
                ax.text(j, i, f"{100 * fraction[i, j]:.0f}", ha="center", va="center", fontsize=size, color=color)
    ax.set(xlabel="predicted", ylabel="true", title="confusion")
    bar = fig.colorbar(image, ax=ax, shrink=0.75, pad=0.02)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.set_label("fraction of the true class")
    return finish(fig, path)


def match_labels(labels: ArrayLike, reference: ArrayLike) -> NDArray[np.int64]:
    """Renumber a label map to match the labels of overlapping regions in a reference map.

    Regions are paired one to one so that the pairs share as many pixels as possible. Unpaired regions get labels that
    do not occur in ``reference``.
    """
    from scipy.optimize import linear_sum_assignment

    ids, first = np.unique(np.asarray(labels), return_inverse=True)
    known, second = np.unique(np.asarray(reference), return_inverse=True)
    shared = np.zeros((len(ids), len(known)), dtype=np.int64)
    np.add.at(shared, (first.ravel(), second.ravel()), 1)
    rows, columns = linear_sum_assignment(shared, maximize=True)
    numbers = np.full(len(ids), -1, dtype=np.int64)
    numbers[rows] = known[columns]
    numbers[numbers < 0] = max(int(known.max()), -1) + 1 + np.arange(int((numbers < 0).sum()))
    return numbers[first].reshape(np.shape(labels))


@styled
def segmentation_grid(
    columns: Sequence[str],
    rows: Sequence[Sequence[ArrayLike | None]],
    path: str | Path | None = None,
    *,
    width: float = 11.0,
) -> Figure:
    """Draw images next to their segmentations, one row per image and one title per column.

    A cell is an image, an integer label map (h, w), or ``None`` if empty. Colors are matched to overlapping regions in
    the last label map of the row, usually a human map. ``width`` is in inches.
    """
    images = [_painted(row) for row in rows]
    sizes = [next((p.shape for p in row if p is not None), (3, 4)) for row in images]
    ratios = [size[0] / size[1] for size in sizes]
    height = width / len(columns) * sum(ratios) + 0.35
    fig, axes = figure(len(rows), len(columns), width=width, height=height, height_ratios=ratios)
    fig.get_layout_engine().set(w_pad=0.03, h_pad=0.03, wspace=0, hspace=0)  # type: ignore[union-attr, call-arg]
    for ax, image in zip(axes, (p for row in images for p in row), strict=True):
        ax.set_axis_off()
        if image is not None:
            ax.imshow(image, interpolation="nearest")
    for ax, name in zip(axes, columns, strict=False):
        ax.set_title(name, fontsize=9.5, loc="center", pad=4)
    return finish(fig, path)


def _painted(row: Sequence[ArrayLike | None]) -> list[NDArray[np.uint8] | None]:
    arrays = [None if cell is None else np.asarray(cell) for cell in row]
    maps = [a for a in arrays if a is not None and a.ndim == 2 and a.dtype.kind in "biu"]
    images: list[NDArray[np.uint8] | None] = []
    for array in arrays:
        if array is not None and any(array is one for one in maps):
            labels = match_labels(array, maps[-1]) if array.shape == maps[-1].shape else array
            images.append(draw_boundaries(paint_labels(labels), labels, color=WHITE))
        else:
            images.append(None if array is None else as_rgb(array))
    return images
