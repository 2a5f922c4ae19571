"""Models, weights and pictures that cannot be used: a one-line error from every command, and no half-written files."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from matbackprop.cli import main
from matbackprop.errors import WeightsError
from matbackprop.vision.inference.loading import load_model
from matbackprop.vision.models.deep_ncuts import DeepNCuts
from matbackprop.vision.models.deep_o2p import RegionClassifier

TRAIN = ["--preset", "smoke", "--data.generate", "8", "--engine.run", "OUT/run"]

CASES = {
    "unknown backbone": (
        ["train", "o2p", *TRAIN, "--model.backbone", "resnet"],
        "Unknown backbone 'resnet'. Backbones",
    ),
    "unknown map": (
        ["train", "o2p", *TRAIN, "--model.taps", "relu9"],
        "Unknown feature map 'relu9'",
    ),
    "unknown map to segment": (
        ["train", "ncuts", *TRAIN, "--model.backbone", "alexnet", "--model.taps", "relu9"],
        "Unknown feature map 'relu9'",
    ),
    "weights of another network": (
        ["train", "o2p", *TRAIN, "--model.weights", "TMP/segmenter/model.safetensors"],
        "do not match AlexNet",
    ),
    "damaged weights": (
        ["train", "o2p", *TRAIN, "--model.weights", "TMP/damaged/model.safetensors"],
        "model.safetensors is damaged",
    ),
    "damaged classifier": (["classify", "TMP/photo.png", "--model", "TMP/damaged"], "model.safetensors is damaged"),
    "damaged classifier to export": (["export", "TMP/damaged", "--out", "OUT/a.onnx"], "model.safetensors is damaged"),
    "other shapes than the configuration": (
        ["classify", "TMP/photo.png", "--model", "TMP/other"],
        "do not match RegionClassifier",
    ),
    "a segmenter that should name": (["classify", "TMP/photo.png", "--model", "TMP/segmenter"], "is a segmenter"),
    "a classifier that should segment": (
        ["segment", "TMP/photo.png", "--model", "TMP/classifier", "--out", "OUT/s"],
        "is a classifier",
    ),
    "no such folder": (["segment", "TMP/photo.png", "--model", "TMP/nothing", "--out", "OUT/s"], "does not exist"),
    "a hub that cannot be reached": (
        ["segment", "TMP/photo.png", "--model", "owner/name", "--out", "OUT/s"],
        "it cannot be downloaded from the Hugging Face hub",
    ),
    "no picture to name": (["classify", "TMP/notes.txt"], "notes.txt is not an image"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    classifier = RegionClassifier(2, head="o2p", canvas=67, reduce=4, names=["cup", "plate"])
    for name in ("classifier", "damaged", "other"):
        classifier.save_pretrained(path / name, dtype=torch.float16)
    DeepNCuts(variant="alexnet-relu5", hidden=8).save_pretrained(path / "segmenter", dtype=torch.float16)
    weights = path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    config = json.loads((path / "other" / "config.json").read_text())
    config["arguments"]["reduce"] = 5
    (path / "other" / "config.json").write_text(json.dumps(config))
    Image.fromarray(np.zeros((40, 60, 3), np.uint8)).save(path / "photo.png")
    (path / "notes.txt").write_text("no picture")
    return path


@pytest.mark.parametrize("case", CASES)
def test_bad_models_are_one_line_and_leave_no_files(case, folder, tmp_path, capsys, monkeypatch):
    if "hub" in case:
        hub = pytest.importorskip("huggingface_hub")

        def refuse(*arguments, **options):
            raise ConnectionError("connection refused")

        monkeypatch.setattr(hub, "snapshot_download", refuse)
    monkeypatch.setenv("MATBACKPROP_CACHE", str(tmp_path / "cache"))
    words, message = CASES[case]
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match="2"):
        main([word.replace("TMP", str(folder)).replace("OUT", str(out)) for word in words])
    said = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert len(said) == 1 and message in said[0], said
    assert not out.exists() or not any(out.iterdir())


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("segmenter", "channels", 0), ("segmenter", "hidden", 10**9), ("segmenter", "dropout", 2.0),
     ("classifier", "margin", -1.0), ("classifier", "margin", 1e300), ("classifier", "side", 0),
     ("classifier", "vector_dropout", -0.5)],
)  # fmt: skip
def test_invalid_numbers_are_rejected_with_their_file(name, field, value, folder, tmp_path):
    shutil.copytree(folder / name, tmp_path / name)
    path = tmp_path / name / "config.json"
    config = json.loads(path.read_text())
    config["arguments"][field] = value
    path.write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=rf"config\.json does not match .*{field}"):
        load_model(tmp_path / name)


@pytest.mark.parametrize(("name", "near"), [("boxx", "box"), ("box/clasifier", "box/classifier")])
def test_a_misspelled_model_is_suggested(name, near):
    with pytest.raises(WeightsError, match=rf"There is no model '{name}'. Did you mean '{near}'\?"):
        load_model(name)
