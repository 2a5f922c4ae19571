"""Every kind of bad file is named."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from scipy import io

from matbackprop.errors import DataError
from matbackprop.vision.data.bsds import BSDS
from matbackprop.vision.data.check import check_dataset, find_layout
from matbackprop.vision.data.shapes import write_shapes_bsds, write_shapes_coco


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    root = tmp_path_factory.mktemp("clean")
    write_shapes_coco(root / "coco", train=3, val=2)
    write_shapes_bsds(root / "bsds", train=2, val=1)
    return root


@pytest.fixture
def coco(clean, tmp_path):
    return shutil.copytree(clean / "coco", tmp_path / "coco")


@pytest.fixture
def bsds(clean, tmp_path):
    return shutil.copytree(clean / "bsds", tmp_path / "bsds")


def only_problem(root):
    (problem,) = check_dataset(root).problems
    return str(problem)


def test_layouts(clean, tmp_path):
    assert find_layout(clean / "coco") == "coco"
    assert find_layout(clean / "bsds") == "bsds"
    with pytest.raises(DataError, match=r"images/SPLIT/NAME\.jpg .*groundTruth/SPLIT/NAME\.png .*NAME_1\.png"):
        find_layout(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        find_layout(tmp_path / "nothing")


def test_valid_data_sets_pass_the_check(clean):
    assert check_dataset(clean / "coco").good
    assert check_dataset(clean / "bsds").good


# ----------------------------------------------------------------------------------------------------------------- BSDS


def first(folder, pattern):
    return sorted(folder.rglob(pattern))[0]


@pytest.mark.parametrize(("pattern", "reason"), [("train/*.jpg", "is damaged"), ("train/*.mat", "cannot be read")])
def test_bsds_corrupt_files(bsds, pattern, reason):
    path = first(bsds, pattern)
    path.write_bytes(path.read_bytes()[:200])
    assert path.name in only_problem(bsds) and reason in only_problem(bsds)


def test_bsds_orphans(bsds):
    first(bsds, "train/*.mat").unlink()
    sorted(bsds.rglob("train/*.jpg"))[1].unlink()
    first_reason, second_reason = (p.reason for p in check_dataset(bsds).problems)
    assert first_reason.startswith("has no human map") and second_reason == "has no image"


def test_bsds_other_size(bsds):
    path = first(bsds, "val/*.mat")
    cells = np.empty((1, 1), object)
    cells[0, 0] = {"Segmentation": np.ones((5, 7), np.uint16)}
    io.savemat(path, {"groundTruth": cells})
    assert "human map 1 has size 5×7, but the image has size 96×128" in only_problem(bsds)


def test_bsds300_layout(bsds, tmp_path):
    from helpers.seg_files import write_seg

    root = tmp_path / "BSDS300"
    shutil.copytree(bsds / "data" / "images", root / "images")
    (root / "human" / "color" / "1105").mkdir(parents=True)
    for image in (root / "images").rglob("*.jpg"):
        write_seg(root / "human" / "color" / "1105" / f"{image.stem}.seg", np.zeros((96, 128), np.int64))
    result = check_dataset(root)
    assert result.good, result.problems
    assert result.counts["train segmentations"] == 2
    write_seg(root / "human" / "color" / "1105" / "999.seg", np.zeros((96, 128), np.int64))
    assert "999.seg: has no image" in only_problem(root)


# ----------------------------------------------------------------------------------------------------------------- COCO


def edit(coco, change, split="train"):
    path = coco / "annotations" / f"instances_{split}.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_coco_images(coco):
    one, two, three = sorted((coco / "images" / "train").iterdir())
    one.unlink()
    two.write_bytes(two.read_bytes()[:100])
    Image.new("RGB", (10, 20)).save(three)
    problems = {p.path.name: p.reason for p in check_dataset(coco).problems}
    assert problems[one.name] == "is missing"
    assert "cannot be decoded" in problems[two.name]
    assert problems[three.name].startswith("has 20×10 pixels, but the annotations specify 96×128")


def test_coco_categories_of_the_splits(coco):
    edit(coco, lambda content: content["categories"][0].update(name="other"))
    assert "have different categories" in only_problem(coco)


def test_coco_corrupt_json(coco):
    (coco / "annotations" / "instances_val.json").write_text("{")
    assert "instances_val.json: cannot be read" in only_problem(coco)


def test_coco_notes_are_not_problems(coco):
    def change(content):
        content["annotations"][0]["iscrowd"] = 1
        content["annotations"][1]["segmentation"] = []
        content["categories"].append({"id": 99, "name": "unused"})

    edit(coco, change)
    edit(coco, lambda c: c["categories"].append({"id": 99, "name": "unused"}), "val")
    result = check_dataset(coco)
    assert result.good, result.problems
    notes = "\n".join(result.notes)
    assert "1 crowds" in notes and "1 empty masks" in notes and "unused" in notes


def test_polygons_pass_the_check(coco):
    edit(coco, lambda content: content["annotations"][0].update(segmentation=[[10, 10, 30, 10, 30, 30]]))
    assert check_dataset(coco).good


def test_files_accepted_by_the_reader_pass_the_check(tmp_path):
    """Numbered maps and bitmaps in a user-defined split."""
    for kind in ("images", "groundTruth"):
        (tmp_path / kind / "garden").mkdir(parents=True)
    Image.new("RGB", (6, 4)).save(tmp_path / "images/garden/pond.bmp")
    for i in (1, 2):
        Image.new("L", (6, 4), i).save(tmp_path / f"groundTruth/garden/pond_{i}.png")
    assert len(BSDS(tmp_path, "garden")[0].segmentations) == 2
    result = check_dataset(tmp_path)
    assert result.good, result.problems
    assert result.counts == {"garden images": 1, "garden segmentations": 2}


@pytest.mark.data
def test_the_published_data_sets_pass_the_check(data_root):
    result = check_dataset(data_root / "BSDS500")
    assert result.good
    assert result.counts["train segmentations"] == 1087 and result.counts["val segmentations"] == 546


def test_a_folder_without_images_and_a_split_that_cannot_be_read_are_reported(clean, tmp_path):
    shutil.copytree(clean / "bsds", tmp_path / "bsds")
    base = next(p.parent for p in (tmp_path / "bsds").rglob("images"))
    (base / "images" / "empty").mkdir()
    problems = check_dataset(tmp_path / "bsds").problems
    assert any(problem.path.name == "empty" for problem in problems)
    for folder in (base / "images").iterdir():
        shutil.rmtree(folder)
    assert "contains no folder of images" in str(check_dataset(tmp_path / "bsds").problems)
