"""Sharded training (FSDP) on the CPU: the same numbers, and whole checkpoints that any strategy goes on from."""

import sys

import pytest
import torch
from torch import nn

from helpers.tiny_run import TinyData, TinyModule, tiny_config, train_groups
from helpers.two_processes import run_two
from matbackprop.errors import ConfigurationError
from matbackprop.training import sharding
from matbackprop.training.checkpoint import load_checkpoint
from matbackprop.training.engine import fit, run_recipe, seed_all
from matbackprop.training.run_folder import RunFolder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


def curve(path, name="train/loss"):
    return [m[name] for m in RunFolder(path).read_metrics() if name in m]


def assert_same_weights(first, second):
    states = [load_checkpoint(path / "checkpoints" / "last.ckpt") for path in (first, second)]
    assert states[0]["state_dict"].keys() == states[1]["state_dict"].keys()
    for key, value in states[0]["state_dict"].items():
        torch.testing.assert_close(states[1]["state_dict"][key], value, rtol=1e-9, atol=1e-12)
    return states


COMMON = {"dropout": 0.0, "gradient_clip": 0.2}


def test_groups_clipping_and_checkpoints_are_those_of_one_process(tmp_path):
    def one(folder, **options):
        train_groups(tiny_config(tmp_path / folder, batch=8, **options, **COMMON))

    def two(folder, **options):
        config = tiny_config(tmp_path / folder, batch=4, devices="2", strategy="fsdp", **options, **COMMON)
        assert run_two(config, train=train_groups) == [0, 0]

    one("one", max_epochs=2)
    two("two", max_epochs=2)
    for name in ("train/loss", "train/gradient_norm", "val/loss"):
        assert curve(tmp_path / "two", name) == pytest.approx(curve(tmp_path / "one", name), rel=1e-9)
    assert max(curve(tmp_path / "one", "train/gradient_norm")) > COMMON["gradient_clip"]  # something was clipped
    states = [c["optimizer_states"][0] for c in assert_same_weights(tmp_path / "one", tmp_path / "two")]
    assert [g["params"] for g in states[1]["param_groups"]] == [[0, 1], [2, 3]]
    for key, state in states[0]["state"].items():
        torch.testing.assert_close(states[1]["state"][key]["exp_avg"], state["exp_avg"], rtol=1e-9, atol=1e-12)

    one("one", max_epochs=3, resume=True)
    two("two", max_epochs=3, resume=True)
    assert_same_weights(tmp_path / "one", tmp_path / "two")
    first, second = tmp_path / "one" / "checkpoints", tmp_path / "two" / "checkpoints"
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    one("one", max_epochs=4, resume=True)  # each goes on from the other's checkpoint
    two("two", max_epochs=4, resume=True)
    assert_same_weights(tmp_path / "one", tmp_path / "two")


def test_one_process_is_enough(tmp_path):
    alone = {"devices": "1", "strategy": "fsdp", "max_epochs": 2, "checkpoint_every_steps": 2}
    train_groups(tiny_config(tmp_path / "plain", **COMMON, max_epochs=2))
    assert run_two(tiny_config(tmp_path / "fsdp", **alone, **COMMON), train=train_groups, processes=1) == [0]
    assert curve(tmp_path / "fsdp") == pytest.approx(curve(tmp_path / "plain"), rel=1e-9)
    assert_same_weights(tmp_path / "plain", tmp_path / "fsdp")


class ConvolutionModule(TinyModule):
    """Convolutions whose layout is changed before they are sharded, and after, as the recipes do."""

    def __init__(self, config):
        super().__init__(config)
        first, second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 5, 3, padding=1)
        self.net = nn.Sequential(nn.Unflatten(1, (2, 3, 1)), first, nn.Tanh(), second, nn.Flatten(), nn.Linear(15, 1))
        self.net.double().to(memory_format=torch.channels_last)

    def on_fit_start(self):
        self.net.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("processes", [1, 2])
def test_layouts_do_not_matter(tmp_path, processes):
    def train(config):
        seed_all(config.engine.seed)
        fit(config, ConvolutionModule(config), TinyData(config), name="tiny")

    train(tiny_config(tmp_path / "plain", batch=4, **COMMON))
    options = {"batch": 4 // processes, "devices": str(processes), "strategy": "fsdp"}
    config = tiny_config(tmp_path / "fsdp", **options, **COMMON)
    assert run_two(config, train=train, processes=processes) == [0] * processes
    assert curve(tmp_path / "fsdp") == pytest.approx(curve(tmp_path / "plain"), rel=1e-9)
    states = [c["optimizer_states"][0]["state"] for c in assert_same_weights(tmp_path / "plain", tmp_path / "fsdp")]
    for key, state in states[0].items():
        torch.testing.assert_close(states[1][key]["momentum_buffer"], state["momentum_buffer"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["o2p", "ncuts"])
def test_recipes_end_with_their_figures_and_report(tmp_path, monkeypatch, name):
    from matbackprop.training.config import get_recipe, merge

    monkeypatch.setenv("MATBACKPROP_CACHE", str(tmp_path / "cache"))
    data = {"data.made": 8, "data.batch_size": 2}
    recipe = get_recipe(name)
    engine = {"max_epochs": 1, "accelerator": "cpu", "progress": False, "tensorboard": False, "log_every": 1}
    options = data | {f"engine.{key}": value for key, value in engine.items()}
    configs = {
        strategy: merge(
            recipe.preset("smoke"),
            options | {"engine.run": str(tmp_path / strategy), "engine.strategy": strategy, "engine.devices": "2"},
        )
        for strategy in ("ddp", "fsdp")
    }
    recipe.build(configs["ddp"])  # prepares the data once
    for config in configs.values():
        assert run_two(config, train=lambda c: run_recipe(recipe, c)) == [0, 0]
    assert (tmp_path / "fsdp" / "report.html").exists() and list((tmp_path / "fsdp" / "figures").iterdir())
    assert curve(tmp_path / "fsdp") == pytest.approx(curve(tmp_path / "ddp"), rel=1e-4)


def test_what_cannot_be_sharded_is_named(tmp_path):
    class Single(TinyModule):
        def __init__(self, config):
            super().__init__(config)
            self.log_eps = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def attempt(config):
        with pytest.raises(ConfigurationError, match=r"a single number: log_eps\. Do not let it learn"):
            fit(config, Single(config), TinyData(config), name="tiny")

    assert run_two(tiny_config(tmp_path / "run", strategy="fsdp", devices="1"), train=attempt, processes=1) == [0]
    config = tiny_config(tmp_path / "run64", strategy="fsdp", precision="64")
    with pytest.raises(ConfigurationError, match="fsdp does not go with --precision 64"):
        fit(config, TinyModule(config), TinyData(config), name="tiny")


def test_autocast_is_all_that_mixed_precision_does():
    plugin = sharding.ShardedPrecision("bf16-mixed", "cpu")
    layer, x = nn.Linear(2, 2).double(), torch.ones(1, 2)
    assert plugin.convert_module(layer).weight.dtype == torch.float64
    assert plugin.convert_input({"x": x.double()})["x"].dtype == torch.float64
    with plugin.forward_context():
        assert nn.Linear(2, 2)(x).dtype == torch.bfloat16
    with sharding.ShardedPrecision("32-true", "cpu").forward_context():
        assert nn.Linear(2, 2)(x).dtype == torch.float32
    config = plugin.mixed_precision_config
    assert config.param_dtype is config.reduce_dtype is config.buffer_dtype is None
