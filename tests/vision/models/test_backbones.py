"""Every backbone declares its maps and the positions of their cells, and ends with the last requested map."""

import pytest
import torch
from torch import nn

import experiments.networks  # noqa: F401 (adds backbones)
from matbackprop.errors import ConfigurationError
from matbackprop.vision.models.backbones import BACKBONES, build_backbone
from matbackprop.vision.models.backbones.base import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Backbone,
    LayerStack,
    TapInfo,
    normalize,
)
from matbackprop.vision.models.backbones.efficientnet_lite2 import _Convolution

NEEDS = {"sift": "kornia"}
SIDE = 224


def built(name, taps=None):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    torch.manual_seed(0)
    return build_backbone(name, taps).eval()


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", BACKBONES)
def test_a_patch_changes_the_cell_over_it(name):
    """On average, a patch of noise changes a map around the cell that ``info`` places over it."""
    backbone = built(name)
    for module in backbone.modules():
        if isinstance(module, nn.Linear):  # attention mixes all cells of a window
            nn.init.zeros_(module.weight)
        elif isinstance(module, nn.Conv2d) and module.groups > 1:  # otherwise a few channels would dominate
            nn.init.constant_(module.weight, 1 / 9)
    draw = torch.Generator().manual_seed(1)
    count = 4
    images = (torch.randn(1, 3, SIDE, SIDE, generator=draw) * 0.1).repeat(count + 1, 1, 1, 1)
    places = torch.randint(SIDE // 3, 2 * SIDE // 3, (count, 2), generator=draw)
    for image, (row, column) in zip(images[1:], places, strict=True):
        image[:, row - 1 : row + 2, column - 1 : column + 2] += 2 * torch.randn(3, 3, 3, generator=draw)
    with torch.no_grad():
        maps = backbone(images, backbone.taps)
    for tap, actual in maps.items():
        info = backbone.info(tap)
        moved = (actual[1:] - actual[:1]).square().sum(1)
        assert (moved.sum((1, 2)) > 0).all()
        for axis in (0, 1):
            weight = moved.sum(2 - axis)
            center = (weight * torch.arange(weight.shape[1])).sum(1) / weight.sum(1)
            distance = (info.offset + info.stride * center - places[:, axis]).mean()
            assert distance.abs() <= max(2.0, 0.5 * info.stride), (tap, float(distance))


@pytest.mark.parametrize("name", BACKBONES)
def test_maps_have_the_declared_channels_and_cells(name):
    backbone = built(name)
    with torch.no_grad():
        for tap in backbone.taps:
            info = backbone.info(tap)
            for cells in (1, 3):
                pixels = info.reach + (cells - 1) * info.stride
                map_ = backbone(torch.zeros(1, 3, max(pixels, 33), pixels), [tap])[tap] if pixels >= 33 else None
                if map_ is not None:
                    assert map_.shape[1] == info.channels and map_.shape[-1] == cells, (tap, pixels)


@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_ends_with_the_last_requested_map(name):
    whole = built(name)
    middle = whole.taps[len(whole.taps) // 2]
    short = built(name, [middle])
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(short(image, [middle])[middle], whole(image, [middle])[middle])
    for parameter in short.parameters():
        assert parameter.grad is None
    if any(True for _ in short.parameters()):
        short(image, [middle])[middle].square().sum().backward()
        assert [n for n, p in short.named_parameters() if p.requires_grad and p.grad is None] == []
    with pytest.raises(ConfigurationError, match="Unknown feature map 'nothing'"):
        whole(image, ["nothing"])


def test_vgg_grids_tile_the_image():
    assert build_backbone("vgg16").info("pool5") == TapInfo(512, 32, 15.5, 32)
    assert build_backbone("vgg16").info("relu1_1") == TapInfo(64, 1, 0.0, 1)


def test_a_backbone_gets_its_input_normalization():
    class Own(LayerStack):
        mean, std = (0.5, 0.4, 0.3), (0.1, 0.2, 0.3)

    own = Own(nn.Sequential(nn.Identity()), {"image": 0})
    colors = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = (colors - torch.tensor(Own.mean).view(3, 1, 1)) / torch.tensor(Own.std).view(3, 1, 1)
    torch.testing.assert_close(own(normalize(colors), ["image"])["image"], expected, rtol=1e-6, atol=1e-6)
    assert (Backbone.mean, Backbone.std) == (IMAGENET_MEAN, IMAGENET_STD)


def test_folded_batch_normalization_equals_separate_layers():
    torch.manual_seed(0)
    for kernel, stride, groups in ((1, 1, 1), (3, 1, 6), (5, 1, 6), (3, 2, 6), (5, 2, 6)):
        layer = _Convolution(6, 6, kernel, stride, groups=groups, bias=False).double()
        norm = nn.BatchNorm2d(6, eps=1e-3).double().eval()
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            nn.init.uniform_(tensor, 0.5, 2.0)
        image = torch.randn(2, 6, 9, 12, dtype=torch.float64, requires_grad=True)
        before = (kernel - stride) // 2
        behind = [(-(-n // stride) - 1) * stride + kernel - n - before for n in (9, 12)]
        padded = nn.functional.pad(image, (before, behind[1], before, behind[0]))
        both = nn.functional.conv2d(padded, layer.weight, stride=stride, groups=groups)
        inputs = (image, layer.weight, norm.weight, norm.bias)
        torch.testing.assert_close(layer(image, norm), norm(both))
        grads = [torch.autograd.grad(y.sin().sum(), inputs) for y in (layer(image, norm), norm(both))]
        torch.testing.assert_close(*grads)


def test_batch_normalization_uses_running_statistics():
    backbone = built("efficientnet-lite2").train()
    images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    together = backbone(images, ["stage2"])["stage2"]
    alone = torch.cat([backbone(image[None], ["stage2"])["stage2"] for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "tap", "later"), [
    ("alexnet", "relu2", ["relu4", "pool5"]), ("efficientnet-lite2", "stage5", ["stage6", "head"]),
    ("xception", "block11", ["conv3", "conv4"]), ("tiny-vit", "layer2", ["neck"]),
])  # fmt: skip
def test_only_the_layers_after_a_map_are_trained(name, tap, later):
    backbone = built(name)
    image = torch.randn(2, 3, 64, 64)
    backbone.freeze(tap)
    backbone(image, later)[later[-1]].sum().backward()
    learns = {name: p.grad is not None for name, p in backbone.named_parameters()}
    assert learns == {name: p.requires_grad for name, p in backbone.named_parameters()}
    early = build_backbone(name, [tap]).state_dict().keys()
    assert {name for name, moves in learns.items() if not moves} <= set(early) and any(learns.values())
