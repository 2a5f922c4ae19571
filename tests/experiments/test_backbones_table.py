"""The table of backbones: its rows can be built, and one command fills it."""

import pytest
import torch

from experiments import backbones
from experiments.backbones import Backbones, Config
from matbackprop.vision.models.deep_o2p import RegionClassifier
from matbackprop.vision.training.config import RegionDataConfig


@pytest.mark.quick(8)
@pytest.mark.parametrize("key", Backbones.rows)
def test_every_row_describes_a_network_and_is_compared_with_first_order_on_it(key):
    table, row = Backbones(Config()), Backbones.rows[key]
    for setting in row.trials:
        config = table.recipe(row, "trial", 0, setting)
        with torch.device("meta"):
            model = RegionClassifier(80, config.model, canvas=config.data.canvas, background=config.data.background)
    reference = Backbones.rows[row.reference]
    assert reference.model["model.head"] == "fc" and reference.kind == row.kind
    assert reference.model["model.backbone"] == row.model["model.backbone"] == model.config.backbone
    trained = {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert ("backbone" in trained) == (row.kind == "fine")
    assert len(row.trials) == len(reference.trials)  # the same budget
    assert row.follows == ("" if row.kind == "frozen" else key.replace("-fine-", "-frozen-"))
    assert not {name for setting in row.trials for name in setting} & set(row.model)


def test_one_command_builds_the_table_of_backbones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config(
        out=tmp_path / "backbones",
        rows=("alexnet-frozen-first", "alexnet-frozen-log", "alexnet-fine-first"),
        data=RegionDataConfig(
            cache=tmp_path / "cache", generate=12, side=56, canvas=67, background="keep", threads=0, batch_size=4
        ),
        trials=1,
        frozen_epochs=1,
        frozen_seeds=2,
        fine_epochs=1,
        fine_seeds=1,
        accelerator="cpu",
        override=("model.weights=none",),
    )
    backbones.main(config)
    table = Backbones(config)
    done = {key: table.results.runs(key) for key in table.chosen}
    assert {key: len(runs) for key, runs in done.items()} == {
        "alexnet-frozen-first": 2, "alexnet-frozen-log": 2, "alexnet-fine-first": 1,
    }  # fmt: skip
    fine, frozen = (done[f"alexnet-{kind}-first"][0]["metrics"] for kind in ("fine", "frozen"))
    assert fine["setting"] == frozen["setting"]  # the frozen row's choice
    assert "regions_per_second" in fine and "regions_per_second" not in frozen  # frozen maps are computed once
    text = (config.out / "table.md").read_text()
    main, held_out = text.split("On held-out training images")
    assert "| AlexNet, frozen, second order, log |" in held_out and "difference to first order" in main
    assert "| AlexNet, frozen, second order, log | rate 0.02, reduce 128, taps" in main and "| paper |" not in text
    command = next(line for line in text.splitlines() if line.startswith("- AlexNet, frozen, second order, log"))
    assert "--model.train-from pool5" in command and "--data.canvas 67" in command and "--data.batch-size 4" in command


def test_a_table_is_built_from_trials_only(tmp_path):
    table = Backbones(Config(out=tmp_path, rows=("alexnet-frozen-first",)))
    metrics = {"setting": {"optimizer.rate": 0.1}, "error": 40.0, "error_large": 30.0}
    table.results.run("alexnet-frozen-first", "trial", 0, {}, lambda: metrics)
    table.summarize()
    assert "| AlexNet, frozen, first order | rate 0.1 | 40.00 | 30.00 |" in (tmp_path / "table.md").read_text()
