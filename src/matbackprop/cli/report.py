"""``matbackprop report``: write the HTML report of a run, and compare several runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from matbackprop.errors import DataError
from matbackprop.vision.files import is_number
from matbackprop.vision.report.html import write_report
from matbackprop.vision.report.tables import Table
from matbackprop.vision.training.run_folder import RunFolder


@dataclass
class Config:
    """Write report.html into run folders, and compare the final metrics of several runs."""

    runs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="(required)")
    ]  #: Run folders.


def main(config: Config) -> dict[str, Any]:
    """Write the reports and print their paths. For several runs, also print a table."""
    if not config.runs:
        raise DataError("No run folder was given. Pass at least one, such as runs/ncuts-smoke-seed0.")
    folders = [RunFolder(path) for path in config.runs]
    reports = [write_report(folder) for folder in folders]
    table = comparison(folders) if len(folders) > 1 else None
    if table is not None:
        table.show()
    return {
        "summary": "\n".join(map(str, reports)),
        "reports": reports,
        "comparison": None if table is None else [dict(zip(table.columns, row, strict=True)) for row in table.rows],
    }


def comparison(folders: list[RunFolder]) -> Table:
    """Return a table of the final metrics that the runs have in common."""
    numbers = [{k: v for k, v in folder.read_summary().items() if is_number(v)} for folder in folders]
    names = [k for k in numbers[0] if all(k in n for n in numbers)]
    rows = [[folder.path.name, *(known[n] for n in names)] for folder, known in zip(folders, numbers, strict=True)]
    return Table(["run", *names], rows)
