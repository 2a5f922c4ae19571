"""The page of all results: tables and plots, generated and never edited by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.speed.measure import Record, Results, load_results
from matbackprop.errors import DataError
from matbackprop.vision.files import atomic_write
from matbackprop.vision.report.figures import lines

TITLES = {
    "pooling": "Second-order pooling, forward + backward",
    "functions": "Eigendecomposition and matrix logarithm",
    "decompositions": "Singular value and eigendecompositions in batches",
    "inverse-root": "Inverse roots for preconditioners",
    "ncuts": "Normalized-cut objectives, forward + backward",
    "segmentation": "Features to segmentations",
    "training-step": "A training step",
}

_DIFFERENT = ("ncuts", "training-step")  #: Suites whose methods compute different results.

INTRODUCTION = """# Benchmarks

Every number on this page was measured by

```
python -m benchmarks speed --output benchmarks/results
```

on the machine in the heading; all records with versions and revisions are in `benchmarks/results`. Times are medians in
milliseconds, or single calls if these are long; hover over a time for its first and third quartile. On a GPU they
include kernel launches. Memory is the peak above the level before the call. The fastest method of each case is
bold. Packages that were not installed on the machine are marked missing.
"""


def _milliseconds(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def _median(record: Record) -> str:
    return _milliseconds(record.median_ms or 0.0)


def _quartiles(record: Record) -> str:
    """The quartiles, or nothing for a single call."""
    if record.low_ms is None or record.high_ms is None or record.repeats == 1:
        return ""
    return f"{_milliseconds(record.low_ms)}–{_milliseconds(record.high_ms)}"


def _memory(record: Record) -> str:
    return "" if record.peak_mb is None else f"{record.peak_mb:.0f} MB"


def format_record(record: Record) -> str:
    """One line for the terminal."""
    if record.status != "ok":
        outcome = f"{record.status}: {record.note}"
    elif record.error is not None:
        outcome = f"error {float(record.error):.1e}"
    else:
        quartiles = _quartiles(record)
        outcome = f"{_median(record)} ms{quartiles and f' ({quartiles})'}, {_memory(record)}"
    return f"{record.suite:<15} {record.case:<49} {record.method:<36} {outcome}"


def _methods(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(r.method for r in records))


def _cell(record: Record | None, best: bool) -> str:
    if record is None or record.status != "ok":
        return "" if record is None else record.status
    text = _median(record) if record.error is None else f"{float(record.error):.1e}"
    if quartiles := _quartiles(record):
        text = f'<span title="{quartiles}">{text}</span>'
    text = f"**{text}**" if best else text
    return text if record.error is not None or record.peak_mb is None else f"{text}<br>{_memory(record)}"


def _score(record: Record) -> float:
    value = record.median_ms if record.error is None else float(record.error)
    return float("inf") if value is None or value != value else float(value)


def _table(records: Sequence[Record]) -> list[str]:
    """One row per case, one column per method; the best is bold if the methods compute the same."""
    methods = _methods(records)
    rows = ["| | " + " | ".join(methods) + " |", "|---|" + "---|" * len(methods)]
    for case in dict.fromkeys(r.case for r in records):
        row = {r.method: r for r in records if r.case == case}
        scores = {m: _score(r) for m, r in row.items() if r.status == "ok" and r.suite not in _DIFFERENT}
        best = min(scores, key=lambda m: scores[m]) if len(scores) > 1 else None
        rows.append(f"| {case} | " + " | ".join(_cell(row.get(m), m == best) for m in methods) + " |")
    notes = dict.fromkeys(f"{r.method}: {r.note}" for r in records if r.note)
    return [*rows, "", *(f"- {note}" for note in notes), ""] if notes else [*rows, ""]


def _plot_sizes(results: Results, folder: Path) -> list[str]:
    """Time against the order of the matrix, one plot per dtype and function."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for r in results.records:
        if r.suite == "functions" and r.status == "ok":
            groups.setdefault((str(r.parameters["function"]), str(r.parameters["dtype"])), []).append(r)
    names = []
    for (function, dtype), records in groups.items():
        series = {}
        for method in _methods(records):
            points = sorted((float(r.parameters["n"]), r.median_ms or 0.0) for r in records if r.method == method)
            series[method] = ([n for n, _ in points], [time for _, time in points])
        what = "eigendecomposition" if function == "eigh" else "log, forward + backward"
        title = f"{what}, {dtype}, batch {int(records[0].parameters['batch'])}"
        names.append(f"{results.name}-{function}-{dtype}.svg")
        lines(series, folder / names[-1], title=title, xlabel="order of the matrix", ylabel="ms", log="xy")
    return names


def _machine_section(results: Results, figures: Path, link: str) -> list[str]:
    machine = results.machine
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    where = f"CUDA {machine['cuda']}, " if machine["kind"] == "cuda" else f"{machine['threads']} threads, "
    text = [
        f"## {machine['device']}",
        "",
        f"{where}{machine['processor']}, Python {machine['python']}; {versions}. Measured on {results.date} with "
        f"`{results.command}`.",
        "",
    ]
    for suite, title in TITLES.items():
        records = [r for r in results.records if r.suite == suite]
        if not records:
            continue
        text += [f"### {title}", ""]
        for function in dict.fromkeys(r.parameters.get("function") for r in records):  # so that no column is empty
            text += _table([r for r in records if r.parameters.get("function") == function])
        plots = _plot_sizes(results, figures) if suite == "functions" else []
        text += [f"![{title}]({link}/{name})" for name in plots]
        text.append("")
    return text


def write_page(folder: Path, page: Path, *, link: str = "_static/benchmarks", figures: Path | None = None) -> Path:
    """Write the Markdown page of all machines whose JSON files are in a folder, and its plots."""
    files = [path for path in sorted(folder.glob("*.json")) if '"records"' in path.read_text(encoding="utf-8")]
    if not files:
        raise DataError(f"No results in {folder}. Run python -m benchmarks speed --output {folder}.")
    figures = figures or page.parent / link
    figures.mkdir(parents=True, exist_ok=True)
    everything = sorted((load_results(f) for f in files), key=lambda r: (r.machine["kind"] != "cuda", r.name))
    text = [INTRODUCTION, *(line for results in everything for line in _machine_section(results, figures, link))]
    atomic_write(page, "\n".join(text).rstrip() + "\n")
    return page
