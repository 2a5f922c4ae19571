"""Third-party networks as backbones: measured geometry, and files that cannot execute code."""

import sys

import pytest
import torch
from torch import nn

from matbackprop.errors import ConfigurationError, MissingExtraError, WeightsError
from matbackprop.vision.models.backbones import build_backbone, load_backbone_weights
from matbackprop.vision.models.backbones.base import TapInfo
from matbackprop.vision.models.backbones.modules import ModuleBackbone
from matbackprop.vision.models.deep_ncuts import DeepNCuts
from matbackprop.vision.models.deep_o2p import RegionClassifier


class Residual(nn.Module):
    """A small network with a residual block, batch normalization, and a classifier that no map needs."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1))
        self.tiles = nn.Conv2d(8, 12, 2, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(12, 5)

    def forward(self, x):
        x = self.stem(x)
        x = self.tiles(x + self.block(x))
        return self.classifier(self.pool(x).flatten(1))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["alexnet", "vgg16"])
def test_measured_geometry_equals_kernels_and_strides(name):
    known = build_backbone(name)
    measured = ModuleBackbone(known.features)
    for tap in known.taps[::3]:
        index = str(known.index[tap])
        assert measured.info(index)[:3] == known.info(tap)[:3], tap
    image = torch.randn(1, 3, 96, 128, generator=torch.Generator().manual_seed(0))
    tap = known.taps[2]
    index = str(known.index[tap])
    assert torch.equal(measured(image, [index])[index], known(image, [tap])[tap])


def test_a_module_returns_the_maps_of_its_submodules():
    torch.manual_seed(0)
    network = Residual()
    backbone = ModuleBackbone(network)
    assert {"stem", "block", "tiles"} <= set(backbone.taps) and not {"pool", "classifier"} & set(backbone.taps)
    assert backbone.info("stem") == TapInfo(8, 4, 0.0, 4)
    assert backbone.info("tiles") == TapInfo(12, 8, 2.0, 8)
    assert network.training  # as it was
    network.classifier.register_forward_hook(lambda *_: pytest.fail("nothing is computed behind the last map"))
    maps = backbone(torch.randn(2, 3, 64, 80), ["tiles", "stem"])
    assert [tuple(maps[tap].shape) for tap in ("tiles", "stem")] == [(2, 12, 8, 10), (2, 8, 16, 20)]
    backbone.cut(["stem"])
    assert {n for n, p in network.named_parameters() if p.requires_grad} == {
        "stem.0.weight", "stem.1.weight", "stem.1.bias"
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match="Unknown feature map 'tiles'"):
        backbone(torch.zeros(1, 3, 64, 64), ["tiles"])


def test_only_the_layers_after_a_map_of_a_module_are_trained():
    backbone = ModuleBackbone(Residual())
    backbone.cut(["tiles"])
    backbone.freeze("stem")
    trained = {name.split(".")[1] for name, p in backbone.named_parameters() if p.requires_grad}
    assert trained == {"block", "tiles"}
    backbone.freeze("tiles")
    backbone.cut(["tiles"])
    assert not any(p.requires_grad for p in backbone.parameters())


def test_a_network_without_maps_is_rejected():
    with pytest.raises(ConfigurationError, match="Sequential has no map"):
        ModuleBackbone(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)))


NAME = f"{__name__}:Residual"


def test_both_systems_accept_a_user_defined_class():
    torch.manual_seed(0)
    image = torch.rand(1, 3, 64, 96)
    segmenter = DeepNCuts(backbone=NAME, taps=("tiles",), hidden=8, channels=5)
    assert segmenter(image).shape == (1, 8, 12, 5)
    classifier = RegionClassifier(4, head="o2p", backbone=NAME, taps=("tiles", "block"), canvas=64)
    classifier(torch.rand(2, 3, 64, 64)).sum().backward()
    for model in (segmenter, classifier):
        model.zero_grad()
    segmenter(image).sum().backward()
    assert [n for n, p in segmenter.named_parameters() if p.requires_grad and p.grad is None] == []


def test_without_taps_the_last_map_of_another_backbone_is_used():
    model = DeepNCuts(backbone=NAME, hidden=8, channels=5)
    assert [model.tap] == ["tiles"] == model.hparams_dict["taps"]
    assert DeepNCuts(variant="alexnet-relu5", hidden=8).tap == "relu5"
    assert DeepNCuts(variant="alexnet-relu5", hidden=8, backbone="alexnet").tap == "relu5"


def test_a_saved_model_cannot_import_code(tmp_path):
    """Names in a file are not imported or called."""
    DeepNCuts(backbone=NAME, taps=("tiles",), hidden=8, channels=5).save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="not allowed in files"):
        DeepNCuts.from_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace(NAME, "os:abort"))
    with pytest.raises(WeightsError, match="not allowed in files"):
        DeepNCuts.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet", "Unknown backbone 'resnet'. Backbones: alexnet"),
        ("no.such.module:Net", "cannot be built: No module named 'no'"),
        ("torch.nn:Nothing", "cannot be built: module 'torch.nn' has no attribute 'Nothing'"),
        ("torch.nn:Linear", "cannot be built: .*missing"),
    ],
)
def test_unknown_backbones_are_reported(name, message):
    with pytest.raises(ConfigurationError, match=message):
        build_backbone(name)


@pytest.mark.parametrize(
    ("scheme", "library"), [("hf", "transformers"), ("timm", "timm"), ("torchvision", "torchvision")]
)
def test_a_missing_library_is_reported(scheme, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f"{library}.models", None)
    with pytest.raises(MissingExtraError, match=f"pip install {library}"):
        build_backbone(f"{scheme}:resnet50")


def hf_config(kind):
    transformers = pytest.importorskip("transformers")
    small = {
        "ResNetConfig": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4},
        "ConvNextConfig": {"hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4},
        "SwinConfig": {"embed_dim": 8, "depths": [1] * 4, "num_heads": [1, 2, 4, 8], "window_size": 4},
        "Dinov2Config": {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 56},
    }[kind]  # fmt: skip
    return getattr(transformers, kind)(**small)


@pytest.mark.parametrize(
    ("kind", "tap", "place"),
    [
        ("ResNetConfig", "stage3", (24, 16, 0.0)),
        ("ConvNextConfig", "stage2", (16, 8, 3.5)),
        ("SwinConfig", "stage2", (16, 8, 3.5)),
        ("Dinov2Config", "stage3", (32, 14, 6.5)),
    ],
)
def test_hugging_face_backbones(tmp_path, kind, tap, place):
    hf_config(kind).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}')
    torch.manual_seed(0)
    backbone = build_backbone(f"hf:{tmp_path}", [tap]).eval()
    assert backbone.info(tap)[:3] == place
    assert backbone.mean == backbone.std == (0.5, 0.5, 0.5)
    actual = backbone(torch.randn(1, 3, 90, 130), [tap])[tap]
    assert actual.shape[1] == place[0] and actual.shape[-1] in (130 // place[1], -(-130 // place[1]))
    segmenter = DeepNCuts(backbone=f"hf:{tmp_path}", taps=(tap,), hidden=8, channels=5)
    segmenter(torch.rand(1, 3, 90, 130)).sum().backward()
    assert [n for n, p in segmenter.named_parameters() if p.requires_grad and p.grad is None] == []


def test_weights_that_hugging_face_publishes_are_loaded(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    published = transformers.AutoBackbone.from_config(hf_config("ResNetConfig"))
    published.save_pretrained(tmp_path)
    backbone = build_backbone(f"hf:{tmp_path}").eval()
    load_backbone_weights(backbone, f"hf:{tmp_path}", "imagenet")
    own, theirs = backbone.network.state_dict(), published.state_dict()
    assert all(torch.equal(own[key], theirs[key]) for key in theirs)


def test_a_missing_model_is_one_line(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(WeightsError, match="cannot be built"):
        build_backbone(f"hf:{tmp_path / 'nothing'}")


def test_timm_networks():
    pytest.importorskip("timm")
    torch.manual_seed(0)
    backbone = build_backbone("timm:resnet18", ["layer2"]).eval()
    assert backbone.info("layer2")[:3] == (128, 8, 0.0)
    assert backbone(torch.zeros(1, 3, 64, 96), ["layer2"])["layer2"].shape == (1, 128, 8, 12)
    with pytest.raises(WeightsError, match="cannot be built"):
        build_backbone("timm:no-such-network")


@pytest.mark.parametrize(
    ("name", "tap", "place"),
    [
        ("vit_tiny_patch16_224", "blocks.11", (192, 16, 7.5)),
        ("swin_tiny_patch4_window7_224", "layers.3", (768, 32, 15.5)),
        ("vit_small_patch14_dinov2", "blocks.11", (384, 14, 6.5)),
    ],
)
def test_timm_transformers_accept_any_image_size(name, tap, place):
    pytest.importorskip("timm")
    torch.manual_seed(0)
    model = RegionClassifier(3, head="o2p", backbone=f"timm:{name}", canvas=99, reduce=8)
    assert model.taps == (tap,) and model.backbone.info(tap)[:3] == place
    assert model(torch.rand(1, 3, 99, 99)).shape == (1, 3)


def test_a_timm_network_of_one_image_size_is_rejected():
    pytest.importorskip("timm")
    with pytest.raises(WeightsError, match="does not take images of any size"):
        build_backbone("timm:levit_128s")


@pytest.mark.parametrize(
    ("name", "theirs", "taps"),
    [
        ("efficientnet-lite2", "tf_efficientnet_lite2", ["stage1", "stage2", "stage3", "stage5", "stage7"]),
        ("tiny-vit", "tiny_vit_5m_224", ["layer0", "layer1", "layer2"]),
    ],
)
def test_our_networks_equal_those_of_timm(name, theirs, taps):
    """With the same weights, in the order of the layers, the same maps."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    ours, other = build_backbone(name).eval(), timm.create_model(theirs, features_only=True).eval()
    draw = torch.Generator().manual_seed(0)
    state = {key: 0.1 * torch.rand(v.shape, generator=draw) for key, v in ours.state_dict().items() if v.ndim}
    ours.load_state_dict(state, strict=False)
    weights = [state[key] for key in ours.state_dict() if key in state]
    keys = [key for key, value in other.state_dict().items() if value.ndim]
    other.load_state_dict(dict(zip(keys, weights, strict=False)), strict=False)
    image = torch.randn(1, 3, 128, 192, generator=draw)
    with torch.no_grad():
        actual = ours.maps(image, taps)
        for tap, expected in zip(taps, other(image), strict=False):
            torch.testing.assert_close(actual[tap], expected, rtol=1e-4, atol=1e-5)
