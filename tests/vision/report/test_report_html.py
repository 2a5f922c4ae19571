"""The report of a run is one self-contained file."""

import html
import re

import numpy as np
import pytest

from matbackprop.errors import DataError
from matbackprop.vision.report.figures import segmentation_grid
from matbackprop.vision.report.html import write_report
from matbackprop.vision.training.run_folder import RunFolder


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "o2p-smoke-seed3").create({"model": {"eps": 1e-3}, "name": "<script>", "seed": 3})
    for step in range(1, 6):
        folder.append_metrics({"step": step, "epoch": 0, "train/loss": 1.0 / step})
    segmentation_grid(["a"], [[np.zeros((4, 4, 3))]], folder.figure_path("examples"))
    folder.write_summary({"val/error": 0.25, "nested": {"rank": 7}, "words": "fine", "broken": float("nan")})
    folder.log_path.write_text("\n".join(f"line {i}" for i in range(200)))
    return folder


def test_the_page_contains_every_part_of_the_run(run):
    page = write_report(run).read_text(encoding="utf-8")
    for part in ("o2p-smoke-seed3", "val/error", "0.25", "nested.rank", "<figcaption>examples"):
        assert part in page
    assert "line 199" in page and "line 100" not in page
    assert '"eps": 0.001' in html.unescape(page)
    assert page.count("data:image/png;base64,") == 2 and page.index(">curves<") < page.index(">examples<")


def test_the_page_loads_nothing_and_escapes_its_content(run):
    page = write_report(run).read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert "prefers-color-scheme: dark" in page


def test_a_run_without_metrics_has_a_report(tmp_path):
    run = RunFolder(tmp_path / "new").create({})
    page = write_report(run).read_text(encoding="utf-8")
    assert "<h1>new</h1>" in page and "Figures" not in page


def test_missing_and_corrupt_files_are_reported(run, tmp_path):
    with pytest.raises(DataError, match="is not a run folder"):
        write_report(RunFolder(tmp_path / "nothing"))
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "report.html").write_text("mine")
    with pytest.raises(DataError, match="is not a run folder"):
        write_report(RunFolder(tmp_path / "thesis"))
    assert (tmp_path / "thesis" / "report.html").read_text() == "mine"
