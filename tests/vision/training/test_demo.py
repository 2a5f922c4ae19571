"""The demonstration trains both systems, writes their reports and segments photographs."""

import pytest

from matbackprop.vision.training.demo import DemoConfig, main


@pytest.mark.slow
def test_both_systems_are_trained_and_shown(tmp_path, capsys):
    folder = tmp_path / "run"
    document = main(DemoConfig(run=folder, images=20, epochs=2))
    assert document["reports"] == [folder / "o2p" / "report.html", folder / "ncuts" / "report.html"]
    for report, measure in zip(document["reports"], ("val/error", "val/objective"), strict=True):
        page = report.read_text(encoding="utf-8")
        assert measure in page and page.count("data:image/png;base64,") == 2
    assert document["photographs"].stat().st_size > 10_000
    assert 0 <= document["results"]["error"]["last"] <= 100 and document["results"]["objective"]["first"] > 0
    assert "second-order pooling" in capsys.readouterr().out
