"""The first table: tuning, seeds, resuming, and the summary."""

import dataclasses
import shlex

import numpy as np
import pytest

from experiments import runs, table1
from experiments.table1 import ROWS, Config, Table1, wrong_by_image
from matbackprop.cli.train import parse
from matbackprop.errors import ConfigurationError, DataError, NonFiniteError
from matbackprop.vision.training.config import O2P_PRESETS, RegionDataConfig

ALEXNET = Table1.rows["alexnet"]
RIGHT = {"target": np.array([0, 1, 0, 1]), "large": np.array([1, 1, 0, 1]), "image": np.array([5, 5, 6, 7])}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def config(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # runs are trained in runs/
    return Config(
        out=tmp_path / "table1",
        rows=("alexnet", "o2p"),
        data=RegionDataConfig(cache=cache, generate=12, side=56, canvas=67, jitter=3, batch_size=16, threads=0),
        trials=2,
        fine_epochs=2,
        fine_seeds=2,
        precision="32",
        accelerator="cpu",
        override=("model.hidden=16", "model.reduce=6", "model.weights=none"),
    )


def record(config, row, part, number, error, predicted=(0, 1, 1, 0)):
    """Append a run that was never trained."""
    metrics = {"setting": Table1.rows[row].trials[0], "error": error, "error_large": error}
    metrics |= wrong_by_image({**RIGHT, "predicted": np.array(predicted)})
    runs.Results(config.out).run(row, part, number, {"row": row, "part": part, "number": number}, lambda: metrics)


def test_one_command_builds_the_table(config, monkeypatch):
    config = dataclasses.replace(config, trials=1, fine_seeds=1, fine_epochs=1)
    table1.main(config)
    text = (config.out / "table.md").read_text()
    assert "| AlexNet | 25.3 |" in text and "| DeepO2P | 28.6 |" in text and "matbackprop train o2p" in text
    assert "Speeds: one run" in text and "Runs come from" in text
    assert (config.out / "figures" / "errors.png").is_file() and (config.out / "figures" / "curves.png").is_file()
    table = Table1(config)
    [alexnet], [o2p] = (table.results.runs(key) for key in config.rows)
    gain = table.difference(Table1.rows["o2p"])
    errors = [run["metrics"]["error"] for run in (o2p, alexnet)]
    assert gain["difference"] == pytest.approx(errors[0] - errors[1], abs=1e-3)
    assert o2p["metrics"]["regions_per_second"] > 0
    monkeypatch.setattr(Table1, "_fit", None)  # would fail if it were called
    before = (config.out / "results.jsonl").read_bytes()
    table1.main(config)
    assert (config.out / "results.jsonl").read_bytes() == before and (config.out / "table.md").read_text() == text


def test_the_setting_with_the_smallest_error_is_trained(config, monkeypatch):
    trained = []

    def fit(self, recipe, row, setting):
        trained.append((recipe.data.split, recipe.engine.seed, setting))
        return {"setting": setting, "error": 40.0 - len(trained), "error_large": 40.0}

    monkeypatch.setattr(Table1, "_fit", fit)
    Table1(dataclasses.replace(config, rows=("alexnet",))).train()
    first, second = ALEXNET.trials[:2]
    assert trained == [("tuning", 1000, first), ("tuning", 1000, second), ("final", 0, second), ("final", 1, second)]


def test_only_the_best_row_of_a_group_is_trained(config):
    config = dataclasses.replace(config, rows=("sqrt-fc", "both-log"), trials=1)
    record(config, "sqrt-fc", "trial", 0, 30.0)
    with pytest.raises(DataError, match="both-log has no trial"):
        Table1(config).wins(Table1.rows["sqrt-fc"])
    record(config, "both-log", "trial", 0, 29.0)
    assert [Table1(config).wins(Table1.rows[key]) for key in config.rows] == [False, True]


OTHER_SETTINGS = {
    "data": {"data": RegionDataConfig(generate=12, side=56, canvas=67, jitter=4, batch_size=16, threads=0)},
    "images": {"data": RegionDataConfig(generate=8, side=56, canvas=67, jitter=3, batch_size=16, threads=0)},
    "override": {"override": ("model.hidden=32", "model.reduce=6", "model.weights=none")},
    "epochs": {"fine_epochs": 3},
    "weights": {"override": ("model.hidden=16", "model.reduce=6", "model.weights=some.safetensors")},
}


@pytest.mark.parametrize("changes", OTHER_SETTINGS.values(), ids=OTHER_SETTINGS)
def test_other_settings_are_other_runs(config, changes, tmp_path, monkeypatch):
    (tmp_path / "some.safetensors").write_bytes(b"weights")
    trained = []
    monkeypatch.setattr(Table1, "_fit", lambda self, recipe, row, setting: trained.append(recipe) or {"error": 1.0})
    other = dataclasses.replace(config, **changes)
    other.data.cache = config.data.cache
    for one in (config, other, config, dataclasses.replace(config, summary=True)):
        Table1(one).run(ALEXNET, "seed", 0, ALEXNET.trials[0])
    assert len(trained) == 2


def test_a_run_that_diverges_is_a_result(config, monkeypatch):
    def fit(recipe, module, data, name):
        raise NonFiniteError("the loss was not finite")

    monkeypatch.setattr(table1, "fit", fit)
    run = Table1(config).run(ALEXNET, "trial", 0, ALEXNET.trials[0])
    assert run["metrics"]["error"] == 100.0 and "not finite" in run["metrics"]["diverged"]


def test_differences_pair_regions_and_resample_images(config):
    for row, predicted in (("alexnet", (0, 1, 1, 0)), ("o2p", (0, 1, 0, 0))):
        for seed in (0, 1):
            record(config, row, "seed", seed, 100 * np.mean(np.array(predicted) != (0, 1, 0, 1)), predicted)
    gain = Table1(config).difference(Table1.rows["o2p"])
    assert gain["difference"] == pytest.approx(-25)
    assert gain["high"] == pytest.approx(0)  # image 6 may be missing from a resample
    assert Table1(config).difference(ALEXNET) is None


def test_a_recorded_difference_belongs_to_exactly_its_runs(config):
    results = runs.Results(config.out)
    for row in ("alexnet", "o2p"):
        results.run(row, "seed", 0, {"row": row}, lambda: {"error": 20.0})
    hashes = [[run["hash"]] for run in results.records]
    results.append({"kind": "difference", "row": "o2p", "runs": hashes[::-1], "difference": {"difference": -3.0}})
    assert Table1(config).difference(Table1.rows["o2p"]) == {"difference": -3.0}
    results.run("o2p", "seed", 1, {"row": "o2p", "seed": 1}, lambda: {"error": 20.0})
    assert Table1(config).difference(Table1.rows["o2p"]) is None


def test_each_rows_command_trains_the_same_configuration(config):
    config = dataclasses.replace(config, rows=(), override=("model.weights=none",))
    table = Table1(config)
    for row in ROWS:
        words = shlex.split(table.command(row, {"metrics": {"setting": row.trials[0]}}))
        if row.kind == "sift":
            assert words[:3] == ["python", "-m", "experiments.networks"]
            words = words[2:]
        assert words[1:3] == ["train", "o2p"]
        said, meant = parse("o2p", words[3:], "test").config, table.recipe(row, "seed", 0, row.trials[0])
        assert said.optimizer == meant.optimizer and said.model == meant.model
        assert said.engine.max_epochs == meant.engine.max_epochs


def test_all_rows_of_the_paper_are_present():
    paper = [row.paper for row in ROWS if row.paper is not None]
    assert paper == [36.4, 25.3, 27.2, 28.6, 32.4, 25.2, 28.9]
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert len({len(row.trials) for row in ROWS}) == 1  # the same budget for every row


def test_the_preset_of_four_maps_is_the_row_with_its_winning_setting():
    row = Table1.rows["both-maps"]
    made = Table1(Config(accelerator="gpu")).recipe(row, "seed", 0, row.trials[0])
    assert (made.model, made.optimizer) == (O2P_PRESETS["maps"].model, O2P_PRESETS["maps"].optimizer)
    assert made.engine.max_epochs == O2P_PRESETS["maps"].engine.max_epochs


def test_bad_options_are_reported(config):
    with pytest.raises(ConfigurationError, match=r"--data\.split is set by the table"):
        Table1(Config(data=RegionDataConfig(split="tuning")))
    with pytest.raises(DataError, match="no finished run"):
        Table1(config).summarize()
