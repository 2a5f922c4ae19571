"""``matbackprop bench`` from the command line's side."""

import pytest

from matbackprop.bench.measure import load_results
from matbackprop.cli import run
from matbackprop.errors import ConfigurationError


def test_measures_prints_and_writes(tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    arguments = ["ncuts", "--quick", "--device", "cpu", "--seconds", "0.01"]
    output, page = tmp_path / "results", tmp_path / "docs" / "benchmarks.md"
    assert run("bench", [*arguments, "--output", str(output), "--page", str(page)]) == 0
    text = capsys.readouterr().out
    assert "matbackprop, J₂" in text and text.rstrip().endswith(str(page))
    (path,) = output.glob("*.json")
    assert {r.suite for r in load_results(path).records} == {"ncuts"}
    page.unlink()
    assert run("bench", ["--no-measure", "--output", str(output), "--page", str(page)]) == 0
    assert "Normalized-cut objectives" in page.read_text()


def test_a_page_needs_results():
    with pytest.raises(ConfigurationError, match="--output"):
        run("bench", ["--page", "page.md"])
