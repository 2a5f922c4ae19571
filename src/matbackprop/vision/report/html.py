"""Self-contained HTML report of a run: configuration, curves and results.

The page embeds images and styles, loads no other files, and supports light and dark color schemes.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from matbackprop.errors import DataError
from matbackprop.vision.data.pictures import open_picture
from matbackprop.vision.files import atomic_write, is_number, read_bytes
from matbackprop.vision.report.figures import curve_panels, curves
from matbackprop.vision.report.tables import format_number

if TYPE_CHECKING:
    from matbackprop.vision.training.run_folder import RunFolder

#: Descriptions of the metrics in ``metrics.jsonl`` and ``summary.json``, by the last part of their names.
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

_HEADLINES = 6


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if is_number(value):
        return format_number(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return shlex.join(value)  # the command
    return json.dumps(value, ensure_ascii=False)


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    undefined=jinja2.StrictUndefined,
)
_TEMPLATES.filters["text"] = _as_text


def write_report(run_folder: RunFolder) -> Path:
    """Write ``report.html`` into a run folder from its existing files.

    The page shows the final metrics, the images under ``figures/`` with the curves, versions and command of the last
    start, the configuration and the end of the log. Sections without a file are omitted, so that a report can be
    written during a run.
    """
    folder = run_folder.path
    if not (run_folder.config_path.is_file() and run_folder.versions_path.is_file()):
        raise DataError(f"{folder} is not a run folder. Pass the folder that a training command printed.")
    starts, metrics = run_folder.read_versions(), run_folder.read_metrics()
    summary = dict(_flatten(run_folder.read_summary()))
    if curve_panels(metrics):
        curves(metrics, run_folder.figure_path("curves"))
    images = sorted(run_folder.figures.glob("*.png"), key=lambda path: (path.stem != "curves", path.name))
    names = {name.split("/")[-1] for row in (*metrics, summary) for name in row if "/" in name}
    page = _TEMPLATES.get_template("page.html").render(
        title=folder.resolve().name,
        facts=" · ".join(_facts(starts, metrics)),
        headlines=_headlines(summary),
        images=[_image(path) for path in images],
        tables={
            "Summary": summary,
            "Metrics": {name: text for name, text in GLOSSARY.items() if name in names},
            "Provenance": dict(_flatten(starts[-1] if starts else {})),
        },
        config=json.dumps(run_folder.read_config(), indent=2, ensure_ascii=False),
        log=_last_lines(run_folder.log_path),
    )
    atomic_write(run_folder.report_path, page)
    return run_folder.report_path


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _headlines(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the best score, then other measures, then other numbers."""
    numbers = {k: v for k, v in summary.items() if is_number(v)}
    if "best" in numbers and "best_metric" in summary:
        numbers = {f"best {summary['best_metric']}": numbers.pop("best"), **numbers}
    first = sorted(numbers.items(), key=lambda item: (not item[0].startswith("best "), "/" not in item[0]))
    return dict(first[:_HEADLINES])


def _facts(starts: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    versions = starts[-1] if starts else {}
    if "seed" in versions:
        yield f"seed {versions['seed']}"
    if metrics:
        yield f"{max(int(row.get('step', 0)) for row in metrics)} steps"
    times = [row["time"] for row in metrics if is_number(row.get("time"))]
    if len(times) > 1:
        yield str(timedelta(seconds=round(max(times) - min(times))))
    if versions.get("git"):
        yield f"revision {versions['git'][:12]}{' (changed)' if versions.get('git_dirty') else ''}"
    if len(starts) > 1:
        yield f"started {len(starts)} times"


def _image(path: Path) -> dict[str, Any]:
    """Return a PNG file in base64 with its width in CSS pixels, from its size in inches."""
    data = base64.b64encode(read_bytes(path, 1 << 26)).decode("ascii")
    with open_picture(path) as file:
        width = round(file.width * 96 / max(float(file.info.get("dpi", (96.0,))[0]), 96.0))
    return {"caption": path.stem.replace("_", " "), "width": width, "data": data}


def _last_lines(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - (1 << 16), 0))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-80:])
