"""results.jsonl: finished runs are not repeated, the last line counts, and a table names its revisions."""

import json

import pytest

from experiments import runs
from experiments.runs import ExperimentConfig, Results
from matbackprop.errors import ConfigurationError, DataError


def never():
    raise AssertionError("the run was repeated")


def test_finished_runs_are_found_by_the_hash_of_their_provenance(tmp_path):
    first = Results(tmp_path).run("a", "seed", 0, {"device": "cpu", "rate": 0.1}, lambda: {"error": 1.0})
    again = Results(tmp_path)  # a later process
    assert again.run("a", "seed", 0, {"rate": 0.1, "device": "cpu"}, never) == first
    with pytest.raises(AssertionError, match="repeated"):
        again.run("a", "seed", 0, {"device": "cpu", "rate": 0.2}, never)
    assert Results(tmp_path).records == [first]  # a failed run leaves no line
    assert again.run("b", "seed", 0, {"device": "cpu", "rate": 0.1}, lambda: {"error": 2.0}) != first  # another row


def test_a_run_records_its_code_and_machine(tmp_path):
    run = Results(tmp_path).run("a", "seed", 3, {"device": "cpu"}, lambda: {"error": 1.0})
    assert run["code"].keys() == {"git", "dirty", "source"} and len(run["code"]["source"]) == 16
    assert run["packages"]["torch"] and run["device"] and run["metrics"]["seconds"] >= 0
    assert json.loads((tmp_path / "results.jsonl").read_text()) == run


def test_the_last_line_of_a_number_counts(tmp_path):
    results = Results(tmp_path)
    for number, error in ((1, 5.0), (0, 1.0), (1, 2.0)):
        results.run("a", "seed", number, {"error": error}, lambda error=error: {"error": error})
    results.run("a", "trial", 0, {}, lambda: {"error": 9.0})
    assert [run["metrics"]["error"] for run in results.runs("a")] == [1.0, 2.0]


def test_a_corrupt_line_is_reported(tmp_path):
    (tmp_path / "results.jsonl").write_text('{"kind": "run", "row": "a"}\n{"kind": "ru')
    with pytest.raises(DataError, match=r"results\.jsonl, line 2 is not JSON"):
        Results(tmp_path)


def test_the_data_hash_changes_with_an_annotation_and_not_with_other_splits(tmp_path):
    for split in ("train", "test"):
        (tmp_path / "groundTruth" / split).mkdir(parents=True)
        (tmp_path / "groundTruth" / split / "1.mat").write_bytes(b"one")
    before = runs.data_hash(tmp_path, ("train",))
    (tmp_path / "groundTruth" / "test" / "1.mat").write_bytes(b"two")
    runs.data_hash.cache_clear()
    assert runs.data_hash(tmp_path, ("train",)) == before
    (tmp_path / "groundTruth" / "train" / "1.mat").write_bytes(b"two")
    runs.data_hash.cache_clear()
    assert runs.data_hash(tmp_path, ("train",)) != before
    with pytest.raises(DataError, match="no image or annotation of val"):
        runs.data_hash(tmp_path, ("val",))


def test_overrides_and_rows_are_checked():
    config = ExperimentConfig(override=("model.hidden=16", "model.weights=none"))
    assert config.overrides() == {"model.hidden": 16, "model.weights": "none"}
    with pytest.raises(ConfigurationError, match="name=value"):
        ExperimentConfig(override=("model.hidden",)).overrides()
    with pytest.raises(ConfigurationError, match=r"Unknown row 'resnet'\. Rows: a, b"):
        ExperimentConfig(rows=("resnet",)).chosen({"a": 1, "b": 2})
    assert ExperimentConfig(rows=("b",)).chosen({"a": 1, "b": 2}) == {"b": 2}
