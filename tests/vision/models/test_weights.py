"""Weights: safetensors, matching architectures, checksums of official files, saved models."""

import hashlib
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from matbackprop.errors import MissingExtraError, WeightsError
from matbackprop.vision.models.backbones import BACKBONES, BackboneEntry, build_backbone
from matbackprop.vision.models.backbones.base import download_weights, find_weights, load_backbone_weights
from matbackprop.vision.models.weights import PretrainedMixin, in_eight_bits, read_weights


@pytest.fixture
def alexnet():
    torch.manual_seed(0)
    return build_backbone("alexnet")


def test_float16_files_are_widened(alexnet, tmp_path):
    save_file({k: v.half() for k, v in alexnet.state_dict().items()}, tmp_path / "w.safetensors")
    other = build_backbone("alexnet")
    assert load_backbone_weights(other, "alexnet", tmp_path / "w.safetensors") == tmp_path / "w.safetensors"
    for key, value in other.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, alexnet.state_dict()[key].half().float())


def test_the_classifier_is_skipped(alexnet, tmp_path):
    save_file(alexnet.state_dict() | {"classifier.1.weight": torch.zeros(2, 2)}, tmp_path / "w.safetensors")
    other = build_backbone("alexnet")
    load_backbone_weights(other, "alexnet", tmp_path / "w.safetensors")
    assert other.state_dict().keys() == alexnet.state_dict().keys()
    for key, value in other.state_dict().items():
        assert torch.equal(value, alexnet.state_dict()[key])


def test_another_architecture_is_named_key_by_key_and_nothing_changes(alexnet, tmp_path):
    state = alexnet.state_dict()
    state["features.0.weight"] = torch.zeros(64, 3, 3, 3)
    state["features.99.weight"] = torch.zeros(1)
    del state["features.3.bias"]
    save_file(state, tmp_path / "w.safetensors")
    other = build_backbone("alexnet")
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(WeightsError) as caught:
        load_backbone_weights(other, "alexnet", tmp_path / "w.safetensors")
    for text in (
        "missing: features.3.bias",
        "not in the model: features.99.weight",
        "features.0.weight (64, 3, 3, 3) instead of (64, 3, 11, 11)",
    ):
        assert text in str(caught.value)
    assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())


def test_weights_that_are_not_finite(alexnet, tmp_path):
    state = alexnet.state_dict()
    state["features.0.bias"] = torch.full((64,), float("nan"))
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match=r"not finite: features\.0\.bias"):
        load_backbone_weights(alexnet, "alexnet", tmp_path / "w.safetensors")


def test_other_files_are_refused(tmp_path):
    evil = tmp_path / "w.pth"
    evil.write_bytes(pickle.dumps(print))
    with pytest.raises(WeightsError, match="can execute code"):
        read_weights(evil)
    with pytest.raises(WeightsError, match="does not exist"):
        read_weights(tmp_path / "missing.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0nonsense")
    with pytest.raises(WeightsError, match="is damaged"):
        read_weights(tmp_path / "bad.safetensors")


def test_search_path_of_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("MATBACKPROP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("MATBACKPROP_CACHE", str(tmp_path / "cache"))
    cached = tmp_path / "cache" / "weights" / "vgg16.safetensors"
    cached.parent.mkdir(parents=True)
    save_file({"a": torch.zeros(1)}, cached)
    assert find_weights("vgg16") == cached
    own = tmp_path / "data" / "weights" / "vgg16_features_fp16.safetensors"
    own.parent.mkdir(parents=True)
    save_file({"a": torch.zeros(1)}, own)
    assert find_weights("vgg16") == own
    with pytest.raises(WeightsError, match="'resnet' has no published weights"):
        find_weights("resnet")


def test_official_files_are_checked_converted_and_cached(alexnet, tmp_path):
    target = tmp_path / "cache" / "alexnet.safetensors"
    target.parent.mkdir()
    downloaded = target.with_name("alexnet.pth")
    torch.save(alexnet.state_dict(), downloaded)
    digest = hashlib.sha256(downloaded.read_bytes()).hexdigest()
    mirror = BackboneEntry("", "", "http://127.0.0.1:9/alexnet.pth", digest[:8])
    assert download_weights("alexnet", target, mirror) == target
    assert torch.equal(load_file(target)["features.0.bias"], alexnet.state_dict()["features.0.bias"])
    assert [p.name for p in target.parent.iterdir()] == ["alexnet.safetensors"]
    with pytest.raises(WeightsError, match=r"weights of alexnet are missing.*another machine to .*alexnet\.pth"):
        download_weights("alexnet", tmp_path / "b" / "x.safetensors", mirror)


def test_official_files_do_not_execute(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    torch.save({"a": Evil()}, tmp_path / "evil.pth")
    digest = hashlib.sha256((tmp_path / "evil.pth").read_bytes()).hexdigest()
    with pytest.raises(WeightsError, match="cannot be read as weights"):
        download_weights("x", tmp_path / "x.safetensors", BackboneEntry("", "", "http://127.0.0.1:9/evil.pth", digest))
    assert not (tmp_path / "executed").exists()


def test_official_names_contain_their_checksum():
    for official in (entry for entry in BACKBONES.values() if entry.url):
        assert official.url.startswith("https://download.pytorch.org/models/")
        assert f"-{official.sha256}.pth" in official.url


@pytest.mark.data
@pytest.mark.parametrize("name", [name for name, entry in BACKBONES.items() if entry.file])
def test_the_data_folder_has_weights_that_fit(name, data_root):
    path = load_backbone_weights(build_backbone(name), name)
    assert path.is_relative_to(data_root)


# ----------------------------------------------------------------------------------------------------------- pretrained


class Small(PretrainedMixin, nn.Module):
    def __init__(self, width: int = 2, names: list[str] | None = None):
        super().__init__()
        self.hparams_dict = {"width": width, "names": names}
        self.layer = nn.Linear(width, 1)
        self.tied = self.layer
        self.register_buffer("count", torch.tensor(3))


class Other(Small):
    pass


def test_saved_models_round_trip(tmp_path):
    model = Small(3, ["a", "b"])
    model.save_pretrained(tmp_path / "m", classes=["a"])
    again = Small.from_pretrained(tmp_path / "m")
    assert again.hparams_dict == {"width": 3, "names": ["a", "b"]}
    assert torch.equal(again.layer.weight, model.layer.weight)
    assert again.count.item() == 3 and not again.training
    assert json.loads((tmp_path / "m" / "config.json").read_text())["classes"] == ["a"]
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_saved_models_in_half_precision(tmp_path):
    model = Small(3)
    model.save_pretrained(tmp_path, dtype=torch.float16)
    assert load_file(tmp_path / "model.safetensors")["layer.weight"].dtype == torch.float16
    assert load_file(tmp_path / "model.safetensors")["count"].dtype == torch.int64
    assert Small.from_pretrained(tmp_path).layer.weight.dtype == torch.float32


def test_wrong_saved_models(tmp_path):
    Small(3).save_pretrained(tmp_path / "m")
    with pytest.raises(WeightsError, match="holds a Small, not a Other"):
        Other.from_pretrained(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["arguments"]["width"] = 4
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="other shapes"):
        Small.from_pretrained(tmp_path / "m")
    config["arguments"]["depth"] = 4
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="does not fit Small"):
        Small.from_pretrained(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="damaged"):
        Small.from_pretrained(tmp_path / "m")
    with pytest.raises(WeightsError, match="does not exist"):
        Small.from_pretrained(tmp_path / "nothing")


def test_the_hub_is_used_for_owner_and_name(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    Small(3).save_pretrained(tmp_path / "m")
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **o: asked.append((name, o)) or str(tmp_path / "m")
    )
    assert Small.from_pretrained("owner/name").hparams_dict["width"] == 3
    assert asked[0][0] == "owner/name"
    assert asked[0][1]["allow_patterns"] == ["config.json", "model.safetensors"]

    def fail(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(WeightsError, match="no network"):
        Small.from_pretrained("owner/name")
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match="pip install huggingface_hub"):
        Small.from_pretrained("owner/name")


def test_weights_of_unused_layers_are_skipped(tmp_path):
    """Published files and models that were saved whole load into a network that ends with its last map."""
    from matbackprop.vision.models.deep_ncuts import DeepNCuts

    whole = build_backbone("vgg16")
    save_file(whole.state_dict(), tmp_path / "vgg16.safetensors")
    part = build_backbone("vgg16", ["relu4_1"])
    assert len(part.features) < len(whole.features)
    load_backbone_weights(part, "vgg16", tmp_path / "vgg16.safetensors")
    assert torch.equal(part.features[17].weight, whole.features[17].weight)
    model = DeepNCuts.variant("vgg16-relu4", hidden=4)
    model.save_pretrained(tmp_path / "model")
    state = load_file(tmp_path / "model" / "model.safetensors")
    state |= {f"backbone.{k}": v for k, v in whole.state_dict().items() if k not in model.backbone.state_dict()}
    save_file(state, tmp_path / "model" / "model.safetensors")
    again = DeepNCuts.from_pretrained(tmp_path / "model")
    assert torch.equal(again.head.first.weight, model.head.first.weight)


@pytest.mark.parametrize("text", ["[]", "3", "null", "\x00", "[" * 100_000, '{"class": "DeepNCuts", "arguments": 7}',
                                  '{"class": "DeepNCuts", "arguments": {"hidden": -3}}',
                                  '{"class": "DeepNCuts", "arguments": {"hidden": 100000000000}}',
                                  '{"class": "DeepNCuts", "arguments": {"wings": 2}}'])  # fmt: skip
def test_invalid_descriptions_are_refused_in_one_line(tmp_path, text):
    from matbackprop.vision.models.deep_ncuts import DeepNCuts

    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=r"config\.json"):
        DeepNCuts.from_pretrained(tmp_path)


def test_weights_in_eight_bits_are_accurate_to_half_a_step(tmp_path):
    torch.manual_seed(0)
    state = {"conv.weight": torch.randn(64, 32, 3, 3) * torch.logspace(-3, 1, 64).view(-1, 1, 1, 1)}
    state |= {"conv.bias": torch.randn(64), "rows.weight": torch.zeros(80, 64), "steps": torch.tensor(7)}
    small = in_eight_bits(state)
    assert small["conv.weight"].dtype == torch.int8 and small["conv.bias"].dtype == torch.float16
    save_file(small, tmp_path / "small.safetensors")
    again = read_weights(tmp_path / "small.safetensors")
    assert list(again) and set(again) == set(state) and again["conv.weight"].dtype == torch.float32
    largest = state["conv.weight"].flatten(1).abs().amax(1)
    off = (again["conv.weight"] - state["conv.weight"]).flatten(1).abs().amax(1)
    assert (off <= largest / 254 * 1.001).all()
    assert not again["rows.weight"].any() and again["steps"] == 7
    save_file(small | {"conv.weight.scale": torch.ones(3)}, tmp_path / "damaged.safetensors")
    with pytest.raises(WeightsError, match=r"conv\.weight\.scale does not fit the weights"):
        read_weights(tmp_path / "damaged.safetensors")
