"""Fine-tuning saved models: ``train RECIPE --from MODEL``."""

import json

import pytest
import torch

from matbackprop.cli import main
from matbackprop.cli.train import parse
from matbackprop.errors import ConfigurationError, WeightsError
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.models.deep_ncuts import DeepNCuts
from matbackprop.vision.models.deep_o2p import RegionClassifier
from matbackprop.vision.training.config import RECIPES
from matbackprop.vision.training.o2p import build_model
from matbackprop.vision.training.regions import region_sets


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def words(tmp_path, cache):
    return ["--data.generate", "8", "--data.cache", cache, "--run", str(tmp_path / "run"), "--max-epochs", "1"]


def saved(folder, words):
    """Save a small classifier of the generated classes."""
    names = region_sets(parse("o2p", words, "train").config.data)[0].classes
    model = RegionClassifier(len(names), head="o2p", canvas=67, side=60, margin=0.1, reduce=6, names=names)
    model.save_pretrained(folder)
    return model


def test_a_saved_classifier_sets_the_model_and_its_weights(tmp_path, words):
    model = saved(tmp_path / "model", words)
    config = parse("o2p", ["--from", str(tmp_path / "model"), *words], "train").config
    assert (config.model.head, config.model.reduce, config.model.taps) == ("o2p", 6, ())
    assert (config.data.canvas, config.data.side, config.data.margin) == (67, 60, 0.1)
    changed = parse("o2p", ["--from", str(tmp_path / "model"), *words, "--model.dropout", "0.1"], "train").config
    assert changed.model.dropout == 0.1 and changed.model.reduce == 6
    fine_tune = RECIPES["o2p"].preset("fine-tune")
    assert config.optimizer == fine_tune.optimizer and config.engine.accelerator == "auto"
    smoke = parse("o2p", ["--from", str(tmp_path / "model"), "--preset", "smoke"], "train")
    assert smoke.preset == "smoke" and smoke.config.optimizer == RECIPES["o2p"].preset("smoke").optimizer
    started = build_model(config, model.names)
    for name, value in model.state_dict().items():
        assert torch.equal(value, started.state_dict()[name]), name
    others = [f"class {i}" for i in range(3)]
    other = build_model(config, others)
    assert other.classifier.out_features == 3
    assert torch.equal(other.backbone.features[0].weight, model.backbone.features[0].weight)


@pytest.mark.parametrize("model", ["saved", pytest.param("box", marks=pytest.mark.slow)])
def test_a_run_fine_tunes_a_saved_model(tmp_path, words, capsys, model):
    if model == "saved":
        model = str(tmp_path / "model")
        saved(model, words)
    command = ["train", "o2p", "--from", model, *words, "--no-report", "--no-tensorboard", "--data.batch-size", "4"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0, capsys.readouterr().err
    config = RegionClassifier.from_pretrained(tmp_path / "run" / "model").config
    assert config.backbone == "efficientnet-lite2" if model == "box" else config.reduce == 6


@pytest.mark.parametrize("name", ["ncuts", "contours"])
def test_saved_segmenters_start_their_recipes(name, tmp_path, words):
    if name == "ncuts":
        model = DeepNCuts(variant="alexnet-relu5", hidden=8, channels=5)
    else:
        model = ContourNet(backbone="alexnet", taps=("relu1", "relu5"), width=6, stem=3)
    model.save_pretrained(tmp_path / "model")
    config = parse(name, ["--from", str(tmp_path / "model"), *words], "train").config
    system, _ = RECIPES[name].module.build(config)
    for key, value in model.state_dict().items():
        assert torch.equal(value, system.model.state_dict()[key]), key


def test_models_of_other_recipes_and_unknown_ones_are_rejected(tmp_path, words):
    saved(tmp_path / "model", words)
    with pytest.raises(ConfigurationError, match=r"is a RegionClassifier, .* Use matbackprop train o2p"):
        parse("ncuts", ["--from", str(tmp_path / "model")], "train")
    with pytest.raises(WeightsError, match="There is no model 'nothing'"):
        parse("ncuts", ["--from", "nothing"], "train")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["arguments"]["backbone"] = "os:abort"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="not allowed in files"):
        parse("o2p", ["--from", str(tmp_path / "model")], "train")
