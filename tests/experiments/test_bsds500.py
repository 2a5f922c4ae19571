"""BSDS500's protocol: what is trained on, contour maps of images with and without human maps, and the table."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from experiments.bsds500 import PUBLISHED, Bsds500, join_splits
from experiments.config import Bsds500Config
from experiments.table import Job
from matbackprop.errors import DataError
from matbackprop.vision.data.bsds import BSDS
from matbackprop.vision.data.label_files import read_label_maps
from matbackprop.vision.data.shapes import write_shapes_bsds
from matbackprop.vision.metrics import evaluate_segmentations
from matbackprop.vision.training.config import ImageDataConfig

JOB = Job("hypercolumns", "seed", 0)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A data set whose test images have human maps, but for one."""
    root = tmp_path_factory.mktemp("bsds")
    write_shapes_bsds(root / "data", train=2, val=2, seed=0)
    write_shapes_bsds(root / "more", train=1, val=2, seed=1)
    base = BSDS(root / "data", "train").root
    for kind in ("images", "groundTruth"):
        shutil.copytree(BSDS(root / "more", "val").root / kind / "val", base / kind / "test")
    shutil.copy(next((base / "images" / "val").iterdir()), base / "images" / "test" / "unseen.png")
    return root / "data"


@pytest.fixture
def config(root, tmp_path):
    data = ImageDataConfig(root=root, cache=tmp_path / "cache", superpixels=30, workers=1)
    options = {"rows": ("hypercolumns",), "epochs": 1, "weights": "none", "seeds": (0,), "workers": 1}
    return Bsds500Config(out=tmp_path / "out", data=data, boundary=False, accelerator="cpu", **options)


def test_training_on_several_splits_sees_all_their_images(root, tmp_path):
    joined = BSDS(join_splits(root, ("train", "val"), tmp_path), "train")
    parts = [BSDS(root, split) for split in ("train", "val")]
    assert sorted(joined.ids) == sorted(name for part in parts for name in part.ids)
    name = parts[1].ids[0]
    assert (joined.image(name) == parts[1].image(name)).all()
    assert len(joined.segmentations(name)) == len(parts[1].segmentations(name))
    assert join_splits(root, ("train",), tmp_path) == root


def test_the_table_of_the_test_images(config, root):
    Bsds500(config).main()
    table = Bsds500(config)
    result = table.result(JOB)
    assert (result["images"], result["scored"]) == (3, 2)
    maps = {path.stem: read_label_maps(path) for path in (table.place(JOB) / "ucm2").glob("*.mat")}
    assert "unseen" in maps and len(maps) == 3 and all(len(one) == 99 for one in maps.values())
    people = BSDS(root, "test", ids=sorted(set(maps) - {"unseen"}))
    expected = evaluate_segmentations(
        {name: maps[name] for name in people.ids},
        {name: [np.asarray(m) for m in people.segmentations(name)] for name in people.ids},
        objects=True,
    )
    assert result["scores"] == pytest.approx(expected)
    text = (config.out / "table.md").read_text()
    assert all(name in text and source in text for name, (source, _) in PUBLISHED.items())
    assert f"| {expected['covering_ods']:.3f} |" in text and "2 of 3 images of test have human maps" in text
    assert table.ready() == []
    stored = json.loads((config.out / "table.json").read_text())["rows"]["hypercolumns"]
    assert table.place(JOB).name.endswith(stored["fingerprints"][0])


def test_merging_by_colour_needs_neither_training_nor_seeds(config):
    config = dataclasses.replace(config, rows=("colour",), seeds=(0, 1, 2), images="val", boundary=True)
    assert Bsds500(config).ready() == [Job("colour", "seed", 0)]
    table = Bsds500(config)
    table.main()
    scores = table.result(Job("colour", "seed", 0), "cuda")["scores"]  # it is the same on every device
    assert 0 < scores["boundary_ap"] <= 1 and 0 < scores["objects_ods"] <= scores["objects_ois"] <= 1


def test_what_a_result_depends_on(config):
    one = Bsds500(config).provenance(JOB, "cpu")
    assert one["configuration"]["splits"] == ("train", "val")
    val = Bsds500(dataclasses.replace(config, images="val"))
    assert val.provenance(JOB, "cpu")["configuration"]["splits"] == ("train",)
    others = [dataclasses.replace(config, epochs=2), dataclasses.replace(config, boundary=True), val.config]
    assert all(Bsds500(other).provenance(JOB, "cpu") != one for other in others)


def test_a_missing_folder_of_test_images_is_named(config, tmp_path):
    shutil.copytree(config.data.root, tmp_path / "data")
    shutil.rmtree(BSDS(tmp_path / "data", "train").root / "images" / "test")
    config.data.root = tmp_path / "data"
    with pytest.raises(DataError, match="test"):
        Bsds500(config).run(JOB)


def test_a_summary_needs_a_run(config):
    with pytest.raises(DataError, match="no finished run"):
        Bsds500(config).summarize()
