"""Published results: tables are rebuilt from results.jsonl, and hashes match the provenance."""

import json
from pathlib import Path

import pytest

from experiments import backbones, table1, table2
from matbackprop.vision.data.cache import cache_key

RESULTS = Path(__file__).parents[2] / "results"
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="results are not part of a source distribution")
FOLDS = {"images": "folds", "seeds": (0, 1, 2, 3, 4)}
TABLES = {
    "table1": (table1.Table1, table1.Config, {}),
    "backbones": (backbones.Backbones, backbones.Config, {}),
    "table2": (table2.Table2, table2.Config, {}),
    "table2/folds": (table2.Table2, table2.Config, FOLDS),
}


@pytest.mark.parametrize("name", TABLES)
def test_hashes_belong_to_their_provenance(name):
    lines = (RESULTS / name / "results.jsonl").read_text().splitlines()
    found = [record for record in map(json.loads, lines) if record["kind"] == "run"]
    assert len(found) > 80
    for run in found:
        assert run["hash"] == cache_key(run["provenance"])
        assert {"configuration", "data", "weights", "device"} <= run["provenance"].keys()


@pytest.mark.parametrize("name", TABLES)
def test_the_table_follows_from_the_runs(name, tmp_path, monkeypatch):
    """Rebuild the table from a copy of results.jsonl; figures are compared by eye."""
    kind, config, options = TABLES[name]
    (tmp_path / "results.jsonl").write_bytes((RESULTS / name / "results.jsonl").read_bytes())
    for module in (table1.figures, table2, backbones):
        for function in ("comparison", "lines", "curves"):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, lambda *arguments, **more: None)
    kind(config(out=tmp_path, **options)).summarize()
    assert (tmp_path / "table.md").read_text() == (RESULTS / name / "table.md").read_text()
