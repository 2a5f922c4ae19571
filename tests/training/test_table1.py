"""The driver of the first table: tuning, seeds, resuming, and what the summary says."""

import dataclasses
import hashlib
import json
import queue
import shlex
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from matbackprop.cli.train import parse
from matbackprop.errors import ConfigurationError, DataError, NonFiniteError
from matbackprop.files import atomic_write
from matbackprop.training import table1
from matbackprop.training.o2p_config import PRESETS, RegionDataConfig
from matbackprop.training.table1 import ROWS, Job
from matbackprop.training.table_config import Table1Config


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


def pretend(config, job, error, predicted=(0, 1, 1, 0)):
    """Write the result of a run that never was; a seed's follows the trials that were written before it."""
    row = table1._row(job.row)
    chosen = job.number if job.part == "trial" else table1.choose(config, row)
    path = table1.run_path(config, job)
    (path / "predictions").mkdir(parents=True)
    np.savez(
        path / "predictions" / "validation.npz",
        target=np.array([0, 1, 0, 1]),
        predicted=np.array(predicted),
        large=np.array([True, True, False, True]),
        image=np.array([5, 5, 6, 7]),
    )
    found = {"row": job.row, "number": job.number, "error": error, "error_large": error, "seconds": 1.0}
    found |= {"parameters": 7, "setting": row.trials[chosen or 0], "model": row.model}
    found |= {"epochs": table1.epochs_of(config, row, job.part)}
    atomic_write(path / "result.json", json.dumps(found))
    (path / "versions.json").write_text(json.dumps([{"time": "now"}]))
    return found


def test_the_whole_table_from_one_command(config):
    table1.main(config)
    table = json.loads((config.out / "table.json").read_text())
    assert [row["name"] for row in table["rows"]] == ["AlexNet", "DeepO2P"]
    for row in table["rows"]:
        assert len(row["trials"]) == 2 and len(row["seeds"]) == 2
        errors = [trial["error"] for trial in row["trials"]]
        assert errors[row["chosen"]] == min(errors)
        for seed in row["seeds"]:
            path = config.out / "runs" / row["key"] / f"seed{seed['seed']}"
            stored = (path / "predictions" / "validation.npz").read_bytes()
            assert hashlib.sha256(stored).hexdigest() == seed["predictions_sha256"]
            assert not list((path / "checkpoints").iterdir())
        assert row["timing"]["regions_per_second"] > 0
    difference = table["rows"][1]["difference"]["all"]
    means = [row["error"]["mean"] for row in table["rows"]]
    assert difference["points"] == pytest.approx(means[1] - means[0], abs=1e-3)
    assert difference["low"] <= difference["points"] <= difference["high"]
    text = (config.out / "table.md").read_text()
    assert "25.3" in text and "28.6" in text and "matbackprop train o2p" in text
    for name in ("errors.png", "curves.png", "confusion-alexnet.png"):
        assert (config.out / "figures" / name).is_file()
    per_class = json.loads((config.out / "per_class.json").read_text())
    counts = per_class["regions"]
    overall = sum(per_class["AlexNet"][n] * counts[n] for n in per_class["AlexNet"]) / sum(counts.values())
    assert overall == pytest.approx(means[0], abs=0.05)


def test_workers_do_what_one_process_does_and_nothing_is_done_twice(config, monkeypatch):
    config.rows, config.trials, config.fine_seeds, config.fine_epochs = ("alexnet",), 1, 1, 1
    config.jobs = 2
    assert table1.run_all(config)
    stored = {p: p.read_text() for p in config.out.glob("runs/*/*/result.json")}
    assert len(stored) == 2
    config.jobs = 1
    monkeypatch.setattr(table1, "run_job", None)  # would fail if it were called
    assert table1.run_all(config)
    assert {p: p.read_text() for p in stored} == stored


def test_runs_wait_for_their_tuning_and_the_smallest_error_wins(config):
    ready, total = table1.open_jobs(config)
    assert {job.part for job, _ in ready} == {"trial"}
    assert total == len(ready) + 4
    pretend(config, Job("alexnet", "trial", 0), 40.0)
    assert table1.choose(config, ROWS[1]) is None
    pretend(config, Job("alexnet", "trial", 1), 30.0)
    seeds = [(job, setting) for job, setting in table1.open_jobs(config)[0] if job.part == "seed"]
    assert [job.row for job, _ in seeds] == ["alexnet", "alexnet"]
    assert all(setting == ROWS[1].trials[1] for _, setting in seeds)


def test_nothing_is_started_that_would_not_end_in_time(config, monkeypatch):
    done = []

    def run_job(config, job, setting):
        done.append(job)
        return pretend(config, job, 50.0) | {"seconds": 1000.0}

    monkeypatch.setattr(table1, "run_job", run_job)
    config.time_limit = 60.0
    assert not table1.run_all(config)
    assert len(done) == 1  # the first one tells how long a run takes
    config.time_limit = None
    assert table1.run_all(config)
    assert len(done) == len(set(done)) == 8


def test_a_run_that_fails_does_not_stop_the_others(config, monkeypatch):
    def worker(config, tasks, results):
        while (task := tasks.get()) is not None:
            broken = task[0] == Job("alexnet", "trial", 0)
            results.put((task[0], None, "broken") if broken else (task[0], pretend(config, task[0], 50.0), None))

    threads = SimpleNamespace(Queue=queue.Queue, Process=threading.Thread)
    monkeypatch.setattr(table1.multiprocessing, "get_context", lambda kind: threads)
    monkeypatch.setattr(table1, "_worker", worker)
    config.jobs = 2
    with pytest.raises(RuntimeError, match="1 runs failed, the first: alexnet trial0:\nbroken"):
        table1.run_all(config)
    left = [job for job, _ in table1.open_jobs(config)[0]]
    assert left == [Job("alexnet", "trial", 0)]  # its seeds wait for it; the other row is finished


def test_a_run_that_diverges_is_a_result(config):
    config.override += ("optimizer.rate=1e30", "optimizer.warmup=0.0")
    found = table1.run_job(config, Job("alexnet", "trial", 0), ROWS[1].trials[0])
    assert found["error"] == 100.0 and "not finite" in found["diverged"]
    assert table1.result(config, Job("alexnet", "trial", 0)) == found


def test_a_diverged_seed_does_not_stop_the_summary(config):
    for row in config.rows:
        for part in ("trial", "seed"):
            for number in (0, 1):
                pretend(config, Job(row, part, number), 50.0)
    for job in (Job("alexnet", "seed", 0), Job("o2p", "seed", 0), Job("o2p", "seed", 1)):
        path = table1.run_path(config, job)
        (path / "predictions" / "validation.npz").unlink()
        stored = json.loads((path / "result.json").read_text())
        atomic_write(path / "result.json", json.dumps(stored | {"error": 100.0, "error_large": 100.0, "diverged": "!"}))
    table = table1.summarize(config)
    assert [row["error"]["values"] for row in table["rows"]] == [[100.0, 50.0], [100.0, 100.0]]
    assert table["regions"] == 4 and "difference" not in table["rows"][1]
    assert set(json.loads((config.out / "per_class.json").read_text())) == {"AlexNet", "regions"}


def test_an_overridden_number_of_epochs_is_run_once(config, monkeypatch):
    config.rows, config.trials, config.fine_seeds = ("alexnet",), 1, 1
    config.override += ("engine.max_epochs=1",)
    runs = []

    def fit(recipe, module, data, name):
        runs.append(recipe.engine.max_epochs)
        assert len(runs) < 3, "a finished run was done again"
        raise NonFiniteError("the loss was not finite")

    monkeypatch.setattr(table1, "fit", fit)
    assert table1.run_all(config) and runs == [1, 1]


def test_results_of_another_setting_or_length_do_not_count(config):
    for trial, error in enumerate((30.0, 40.0)):
        pretend(config, Job("alexnet", "trial", trial), error)
    seed = Job("alexnet", "seed", 0)
    pretend(config, seed, 20.0)
    assert table1.result(config, seed)["error"] == 20.0
    config.fine_epochs += 1  # all of them were shorter
    assert table1.result(config, seed) is None and table1.result(config, Job("alexnet", "trial", 0)) is None
    config.fine_epochs -= 1
    path = table1.run_path(config, Job("alexnet", "trial", 1)) / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"error": 10.0}))  # now the other trial is chosen
    assert table1.result(config, seed) is None


def test_of_a_group_only_the_best_is_trained_to_the_end(config):
    config.rows, config.trials = ("sqrt-fc", "both-log"), 1
    rows = table1.chosen_rows(config)
    assert [table1.wins(config, row) for row in rows] == [None, None]
    pretend(config, Job("sqrt-fc", "trial", 0), 30.0)
    assert [table1.wins(config, row) for row in rows] == [None, None]
    pretend(config, Job("both-log", "trial", 0), 29.0)
    assert [table1.wins(config, row) for row in rows] == [False, True]
    assert {job.row for job, _ in table1.open_jobs(config)[0]} == {"both-log"}


def test_differences_pair_regions_and_resample_images(config):
    for row, predicted in (("alexnet", (0, 1, 1, 0)), ("o2p", (0, 1, 0, 0))):
        for seed in (0, 1):
            pretend(config, Job(row, "seed", seed), 100 * np.mean(np.array(predicted) != (0, 1, 0, 1)), predicted)
        for trial in (0, 1):
            pretend(config, Job(row, "trial", trial), 1.0)
    table = table1.summarize(config)
    difference = table["rows"][1]["difference"]
    assert difference["all"]["points"] == pytest.approx(-25)
    assert difference["large"]["points"] == pytest.approx(0)
    assert difference["all"]["high"] == pytest.approx(0)  # image 6 may be missing from a resample


def test_each_rows_command_says_what_its_runs_were(config):
    for row in ROWS:
        for trial in range(config.trials):
            pretend(config, Job(row.key, "trial", trial), float(trial))
        words = shlex.split(table1.command(config, row))
        assert words[:3] == ["matbackprop", "train", "o2p"]
        said = parse("o2p", words[3:], "test").config
        plain = dataclasses.replace(config, override=())
        meant = table1.run_config(plain, row, Job(row.key, "seed", 0), row.trials[0])
        assert said.optimizer == meant.optimizer and said.model == meant.model
        assert said.engine.max_epochs == meant.engine.max_epochs


def test_the_papers_rows_are_all_there():
    paper = [row.paper for row in ROWS if row.paper is not None]
    assert paper == [36.4, 25.3, 27.2, 28.6, 32.4, 25.2, 28.9]
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert len({len(row.trials) for row in ROWS}) == 1  # the same budget for every row


def test_the_preset_of_four_maps_is_the_row_with_its_winning_setting():
    row = table1._row("both-maps")
    made = table1.run_config(Table1Config(), row, Job(row.key, "seed", 0), row.trials[0])
    assert (made.model, made.optimizer) == (PRESETS["maps"].model, PRESETS["maps"].optimizer)
    assert made.engine.max_epochs == PRESETS["maps"].engine.max_epochs


@pytest.mark.parametrize(("cuda", "accelerator", "precision"), [
    (True, "auto", "bf16-mixed"), (True, "cpu", "32"), (False, "auto", "32"),
])  # fmt: skip
def test_half_precision_is_for_gpus(monkeypatch, cuda, accelerator, precision):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    config, row = Table1Config(accelerator=accelerator), table1._row("o2p")
    job = Job("o2p", "seed", 0)
    assert table1.run_config(config, row, job, row.trials[0]).engine.precision == precision


def test_bad_options_are_named(config, tmp_path):
    with pytest.raises(ConfigurationError, match="no row 'resnet'"):
        table1.chosen_rows(Table1Config(rows=("resnet",)))
    config.override = ("model.hidden",)
    with pytest.raises(ConfigurationError, match="name=value"):
        table1.run_config(config, ROWS[1], Job("alexnet", "seed", 0), {})
    with pytest.raises(DataError, match="no finished run"):
        table1.summarize(Table1Config(out=Path(tmp_path / "nothing")))
