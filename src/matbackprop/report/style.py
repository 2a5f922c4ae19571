"""The look that all figures share, and how a figure becomes a file or an SVG that follows the page's theme.

Figures are made without ``pyplot``: no window system, no figure that stays open.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

PALETTE = ("#2f7de1", "#e2711d", "#2a9d6f", "#8b5fd3", "#d1495b", "#1798b5", "#b8901f", "#7c8491")
"""Eight hues that stay apart on white, on near-black and for the common kinds of colour blindness, in drawing order."""

INK = "#1d2025"
MUTED = "#6b7280"
GRID = "#e3e6ea"
SURFACE = "#ffffff"
CONTINUOUS = LinearSegmentedColormap.from_list("matbackprop", ["#f4f7fb", "#9cc3f0", "#2f7de1", "#16407c"])
"""One hue from light to dark for magnitudes such as a confusion matrix."""

_FONTS = ("Inter", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans")
_RC: Any = {
    # A list of families, not a generic one, so that a sign missing in the first is taken from the next. DejaVu Sans
    # comes with matplotlib and has all Greek letters and mathematical signs that we write.
    "font.family": [name for name in _FONTS if name in font_manager.get_font_names()],
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.titlecolor": INK,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.linewidth": 0.9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=PALETTE),
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "lines.markersize": 4.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "matbackprop",
    "figure.facecolor": SURFACE,
    "savefig.facecolor": SURFACE,
    "figure.constrained_layout.use": True,
}


styled = mpl.rc_context(_RC)
"""Decorator: everything that the function draws is in the shared style, whatever the user's own settings are."""


@styled
def figure(rows: int = 1, columns: int = 1, *, width: float = 6.4, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """Make a figure of ``width`` × ``height`` inches with ``rows`` × ``columns`` axes, given row by row.

    Example:
        >>> fig, axes = figure(1, 2, width=8, height=3)
        >>> len(axes)
        2
    """
    fig = Figure(figsize=(width, height))
    FigureCanvasAgg(fig)
    return fig, list(np.atleast_1d(fig.subplots(rows, columns)).ravel())


@styled
def finish(fig: Figure, path: str | Path | None) -> Figure:
    """Write ``fig`` to ``path`` (the folder is made; the ending chooses the format) if one is given, and return it.

    Example:
        >>> import tempfile
        >>> fig, _ = figure()
        >>> target = Path(tempfile.mkdtemp()) / "figures" / "empty.png"
        >>> _ = finish(fig, target)
        >>> target.exists()
        True
    """
    if path is not None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Files carry no date: the same data give the same bytes.
        metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
        fig.savefig(path, dpi=144, metadata=metadata)
    return fig


@styled
def svg(fig: Figure, *, prefix: str = "f") -> str:
    """Return ``fig`` as an ``<svg>`` element for inlining in a page, with its inks taken from the page's CSS variables.

    The text, axes and grid colours become ``var(--ink)``, ``var(--muted)`` and ``var(--grid)``, so that one drawing
    serves a light and a dark page; ``prefix``, put before every id, keeps several drawings on one page apart.

    Example:
        >>> fig, (axes,) = figure()
        >>> _ = axes.set_title("loss")
        >>> text = svg(fig, prefix="a")
        >>> text.startswith("<svg") and "var(--ink" in text
        True
    """
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    for colour, name in ((INK, "--ink"), (MUTED, "--muted"), (GRID, "--grid"), (SURFACE, "--surface")):
        text = text.replace(colour, f"var({name}, {colour})")
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", text)
