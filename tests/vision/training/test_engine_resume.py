"""A resumed run is bitwise equal to one that was not interrupted."""

import pytest
import torch

from helpers.tiny_run import TinyData, TinyModule, assert_equal_tensors, last_checkpoint, lines, tiny_config, train
from matbackprop.errors import ConfigurationError
from matbackprop.vision.training.checkpoint import load_checkpoint, save_checkpoint
from matbackprop.vision.training.engine import fit


class _Stop(Exception):
    pass


def _train_until(config, step):
    """Train, and raise before the given step."""

    class Dying(TinyModule):
        def training_step(self, batch):
            if self.step == step:
                raise _Stop
            return super().training_step(batch)

    with pytest.raises(_Stop):
        train(config, Dying)


@pytest.mark.parametrize(
    ("stop", "every", "accumulate"), [(3, 1, 1), (6, 1, 1), (8, 3, 1), (13, 0, 1), (7, 1, 2), (17, 5, 1)]
)
def test_resumed_run_is_bitwise_equal(tmp_path, stop, every, accumulate):
    options = {"checkpoint_every_steps": every, "accumulate": accumulate}
    whole, module = train(tiny_config(tmp_path / "whole", **options))
    _train_until(tiny_config(tmp_path / "parts", **options), stop)
    # another global seed: the resumed run must not depend on it
    torch.manual_seed(99)
    parts, resumed = train(tiny_config(tmp_path / "parts", resume=True, **options))
    assert_equal_tensors(module.state_dict(), resumed.state_dict())
    one, two = last_checkpoint(whole), last_checkpoint(parts)
    assert_equal_tensors(one["state_dict"], two["state_dict"])
    for key, state in one["optimizer"]["state"].items():
        assert torch.equal(state["momentum_buffer"], two["optimizer"]["state"][key]["momentum_buffer"])
    assert one["schedule"] == two["schedule"]
    assert lines(whole) == lines(parts)
    best = [load_checkpoint(r.checkpoints / "best.ckpt") for r in (whole, parts)]
    assert best[0]["score"] == best[1]["score"]
    assert_equal_tensors(best[0]["state_dict"], best[1]["state_dict"])


def test_a_complete_run_does_not_change(tmp_path):
    run, module = train(tiny_config(tmp_path / "run"))
    summary = run.read_summary()
    again, module2 = train(tiny_config(tmp_path / "run", resume=True))
    assert_equal_tensors(module.state_dict(), module2.state_dict())
    assert again.read_summary()["best"] == summary["best"]
    assert again.read_summary()["steps"] == summary["steps"] == 18


class Falling(TinyModule):
    def optimizers(self, steps):
        optimizer, _ = super().optimizers(steps)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)


@pytest.mark.parametrize("kind", [TinyModule, Falling])
def test_a_longer_run_continues_its_schedule_to_the_new_end(tmp_path, kind):
    train(tiny_config(tmp_path / "run", max_epochs=1), kind)
    longer, _ = train(tiny_config(tmp_path / "run", max_epochs=3, resume=True), kind)
    whole, _ = train(tiny_config(tmp_path / "whole", max_epochs=3), kind)
    rates = [[m["train/learning_rate"] for m in run.read_metrics() if "train/loss" in m] for run in (longer, whole)]
    assert len(rates[0]) == 18 and rates[0][7:] == pytest.approx(rates[1][7:])


def test_a_folder_with_a_run_is_not_overwritten_by_accident(tmp_path):
    train(tiny_config(tmp_path / "run", max_epochs=1))
    with pytest.raises(ConfigurationError, match="already contains a run"):
        train(tiny_config(tmp_path / "run", max_epochs=1))
    with pytest.raises(ConfigurationError, match="batch: 4 then, 8 now"):
        train(tiny_config(tmp_path / "run", max_epochs=1, batch=8, resume=True))
    run, _ = train(tiny_config(tmp_path / "run", max_epochs=1, batch=8, overwrite=True))
    assert run.read_summary()["steps"] == 3


def test_without_validation_there_is_no_best_checkpoint(tmp_path):
    class TrainingData(TinyData):
        def validation_loader(self):
            return None

    config = tiny_config(tmp_path / "run", max_epochs=1)
    run = fit(config, TinyModule(config), TrainingData(config), name="tiny")
    assert run.read_summary()["steps"] == 6
    assert "best" not in run.read_summary()
    assert (run.checkpoints / "last.ckpt").exists() and not (run.checkpoints / "best.ckpt").exists()


def test_a_run_without_checkpoints_leaves_numbers_only(tmp_path):
    run, _ = train(tiny_config(tmp_path / "run", max_epochs=1, checkpoints=False))
    assert run.read_summary()["best"] > 0
    assert not list(run.checkpoints.iterdir())


def test_a_missing_monitor_is_reported_once(tmp_path, caplog):
    run, _ = train(tiny_config(tmp_path / "run", max_epochs=2, monitor="val/lost"))
    assert caplog.text.count("Metric 'val/lost' was not logged") == 1
    assert "Logged metrics: val/loss" in caplog.text
    assert "best" not in run.read_summary()


def test_another_number_of_processes_within_an_epoch_is_rejected(tmp_path):
    _train_until(tiny_config(tmp_path / "run", checkpoint_every_steps=2), 8)
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    state = load_checkpoint(path)
    state["processes"] *= 2
    save_checkpoint(state, path)
    with pytest.raises(ConfigurationError, match="within an epoch by 2 processes"):
        train(tiny_config(tmp_path / "run", checkpoint_every_steps=2, resume=True))
