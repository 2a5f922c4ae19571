"""The run folder's files."""

import json

import pytest
import torch

from matbackprop.errors import ConfigurationError
from matbackprop.training.config import EngineConfig
from matbackprop.training.run_folder import RunFolder, atomic_write


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run").create(EngineConfig(seed=4), seed=4)


def test_files_of_a_new_run(run):
    assert run.read_config()["seed"] == 4
    (entry,) = run.read_versions()
    assert entry["seed"] == 4
    assert entry["packages"]["torch"] == torch.__version__
    assert entry["command"]
    assert len(entry["git"] or "0" * 40) == 40
    assert run.read_metrics() == []
    assert run.read_summary() == {}


def test_every_start_is_noted(run):
    run.create(EngineConfig(seed=4), resume=True, seed=4)
    assert len(run.read_versions()) == 2


def test_metrics_lines(run):
    run.append_metrics({"step": 1, "epoch": 0, "train/loss": torch.tensor(0.5), "bad": float("nan")})
    run.append_metrics({"step": 2, "epoch": 0, "train/loss": 0.25})
    first, second = run.read_metrics()
    assert first["train/loss"] == 0.5
    assert first["bad"] is None
    assert second["step"] == 2 and second["time"] > 0


def test_a_half_written_last_line_is_passed_over_and_dropped(run):
    run.append_metrics({"step": 1})
    run.append_metrics({"step": 2})
    with run.metrics_path.open("a") as file:
        file.write('{"step": 3, "tra')
    assert [m["step"] for m in run.read_metrics()] == [1, 2]
    run.keep_metrics_until(1)
    run.append_metrics({"step": 2})
    assert [m["step"] for m in run.read_metrics()] == [1, 2]


def test_a_damaged_line_in_the_middle_is_an_error(run):
    run.metrics_path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ConfigurationError, match="line 2 is damaged"):
        run.read_metrics()


def test_places_are_made(run):
    assert run.figure_path("curves") == run.path / "figures" / "curves.png"
    assert run.figure_path("a/b.svg").parent.is_dir()
    assert run.predictions_path("val.npz").parent.is_dir()


def test_summary(run):
    run.write_summary({"val/error": torch.tensor(0.25), "nested": {"inf": float("inf")}})
    assert json.loads(run.summary_path.read_text()) == {"val/error": 0.25, "nested": {"inf": None}}


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(ConfigurationError, match="is no run folder"):
        RunFolder(tmp_path).read_config()


def test_how_a_run_is_carried_out_may_change_but_not_what(run):
    run.create(EngineConfig(seed=4, devices="2", log_every=7, max_epochs=9, resume=True), resume=True)
    with pytest.raises(ConfigurationError, match=r"gradient_clip: None then, 1\.0 now"):
        run.create(EngineConfig(seed=4, gradient_clip=1.0), resume=True)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    atomic_write(path, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
