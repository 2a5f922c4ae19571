"""The table of backbones: its rows can be built, and one command fills it."""

import dataclasses
import json

import pytest
import torch

from experiments.backbones import Backbones
from experiments.config import BackbonesConfig
from experiments.table import Job
from matbackprop.errors import DataError
from matbackprop.vision.models.deep_o2p import RegionClassifier
from matbackprop.vision.training.config import RegionDataConfig


@pytest.mark.quick(3)
@pytest.mark.parametrize("key", Backbones.rows)
def test_every_row_describes_a_network_and_is_compared_with_first_order_on_it(key):
    table, row = Backbones(BackbonesConfig()), Backbones.rows[key]
    for setting in row.trials:
        config = table.run_config(Job(key, "trial"), setting, "cpu")
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


@pytest.mark.slow
def test_one_command_fills_the_table(tmp_path):
    config = BackbonesConfig(
        out=tmp_path / "backbones",
        rows=("alexnet-frozen-first", "alexnet-frozen-log", "alexnet-fine-first"),
        data=RegionDataConfig(
            cache=tmp_path / "cache", made=12, side=56, canvas=67, background="keep", threads=0, batch_size=4
        ),
        trials=1,
        frozen_epochs=1,
        frozen_seeds=2,
        fine_epochs=1,
        fine_seeds=1,
        accelerator="cpu",
        override=("model.weights=none",),
    )
    (tmp_path / "table2").mkdir()
    scores = {name: {"each": [0.7, 0.8]} for name in ("paper_best", "paper_average")}
    row = {
        "network": "AlexNet ReLU-5",
        "title": "DeepNCuts",
        "objective": "J2",
        "scores": scores,
        "speed": {"testing": 99},
    }
    rows = {"deep": row, "humans": {"network": "none"}}
    (tmp_path / "table2" / "table.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "box").mkdir()
    box = {"paper_best": 0.8, "paper_average": 0.7}
    (tmp_path / "box" / "scores.json").write_text(json.dumps({"scores": box}))
    Backbones(dataclasses.replace(config, stage="tune")).main()
    Backbones(config).summarize()
    text = (config.out / "table.md").read_text()
    assert (
        "error on held-out training images" in text
        and "| AlexNet, frozen, second order, log | rate 0.02, reduce 128, taps" in text
    )
    assert "| AlexNet, frozen, second order, log |" in text.split("On held-out training images")[1]
    Backbones(config).main()
    for path in config.out.glob("runs/*/trial*/predictions/validation.npz"):
        path.unlink()
    held_out = json.loads((config.out / "table.json").read_text())["held_out"]
    Backbones(config).summarize()
    assert json.loads((config.out / "table.json").read_text())["held_out"] == held_out  # kept without predictions
    assert [one["key"] for one in held_out] == ["alexnet-frozen-log"] and held_out[0]["tried"] == [1, 1]
    assert held_out[0]["difference"]["difference"] == pytest.approx(held_out[0]["errors"][0] - held_out[0]["errors"][1])
    first, log, fine = json.loads((config.out / "table.json").read_text())["rows"]
    assert (first["key"], log["key"]) == ("alexnet-frozen-first", "alexnet-frozen-log")
    assert len(first["seeds"]) == len(log["seeds"]) == 2 and len(fine["seeds"]) == 1
    assert fine["chosen"] == first["chosen"] and not fine["trials"]
    assert fine["timing"] == {"regions_per_second": first["timing"]["regions_per_second"]}
    assert 0 < log["timing"]["profile"]["share"]["layer forward"] < 1 and log["timing"]["regions_per_second"] > 0
    assert log["difference"]["to"] == "alexnet-frozen-first" and "difference" not in first
    text = (config.out / "table.md").read_text()
    assert "difference to first order" in text and "AlexNet, frozen, second order, log" in text
    assert "| AlexNet ReLU-5 | DeepNCuts (J2) | 0.750 ± 0.071 |" in text and "| 99 |" in text
    assert "| EfficientNet-Lite2 | the segmenter in the package | **0.800** | 0.700 |" in text
    assert "| paper |" not in text
    command = next(line for line in text.splitlines() if line.startswith("- AlexNet, frozen, second order, log"))
    assert "--model.train-from pool5" in command and "--data.canvas 67" in command and "--data.batch-size 4" in command


def test_a_table_without_any_run_says_so(tmp_path):
    data = RegionDataConfig(made=4, cache=tmp_path / "cache", background="keep")
    with pytest.raises(DataError, match="there is no finished run"):
        Backbones(BackbonesConfig(out=tmp_path, data=data, override=("model.weights=none",))).summarize()


def test_a_setting_that_was_chosen_on_another_kind_of_device_is_taken_over(tmp_path):
    data = RegionDataConfig(cache=tmp_path / "cache", made=4, background="keep")
    table = Backbones(BackbonesConfig(out=tmp_path, data=data, accelerator="cpu", override=("model.weights=none",)))
    row = table.rows["alexnet-frozen-sqrt"]
    assert table.choose(row) is None
    for number, error in enumerate((40.0, 38.0, 39.0, 41.0)):
        job = Job(row.key, "trial", number)
        table.store.write(job, table.provenance(job, "cuda"), {"error": error, "error_large": error})
    assert table.choose(row) == table.choose(table.rows["alexnet-fine-sqrt"]) == 1
    assert [trial["error"] for trial in table.trials(row, "cpu")] == [40.0, 38.0, 39.0, 41.0]
    job = Job(row.key, "trial", 3)  # what this kind of device has is preferred
    table.store.write(job, table.provenance(job, "cpu"), {"error": 30.0, "error_large": 30.0})
    assert table.choose(row) == 3 and table.choose(row, "cuda") == 1
