"""The recipe of the contour network: targets, crops, loss, training."""

import dataclasses

import numpy as np
import pytest
import torch

from matbackprop import segment
from matbackprop.errors import DataError
from matbackprop.vision.configuration import merge
from matbackprop.vision.data.bsds import BSDS
from matbackprop.vision.data.shapes import write_shapes_bsds
from matbackprop.vision.metrics.boundaries import boundary_map
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.training.config import CONTOURS_PRESETS, RECIPES, ContourDataConfig
from matbackprop.vision.training.contours import (
    ContourImage,
    ContoursData,
    augment,
    contour_loss,
    read_images,
    read_predicted,
    threshold_images,
)
from matbackprop.vision.training.engine import run_recipe
from matbackprop.vision.training.loading import generator_for


def line_image(h=120, w=160):
    """Black and white halves; one of two annotators also drew a horizontal line."""
    image = torch.zeros(3, h, w, dtype=torch.uint8)
    image[..., w // 2 :] = 255
    agreement = torch.zeros(h, w, dtype=torch.uint8)
    agreement[h // 2] = 128
    agreement[:, w // 2 - 1] = 255
    return ContourImage(image, agreement)


def test_targets_are_the_fraction_of_annotators(tmp_path):
    write_shapes_bsds(tmp_path, train=2, val=1)
    data = BSDS(tmp_path, "train")
    drawn = np.mean([boundary_map(m.numpy()) for m in data[0].segmentations], 0)
    np.testing.assert_allclose(read_images(data)[0].target.numpy() / 255, drawn, atol=0.003)


@pytest.mark.parametrize("seed", range(8))
def test_crops_have_one_size_and_keep_lines_on_their_borders(seed):
    config = ContourDataConfig(crop=64, scale=(0.75, 1.5), jitter=0.0)
    crop = augment(line_image(), config, generator_for(seed))
    assert crop.image.shape == (3, 64, 64) and crop.target.shape == (64, 64)
    gray = crop.image[0]
    edge = torch.zeros(64, 64, dtype=torch.bool)
    edge[:, 1:] |= (gray[:, 1:] - gray[:, :-1]).abs() > 0.3
    edge[1:] |= (gray[1:] - gray[:-1]).abs() > 0.3
    near = torch.nn.functional.max_pool2d((crop.target == 1).float()[None], 5, 1, 2)[0] > 0
    assert bool((near | ~edge)[3:-3, 3:-3].all())


@pytest.mark.parametrize("size", [(40, 90), (90, 40), (63, 64), (8, 8)])
def test_images_smaller_than_a_crop_are_enlarged(size):
    crop = augment(line_image(*size), ContourDataConfig(crop=64), generator_for(0))
    assert crop.image.shape == (3, 64, 64) and crop.target.shape == (64, 64)
    assert crop.target.max() == 1


def test_crops_depend_on_the_generator_alone():
    one, two = (augment(line_image(), ContourDataConfig(crop=64), generator_for(3, 1)) for _ in range(2))
    assert torch.equal(one.image, two.image) and torch.equal(one.target, two.target)


def test_loss_ignores_contours_of_few_annotators():
    drawn, annotated = torch.tensor([[[0.0, 0.2, 1.0, 0.0]]]), torch.tensor([False])
    logits = torch.tensor([[[-3.0, 0.0, 3.0, -3.0]]])
    changed = logits.clone()
    changed[0, 0, 1] = 50.0
    assert contour_loss(logits, drawn, annotated) == contour_loss(changed, drawn, annotated)
    assert contour_loss(-logits, drawn, annotated) > 10 * contour_loss(logits, drawn, annotated)


def test_loss_is_smallest_at_predicted_strengths():
    strength = torch.rand(2, 5, 6, generator=generator_for(0)) * 0.9 + 0.05
    logits = strength.logit().requires_grad_()
    contour_loss(logits, strength, torch.tensor([True, True])).backward()
    assert logits.grad.abs().max() < 1e-7


def test_predicted_contours_do_not_change_the_balance_of_annotated_images():
    one = torch.randint(2, (1, 8, 8), generator=generator_for(0)).float()
    logits = torch.randn(2, 8, 8, generator=generator_for(1), requires_grad=True)
    alone = contour_loss(logits[:1], one, torch.tensor([False]))
    mixed = contour_loss(logits, torch.cat([one, one / 2]), torch.tensor([False, True]))
    expected = torch.autograd.grad(alone, logits)[0][0] / 2  # the mean has twice as many pixels
    torch.testing.assert_close(torch.autograd.grad(mixed, logits)[0][0], expected)


def test_half_of_the_crops_have_predicted_contours(tmp_path):
    write_shapes_bsds(tmp_path, train=5, val=1)
    photographs = BSDS(tmp_path, "train").root / "images" / "train"
    segments = segment(photographs, model=None)
    for one in segments[:3]:
        one.save(tmp_path / "contours", formats=["contours"])
    changes = {"data.root": str(tmp_path), "data.generate": 0, "data.split": "final", "data.batch_size": 1,
               "data.predicted": [str(photographs), str(tmp_path / "contours")]}  # fmt: skip
    data = ContoursData(merge(CONTOURS_PRESETS["smoke"], changes))
    for one, read in zip(segments, data.predicted, strict=False):
        np.testing.assert_allclose(read.target.numpy() / 255, one.contours.astype(float), atol=0.003)
    crops = list(data.train_loader().read(0))
    assert sorted(bool(crop.predicted) for crop in crops) == 5 * [False] + 5 * [True]
    with pytest.raises(DataError, match="has no contours of the photographs"):
        read_predicted(photographs, tmp_path)


def test_training_with_averaged_weights_lowers_the_validation_loss(tmp_path):
    changes = {"engine.run": str(tmp_path / "run"), "engine.max_epochs": 6, "engine.report": False,
               "engine.progress": False, "engine.tensorboard": False, "data.cache": str(tmp_path),
               "data.generate": 16, "train.average_from": 5, "train.average": 0.8}  # fmt: skip
    run = run_recipe(RECIPES["contours"], merge(CONTOURS_PRESETS["smoke"], changes), preset="smoke")
    losses = [line["val/loss"] for line in run.read_metrics() if "val/loss" in line]
    assert losses[-1] < losses[0]
    assert ContourNet.from_pretrained(run.path / "model").config.backbone == "alexnet"


@pytest.mark.parametrize(
    ("split", "val", "expected", "training"), [("tuning", True, ("train", 2), 8), ("final", True, ("val", 4), 10),
                                               ("final", False, None, 10), ("train+val", True, None, 14)])  # fmt: skip
def test_the_threshold_is_chosen_on_held_out_images(tmp_path, split, val, expected, training):
    write_shapes_bsds(tmp_path, train=10, val=4)
    if not val:
        images = BSDS(tmp_path, "val").root / "images"
        (images / "val").rename(images / "other")
    changes = {"data.root": str(tmp_path), "data.generate": 0, "data.split": split}
    data = ContoursData(merge(CONTOURS_PRESETS["smoke"], changes))
    chosen = threshold_images(data)
    assert (chosen and (chosen.split, len(chosen))) == expected and len(data.training) == training


def test_frozen_layers_do_not_change(tmp_path):
    from matbackprop.vision.training.contours import ContoursModule

    config = dataclasses.replace(CONTOURS_PRESETS["smoke"])
    config.train = dataclasses.replace(config.train, freeze="relu2")
    module = ContoursModule(config, ContourNet(config.model))
    learning = {id(p) for group in module.optimizers(4)[0].param_groups for p in group["params"]}
    frozen = [p for p in module.model.backbone.parameters() if id(p) not in learning]
    assert len(frozen) == 4 and not any(p.requires_grad for p in frozen)
