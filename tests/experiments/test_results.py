"""The results in the repository: every number of a table is there with the fingerprint of what made it."""

import json
from pathlib import Path

import pytest

from experiments.config import Table1Config, Table2Config
from experiments.table import fingerprint
from experiments.table1 import Table1
from experiments.table2 import Table2

RESULTS = Path(__file__).parents[2] / "results"
FILES = sorted(RESULTS.glob("**/runs/*/*/result.json"))
pytestmark = pytest.mark.skipif(not FILES, reason="results are not part of a source distribution")
TABLES = {
    "table1": Table1(Table1Config(out=RESULTS / "table1", accelerator="gpu", stage="all")),
    "table2": Table2(Table2Config(out=RESULTS / "table2", accelerator="gpu", stage="all")),
    "table2/folds": Table2(
        Table2Config(out=RESULTS / "table2" / "folds", accelerator="gpu", images="folds", seeds=(0, 1, 2, 3, 4))
    ),
}


def test_every_result_was_made_by_what_its_folder_says():
    assert len(FILES) > 200
    for path in FILES:
        actual = json.loads(path.read_text())
        assert path.parent.name.endswith(f"-{fingerprint(actual['provenance'])}"), path
        assert actual["provenance"].keys() == {"configuration", "data", "weights", "device", "measure"}


def test_every_number_of_the_first_table_is_that_of_a_result():
    for row in json.loads((RESULTS / "table1" / "table.json").read_text())["rows"]:
        for seed, error in zip(row["seeds"], row["error"]["values"], strict=True):
            path = RESULTS / "table1" / "runs" / row["key"] / f"seed{seed['seed']}-{seed['fingerprint']}"
            assert json.loads((path / "result.json").read_text())["error"] == error


@pytest.mark.parametrize("name", ["table2", "table2/folds"])
def test_every_number_of_the_second_table_is_that_of_a_result(name):
    stored = {
        path.parent.name: json.loads(path.read_text())["rows"] for path in FILES if RESULTS / name in path.parents
    }
    for key, row in json.loads((RESULTS / name / "table.json").read_text())["rows"].items():
        part = "seed" if row["inference"] else "baseline"
        for i, (seed, mark) in enumerate(zip(row["seeds"], row["fingerprints"], strict=True)):
            scores = stored[f"{part}{seed}-{mark}"][key]["scores"]
            assert all(scores[measure] == actual["each"][i] for measure, actual in row["scores"].items())


@pytest.mark.data
@pytest.mark.parametrize("name", TABLES)
def test_the_commands_ask_for_what_is_there(name):
    """Each number of the tables is found again by the fingerprint of what the command would do now."""
    table = TABLES[name]
    shown = json.loads((RESULTS / name / "table.json").read_text())["rows"]
    entries = {row["key"]: row for row in shown} if isinstance(shown, list) else shown
    finished = {key: count for key in table.rows if (count := _finished(table, key))}
    assert finished == {key: len(entry["seeds"]) for key, entry in entries.items()}


def _finished(table, key):
    row = table.rows[key]
    return len(table.finished(table.seeds(row))[1] if isinstance(table, Table1) else table.line(row).results)
