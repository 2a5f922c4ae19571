"""The recipe of DeepNCuts: preparation, batches, augmentation, losses, training and presets."""

import dataclasses

import pytest
import torch

from matbackprop import normalized_cut_j2, normalized_cut_soft
from matbackprop.errors import ConfigurationError
from matbackprop.vision.configuration import merge
from matbackprop.vision.data.bsds import BSDSSample, prepare_image
from matbackprop.vision.models.deep_ncuts import DeepNCuts
from matbackprop.vision.training.config import (
    RECIPES,
    NCutsConfig,
    NCutsDataConfig,
    NCutsModelConfig,
    ObjectiveConfig,
)
from matbackprop.vision.training.engine import run_recipe
from matbackprop.vision.training.ncuts import (
    NCutsBatch,
    NCutsData,
    NCutsModule,
    PreparedSource,
    augment,
    build,
)


def sample(name="a", h=48, w=64, annotators=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tiles = torch.rand(1, 3, 6, 8, generator=generator)
    image = (torch.nn.functional.interpolate(tiles, size=(h, w), mode="nearest")[0] * 255).byte()
    maps = [(torch.arange(h)[:, None] * (a + 2) // h * 2 + torch.arange(w)[None] * 2 // w) for a in range(annotators)]
    return BSDSSample(name, image, maps)


def prepared(count=3, stride=16, **changes):
    return [prepare_image(sample(f"i{i}", seed=i, **changes), stride) for i in range(count)]


def one_image():
    return augment(PreparedSource(prepared(1), None, 0).fetch(torch.tensor([0]), 0))


def tiny(preset="smoke", **train):
    config = RECIPES["ncuts"].preset(preset)
    config.model = dataclasses.replace(config.model, weights="none", hidden=8, channels=6)
    config.engine = dataclasses.replace(config.engine, precision="32", accelerator="cpu", tensorboard=False)
    config.train = dataclasses.replace(config.train, **train)
    return config


def build_module(config):
    return NCutsModule(config, DeepNCuts(config.model))


def test_batches_of_different_shapes_are_padded():
    images = [prepare_image(sample("a", 48, 64), 16), prepare_image(sample("b", 64, 40), 16)]
    batch = PreparedSource(images, None, 0).fetch(torch.tensor([0, 1]), 0)
    assert batch.image.shape == (2, 3, 64, 64) and (batch.grid[1, :, :, 3:] == -1).all()
    config = tiny("paper-alexnet-relu5")
    module = build_module(config).eval()
    total, f = module.loss(augment(batch))
    labels = batch.grid.flatten(-2)  # (image, annotator, cell)
    values = []
    for features, annotators in zip(f, labels, strict=True):
        known = [one for one in annotators if (one >= 0).any()]
        values.append(torch.stack([normalized_cut_j2(features[one >= 0], one[one >= 0]) for one in known]).mean())
    torch.testing.assert_close(total, torch.stack(values).mean())  # cells of the padding do not count
    assert (labels < 0).any()


def test_flip_moves_labels_along():
    batch = PreparedSource(prepared(8), NCutsDataConfig(flip=True), 0).fetch(torch.arange(8), 0)
    assert batch.flip.any() and not batch.flip.all()
    image, grid = (
        torch.stack([x.flip(-1) if f else x for x, f in zip(part, batch.flip, strict=True)]) for part in batch[:2]
    )
    by_hand = NCutsBatch(image, grid, batch.num_labels)
    out, expected = augment(batch), augment(by_hand)
    assert torch.equal(out.grid, expected.grid)
    torch.testing.assert_close(out.image, expected.image)


def test_colors_are_drawn_from_seed_and_epoch():
    source = PreparedSource(prepared(2), NCutsDataConfig(jitter=0.3), 0)
    batch, again, other = (source.fetch(torch.arange(2), epoch) for epoch in (0, 0, 1))
    image = augment(batch).image
    assert image.min() >= 0 and image.max() <= 1
    assert torch.equal(batch.factors, again.factors) and not torch.equal(batch.factors, other.factors)


@pytest.mark.parametrize(
    ("options", "objective", "tolerance"),
    [(("paper-alexnet-relu5",), normalized_cut_j2, {}), ((), normalized_cut_soft, {"rtol": 1e-4, "atol": 1e-4})],
)
def test_the_objective_is_that_of_the_cells(options, objective, tolerance):
    module = build_module(tiny(*options)).eval()
    batch = one_image()
    total, f = module.loss(batch)
    expected = torch.stack([objective(f[0], g.flatten()) for g in batch.grid[0]]).mean()
    torch.testing.assert_close(total, expected, **tolerance)
    if options:
        assert torch.equal(f[0], module.model(batch.image)[0].reshape(-1, 6)) and f.shape == (1, 12, 6)


@pytest.mark.parametrize("preset", ["paper-vgg16-relu4", "soft-vgg16-relu4", "paper-alexnet-relu5"])
def test_every_weight_has_a_gradient(preset):
    """Layers after the last used map would have none, and DDP would fail."""
    module = build_module(tiny(preset))
    batch = PreparedSource(prepared(1, stride=16 if "alex" in preset else 8), None, 0)
    module.loss(augment(batch.fetch(torch.tensor([0]), 0)))[0].backward()
    assert [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize("objective", ["j1", "j2", "soft"])
@pytest.mark.parametrize("regions", [1, 16])
def test_degenerate_labels_have_finite_gradients(objective, regions):
    """One region, and more regions than channels."""
    labels = torch.arange(48 * 64).view(48, 64) * regions // (48 * 64)
    images = [prepare_image(BSDSSample("a", sample().image, [labels]), 16)]
    module = build_module(tiny("paper-alexnet-relu5", objective=objective))
    total = module.loss(augment(PreparedSource(images, None, 0).fetch(torch.tensor([0]), 0)))[0]
    total.backward()
    assert torch.isfinite(total)
    assert all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)


def test_features_of_zeros_are_finite():
    module = build_module(tiny("paper-alexnet-relu5"))
    for parameter in module.model.head.parameters():
        torch.nn.init.zeros_(parameter)
    batch = one_image()
    total, f = module.loss(batch)
    total.backward()
    assert torch.isfinite(total) and (f == 0).all()
    module.training_step(batch)
    assert module.means.flush(module.device)["layer/eigen_max"] == 0


@pytest.mark.slow
def test_the_first_command_lowers_the_loss_and_fills_the_run_folder(tmp_path):
    changes = {"engine.run": str(tmp_path / "run"), "engine.progress": False, "engine.tensorboard": False}
    config = merge(RECIPES["ncuts"].preset("smoke"), changes | {"data.cache": str(tmp_path / "cache")})
    run = run_recipe(RECIPES["ncuts"], config)
    lines = run.read_metrics()
    validation = [line["val/loss"] for line in lines if "val/loss" in line]
    training = [line["train/loss"] for line in lines if "train/loss" in line]
    assert validation[-1] < validation[0] and sum(training[-8:]) < sum(training[:8])
    names = {name for line in lines for name in line}
    assert {"layer/rank", "layer/soft_rank", "layer/eigen_max", "layer/gradient_norm", "val/objective"} <= names
    assert (run.path / "figures" / "segmentations.png").exists()


def test_tuning_and_final_splits(tmp_path):
    config = tiny()
    config.data = dataclasses.replace(config.data, cache=tmp_path, generate=6)
    data = NCutsData(config, 16)
    assert (len(data.training), len(data.validation)) == (4, 2)
    training, validation = ([image.id for image in part] for part in (data.training, data.validation))
    assert set(validation) == set(sorted([*training, *validation])[::5])
    config.data.split = "final"
    data = NCutsData(config, 16)
    assert (len(data.training), len(data.validation)) == (6, 0) and data.validation_loader() is None


def test_groups_of_parameters():
    module = build_module(tiny("paper-alexnet-relu5"))
    optimizer, _ = module.optimizers(10)
    assert [g["max_lr"] for g in optimizer.param_groups] == [1e-3, 1e-4]
    held = sum(p.numel() for g in optimizer.param_groups for p in g["params"])
    assert held == sum(p.numel() for p in module.parameters())
    module = build_module(tiny("small", backbone_rate=0.0))
    assert len(module.optimizers(10)[0].param_groups) == 1
    module.loss(one_image())[0].backward()
    assert all((p.grad is None) == name.startswith("model.backbone.") for name, p in module.named_parameters())


def test_labels_follow_the_grid_of_any_map(tmp_path):
    config = tiny("paper-alexnet-relu5")
    config.data = dataclasses.replace(config.data, generate=2, cache=tmp_path)
    config.model = dataclasses.replace(config.model, taps=("relu1",))
    image = NCutsData(config, DeepNCuts(config.model).stride).training[0]
    assert image.grid.shape[1:] == (24, 32)  # 96×128 pixels, stride 4
    config.model = dataclasses.replace(config.model, zoom=1.5)
    with pytest.raises(ConfigurationError, match=r"cells of 2\.66667 pixels"):
        build(config)


@pytest.mark.parametrize("objective", ["j2", "soft"])
def test_a_trainable_lambda_is_rejected_if_nothing_depends_on_it(objective):
    with pytest.raises(ConfigurationError, match="does not depend on Λ"):
        NCutsConfig(model=NCutsModelConfig(affinity="lambda"), train=ObjectiveConfig(objective=objective))
    NCutsConfig(model=NCutsModelConfig(affinity="lambda"), train=ObjectiveConfig(objective="j1"))


@pytest.mark.parametrize(("backbone", "tap"), [("efficientnet-lite2", "stage4"), ("tiny-vit", "neck")])
def test_another_backbone_trains_and_is_saved_and_loaded(backbone, tap, tmp_path):
    config = tiny("soft-alexnet-relu5")
    config.model = dataclasses.replace(config.model, backbone=backbone, taps=(tap,))
    module = build_module(config)
    module.loss(one_image())[0].backward()
    assert [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None] == []
    model = module.model.eval()
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).tap == tap
