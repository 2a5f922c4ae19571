"""DeepNCuts: grids, geometry, heads, saving, segmenting, and images of odd sizes."""

import numpy as np
import pytest
import torch
from torch import nn

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.vision.models.backbones.base import LayerStack
from matbackprop.vision.models.config import VARIANTS, NCutsModelConfig
from matbackprop.vision.models.deep_ncuts import (
    DeepNCuts,
    merge_superpixels,
    pool_borders,
    pool_superpixels,
)
from matbackprop.vision.segmentation import rgb_to_lab


def small(name, **changes):
    changes = {"hidden": 8, **changes}
    torch.manual_seed(0)
    return DeepNCuts.variant(name, **changes).eval()


def image(h=48, w=64, seed=0):
    return torch.rand(1, 3, h, w, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "stride", "channels"), [
    ("alexnet-relu5", 16, 20), ("vgg16-relu4", 8, 20), ("vgg16-relu5", 16, 20), ("hypercolumns", 4, 32),
])  # fmt: skip
def test_grid_and_channels(name, stride, channels):
    maps = small(name)(image())
    assert maps.features.shape == (1, 48 // stride, 64 // stride, channels)
    if name == "hypercolumns":
        assert maps.hidden.shape == (1, 8, 12, 16)
    else:
        assert maps.hidden is None and (maps.features >= 0).all()


@pytest.mark.parametrize("zoom", [1.0, 1.5, 2.0])
def test_an_enlarged_image_is_seen_on_the_same_grid_in_the_same_place(zoom):
    """What a bright square changes most lies under the square, whatever the backbone's own size."""
    model = small("hypercolumns", zoom=zoom, backbone="vgg16", taps=("relu1_2",), stride=4)
    with torch.no_grad():
        model.head.place.weight.zero_()  # only what the backbone saw
        x = torch.full((1, 3, 64, 80), 0.4)
        y = x.clone()
        y[..., 20:28, 40:48] = 1.0
        change = (model(y).hidden - model(x).hidden).abs().sum(1)[0]
    rows, columns = (torch.arange(n) * 4 + 1.5 for n in change.shape)
    assert change.shape == (16, 20)
    assert abs((change.sum(1) * rows).sum() / change.sum() - 23.5) < 0.5
    assert abs((change.sum(0) * columns).sum() / change.sum() - 43.5) < 0.5


@pytest.mark.parametrize("head", ["paper", "none"])
def test_one_map_of_an_enlarged_image_is_finer_and_in_the_same_place(head):
    model = small("vgg16-relu5", zoom=2.0, taps=("relu3_1",), head=head).eval()
    with torch.no_grad():
        x = torch.full((1, 3, 64, 80), 0.4)
        y = x.clone()
        y[..., 20:28, 40:48] = 1.0
        change = (model(y).features - model(x).features).abs().sum(-1)[0]
    assert change.shape == model.grid((64, 80)) == (32, 40)  # the map's stride is 4
    rows, columns = (torch.arange(n) * 2 + 0.5 for n in change.shape)
    assert abs((change.sum(1) * rows).sum() / change.sum() - 23.5) < 1.5
    assert abs((change.sum(0) * columns).sum() / change.sum() - 43.5) < 1.5


def test_zoom_out_of_range_is_refused():
    with pytest.raises(ConfigurationError, match=r"zoom is 0\.5\. Input should be greater than or equal to 1"):
        NCutsModelConfig(variant="hypercolumns", zoom=0.5)


def test_the_papers_widths():
    assert {n: VARIANTS[n]["hidden"] for n in ("alexnet-relu5", "vgg16-relu4", "vgg16-relu5")} == {
        "alexnet-relu5": 256, "vgg16-relu4": 1024, "vgg16-relu5": 1024,
    }  # fmt: skip
    model = DeepNCuts.variant("alexnet-relu5")
    assert (model.channels, model.head.drop.p, model.taps) == (20, 0.25, ["relu5"])


@pytest.mark.parametrize(
    ("name", "tap"),
    [("alexnet", "relu5"), ("vgg16", "relu4_1"), ("efficientnet-lite2", "stage3"), ("efficientnet-lite2", "stage5")],
)
def test_cells_lie_over_their_blocks(name, tap):
    """The gradient of one cell is centred on the cell's block of pixels.

    Positive weights keep gradients from cancelling, and means instead of maxima from leaning to one side.
    """
    model = DeepNCuts(backbone=name, taps=(tap,), head="none").eval()
    for parameter_name, parameter in model.backbone.named_parameters():
        weight = 0.01 if parameter.ndim > 1 else 1.0
        nn.init.constant_(parameter, weight if parameter_name.endswith("weight") else 0.0)
    for parent in model.backbone.modules():
        for child_name, layer in parent.named_children():
            if isinstance(layer, nn.MaxPool2d):
                setattr(parent, child_name, nn.AvgPool2d(layer.kernel_size, layer.stride))
    stride = model.stride
    x = torch.full((1, 3, 13 * stride, 15 * stride), 0.9, requires_grad=True)
    features = model(x).features
    assert features.shape[1:3] == (13, 15)
    features[0, 6, 7].sum().backward()
    weight = x.grad[0].sum(0)
    y = (weight.sum(1) * torch.arange(x.shape[-2])).sum() / weight.sum()
    z = (weight.sum(0) * torch.arange(x.shape[-1])).sum() / weight.sum()
    assert abs(y - (6.5 * stride - 0.5)) < 1 and abs(z - (7.5 * stride - 0.5)) < 1


@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("size", [(1, 1), (3, 50), (37, 23)])
def test_tiny_images(name, size):
    model = small(name)
    actual = model.cluster(image(*size), (2, 5))
    assert actual.labels.shape == (1, 2, *size) and torch.isfinite(actual.embedding.points).all()


def test_bytes_and_floats_agree():
    model = small("alexnet-relu5")
    x = torch.randint(0, 256, (1, 3, 40, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(x).features, model(x.float() / 255).features)


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 4, 8, 8), (0, 3, 8, 8), (1, 3, 0, 8)])
def test_what_is_no_batch_of_images_is_refused(shape):
    with pytest.raises(ShapeError, match=r"b, 3, h, w"):
        small("alexnet-relu5")(torch.zeros(shape))


def test_constant_image_is_finite():
    actual = small("hypercolumns").cluster(torch.full((1, 3, 32, 32), 0.5), (2,))
    assert torch.isfinite(actual.embedding.points).all()


def test_frozen_backbone_gets_no_gradient():
    model = small("alexnet-relu5")
    model.freeze_backbone()
    model(image()).features.sum().backward()
    assert all(p.grad is None for p in model.backbone.parameters())
    assert model.head.second.weight.grad is not None
    model.freeze_backbone(False)
    model(image()).features.sum().backward()
    assert all(p.grad is not None for p in model.backbone.parameters())


def test_learned_affinity_is_positive_semidefinite_and_used():
    model = small("alexnet-relu5", affinity="lambda", channels=6)
    with torch.no_grad():
        model.factor.copy_(torch.randn(6, 6, generator=torch.Generator().manual_seed(2)).abs())
    assert torch.linalg.eigvalsh(model.lam).min() >= -1e-6
    plain = small("alexnet-relu5", channels=6)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k != "factor"})
    x = image()
    assert not torch.allclose(
        model.cluster(x, (3,)).embedding.eigenvalues, plain.cluster(x, (3,)).embedding.eigenvalues
    )


def test_saving_and_loading(tmp_path):
    model = small("hypercolumns", cost=(0.4, 0.3, 0.2), ridge=0.7)
    model.save_pretrained(tmp_path)
    again = DeepNCuts.from_pretrained(tmp_path)
    assert again.cost == model.cost and again.ridge == 0.7
    torch.testing.assert_close(again(image()).features, model(image()).features)


def test_a_backbone_of_ones_own():
    layers = nn.Sequential(nn.Conv2d(3, 7, 3, stride=2, padding=1), nn.ReLU())
    own = LayerStack(layers, {"out": 1})
    model = DeepNCuts(network=own, taps=("out",), hidden=8, channels=5).eval()
    assert model(image()).features.shape == (1, 24, 32, 5)
    assert model.cluster(image(), (2, 3)).labels.shape == (1, 2, 48, 64)


@pytest.mark.parametrize("changes", [
    {"head": "transformer"}, {"space": "fourier"}, {"affinity": "rbf"}, {"taps": ("relu9",)}, {"backbone": "resnet"},
    {"taps": ("relu5_3", "relu4_3")}, {"boundary": True},
])  # fmt: skip
def test_contradictory_arguments(changes):
    with pytest.raises(ConfigurationError):
        DeepNCuts(**changes)
    with pytest.raises(ConfigurationError, match="variant is 'resnet'"):
        DeepNCuts.variant("resnet")


def test_merging_sees_the_mean_colour_of_each_superpixel():
    model = small("hypercolumns")
    assert (model.ridge, model.merge_ridge, model.cost.colour) == (0.3, 1.0, 0.1)
    assert small("hypercolumns", cost=(0.8, 0.4, 0.27)).cost.colour == 0  # as models were saved before
    x = nn.functional.interpolate(image(6, 8), size=(48, 64), mode="nearest")
    blocks = torch.arange(48).view(6, 8).repeat_interleave(8, 0).repeat_interleave(8, 1)
    expected = rgb_to_lab(x[0])[:, ::8, ::8].flatten(1).mT
    for picture in (x, (255 * x).round().to(torch.uint8)):
        actual = model.region_points(picture, blocks.unsqueeze(0))
        torch.testing.assert_close(actual.colours[0], expected, atol=0.5, rtol=0)


def test_clusters_in_another_space_than_the_models_own():
    model, other = small("alexnet-relu5", channels=6), small("alexnet-relu5", channels=6, space="soft")
    x = image(96, 128)
    actual = {space: model.cluster(x, (3, 5), space=space).labels for space in (None, "ncut", "soft")}
    assert torch.equal(actual[None], actual["ncut"]) and not torch.equal(actual["ncut"], actual["soft"])
    assert torch.equal(actual["soft"], other.cluster(x, (3, 5)).labels)


def test_pooling_on_superpixels():
    generator = torch.Generator().manual_seed(4)
    maps, ids = torch.rand(2, 3, 6, 7, generator=generator), torch.randint(-1, 4, (2, 6, 7), generator=generator)
    means, mass = pool_superpixels(maps, ids, 5)
    for b in range(2):
        for s in range(4):
            inside = ids[b] == s
            assert mass[b, s] == inside.sum()
            torch.testing.assert_close(means[b, s], maps[b][:, inside].mean(-1))
    assert (means[:, 4] == 0).all()


def test_pooling_on_borders():
    ids = torch.tensor([[[0, 0, 1], [2, 2, 1]], [[0, 1, 1], [0, -1, 1]]])
    maps = torch.rand(2, 3, 2, 3, generator=torch.Generator().manual_seed(5))
    edges = torch.tensor([[[0, 1], [0, 2], [1, 2]], [[0, 1], [-1, -1], [-1, -1]]])
    means, mass = pool_borders(maps, ids, edges, 3)
    assert mass.tolist() == [[2, 4, 2], [2, 0, 0]]
    torch.testing.assert_close(means[0, 0], 0.5 * (maps[0, :, 0, 1] + maps[0, :, 0, 2]))
    torch.testing.assert_close(means[0, 1], maps[0, :, :, :2].mean((1, 2)))
    torch.testing.assert_close(means[0, 2], 0.5 * (maps[0, :, 1, 1] + maps[0, :, 1, 2]))
    torch.testing.assert_close(means[1, 0], 0.5 * (maps[1, :, 0, 0] + maps[1, :, 0, 1]))
    assert (means[1, 1:] == 0).all()


def test_rows_on_superpixels_are_means_of_the_map():
    model = small("hypercolumns")
    x = image()
    ids = (torch.arange(12)[:, None] // 4 * 4 + torch.arange(16)[None] // 4).unsqueeze(0)
    rows = model.on_superpixels(x, ids, 12, torch.tensor([[[0, 1], [0, 4]]]))
    expected = pool_superpixels(model(x).features.movedim(-1, 1), ids, 12)[0]
    torch.testing.assert_close(rows.features, expected, rtol=1e-4, atol=1e-4)
    assert rows.edges.shape == (1, 2) and (rows.mass == 16).all()
    plain = small("alexnet-relu5").on_superpixels(x, ids, 12)
    assert plain.features.shape == (1, 12, 20) and plain.edges is None


def test_merging_gives_nested_maps_of_the_size_asked_for():
    photograph = torch.zeros(3, 40, 60)
    photograph[:, :, 30:] = 1
    actual = small("hypercolumns", superpixels=30).merge(photograph, (2, 4, 8))
    assert actual.labels.shape == (3, 40, 60) and [m.max() + 1 for m in actual.labels] == [2, 4, 8]
    pairs = {(a, b) for a, b in zip(actual.labels[1].ravel(), actual.labels[2].ravel(), strict=True)}
    assert len(pairs) == 8


def test_merging_by_colour_finds_the_halves():
    superpixels = np.arange(8).repeat(5).reshape(1, -1).repeat(4, 0)
    points = np.array([[0.0], [0.1], [0.0], [0.1], [5.0], [5.1], [5.0], [5.1]])
    labels = merge_superpixels(superpixels, points, None, (2,)).labels[0]
    assert (labels[:, :20] == labels[0, 0]).all() and (labels[:, 20:] == labels[0, -1]).all()
    assert labels[0, 0] != labels[0, -1]
