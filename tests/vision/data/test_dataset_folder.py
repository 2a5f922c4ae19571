"""The folder of a recipe's data set."""

import pytest

from matbackprop.errors import DataError
from matbackprop.vision.training.config import RegionDataConfig


def test_synthetic_images_are_written_once(tmp_path):
    config = RegionDataConfig(generate=3, cache=tmp_path)
    folder = config.folder()
    assert [len(list((folder / "images" / split).iterdir())) for split in ("train", "val")] == [3, 1]
    (folder / "mark.txt").write_text("kept")
    assert (config.folder() / "mark.txt").read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["shapes-coco-3"]


def test_the_root_option_overrides_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("MATBACKPROP_DATA", str(tmp_path / "all"))
    assert RegionDataConfig(root=tmp_path / "mine", generate=3).folder() == tmp_path / "mine"
    assert RegionDataConfig().folder() == tmp_path / "all" / "coco"
    monkeypatch.delenv("MATBACKPROP_DATA")
    with pytest.raises(DataError, match=r"--data\.root FOLDER.*MATBACKPROP_DATA.*contains coco/.*--data\.generate"):
        RegionDataConfig().folder()
