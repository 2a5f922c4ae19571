"""Every recipe runs from the command line on synthetic data, resumes, and can be evaluated."""

import json

import pytest

from helpers.command_line import call
from matbackprop.vision.training.config import RECIPES
from matbackprop.vision.training.run_folder import RunFolder

SHORT = {
    "o2p": ["--data.generate", "12", "--data.batch-size", "8"],
    "ncuts": ["--data.generate", "8"],
    "contours": ["--data.generate", "8"],
}
"""What makes a smoke run even shorter."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MATBACKPROP_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_smoke_run(recipe, tmp_path, capsys):
    base = ["train", recipe, "--preset", "smoke", "--run", str(tmp_path / "run"), "--accelerator", "cpu"]
    base += [*SHORT[recipe], "--no-tensorboard"]
    words = [*base, "--max-epochs", "1", "--log-every", "1"]
    assert call(*words) == 0
    structured = recipe != "contours"
    assert f"run folder: {tmp_path / 'run'}" in capsys.readouterr().out
    run = RunFolder(tmp_path / "run")
    assert run.read_config()["engine"]["max_epochs"] == 1
    metrics = run.read_metrics()
    names = {name for line in metrics for name in line}
    layer = {"layer/rank", "layer/eigen_max", "layer/eigen_min", "layer/gradient_norm"} if structured else set()
    assert {"train/loss", "train/gradient_norm", "train/learning_rate", "val/loss"} | layer <= names
    assert all(line["train/loss"] > 0 for line in metrics if "train/loss" in line)
    for path in (run.report_path, run.summary_path, run.checkpoints / "last.ckpt", run.path / "model" / "config.json"):
        assert path.stat().st_size > 0
    assert list(run.figures.glob("*.png"))

    # The same command stops without --resume, and resumes with it.
    assert call(*words) == 2
    assert "already contains a run" in capsys.readouterr().err
    steps = run.read_summary()["steps"]
    assert call(*base, "--max-epochs", "2", "--resume", "--no-report") == 0
    assert run.read_summary()["steps"] == 2 * steps
    assert len(run.read_versions()) == 2
    capsys.readouterr()

    assert call("evaluate", "run", str(run.path), "--which", "last", "--accelerator", "cpu", "--json") == 0
    again = json.loads(capsys.readouterr().out)["metrics"]
    assert again["val/loss"] == pytest.approx(run.read_summary()["val/loss"], rel=1e-4)


def test_a_configuration_of_no_recipe_is_rejected(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"strange": 1}')
    assert call("evaluate", "run", str(tmp_path)) == 2
    err = capsys.readouterr().err
    assert "does not match any recipe" in err and "Unknown field 'strange'" in err
