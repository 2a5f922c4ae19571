"""The demonstration trains both systems, and its page shows the results."""

import json

from matbackprop.vision.training.demo import DemoConfig, run_demo
from matbackprop.vision.training.run_folder import RunFolder


def test_both_systems_are_trained_and_shown(tmp_path):
    folder = tmp_path / "run"
    assert run_demo(DemoConfig(run=folder, images=20, epochs=2)) == folder / "report.html"
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 3 and page.count("<svg") == 5
    for part in ("second-order pooling", "normalized cuts", "Photographs", "matbackprop serve"):
        assert part in page
    for part, measure in (("o2p", "val/error"), ("ncuts", "val/objective")):
        rows = RunFolder(folder / part).read_metrics()
        assert sum("train/loss" in row for row in rows) >= 2 and sum(measure in row for row in rows) == 2
    summary = json.loads((folder / "summary.json").read_text())
    assert all(0 <= summary[name][when] <= 1 for name in ("accuracy", "covering") for when in ("before", "after"))
