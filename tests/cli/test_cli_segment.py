"""``matbackprop segment`` with and without a model."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from matbackprop.cli.segment import Config, main
from matbackprop.vision.data.label_files import read_label_maps
from matbackprop.vision.models.deep_ncuts import DeepNCuts


@pytest.fixture
def picture(tmp_path):
    pixels = np.zeros((50, 70, 3), np.uint8)
    pixels[:, 35:] = (220, 120, 30)
    path = tmp_path / "photo.png"
    Image.fromarray(pixels).save(path)
    return path


def test_without_a_model(picture, tmp_path, capsys):
    assert main(Config((picture,), out=tmp_path / "out", ks=(2, 4), model="none"))["exit_code"] == 0
    assert "photo.png: 2 regions" in capsys.readouterr().out
    labels = np.asarray(Image.open(tmp_path / "out" / "photo.png"))
    assert labels.dtype in (np.uint16, np.int32)  # before and since Pillow 11
    assert (labels[:, :33] == 0).all() and (labels[:, 37:] == 1).all()
    levels = np.load(tmp_path / "out" / "photo.npz")
    assert len(list(read_label_maps(tmp_path / "out" / "photo-ucm2.mat", thresholds=9))) == 9
    assert levels["labels"].shape == (2, 50, 70) and levels["ks"].tolist() == [2, 4]
    np.testing.assert_array_equal(levels["labels"][0], labels)
    overlay = np.asarray(Image.open(tmp_path / "out" / "photo-overlay.png"))
    assert overlay.shape == (50, 70, 3)
    changed = (overlay != np.asarray(Image.open(picture))).any(-1)
    assert changed[:, 30:40].any() and not changed[:, :20].any()
    colors = np.asarray(Image.open(tmp_path / "out" / "photo-colors.png"))
    assert len(np.unique(colors.reshape(-1, 3), axis=0)) == 2 and colors.max() > 100


def test_with_a_saved_model(picture, tmp_path):
    torch.manual_seed(0)
    DeepNCuts(variant="alexnet-relu5", hidden=8).save_pretrained(tmp_path / "model")
    config = Config((picture, picture), out=tmp_path / "out", model=str(tmp_path / "model"))
    document = main(config)
    assert document["exit_code"] == 0 and document["summary"] == f"2 images segmented → {tmp_path / 'out'}"
    assert document["network"] and [e["labels"].rsplit("/")[-1] for e in document["images"]] == [
        "photo.png",
        "photo-2.png",
    ]
    assert len(document["images"][0]["regions"]) == 8


def test_bad_pictures_are_reported_counted_and_skipped(picture, tmp_path, capsys):
    folder = picture.parent / "photos"
    folder.mkdir()
    picture.rename(folder / "good.png")
    (folder / "bad.png").write_text("no picture")
    (folder / "notes.txt").write_text("no picture either")
    missing = tmp_path / "missing.jpg"
    assert main(Config((folder, missing), out=tmp_path / "out", model="none"))["exit_code"] == 1
    captured = capsys.readouterr()
    assert "good.png: 2 regions" in captured.out
    assert "bad.png is not an image" in captured.err and "missing.jpg does not exist" in captured.err
    assert "2 of 3 images skipped" in captured.err and "notes.txt" not in captured.err
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "good-colors.png",
        "good-overlay.png",
        "good-ucm2.mat",
        "good.npz",
        "good.png",
    ]


def test_any_number_of_regions_can_be_shown(tmp_path, capsys):
    path = tmp_path / "noise.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)).save(path)
    for k in (1, 12):
        config = Config((path,), out=tmp_path / "out", k=k, model="none", overwrite=True)
        assert main(config)["exit_code"] == 0
        assert np.asarray(Image.open(tmp_path / "out" / "noise.png")).max() == k - 1
    said = capsys.readouterr().out
    assert "noise.png: 1 region," in said and "noise.png: 12 regions," in said
    DeepNCuts(variant="alexnet-relu5", hidden=8).save_pretrained(tmp_path / "model")
    config = Config((path,), out=tmp_path / "out", k=5, model=str(tmp_path / "model"), ks=(2, 4), overwrite=True)
    assert main(config)["exit_code"] == 0
    assert np.load(tmp_path / "out" / "noise.npz")["ks"].tolist() == [2, 4, 5]


def test_results_that_exist_are_kept_unless_overwritten(picture, tmp_path, capsys):
    config = Config((picture,), out=tmp_path / "out", model="none", format=("npz",))
    assert len(main(config)["images"]) == 1
    (tmp_path / "out" / "photo.npz").write_bytes(b"mine")
    document = main(config)
    assert document["images"] == [] and document["kept"] == [picture.as_posix()] and document["exit_code"] == 0
    assert (tmp_path / "out" / "photo.npz").read_bytes() == b"mine"
    assert "--overwrite" in capsys.readouterr().err
    config.overwrite = True
    assert len(main(config)["images"]) == 1 and np.load(tmp_path / "out" / "photo.npz")["labels"].size


def test_results_of_images_with_equal_names_have_different_names(tmp_path):
    paths = [tmp_path / name for name in ("a.png", "b/a.png", "a-2.png", "c/a.png")]
    for number, path in enumerate(paths, 1):
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.zeros((20, 10 * number, 3), np.uint8)).save(path)
    document = main(Config(tuple(paths), out=tmp_path / "out", model="none", format=("png",)))
    files = [entry["labels"] for entry in document["images"]]
    assert [Image.open(file).width for file in files] == [10, 20, 30, 40] and len(set(files)) == 4


def test_threshold_determines_the_regions(tmp_path):
    path = tmp_path / "noise.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)).save(path)
    shown = []
    for threshold in (0.0, 0.5, 1.0):
        config = Config((path,), out=tmp_path / "out", model="none", threshold=threshold, overwrite=True)
        shown.append(main(config)["images"][0]["shown"])
    assert shown[0] > shown[1] > shown[2] == 1


def test_one_coco_file_for_a_folder(tmp_path, capsys):
    folder = tmp_path / "photos"
    folder.mkdir()
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[:, 30:] = 200
    for name in ("a.png", "b.png", "x\x1b[31m.png"):
        Image.fromarray(pixels).save(folder / name)
    for _ in range(2):  # the second time all results exist
        document = main(Config((folder,), out=tmp_path / "out", model="none", format=("coco",)))
        assert document["exit_code"] == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err and "\\x1b[31m.png" in said.out
    assert len(json.loads((tmp_path / "out" / "coco.json").read_text())["images"]) == 3
