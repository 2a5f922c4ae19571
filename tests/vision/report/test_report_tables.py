"""One table in two forms."""

import pytest

from experiments.runs import Measured
from matbackprop.vision.report.tables import Table


@pytest.fixture
def table():
    return Table(
        ["row", "error", "time"],
        [["AlexNet", Measured.of([25.0, 25.6]), 5.2], ["<b>", 24.0, None], ["a|b", float("nan"), 7.0]],
        title="Table 1",
        note="two seeds",
        formats={"error": ".1f"},
        best={"error": "min", "time": "max"},
    )


def test_markdown_marks_the_best_and_escapes_pipes(table):
    lines = table.markdown().splitlines()
    assert lines[0] == "**Table 1**"
    assert lines[2:5] == ["| row | error | time |", "| --- | ---: | ---: |", "| AlexNet | 25.3 ± 0.4 | 5.2 |"]
    assert lines[5] == "| <b> | **24.0** |  |"
    assert lines[6] == "| a\\|b | NaN | **7** |"
    assert lines[-1] == "two seeds"


def test_console_shows_every_cell(table, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    table.show()
    text = capsys.readouterr().out
    assert all(word in text for word in ("Table 1", "two seeds", "25.3 ± 0.4", "a|b", "NaN"))
