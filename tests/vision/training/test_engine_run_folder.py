"""The run folder's files."""

import pytest
import torch

from matbackprop.errors import ConfigurationError
from matbackprop.vision.training.config import EngineConfig
from matbackprop.vision.training.run_folder import RunFolder


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run").create(EngineConfig(seed=4))


def test_files_of_a_new_run(run):
    assert run.read_config()["seed"] == 4
    (entry,) = run.read_versions()
    assert entry["seed"] == 4
    assert entry["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert entry["command"]
    assert len(entry["git"] or "0" * 40) == 40
    assert run.read_metrics() == []
    assert run.read_summary() == {}
    run.create(EngineConfig(seed=4), resume=True)
    assert len(run.read_versions()) == 2


def test_metrics_lines(run):
    run.append_metrics({"step": 1, "epoch": 0, "train/loss": torch.tensor(0.5), "bad": float("nan")})
    run.append_metrics({"step": 2, "epoch": 0, "train/loss": 0.25})
    first, second = run.read_metrics()
    assert first["train/loss"] == 0.5
    assert first["bad"] is None
    assert second["step"] == 2 and second["time"] > 0


def test_a_half_written_last_line_is_dropped(run):
    run.append_metrics({"step": 1})
    run.append_metrics({"step": 2})
    with run.metrics_path.open("a") as file:
        file.write('{"step": 3, "tra')
    assert [m["step"] for m in run.read_metrics()] == [1, 2]
    run.keep_metrics_until(1)
    run.append_metrics({"step": 2})
    assert [m["step"] for m in run.read_metrics()] == [1, 2]


def test_a_corrupt_line_in_the_middle_is_an_error(run):
    run.metrics_path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ConfigurationError, match="line 2 is damaged"):
        run.read_metrics()


def test_final_numbers_are_plain_json(run):
    run.write_summary({"val/error": torch.tensor(0.25), "accuracy": {"fc": float("inf")}})
    assert run.read_summary() == {"val/error": 0.25, "accuracy": {"fc": None}}


def test_devices_may_change_between_starts_but_not_settings(run):
    run.create(EngineConfig(seed=4, devices="2", log_every=7, max_epochs=9, resume=True), resume=True)
    with pytest.raises(ConfigurationError, match=r"gradient_clip: None then, 1\.0 now"):
        run.create(EngineConfig(seed=4, gradient_clip=1.0), resume=True)


def test_overwriting_removes_the_files_of_a_run_and_keeps_others(run, tmp_path):
    own = [run.figure_path("curves"), run.predictions / "validation.npz", run.checkpoints / "last.ckpt"]
    foreign = [run.path / name for name in ("thesis.tex", "notes/a.txt", "figures.txt")]
    own.append(run.path / "model" / "config.json")
    for path in (*own, *foreign):
        path.parent.mkdir(exist_ok=True)
        path.write_text("content")
    run.append_metrics({"step": 1})
    run.create(EngineConfig(seed=5), overwrite=True)
    assert run.read_config()["seed"] == 5 and run.read_metrics() == [] and len(run.read_versions()) == 1
    assert not any(path.exists() for path in own) and all(path.exists() for path in foreign)


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(ConfigurationError, match="is not a run folder"):
        RunFolder(tmp_path).read_config()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="is not a run folder"):
        RunFolder(tmp_path).create(EngineConfig(), overwrite=True)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_run_killed_before_it_had_a_configuration_restarts(run):
    run.config_path.unlink()
    run.create(EngineConfig(seed=5), resume=True)
    assert run.read_config()["seed"] == 5


def test_temporary_files_of_others_are_kept(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in (".theirs.1.tmp", "sub/.theirs.2.tmp", ".config.json.77.tmp"):
        (tmp_path / name).write_text("")
    RunFolder(tmp_path).create(EngineConfig())
    assert (tmp_path / ".theirs.1.tmp").exists() and (tmp_path / "sub" / ".theirs.2.tmp").exists()
    assert not (tmp_path / ".config.json.77.tmp").exists()
