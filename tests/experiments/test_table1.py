"""The first table: tuning, seeds, resuming, what counts as finished, and what the summary says."""

import dataclasses
import hashlib
import json
import shlex

import numpy as np
import pytest

from experiments import table1
from experiments.config import Table1Config
from experiments.table import Job
from experiments.table1 import ROWS, Table1
from matbackprop.cli.train import parse
from matbackprop.errors import ConfigurationError, DataError, NonFiniteError
from matbackprop.vision.training.config import O2P_PRESETS, RegionDataConfig

ALEXNET = Table1.rows["alexnet"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def config(cache, tmp_path):
    return Table1Config(
        out=tmp_path / "table1",
        rows=("alexnet", "o2p"),
        data=RegionDataConfig(cache=cache, made=12, side=56, canvas=67, jitter=3, batch_size=16, threads=0),
        trials=2,
        fine_epochs=2,
        fine_seeds=2,
        precision="32",
        accelerator="cpu",
        override=("model.hidden=16", "model.reduce=6", "model.weights=none"),
    )


def pretend(config, job, error, predicted=(0, 1, 1, 0), diverged=False):
    """Keep the result of a run that never was; a seed's follows the trials that were kept before it."""
    table = Table1(config)
    provenance = table.provenance(job, "cpu")
    path = table.store.path(job, provenance)
    actual = {"number": job.number, "error": error, "error_large": error, "seconds": 1.0, "parameters": 7}
    if diverged:
        actual["diverged"] = "the loss was not finite"
    else:
        (path / "predictions").mkdir(parents=True)
        np.savez(
            path / "predictions" / "validation.npz",
            target=np.array([0, 1, 0, 1]),
            predicted=np.array(predicted),
            large=np.array([True, True, False, True]),
            image=np.array([5, 5, 6, 7]),
        )
    table.store.write(job, provenance, actual)


def pretend_tuning(config, row="alexnet", errors=(40.0, 30.0)):
    for trial, error in enumerate(errors):
        pretend(config, Job(row, "trial", trial), error)


def test_the_whole_table_from_one_command(config):
    config = dataclasses.replace(config, trials=1, fine_seeds=1, fine_epochs=1)
    Table1(config).main()
    table = json.loads((config.out / "table.json").read_text())
    assert [row["name"] for row in table["rows"]] == ["AlexNet", "DeepO2P"]
    for row in table["rows"]:
        assert len(row["trials"]) == len(row["seeds"]) == 1 and row["chosen"] == 0
        [path] = (config.out / "runs" / row["key"]).glob("seed0-*")
        assert path.name == f"seed0-{row['seeds'][0]['fingerprint']}"
        stored = (path / "predictions" / "validation.npz").read_bytes()
        assert hashlib.sha256(stored).hexdigest() == row["seeds"][0]["predictions_sha256"]
        assert not list((path / "checkpoints").iterdir())
        assert row["timing"]["regions_per_second"] > 0
    difference = table["rows"][1]["difference"]["all"]
    means = [row["error"]["mean"] for row in table["rows"]]
    assert difference["difference"] == pytest.approx(means[1] - means[0], abs=1e-3)
    assert difference["low"] <= difference["difference"] <= difference["high"]
    text = (config.out / "table.md").read_text()
    assert "25.3" in text and "28.6" in text and "matbackprop train o2p" in text and "Speeds: one run" in text
    for name in ("errors.png", "curves.png", "confusion-alexnet.png"):
        assert (config.out / "figures" / name).is_file()
    per_class = json.loads((config.out / "per_class.json").read_text())
    counts = per_class["regions"]
    overall = sum(per_class["AlexNet"][n] * counts[n] for n in per_class["AlexNet"]) / sum(counts.values())
    assert overall == pytest.approx(means[0], abs=0.05)


def test_runs_wait_for_their_tuning_and_the_smallest_error_wins(config):
    table = Table1(config)
    assert {job.part for job in table.ready()} == {"trial"}
    pretend(config, Job("alexnet", "trial", 0), 40.0)
    assert table.choose(ALEXNET) is None
    pretend(config, Job("alexnet", "trial", 1), 30.0)
    seeds = [job for job in table.ready() if job.part == "seed"]
    assert seeds == [Job("alexnet", "seed", 0), Job("alexnet", "seed", 1)]
    chosen = table.provenance(seeds[0], "cpu")["configuration"]["optimizer"]
    assert chosen["rate"] == ALEXNET.trials[1]["optimizer.rate"]


def test_a_run_that_diverges_is_a_result(config):
    config.override += ("optimizer.rate=1e6", "optimizer.warmup=0.0")
    table = Table1(config)
    assert table.run(Job("alexnet", "trial", 0)).startswith("error 100.00")
    assert "not finite" in table.result(Job("alexnet", "trial", 0))["diverged"]


def test_a_diverged_seed_does_not_stop_the_summary(config):
    pretend_tuning(config)
    pretend_tuning(config, "o2p")
    pretend(config, Job("alexnet", "seed", 1), 50.0)
    for job in (Job("alexnet", "seed", 0), Job("o2p", "seed", 0), Job("o2p", "seed", 1)):
        pretend(config, job, 100.0, diverged=True)
    table = Table1(config).summarize()
    assert [row["error"]["values"] for row in table["rows"]] == [[100.0, 50.0], [100.0, 100.0]]
    assert table["regions"] == 4 and "difference" not in table["rows"][1]
    assert set(json.loads((config.out / "per_class.json").read_text())) == {"AlexNet", "regions"}


def test_an_overridden_number_of_epochs_is_run_once(config, monkeypatch):
    config = dataclasses.replace(config, rows=("alexnet",), trials=1, fine_seeds=1, stage="train")
    config.override += ("engine.max_epochs=1",)
    pretend(config, Job("alexnet", "trial", 0), 40.0)
    pretend(config, Job("alexnet", "seed", 0), 40.0)
    assert Table1(config).ready() == []
    [other] = Table1(dataclasses.replace(config, override=config.override[:-1], stage="all")).ready()
    assert other == Job("alexnet", "trial", 0)  # what was run for one epoch is not a result of two


OTHER_SETTINGS = {
    "data": {"data": RegionDataConfig(made=12, side=56, canvas=67, jitter=4, batch_size=16, threads=0)},
    "images": {"data": RegionDataConfig(made=8, side=56, canvas=67, jitter=3, batch_size=16, threads=0)},
    "override": {"override": ("model.hidden=32", "model.reduce=6", "model.weights=none")},
    "epochs": {"fine_epochs": 3},
    "weights": {"override": ("model.hidden=16", "model.reduce=6", "model.weights=some.safetensors")},
}


@pytest.mark.parametrize("changes", OTHER_SETTINGS.values(), ids=OTHER_SETTINGS)
def test_results_made_under_other_settings_do_not_count(config, changes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.safetensors").write_bytes(b"weights")
    config = dataclasses.replace(config, rows=("alexnet",))
    pretend_tuning(config)
    for seed in (0, 1):
        pretend(config, Job("alexnet", "seed", seed), 20.0)
    assert Table1(config).ready() == []
    other = dataclasses.replace(config, **changes)
    other.data.cache = config.data.cache
    assert Table1(other).ready() == [Job("alexnet", "trial", 0), Job("alexnet", "trial", 1)]
    assert Table1(config).ready() == []


def test_results_of_another_precision_or_device_do_not_count(config):
    config = dataclasses.replace(config, accelerator="gpu", rows=("alexnet",))
    fingerprints = [
        Table1(dataclasses.replace(config, precision=precision)).provenance(Job("alexnet", "trial", 0), device)
        for precision, device in (("32", "cuda"), ("bf16-mixed", "cuda"), ("32", "cpu"))
    ]
    assert len({json.dumps(one) for one in fingerprints}) == 3


def test_results_do_not_depend_on_where_and_how_a_run_is_carried_out(config, tmp_path):
    one = Table1(config).provenance(Job("alexnet", "trial", 0), "cpu")
    config = dataclasses.replace(config, out=tmp_path / "elsewhere", jobs=7)
    config.data = dataclasses.replace(config.data, threads=3, resident="no")
    assert Table1(config).provenance(Job("alexnet", "trial", 0), "cpu") == one


def test_a_seed_follows_the_trial_that_is_chosen(config):
    pretend_tuning(config, errors=(30.0, 40.0))
    seed = Job("alexnet", "seed", 0)
    pretend(config, seed, 20.0)
    assert Table1(config).result(seed)["error"] == 20.0
    table = Table1(config)
    table.store.write(Job("alexnet", "trial", 1), table.provenance(Job("alexnet", "trial", 1), "cpu"), {"error": 10.0})
    assert Table1(config).result(seed) is None


def test_of_a_group_only_the_best_is_trained_to_the_end(config):
    config = dataclasses.replace(config, rows=("sqrt-fc", "both-log"), trials=1)
    pretend(config, Job("sqrt-fc", "trial", 0), 30.0)
    assert [Table1(config).wins(Table1.rows[key]) for key in config.rows] == [False, False]
    pretend(config, Job("both-log", "trial", 0), 29.0)
    assert [Table1(config).wins(Table1.rows[key]) for key in config.rows] == [False, True]
    assert {job.key for job in Table1(config).ready()} == {"both-log"}


def test_differences_pair_regions_and_resample_images(config):
    for row, predicted in (("alexnet", (0, 1, 1, 0)), ("o2p", (0, 1, 0, 0))):
        pretend_tuning(config, row)
        for seed in (0, 1):
            pretend(config, Job(row, "seed", seed), 100 * np.mean(np.array(predicted) != (0, 1, 0, 1)), predicted)
    difference = Table1(config).summarize()["rows"][1]["difference"]
    assert difference["all"]["difference"] == pytest.approx(-25)
    assert difference["large"]["difference"] == pytest.approx(0)
    assert difference["all"]["high"] == pytest.approx(0)  # image 6 may be missing from a resample


def test_each_rows_command_says_what_its_runs_were(config):
    config = dataclasses.replace(config, rows=(), override=("model.weights=none",))
    for row in ROWS:
        pretend_tuning(config, row.key, range(config.trials))
        table = Table1(config)
        words = shlex.split(table.command(row, "cpu"))
        assert words[:3] == ["matbackprop", "train", "o2p"]
        said = parse("o2p", words[3:], "test").config
        meant = table.run_config(Job(row.key, "seed", 0), row.trials[0], "cpu")
        assert said.optimizer == meant.optimizer and said.model == meant.model
        assert said.engine.max_epochs == meant.engine.max_epochs


def test_the_papers_rows_are_all_there():
    paper = [row.paper for row in ROWS if row.paper is not None]
    assert paper == [36.4, 25.3, 27.2, 28.6, 32.4, 25.2, 28.9]
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert len({len(row.trials) for row in ROWS}) == 1  # the same budget for every row


def test_the_preset_of_four_maps_is_the_row_with_its_winning_setting():
    row = Table1.rows["both-maps"]
    made = Table1(Table1Config()).run_config(Job(row.key, "seed", 0), row.trials[0], "cuda")
    assert (made.model, made.optimizer) == (O2P_PRESETS["maps"].model, O2P_PRESETS["maps"].optimizer)
    assert made.engine.max_epochs == O2P_PRESETS["maps"].engine.max_epochs


@pytest.mark.parametrize(("row", "device", "precision"), [
    ("o2p", "cuda", "bf16-mixed"), ("o2p", "cpu", "32"), ("sift", "cuda", "32"),
])  # fmt: skip
def test_half_precision_is_for_networks_on_gpus(row, device, precision):
    table = Table1(Table1Config())
    assert table.run_config(Job(row, "seed", 0), {}, device).engine.precision == precision


def test_bad_options_are_named(config, tmp_path):
    with pytest.raises(ConfigurationError, match="no row 'resnet'"):
        Table1(Table1Config(rows=("resnet",)))
    with pytest.raises(ConfigurationError, match=r"--data\.split is the table's own"):
        Table1(Table1Config(data=RegionDataConfig(split="tuning")))
    config.override = ("model.hidden",)
    with pytest.raises(ConfigurationError, match="name=value"):
        Table1(config).run_config(Job("alexnet", "seed", 0), {}, "cpu")
    config.override = ("model.weights=none",)
    with pytest.raises(DataError, match="no finished run"):
        Table1(config).summarize()


def test_published_results_without_predictions_keep_the_differences_of_their_table(config):
    for row, predicted in (("alexnet", (0, 1, 1, 0)), ("o2p", (0, 1, 0, 0))):
        pretend_tuning(config, row)
        pretend(config, Job(row, "seed", 0), 20.0, predicted)
    before = Table1(config).summarize()
    for path in config.out.glob("runs/*/*/predictions/validation.npz"):
        path.unlink()
    table = Table1(config)
    table._write("speed.json", json.dumps({"machine": {"device": "a GPU"}, "device": "cpu", "rows": {
        "o2p": {"fingerprint": table._fingerprint(Job("o2p", "timing"), "cpu"), "regions_per_second": 77}
    }}))  # fmt: skip
    after = table.summarize()
    assert after["rows"][1].pop("timing")["regions_per_second"] == 77
    assert before["rows"][1].pop("timing") == {} and after == before
    assert "| 77 |" in (config.out / "table.md").read_text()
    pretend(config, Job("o2p", "seed", 1), 30.0)
    with pytest.raises(DataError, match="predictions of alexnet, o2p are missing"):
        Table1(config).summarize()  # the table was made of other runs


def test_a_run_without_finite_numbers_can_be_compared_with_nothing(config, monkeypatch):
    def fit(recipe, module, data, name):
        raise NonFiniteError("the loss was not finite")

    monkeypatch.setattr(table1, "fit", fit)
    config = dataclasses.replace(config, rows=("alexnet",), trials=1, fine_seeds=1, stage="train")
    pretend(config, Job("alexnet", "trial", 0), 40.0)
    with pytest.raises(DataError, match="diverged; there is nothing to compare"):
        Table1(config).main()
