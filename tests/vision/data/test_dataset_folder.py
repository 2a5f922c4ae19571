"""The folder of a recipe's data set."""

import pytest

from matbackprop.errors import DataError
from matbackprop.vision.data.cache import dataset_folder


def _folder(tmp_path, root=None, generate=0):
    return dataset_folder("coco", root, generate, tmp_path / "cache")


def test_synthetic_images_are_written_once_and_override_a_root(tmp_path):
    folder = _folder(tmp_path, root=tmp_path, generate=3)
    assert [len(list((folder / "images" / split).iterdir())) for split in ("train", "val")] == [3, 1]
    (folder / "mark.txt").write_text("kept")
    assert (_folder(tmp_path, generate=3) / "mark.txt").read_text() == "kept"
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["shapes-coco-3"]


def test_the_root_option_overrides_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("MATBACKPROP_DATA", str(tmp_path / "all"))
    assert _folder(tmp_path, root=tmp_path / "mine") == tmp_path / "mine"
    assert _folder(tmp_path) == tmp_path / "all" / "coco"
    monkeypatch.delenv("MATBACKPROP_DATA")
    with pytest.raises(DataError, match=r"--data\.root FOLDER.*MATBACKPROP_DATA.*contains coco/.*--data\.generate"):
        _folder(tmp_path)
