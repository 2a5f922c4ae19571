"""Training on a GPU: no synchronization, bad batches are found although flags are read late, recipes."""

import math
import os

import pytest
import torch

from helpers.tiny_run import GroupedModule, TinyModule, last_checkpoint, tiny_config, train
from matbackprop.vision.configuration import merge
from matbackprop.vision.training.config import RECIPES
from matbackprop.vision.training.engine import run_recipe
from matbackprop.vision.training.run_folder import RunFolder

pytestmark = pytest.mark.cuda


def test_no_step_synchronizes(tmp_path):
    class Strict(TinyModule):
        def training_step(self, batch):
            if self.step in (4, 20):
                torch.cuda.set_sync_debug_mode("error" if self.step == 4 else "default")
            return super().training_step(batch)

    config = tiny_config(tmp_path / "run", accelerator="gpu", items=128, max_epochs=1, log_every=50, guard_every=50)
    try:
        run, _ = train(config, Strict)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.read_summary()["steps"] == 32


def test_optimizers_are_fused_also_after_resuming_a_run_of_the_cpu(tmp_path):
    class Adam(TinyModule):
        def optimizers(self, steps):
            self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, fused=self.device.type == "cuda")
            return self.optimizer, None

    _, module = train(tiny_config(tmp_path / "run", max_epochs=1), Adam)
    assert not module.optimizer.param_groups[0]["fused"]
    for epochs in (2, 3):
        config = tiny_config(tmp_path / "run", max_epochs=epochs, accelerator="gpu", resume=True)
        run, module = train(config, Adam)
        assert module.optimizer.param_groups[0]["fused"]
        assert all(state["step"].is_cuda for state in module.optimizer.state.values())
        assert run.read_summary()["steps"] == 6 * epochs


@pytest.fixture
def environment():
    """Restore environment variables that Fabric's launcher sets."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():  # left by a run that failed
        torch.distributed.destroy_process_group()


def curve(run, name="train/loss"):
    return [m[name] for m in run.read_metrics() if name in m]


def weights(run):
    return last_checkpoint(run)["state_dict"]


@pytest.mark.filterwarnings("default")
def test_ddp_with_one_process_equals_auto_and_resumes(tmp_path, environment):
    common = {"dropout": 0.0, "gradient_clip": 0.2, "accelerator": "gpu", "devices": "1"}
    runs = {}
    for name in ("auto", "ddp"):
        runs[name], _ = train(tiny_config(tmp_path / name, strategy=name, max_epochs=4, **common), GroupedModule)
    assert not torch.distributed.is_initialized()
    parts = tmp_path / "parts"
    train(tiny_config(parts, strategy="ddp", max_epochs=2, **common), GroupedModule)
    runs["parts"], _ = train(tiny_config(parts, strategy="auto", max_epochs=4, resume=True, **common), GroupedModule)
    for name in ("ddp", "parts"):
        for value in ("train/loss", "train/gradient_norm", "val/loss"):
            assert curve(runs[name], value) == pytest.approx(curve(runs["auto"], value), rel=1e-8), (name, value)
        assert runs[name].read_summary()["steps"] == 24
        for key, value in weights(runs["auto"]).items():
            torch.testing.assert_close(weights(runs[name])[key], value, rtol=1e-8, atol=1e-10)


SMALL = {
    "o2p": {"data.generate": 8, "data.batch_size": 4},
    "ncuts": {"data.generate": 8, "data.batch_size": 2},
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
@pytest.mark.parametrize("name", SMALL)
def test_recipes_train_in_every_precision_and_resume(tmp_path_factory, tmp_path, monkeypatch, name, precision):
    monkeypatch.setenv("MATBACKPROP_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    recipe = RECIPES[name]

    def run(epochs, resume=False):
        engine = {"accelerator": "gpu", "devices": "1", "precision": precision, "log_every": 1, "tensorboard": False}
        engine |= {"run": str(tmp_path / "run"), "max_epochs": epochs, "resume": resume}
        engine |= {"progress": False, "report": resume}
        config = merge(recipe.preset("smoke"), SMALL[name] | {f"engine.{k}": v for k, v in engine.items()})
        return run_recipe(recipe, config)

    losses, states = curve(run(1)), weights(RunFolder(tmp_path / "run"))
    assert len(losses) >= 2
    resumed = run(2, resume=True)
    assert curve(resumed)[: len(losses)] == losses
    assert len(curve(resumed)) == 2 * len(losses) and all(math.isfinite(v) for v in curve(resumed))
    assert any(not torch.equal(value, states[key]) for key, value in weights(resumed).items())
    assert resumed.report_path.exists()
