"""The presets on networks of the hub train; small networks under their names are in a local folder."""

import pytest
import torch
from safetensors.torch import load_file

from matbackprop.vision.configuration import merge
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.models.deep_o2p import RegionClassifier
from matbackprop.vision.training.config import RECIPES
from matbackprop.vision.training.engine import run_recipe

transformers = pytest.importorskip("transformers")

SMALL = {
    "microsoft/resnet-50": ("ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4}),
    "facebook/dinov2-small": ("Dinov2Config", {"hidden_size": 32, "num_hidden_layers": 12, "num_attention_heads": 2,
                                               "image_size": 56}),
}  # fmt: skip


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder with both networks under their names, which is searched before the hub."""
    torch.manual_seed(0)
    for name, (kind, fields) in SMALL.items():
        config = getattr(transformers, kind)(**fields)
        transformers.AutoBackbone.from_config(config).save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.quick(1)
@pytest.mark.parametrize(("recipe", "preset"), [
    ("o2p", "resnet50"), ("o2p", "dinov2"), ("contours", "resnet50"), ("contours", "dinov2"),
])  # fmt: skip
def test_a_preset_on_a_network_of_the_hub_trains_from_its_published_weights(hub, recipe, preset):
    changes = {"engine.run": str(hub / "run"), "engine.max_epochs": 1, "engine.accelerator": "cpu", "data.generate": 8,
               "engine.precision": "32", "engine.report": False, "engine.tensorboard": False, "data.cache": str(hub),
               "engine.progress": False, "engine.validate_every": 1}  # fmt: skip
    if recipe == "o2p":
        changes |= {"data.side": 56, "data.canvas": 70, "data.batch_size": 4, "model.reduce": 8, "data.threads": 0}
    else:
        changes |= {"data.crop": 64, "data.batch_size": 4}
    config = merge(RECIPES[recipe].preset(preset), changes)
    assert config.model.weights == "imagenet" and config.model.backbone.removeprefix("hf:") in SMALL
    run = run_recipe(RECIPES[recipe], config, preset=preset)
    assert run.read_summary()["epochs"] == 1
    losses = [line["train/loss"] for line in run.read_metrics() if "train/loss" in line]
    assert losses and all(0 < loss < 100 for loss in losses)
    published = load_file(config.model.backbone.removeprefix("hf:") + "/model.safetensors")
    model = (RegionClassifier if recipe == "o2p" else ContourNet).from_pretrained(run.path / "model")
    learned = model.backbone.network.state_dict()
    moved = [(learned[key] - value).abs().max() for key, value in published.items() if key in learned
             and value.is_floating_point() and value.ndim > 1]  # fmt: skip
    assert 0 < max(moved) < 0.1  # trained, and close to the initial weights
