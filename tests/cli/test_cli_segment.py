"""``matbackprop segment`` with and without a model."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from matbackprop.cli.segment import Config, load_segmenter, main
from matbackprop.errors import ConfigurationError, DataError, WeightsError
from matbackprop.models.deep_ncuts import DeepNCuts


@pytest.fixture
def picture(tmp_path):
    pixels = np.zeros((50, 70, 3), np.uint8)
    pixels[:, 35:] = (220, 120, 30)
    path = tmp_path / "photo.png"
    Image.fromarray(pixels).save(path)
    return path


def test_without_a_model(picture, tmp_path, capsys):
    assert main(Config((picture,), out=tmp_path / "out", ks=(2, 4))) == 0
    said = capsys.readouterr().out
    assert "colour and contrast" in said and "2 regions shown" in said
    labels = np.asarray(Image.open(tmp_path / "out" / "photo.png"))
    assert (labels[:, :33] == 0).all() and (labels[:, 37:] == 1).all()
    levels = np.load(tmp_path / "out" / "photo.npz")
    assert levels["labels"].shape == (2, 50, 70) and levels["ks"].tolist() == [2, 4]
    overlay = np.asarray(Image.open(tmp_path / "out" / "photo-overlay.png"))
    assert overlay.shape == (50, 70, 3)
    changed = (overlay != np.asarray(Image.open(picture))).any(-1)
    assert changed[:, 30:40].any() and not changed[:, :20].any()


@pytest.mark.parametrize("method", ["merge", "cluster"])
def test_with_a_saved_model_as_json(picture, tmp_path, capsys, method):
    torch.manual_seed(0)
    DeepNCuts.variant("alexnet-relu5", hidden=8).save_pretrained(tmp_path / "model")
    config = Config((picture, picture), out=tmp_path / "out", model=str(tmp_path / "model"), method=method, json=True)
    assert main(config) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["network"] and [e["labels"].rsplit("/")[-1] for e in found["images"]] == ["photo.png", "photo-2.png"]
    assert len(found["images"][0]["regions"]) == 8


def test_bad_files_and_models_are_named(picture, tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_text("no picture")
    with pytest.raises(DataError, match=r"bad\.png"):
        main(Config((bad,), out=tmp_path / "out"))
    with pytest.raises(DataError, match="no picture"):
        main(Config(()))
    with pytest.raises(WeightsError):
        load_segmenter(str(tmp_path / "nothing"))


def test_pictures_are_looked_for_before_anything_else(picture, tmp_path, capsys):
    missing = tmp_path / "missing.png"
    with pytest.raises(DataError, match=r"cannot read the picture .*missing\.png"):
        main(Config((picture, missing), out=tmp_path / "out"))
    with pytest.raises(DataError, match=r"missing\.png"):
        main(Config((missing,), out=tmp_path / "out", model=str(tmp_path / "nothing")))
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "out").exists()


def test_shown_number_must_be_one_of_the_numbers(picture, tmp_path):
    with pytest.raises(ConfigurationError, match="--k 5 is none of --ks 2 4"):
        main(Config((picture,), out=tmp_path / "out", ks=(2, 4), k=5))


def test_run_of_a_segmenter_does_not_classify(tmp_path):
    from matbackprop.models.predict_regions import load_classifier

    (tmp_path / "config.json").write_text('{"model": {"variant": "paper"}}')
    with pytest.raises(WeightsError, match=r"holds no saved model.*train one"):
        load_classifier(tmp_path)
