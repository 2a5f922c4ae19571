"""A loss or gradient that is not finite stops the run before a checkpoint, with a report."""

import json

import pytest
import torch
from safetensors.torch import load_file

from helpers.tiny_run import TinyData, TinyModule, tiny_config, train
from matbackprop.errors import DomainError, NonFiniteError, SolverError
from matbackprop.vision.training.checkpoint import load_checkpoint
from matbackprop.vision.training.engine import fit, seed_all
from matbackprop.vision.training.guard import Guard, named_tensors
from matbackprop.vision.training.run_folder import RunFolder


def _check_report(run, step, batch_holds):
    (folder,) = run.nonfinite.iterdir()
    report = json.loads((folder / "report.json").read_text())
    assert report["step"] == step
    assert report["layer"]["spectrum"]
    batch = load_file(folder / "batch.safetensors")
    assert not torch.isfinite(batch[batch_holds]).all()
    return report


def _finite(run):
    for path in run.checkpoints.iterdir():
        for tensor in load_checkpoint(path)["state_dict"].values():
            assert torch.isfinite(tensor).all()


def test_a_bad_batch_stops_before_the_optimizer_step(tmp_path):
    config = tiny_config(tmp_path / "run", poison=5, checkpoint_every_steps=1)
    with pytest.raises(NonFiniteError, match=r"not finite at step \d+, epoch 1, batch \d") as caught:
        train(config)
    run = RunFolder(tmp_path / "run")
    last = load_checkpoint(run.checkpoints / "last.ckpt")
    step = last["global_step"]
    assert 6 <= step < 12  # the item is bad in the second epoch
    report = _check_report(run, step, "0")
    assert report["nonfinite_weights"] == []
    assert "net.0.weight" in report["nonfinite_gradients"]
    assert str(run.checkpoints / "last.ckpt") in str(caught.value)
    _finite(run)


def test_the_run_resumes_from_the_last_good_checkpoint(tmp_path):
    with pytest.raises(NonFiniteError):
        train(tiny_config(tmp_path / "run", poison=5))
    with pytest.raises(NonFiniteError):  # deterministic: the same batch fails again
        train(tiny_config(tmp_path / "run", poison=5, resume=True))
    assert len(list((tmp_path / "run" / "nonfinite").iterdir())) == 1


class Lagging(TinyModule):
    fused = True

    def optimizers(self, steps):
        optimizer, schedule = super().optimizers(steps)
        optimizer.param_groups[0] |= {"fused": self.fused, "foreach": False}
        return optimizer, schedule


class LaggingGuard(Guard):
    """As on a GPU: flags are read every few batches."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.every = arguments[1].guard_every


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("every", [3, 100])
def test_flags_read_late_find_the_right_batch_and_no_bad_checkpoint_is_written(tmp_path, monkeypatch, fused, every):
    monkeypatch.setattr(Lagging, "fused", fused)
    monkeypatch.setattr("matbackprop.vision.training.engine.Guard", LaggingGuard)
    config = tiny_config(tmp_path / "run", poison=5, guard_every=every)
    seed_all(3)
    module = Lagging(config)
    with pytest.raises(NonFiniteError):
        fit(config, module, TinyData(config), name="tiny")
    run = RunFolder(tmp_path / "run")
    monkeypatch.undo()
    with pytest.raises(NonFiniteError):
        train(tiny_config(tmp_path / "immediate", poison=5))
    (immediate,) = (tmp_path / "immediate" / "nonfinite").iterdir()
    step = int(immediate.name.removeprefix("step-"))
    report = _check_report(run, step, "0")
    assert load_checkpoint(run.checkpoints / "last.ckpt")["global_step"] == 6
    _finite(run)
    if fused:
        # the optimizer skipped every update from the bad gradient on
        assert report["nonfinite_weights"] == []
        assert all(torch.isfinite(p).all() for p in module.parameters())
    elif every == 100:
        assert "net.0.weight" in report["nonfinite_weights"]


@pytest.mark.parametrize("kind", [SolverError, DomainError, torch.linalg.LinAlgError])
def test_a_layer_that_refuses_a_batch_is_reported_the_same_way(tmp_path, kind):
    class Refusing(TinyModule):
        def training_step(self, batch):
            if self.step == 8:
                raise kind("no decomposition")
            return super().training_step(batch)

    config = tiny_config(tmp_path / "run")
    seed_all(3)
    with pytest.raises(
        NonFiniteError, match=r"A batch cannot be computed at step 8, epoch 1, batch 2 \(no decomposition\)"
    ) as caught:
        fit(config, Refusing(config), TinyData(config), name="tiny")
    assert isinstance(caught.value.__cause__, kind)
    (folder,) = RunFolder(tmp_path / "run").nonfinite.iterdir()
    report = json.loads((folder / "report.json").read_text())
    assert report["layer"]["spectrum"] and report["nonfinite_weights"] == []
    assert load_file(folder / "batch.safetensors")["0"].shape == (4, 6)


def test_other_errors_propagate(tmp_path):
    class Failing(TinyModule):
        def training_step(self, batch):
            raise ZeroDivisionError("a bug")

    config = tiny_config(tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        fit(config, Failing(config), TinyData(config), name="tiny")
    assert not RunFolder(tmp_path / "run").nonfinite.exists()


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

    config = tiny_config(tmp_path / "run", max_epochs=1, checkpoint_every_steps=2)
    seed_all(3)
    with pytest.raises(NonFiniteError, match="A weight is not finite"):
        fit(config, Exploding(config), TinyData(config), name="tiny")
    run = RunFolder(tmp_path / "run")
    assert load_checkpoint(run.checkpoints / "last.ckpt")["global_step"] == 4
    _finite(run)


def test_clipping_bounds_the_gradient_and_the_norm_is_logged_unclipped(tmp_path):
    norms = []

    class Watching(TinyModule):
        def optimizers(self, steps):
            optimizer, schedule = super().optimizers(steps)
            optimizer.register_step_post_hook(self.measure)
            return optimizer, schedule

        def measure(self, *_):
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())

    for clip in (None, 0.5):
        norms.clear()
        config = tiny_config(tmp_path / f"run{clip}", max_epochs=1, gradient_clip=clip)
        seed_all(3)
        run = fit(config, Watching(config), TinyData(config), name="tiny")
        logged = [m["train/gradient_norm"] for m in run.read_metrics() if "train/gradient_norm" in m]
        assert max(logged) > 0.5
        if clip is None:
            assert logged == pytest.approx(norms)
        else:
            assert max(norms) <= 0.5 + 1e-6
            assert norms == pytest.approx([min(n, 0.5) for n in logged], rel=1e-5)


def test_tensors_are_found_in_any_nesting():
    t = torch.ones(1)
    actual = dict(named_tensors({"a": [t, (t, {"b": t})], "c": "text"}))
    assert sorted(actual) == ["a.0", "a.1.0", "a.1.1.b"]
    assert [name for name, _ in named_tensors(t)] == ["batch"]
