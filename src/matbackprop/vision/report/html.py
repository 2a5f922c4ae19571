"""Self-contained HTML report of a run: configuration, curves and results.

The page embeds images and styles, loads no other files, and supports light and dark color schemes.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterator, Mapping
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
    if curve_panels(metrics):
        curves(metrics, run_folder.figure_path("curves"))
    images = sorted(run_folder.figures.glob("*.png"), key=lambda path: (path.stem != "curves", path.name))
    page = _TEMPLATES.get_template("page.html").render(
        title=folder.resolve().name,
        images=[_image(path) for path in images],
        tables={
            "Summary": dict(_flatten(run_folder.read_summary())),
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
