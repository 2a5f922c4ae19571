"""Published results: tables are rebuilt from results.jsonl, and hashes match the provenance."""

import json
from pathlib import Path

import pytest

from experiments import backbones, bsds500, cuts, joint, runs, table1, table2
from matbackprop.vision.data.cache import cache_key

RESULTS = Path(__file__).parents[2] / "results"
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="results are not part of a source distribution")
FOLDS = {"images": "folds", "seeds": (0, 1, 2, 3, 4)}
TABLES = {
    "table1": (table1, {}),
    "backbones": (backbones, {}),
    "table2": (table2, {}),
    "table2/folds": (table2, FOLDS),
    "contours/val": (bsds500, {"images": "val"}),
    "contours/test": (bsds500, {"images": "test", "model": ("box",)}),
    "cuts": (cuts, {}),
    "joint": (joint, {}),
}
LARGE = ("table1", "backbones", "table2", "table2/folds")


@pytest.mark.parametrize("name", LARGE)
def test_hashes_belong_to_their_provenance(name):
    lines = (RESULTS / name / "results.jsonl").read_text().splitlines()
    found = [record for record in map(json.loads, lines) if record["kind"] == "run"]
    assert len(found) > 80
    for run in found:
        assert run["hash"] == cache_key(run["provenance"])
        assert {"configuration", "data", "weights", "device"} <= run["provenance"].keys()


@pytest.mark.parametrize("name", TABLES)
def test_the_table_follows_from_the_runs(name, tmp_path, monkeypatch, capsys):
    """Rebuild the table from a copy of results.jsonl; figures are compared by eye."""
    experiment, options = TABLES[name]
    (tmp_path / "results.jsonl").write_bytes((RESULTS / name / "results.jsonl").read_bytes())
    for module in (table1.figures, table2, runs, bsds500):
        for function in ("comparison", "lines", "curves"):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, lambda *arguments, **more: None)
    experiment.main(experiment.Config(out=tmp_path, summary=True, **options))
    assert (tmp_path / "table.md").read_text() == (RESULTS / name / "table.md").read_text()
