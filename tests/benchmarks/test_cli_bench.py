"""The command ``python -m benchmarks speed``."""

import pytest

from benchmarks.__main__ import COMMANDS
from benchmarks.speed.cli import Config, measure_alone
from benchmarks.speed.measure import load_results
from matbackprop.cli import run
from matbackprop.errors import ConfigurationError


def test_measures_prints_and_writes(tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    arguments = ["ncuts", "--quick", "--device", "cpu", "--seconds", "0.01"]
    output, page = tmp_path / "results", tmp_path / "docs" / "benchmarks.md"
    assert run("speed", [*arguments, "--output", str(output), "--page", str(page)], COMMANDS) == 0
    text = capsys.readouterr().out
    assert "matbackprop, J₂" in text and text.rstrip().endswith(str(page))
    (path,) = output.glob("*.json")
    assert {r.suite for r in load_results(path).records} == {"ncuts"}
    page.unlink()
    assert run("speed", ["--no-measure", "--output", str(output), "--page", str(page)], COMMANDS) == 0
    assert "Normalized-cut objectives" in page.read_text()


@pytest.mark.slow
def test_a_suite_in_a_separate_process():
    results = measure_alone(Config(quick=True, seconds=0.01, revision="abc", threads=1), "inverse-root", "cpu")
    assert results.revision == "abc" and results.machine["threads"] == 1
    assert {r.suite for r in results.records} == {"inverse-root"} and any(r.status == "ok" for r in results.records)


def test_a_page_needs_results():
    with pytest.raises(ConfigurationError, match="--output"):
        run("speed", ["--page", "page.md"], COMMANDS)
