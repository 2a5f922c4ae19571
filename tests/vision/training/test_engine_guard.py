"""A loss or gradient that is not finite stops the run before a checkpoint is written."""

import re

import pytest
import torch

from helpers.tiny_run import TinyModule, last_checkpoint, tiny_config, train
from matbackprop.errors import DomainError, NonFiniteError, SolverError
from matbackprop.vision.training import engine
from matbackprop.vision.training.checkpoint import load_checkpoint
from matbackprop.vision.training.run_folder import RunFolder


def _finite(run):
    for path in run.checkpoints.iterdir():
        for tensor in load_checkpoint(path)["state_dict"].values():
            assert torch.isfinite(tensor).all()


def _place(error):
    return re.search(r"not finite at (step \d+, epoch 1, batch \d)", str(error)).group(1)


def test_a_bad_batch_stops_before_the_optimizer_step(tmp_path):
    config = tiny_config(tmp_path / "run", poison=5, checkpoint_every_steps=1)
    with pytest.raises(NonFiniteError) as caught:
        train(config)
    run = RunFolder(tmp_path / "run")
    step = last_checkpoint(run)["global_step"]
    assert 6 <= step < 12  # the item is bad in the second epoch
    assert _place(caught.value) == f"step {step}, epoch 1, batch {step - 6}"
    assert str(run.checkpoints / "last.ckpt") in str(caught.value)
    _finite(run)
    with pytest.raises(NonFiniteError, match=_place(caught.value)):  # resuming repeats the batch
        train(tiny_config(tmp_path / "run", poison=5, checkpoint_every_steps=1, resume=True))


@pytest.mark.parametrize("every", [3, 100])
def test_flags_read_late_find_the_right_batch_and_no_bad_checkpoint_is_written(tmp_path, monkeypatch, every):
    with pytest.raises(NonFiniteError) as immediate:
        train(tiny_config(tmp_path / "immediate", poison=5))

    class Late(engine.Training):  # as on a GPU
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.check_every = every

    monkeypatch.setattr(engine, "Training", Late)
    with pytest.raises(NonFiniteError) as late:
        train(tiny_config(tmp_path / "late", poison=5))
    assert _place(late.value) == _place(immediate.value)
    run = RunFolder(tmp_path / "late")
    assert last_checkpoint(run)["global_step"] == 6
    _finite(run)


@pytest.mark.parametrize("kind", [SolverError, DomainError, torch.linalg.LinAlgError])
def test_a_layer_that_rejects_a_batch_is_reported_the_same_way(tmp_path, kind):
    class Rejecting(TinyModule):
        def training_step(self, batch):
            if self.step == 8:
                raise kind("no decomposition")
            return super().training_step(batch)

    message = r"A batch cannot be computed at step 8, epoch 1, batch 2 \(no decomposition\)"
    with pytest.raises(NonFiniteError, match=message) as caught:
        train(tiny_config(tmp_path / "run"), Rejecting)
    assert isinstance(caught.value.__cause__, kind)


def test_weights_that_overflow_are_not_saved(tmp_path):
    class Exploding(TinyModule):
        def optimizers(self, steps):
            optimizer, schedule = super().optimizers(steps)
            optimizer.register_step_post_hook(self.explode)
            return optimizer, schedule

        def explode(self, *_):
            if self.step == 5:
                with torch.no_grad():
                    self.net[0].bias.fill_(float("inf"))

    with pytest.raises(NonFiniteError, match="A weight is not finite"):
        train(tiny_config(tmp_path / "run", max_epochs=1, checkpoint_every_steps=2), Exploding)
    run = RunFolder(tmp_path / "run")
    assert last_checkpoint(run)["global_step"] == 4
    _finite(run)


def test_clipping_bounds_the_gradient_and_the_norm_is_logged_unclipped(tmp_path):
    norms = []

    class Measured(TinyModule):
        def optimizers(self, steps):
            optimizer, schedule = super().optimizers(steps)
            optimizer.register_step_post_hook(self.measure)
            return optimizer, schedule

        def measure(self, *_):
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())

    for clip in (None, 0.5):
        norms.clear()
        run, _ = train(tiny_config(tmp_path / f"run{clip}", max_epochs=1, gradient_clip=clip), Measured)
        logged = [m["train/gradient_norm"] for m in run.read_metrics() if "train/gradient_norm" in m]
        assert max(logged) > 0.5
        if clip is None:
            assert logged == pytest.approx(norms)
        else:
            assert max(norms) <= 0.5 + 1e-6
            assert norms == pytest.approx([min(n, 0.5) for n in logged], rel=1e-5)
