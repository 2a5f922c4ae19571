"""The recipe o2p from generated regions to a saved classifier."""

import dataclasses

import numpy as np
import pytest
import torch

from experiments.networks import sift_o2p
from matbackprop.errors import DataError
from matbackprop.vision.configuration import merge
from matbackprop.vision.data import coco_regions
from matbackprop.vision.models.deep_o2p import RegionClassifier
from matbackprop.vision.training.checkpoint import load_checkpoint
from matbackprop.vision.training.config import RECIPES, O2PConfig, RegionDataConfig
from matbackprop.vision.training.engine import fit, run_recipe, seed_all
from matbackprop.vision.training.o2p import RegionModule, build
from matbackprop.vision.training.regions import region_sets
from matbackprop.vision.training.run_folder import RunFolder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def config(cache, tmp_path):
    """A run of a few seconds."""
    return merge(
        RECIPES["o2p"].preset("smoke"),
        {
            "engine.run": (tmp_path / "run").as_posix(),
            "engine.max_epochs": 2,
            "engine.report": False,
            "engine.tensorboard": False,
            "engine.progress": False,
            "data.cache": cache.as_posix(),
            "data.generate": 12,
            "data.side": 56,
            "data.canvas": 67,
            "data.batch_size": 8,
            "model.reduce": 6,
            "model.hidden": 16,
        },
    )


def train(config: O2PConfig) -> tuple[RegionModule, RunFolder]:
    seed_all(config.engine.seed)
    module, data = build(config)
    return module, fit(config, module, data, name="test")


def same(one: torch.nn.Module, two: torch.nn.Module) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_run_trains_validates_and_leaves_a_model_that_can_be_used(config):
    config = merge(config, {"engine.report": True})
    run = run_recipe(RECIPES["o2p"], config, preset="smoke")
    summary = run.read_summary()
    assert summary["epochs"] == 2 and 0 <= summary["val/error"] <= 100
    with np.load(run.path / "predictions" / "validation.npz") as stored:
        wrong = stored["predicted"] != stored["target"]
        _, validation = region_sets(config.data)
        np.testing.assert_array_equal(stored["target"], validation.labels)
        np.testing.assert_array_equal(stored["large"], validation.areas >= 400)
        np.testing.assert_array_equal(stored["image"], validation.image_ids)
    assert 100 * wrong.mean() == pytest.approx(summary["val/error"], abs=1e-3)  # the predictions of the saved weights
    names = {name for line in run.read_metrics() for name in line}
    assert {"train/loss", "val/error_large", "layer/rank", "layer/eigen_max", "layer/gradient_norm"} <= names
    model = RegionClassifier.from_pretrained(run.path / "model")
    assert model.names == validation.classes and all(bool(p.calibrated) for p in model.poolings().values())
    assert (run.path / "figures" / "confusion.png").is_file()


@pytest.mark.slow
def test_the_first_command_of_the_tutorial_lowers_the_error(cache, tmp_path):
    config = merge(
        RECIPES["o2p"].preset("smoke"), {"engine.run": (tmp_path / "run").as_posix(), "data.cache": str(cache)}
    )
    config = merge(config, {"engine.tensorboard": False, "engine.progress": False, "engine.max_epochs": 4})
    _, run = train(config)
    errors = [m["val/error"] for m in run.read_metrics() if "val/error" in m]
    losses = [m["train/loss"] for m in run.read_metrics() if "train/loss" in m]
    assert errors[-1] < 45 and errors[-1] < errors[0]  # six classes: chance is 83 %
    assert losses[-1] < 0.8 * losses[0]
    assert max(m.get("layer/eigen_max", 0) for m in run.read_metrics()) < 1e6


@pytest.mark.parametrize("split", ["final", "tuning"])
def test_weights_are_chosen_on_held_out_training_images_only(config, split, monkeypatch):
    """In the final split the validation regions are those that the result is reported on."""
    errors = iter([10.0, 20.0, 30.0])  # increasing errors, and a final one after the run
    monkeypatch.setattr(RegionModule, "validation_end", lambda self, data: {"val/error": next(errors)})
    monkeypatch.setattr("matbackprop.vision.training.o2p.save_predictions", lambda run, module: "")
    run = run_recipe(RECIPES["o2p"], merge(config, {"data.split": split}), preset="smoke")
    summary, exported = run.read_summary(), RegionClassifier.from_pretrained(run.path / "model").state_dict()
    chosen = {"final": "last.ckpt", "tuning": "best.ckpt"}[split]
    state = load_checkpoint(run.checkpoints / chosen)
    assert state["global_step"] == {"final": 4, "tuning": summary["steps"] // 2}[split]
    assert ("best" in summary) == (run.checkpoints / "best.ckpt").exists() == (split == "tuning")
    assert summary["val/error"] == 20.0
    for name, value in exported.items():
        assert torch.equal(value, state["state_dict"][f"model.{name}"]), name


def test_the_tuning_split_takes_training_images_only(config):
    _, data = build(merge(config, {"data.split": "tuning"}))
    assert not any(isinstance(value, torch.nn.Module) for value in vars(data).values())  # the model is not kept alive
    regions = data.train_regions
    assert data.validation_regions is regions
    fit_images, tune_images = (set(regions.image_ids[one.positions]) for one in (data.train, data.validation))
    assert fit_images and tune_images and not fit_images & tune_images


def test_sift_o2p_trains_on_descriptors_that_are_computed_once(config):
    pytest.importorskip("kornia")
    sift = merge(
        config,
        sift_o2p(config.data.canvas)
        | {"model.reduce": None, "model.support": "mask", "optimizer.rate": 1e-3, "engine.max_epochs": 6},
    )
    module, run = train(sift)
    losses = [m["train/loss"] for m in run.read_metrics() if "train/loss" in m]
    assert losses[-1] < 0.7 * losses[0]
    again, _ = train(merge(sift, {"engine.run": str(config.engine.run) + "-again"}))
    assert same(module, again)


def test_frozen_descriptors_are_computed_once_and_the_saved_model_agrees(config, monkeypatch):
    frozen = merge(
        config,
        {"model.head": "both", "model.average": True, "model.frozen": True, "model.reduce": 6, "engine.max_epochs": 6}
        | {"model.support": "mask+all", "optimizer.rate": 3e-3, "data.margin": 0.1, "data.background": "keep"},
    )
    seen, describe = [], RegionClassifier.describe
    monkeypatch.setattr(RegionClassifier, "describe", lambda self, *a: seen.append(len(a[0])) or describe(self, *a))
    module, run = train(frozen)
    train_regions, validation = region_sets(frozen.data)
    fit_regions, _ = coco_regions.hold_out_images(train_regions.image_ids)  # for the calibration
    assert sum(seen) == len(train_regions) + len(validation) + len(fit_regions)
    losses = [m["train/loss"] for m in run.read_metrics() if "train/loss" in m]
    assert losses[-1] < 0.7 * losses[0]
    model = module.model.eval()
    assert (model.margin, model.background) == (0.1, "keep")
    data = build(frozen)[1]
    source = coco_regions.RegionSource(data.validation_regions, np.asarray(data.validation.positions))
    indices = torch.arange(len(source))
    batch = coco_regions.place_batch(source.fetch(indices, 0), frozen.data.canvas, frozen.data.background)
    with torch.no_grad():  # from the pictures; training used descriptors in half precision
        scores = model(batch.image, batch.mask)
        trained = module.scores(data.validation.fetch(indices, 0))
    torch.testing.assert_close(scores, trained, rtol=1e-2, atol=1e-2)


def test_rates_follow_the_schedule(config):
    _, run = train(merge(config, {"engine.log_every": 1, "optimizer.warmup": 0.5}))
    rates = [m["train/learning_rate"] for m in run.read_metrics() if "train/learning_rate" in m]
    # four steps: one of warm-up, the full rate, then down half a cosine
    assert len(rates) == 4 and rates[0] == pytest.approx(config.optimizer.rate / 2)
    assert max(rates) == pytest.approx(config.optimizer.rate)
    assert rates[2:] == sorted(rates[2:], reverse=True) and 0 < rates[-1] < 0.5 * config.optimizer.rate


def test_missing_data_are_named(tmp_path):
    with pytest.raises(DataError, match="No annotations"):
        region_sets(RegionDataConfig(root=tmp_path))


@pytest.mark.parametrize("preset", ["small", "paper"])
def test_presets_build_on_any_data(config, preset):
    """The large presets, on synthetic regions and without training."""
    big = RECIPES["o2p"].preset(preset)
    data = dataclasses.replace(config.data, canvas=227)
    region_sets(data)  # created here, outside the meta device
    with torch.device("meta"):
        module, _ = build(merge(dataclasses.replace(big, data=data), {"model.weights": "none"}))
    assert module.model.poolings()["pool5"].width == 256
