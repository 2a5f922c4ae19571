"""Both recipes, interrupted within an epoch and resumed, are bitwise equal to uninterrupted runs."""

import pytest
import torch

from helpers.tiny_run import lines
from matbackprop.vision.configuration import merge
from matbackprop.vision.training.config import RECIPES
from matbackprop.vision.training.engine import fit, seed_all

CASES = {
    "o2p": {"data.generate": 8, "data.batch_size": 4},
    "ncuts": {"data.generate": 8, "data.batch_size": 2},
}
ENGINE = {
    "max_epochs": 2,
    "accelerator": "cpu",
    "log_every": 1,
    "checkpoint_every_steps": 1,
    "checkpoint_min_seconds": 0.0,
    "tensorboard": False,
    "report": False,
}


class _Stop(Exception):
    pass


@pytest.mark.quick(1)
@pytest.mark.parametrize("log_every", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_recipe_is_bitwise_equal(name, log_every, tmp_path, monkeypatch):
    monkeypatch.setenv("MATBACKPROP_CACHE", str(tmp_path / "cache"))
    recipe = RECIPES[name]

    def train(folder, stop=None, resume=False):
        options = ENGINE | {"run": str(tmp_path / folder), "resume": resume, "log_every": log_every}
        config = merge(recipe.preset("smoke"), CASES[name] | {f"engine.{k}": v for k, v in options.items()})
        seed_all(config.engine.seed)
        module, data = recipe.module.build(config)
        step = module.training_step

        def stopping(batch):
            if module.step == stop:
                raise _Stop
            return step(batch)

        module.training_step = stopping
        if stop is None:
            return fit(config, module, data, name=name), module
        with pytest.raises(_Stop):
            fit(config, module, data, name=name)
        return None

    whole, module = train("whole")
    steps, per_epoch = module.step, module.step // 2
    assert per_epoch >= 2
    train("parts", stop=per_epoch + 1)
    torch.manual_seed(99)
    parts, resumed = train("parts", resume=True)
    assert resumed.step == steps == 2 * per_epoch
    for key, value in module.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key
    assert lines(whole) == lines(parts)
    assert len([m for m in whole.read_metrics() if "train/loss" in m]) == -(-per_epoch // log_every) * 2
