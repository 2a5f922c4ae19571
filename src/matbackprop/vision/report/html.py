"""Self-contained HTML report of a run: configuration, curves and results.

The page embeds images and styles, loads no other files, and supports light and dark color schemes.
"""

from __future__ import annotations

import base64
import html
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from matbackprop.errors import DataError
from matbackprop.vision.data.pictures import open_picture
from matbackprop.vision.files import atomic_write, is_number, read_bytes
from matbackprop.vision.report.figures import curve_panels, curves, svg
from matbackprop.vision.report.tables import Table, format_number

if TYPE_CHECKING:
    from matbackprop.vision.training.run_folder import RunFolder

GLOSSARY = {
    "loss": "training objective, mean over regions or images",
    "objective": "normalized-cut objective: distance between the span of the features and that of the human regions",
    "error": "percent of the regions whose most likely class is wrong",
    "error_large": "the same for regions of at least 400 pixels",
    "gradient_norm": "norm of the gradient; under layer/, of the gradient of the structured layer's output",
    "rank": "number of eigenvalues that are not negligible relative to the largest",
    "eigen_max": "largest eigenvalue of the features' Gram matrix",
    "eigen_min": "smallest eigenvalue of the features' Gram matrix",
    "eps": "ε, which is added to every eigenvalue before the matrix function",
    "power": "exponent of the matrix power",
    "soft_rank": "trace of the soft projector",
}
"""Descriptions of the metrics in ``metrics.jsonl`` and ``summary.json``, by the last part of their names."""

_HEADLINES = 6
_TEMPLATE = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))


class Page:
    """HTML page, assembled in order."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title = title
        self._parts = [f"<h1>{html.escape(title)}</h1>"]
        if subtitle:
            self._parts.append(f'<p class="subtitle">{html.escape(subtitle)}</p>')
        self._top = len(self._parts)

    def section(self, heading: str) -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{html.escape(heading)}</h2>")

    def text(self, paragraph: str) -> None:
        """Add a paragraph of plain text."""
        self._parts.append(f"<p>{html.escape(paragraph)}</p>")

    def tiles(self, values: Mapping[str, float | str]) -> None:
        """Add a row of key values below the title."""
        cells = [
            f'<div class="tile"><div class="name">{html.escape(name)}</div>'
            f'<div class="value">{html.escape(_as_text(value))}</div></div>'
            for name, value in values.items()
        ]
        self._parts.insert(self._top, f'<div class="tiles">{"".join(cells)}</div>')

    def table(self, table: Table) -> None:
        """Add a table."""
        self._parts.append(f'<div class="card">{table.html()}</div>')

    def curves(self, metrics: Sequence[Mapping[str, Any]], panels: Mapping[str, Sequence[str]] | None = None) -> None:
        """Add the curves of a run; see :func:`~matbackprop.vision.report.figures.curves`."""
        drawings = [
            svg(curves(metrics, panels={title: names}), prefix=f"p{len(self._parts)}-{number}")
            for number, (title, names) in enumerate((panels or curve_panels(metrics)).items())
        ]
        self._parts.append(f'<div class="card panels">{"".join(drawings)}</div>')

    def image(self, path: Path, caption: str) -> None:
        """Embed a PNG file at its size in inches."""
        data = base64.b64encode(read_bytes(path, 1 << 26)).decode("ascii")
        with open_picture(path) as file:
            dpi = max(float(file.info.get("dpi", (96.0,))[0]), 96.0)
            width = round(file.width * 96 / dpi)
        text = html.escape(caption)
        image = f'<img alt="{text}" width="{width}" src="data:image/png;base64,{data}">'
        self._parts.append(f'<figure class="card">{image}<figcaption>{text}</figcaption></figure>')

    def folded(self, heading: str, text: str) -> None:
        """Add preformatted text, collapsed by default."""
        self._parts.append(
            f"<details><summary>{html.escape(heading)}</summary><pre>{html.escape(text)}</pre></details>"
        )

    def write(self, path: Path) -> Path:
        """Write the page and return its path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, _TEMPLATE.substitute(title=html.escape(self.title), body="\n".join(self._parts)))
        return path


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if is_number(value):
        return format_number(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return shlex.join(value)  # the command
    return json.dumps(value, ensure_ascii=False)


def _key_value(values: Mapping[str, Any]) -> Table:
    return Table(["name", "value"], [[name, _as_text(value)] for name, value in _flatten(values)])


def _headlines(summary: Mapping[str, Any]) -> dict[str, float | str]:
    flat = {k: v for k, v in _flatten(summary) if is_number(v)}
    best = {f"best {summary['best_metric']}": flat.pop("best")} if "best_metric" in summary and "best" in flat else {}
    measures_first = dict(sorted(flat.items(), key=lambda item: "/" not in item[0]))
    return dict(list((best | measures_first).items())[:_HEADLINES])


def _facts(starts: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]) -> str:
    versions = starts[-1] if starts else {}
    facts = [f"seed {versions['seed']}"] if "seed" in versions else []
    if metrics:
        facts.append(f"{max(int(row.get('step', 0)) for row in metrics)} steps")
    times = [row["time"] for row in metrics if is_number(row.get("time"))]
    if len(times) > 1:
        facts.append(str(timedelta(seconds=round(max(times) - min(times)))))
    if versions.get("git"):
        facts.append(f"revision {versions['git'][:12]}{' (changed)' if versions.get('git_dirty') else ''}")
    if len(starts) > 1:
        facts.append(f"started {len(starts)} times")
    return " · ".join(facts)


def write_report(run_folder: RunFolder) -> Path:
    """Write ``report.html`` into a run folder from its existing files.

    The page shows the final metrics, all curves, the images under ``figures/``, versions and command of the last
    start, the configuration and the end of the log. Sections without a file are omitted, so a report can also be
    written during a run.
    """
    folder = run_folder.path
    if not (run_folder.config_path.is_file() and run_folder.versions_path.is_file()):
        raise DataError(f"{folder} is not a run folder. Pass the folder that a training command printed.")
    starts, summary, metrics = run_folder.read_versions(), run_folder.read_summary(), run_folder.read_metrics()
    page = Page(folder.resolve().name, _facts(starts, metrics))
    if headlines := _headlines(summary):
        page.tiles(headlines)
    if curve_panels(metrics):
        page.section("Curves")
        page.curves(metrics)
    images = sorted(path for path in run_folder.figures.glob("*.png") if path.stem != "curves")
    if images:
        page.section("Figures")
    for path in images:
        page.image(path, path.stem.replace("_", " "))
    names = {name.split("/")[-1] for row in (*metrics, dict(_flatten(summary))) for name in row if "/" in name}
    terms = [[term, text] for term, text in GLOSSARY.items() if term in names]
    tables = {
        "Summary": _key_value(summary),
        "Metrics": Table(["name", "meaning"], terms),
        "Provenance": _key_value(starts[-1] if starts else {}),
    }
    for heading, table in tables.items():
        if table.rows:
            page.section(heading)
            page.table(table)
    page.folded("Configuration", json.dumps(run_folder.read_config(), indent=2, ensure_ascii=False))
    if run_folder.log_path.is_file():
        with run_folder.log_path.open("rb") as file:
            file.seek(max(run_folder.log_path.stat().st_size - (1 << 16), 0))
            lines = file.read().decode(errors="replace").splitlines()
        page.folded("Log (last lines)", "\n".join(lines[-80:]))
    return page.write(run_folder.report_path)
