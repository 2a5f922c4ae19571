"""The demonstration runs, and its page shows the results."""

import json

import pytest

from matbackprop.vision.training.demo import DemoConfig, run_demo


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    config = DemoConfig(run=tmp_path_factory.mktemp("demo") / "run", images=20, epochs=2)
    assert run_demo(config) == config.run / "report.html"
    return config.run


def test_the_page_shows_both_systems_with_pictures(demo):
    page = (demo / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 3
    assert page.count("<svg") == 5
    for part in ("second-order pooling", "normalized cuts", "Photographs", "matbackprop serve"):
        assert part in page


def test_both_systems_were_trained_by_the_engine(demo):
    """Training of the smallest presets is tested with the recipes."""
    for part, measure in (("o2p", "val/error"), ("ncuts", "val/objective")):
        rows = [json.loads(line) for line in (demo / part / "metrics.jsonl").read_text().splitlines()]
        assert sum("train/loss" in row for row in rows) >= 2 and sum(measure in row for row in rows) == 2
        assert (demo / part / "checkpoints" / "last.ckpt").is_file()


def test_the_summary_contains_scores_before_and_after_training(demo):
    summary = json.loads((demo / "summary.json").read_text())
    for name in ("accuracy", "covering"):
        assert all(0 <= summary[name][when] <= 1 for when in ("before", "after"))
