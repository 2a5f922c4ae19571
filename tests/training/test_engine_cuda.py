"""What only a GPU shows: no step waits for it, and a bad batch is found although the flag is read late."""

import json

import pytest
import torch

from helpers.tiny_run import TinyData, TinyModule, tiny_config
from matbackprop.errors import NonFiniteError
from matbackprop.training.checkpoint import load_checkpoint
from matbackprop.training.engine import fit, seed_all
from matbackprop.training.guard import GradientGuard
from matbackprop.training.run_folder import RunFolder

pytestmark = pytest.mark.cuda


def train(module_class, config):
    seed_all(3)
    module = module_class(config)
    return fit(config, module, TinyData(config), name="tiny"), module


def test_no_step_waits_for_the_device(tmp_path):
    class Strict(TinyModule):
        def on_train_batch_start(self, batch, batch_idx):
            if self.trainer.global_step == 4:
                torch.cuda.set_sync_debug_mode("error")

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.trainer.global_step == 20:
                torch.cuda.set_sync_debug_mode("default")

    config = tiny_config(tmp_path / "run", accelerator="gpu", items=128, max_epochs=1, log_every=50, guard_every=50)
    try:
        run, _ = train(Strict, config)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.read_summary()["steps"] == 32


@pytest.mark.parametrize("every", [3, 100])
def test_a_bad_batch_is_skipped_on_the_device_and_found(tmp_path, every):
    with pytest.raises(NonFiniteError):
        train(TinyModule, tiny_config(tmp_path / "cpu", poison=5))
    config = tiny_config(tmp_path / "gpu", accelerator="gpu", poison=5, guard_every=every)
    seed_all(3)
    module = TinyModule(config)
    with pytest.raises(NonFiniteError):
        fit(config, module, TinyData(config), name="tiny")
    assert all(torch.isfinite(p).all() for p in module.parameters())
    names = [[p.name for p in (tmp_path / d / "nonfinite").iterdir()] for d in ("cpu", "gpu")]
    assert names[0] == names[1]
    run = RunFolder(tmp_path / "gpu")
    report = json.loads((run.nonfinite / names[1][0] / "report.json").read_text())
    assert report["weights"] == "those of this step"
    for path in run.checkpoints.iterdir():
        assert all(torch.isfinite(t).all() for t in load_checkpoint(path)["state_dict"].values())


def test_optimisers_are_fused_also_after_resuming_a_run_of_the_cpu(tmp_path):
    class Adam(TinyModule):
        fused = None

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_end(self):
            Adam.fused = self.trainer.optimizers[0].param_groups[0]["fused"]
            (guard,) = [c for c in self.trainer.callbacks if isinstance(c, GradientGuard)]
            assert guard._fused is bool(Adam.fused)

    train(Adam, tiny_config(tmp_path / "run", max_epochs=1))
    assert not Adam.fused
    run, _ = train(Adam, tiny_config(tmp_path / "run", max_epochs=2, accelerator="gpu", resume=True))
    assert Adam.fused
    assert run.read_summary()["steps"] == 12
