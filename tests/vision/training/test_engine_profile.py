"""The profile of a step adds up and includes the structured layer."""

import json

import pytest
import torch
from torch import nn

from helpers.tiny_run import TinyData, TinyModule, tiny_config
from matbackprop import matrix_log
from matbackprop.nn import SecondOrderPool
from matbackprop.vision.training.engine import fit, seed_all
from matbackprop.vision.training.profile import PARTS, structured_layers


class Pooling(TinyModule):
    def __init__(self, config):
        super().__init__(config)
        self.before = nn.Linear(6, 6).double()
        self.pool = SecondOrderPool(eps=1.0)

    def loss(self, batch):
        x, y = batch
        pooled = self.pool(self.before(x).unsqueeze(1).expand(-1, 3, -1))
        return super().loss((x, y)) + 1e-3 * pooled.square().mean()


def test_profile_is_printed_and_saved(tmp_path, capsys):
    config = tiny_config(tmp_path / "run", profile=True, profile_steps=6)
    seed_all(0)
    run = fit(config, Pooling(config), TinyData(config), name="tiny")
    actual = json.loads(run.profile_path.read_text())
    assert actual["steps"] == 6
    assert set(actual["milliseconds"]) == set(PARTS)
    assert sum(actual["milliseconds"].values()) == pytest.approx(actual["total_milliseconds"])
    assert sum(actual["share"].values()) == pytest.approx(1.0)
    assert all(value > 0 for value in actual["milliseconds"].values()), actual["milliseconds"]
    out = capsys.readouterr().out
    for part in PARTS:
        assert part in out
    assert run.read_summary()["step_milliseconds"] == pytest.approx(actual["total_milliseconds"])


def test_profile_does_not_change_the_run(tmp_path):
    ends = []
    for profile in (False, True):
        config = tiny_config(tmp_path / str(profile), profile=profile, max_epochs=1)
        seed_all(0)
        module = Pooling(config)
        fit(config, module, TinyData(config), name="tiny")
        ends.append(module.state_dict())
    for key, value in ends[0].items():
        assert torch.equal(value, ends[1][key])


class Penalty(nn.Module):
    structured = True

    def forward(self, f):
        return 1e-3 * matrix_log(f.mT @ f + torch.eye(6, dtype=f.dtype)).square().mean()


class Calling(TinyModule):
    def __init__(self, config):
        super().__init__(config)
        self.penalty = Penalty()

    def loss(self, batch):
        return super().loss(batch) + self.penalty(self.net[0].weight)


def test_modules_marked_as_structured_are_timed(tmp_path):
    config = tiny_config(tmp_path / "run", profile=True, max_epochs=1)
    seed_all(0)
    run = fit(config, Calling(config), TinyData(config), name="tiny")
    actual = json.loads(run.profile_path.read_text())["milliseconds"]
    assert actual["layer forward"] > 0 and actual["layer backward"] > 0


def test_a_short_run_is_profiled_too(tmp_path):
    config = tiny_config(tmp_path / "run", profile=True, max_epochs=1)  # six steps; a profile takes twenty-five
    seed_all(0)
    run = fit(config, Pooling(config), TinyData(config), name="tiny")
    assert json.loads(run.profile_path.read_text())["steps"] == 5


def test_outermost_structured_layers_are_found():
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(SecondOrderPool()), SecondOrderPool())
    assert [type(m).__name__ for m in structured_layers(module)] == ["SecondOrderPool", "SecondOrderPool"]
