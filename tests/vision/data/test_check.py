"""Every kind of bad file is named."""

import json
import shutil

import pytest
from PIL import Image

from matbackprop.errors import DataError
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
    assert not check_dataset(clean / "coco").problems and not check_dataset(clean / "bsds").problems
    with pytest.raises(DataError, match=r"images/SPLIT/NAME\.jpg .*groundTruth/SPLIT/NAME\.png .*NAME_1\.png"):
        find_layout(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        find_layout(tmp_path / "nothing")


def first(folder, pattern):
    return sorted(folder.rglob(pattern))[0]


@pytest.mark.parametrize(("pattern", "reason"), [("train/*.jpg", "cannot be read"), ("train/*.mat", "cannot be read")])
def test_bsds_corrupt_files(bsds, pattern, reason):
    path = first(bsds, pattern)
    path.write_bytes(path.read_bytes()[:200])
    assert path.name in only_problem(bsds) and reason in only_problem(bsds)


def test_bsds_orphans(bsds):
    first(bsds, "train/*.mat").unlink()
    sorted(bsds.rglob("train/*.jpg"))[1].unlink()
    first_reason, second_reason = (p.reason for p in check_dataset(bsds).problems)
    assert first_reason.startswith("has no human map") and second_reason == "has no image"


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
    assert "cannot be read" in problems[two.name]
    assert problems[three.name].startswith("has 20×10 pixels, but the annotations specify 96×128")


def test_coco_categories_of_the_splits(coco):
    edit(coco, lambda content: content["categories"][0].update(name="other"))
    assert "have different categories" in only_problem(coco)


def test_skipped_annotations_are_counted(coco):
    def change(content):
        content["annotations"][0]["iscrowd"] = 1
        content["annotations"][1]["segmentation"] = []

    edit(coco, change)
    result = check_dataset(coco)
    assert not result.problems
    for kind in ("crowd", "empty mask"):
        assert result.counts[f"train annotations skipped in training ({kind})"] == 1


@pytest.mark.data
def test_the_published_data_sets_pass_the_check(data_root):
    result = check_dataset(data_root / "BSDS500")
    assert not result.problems
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
