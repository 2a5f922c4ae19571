"""Every notebook runs, asserts its claims, ends in a picture and contains the output of a run."""

import json
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def _code(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [(cell, "".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_contains_output_and_ends_in_a_picture(notebook):
    cells = _code(notebook)
    outputs = [output for cell, _ in cells for output in cell["outputs"]]
    assert [cell["execution_count"] for cell, _ in cells] == list(range(1, len(cells) + 1))
    assert all(output["output_type"] != "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in cells[-1][0]["outputs"])
    assert any("assert" in source for _, source in cells)
    assert notebook.stat().st_size < 600_000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings are not errors in a notebook
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: None)
    matplotlib.use("Agg")
    names = {}
    try:
        for _, source in _code(notebook):
            exec(compile(source, str(notebook), "exec"), names)
        assert plt.get_fignums()
    finally:
        plt.close("all")
