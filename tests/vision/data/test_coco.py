"""Invalid COCO files: each bad entry is named, and the rest is used."""

import copy
import json
import re

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from matbackprop.errors import DataError
from matbackprop.vision.data.check import check_coco
from matbackprop.vision.data.coco import coco_files, decode_mask, read_coco
from matbackprop.vision.data.coco_regions import cache_regions
from matbackprop.vision.data.shapes import write_shapes_coco

FAR = [[0, 0, 1e9, 0, 1e9, 1e9, 0, 1e9]]


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    root = tmp_path_factory.mktemp("shapes")
    write_shapes_coco(root, train=2, val=1)
    return root


@pytest.fixture
def coco(clean, tmp_path):
    """The shapes with another annotation file: the images are linked."""
    (tmp_path / "annotations").mkdir()
    (tmp_path / "images").symlink_to(clean / "images")
    content = json.loads((clean / "annotations" / "instances_train.json").read_text())

    def write(text):
        (tmp_path / "annotations" / "instances_train.json").write_text(text)
        return tmp_path

    write.content = content
    return write


def annotated(**fields):
    return lambda content: content["annotations"][0].update(fields)


def pictured(**fields):
    return lambda content: content["images"][0].update(fields)


def without(name, where="annotations"):
    return lambda content: content[where][0].pop(name)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("id"), "annotation number 1 of the list has no id"),
        (without("image_id"), "annotation 1 has no image_id"),
        (annotated(id="one"), 'annotation number 1 of the list has the id "one"'),
        (annotated(id=1 << 70), "annotation number 1 of the list has the id 118059"),
        (annotated(category_id=[1]), r"annotation 1 has the category_id \[1\]"),
        (annotated(iscrowd="yes"), 'annotation 1 has the iscrowd "yes"'),
        (annotated(area=float("nan")), "annotation 1 has the area NaN"),
        (annotated(bbox=[float("nan"), 1, 2, 3]), r"annotation 1 has the bbox \[NaN, 1, 2, 3\]"),
        (annotated(bbox=[1, 1, 10**400, 2]), "annotation 1 has the bbox"),
        (annotated(segmentation="abc"), 'annotation 1 has the segmentation "abc"'),
        (annotated(segmentation=FAR), "annotation 1 has a polygon that is far outside its image of 128 × 96"),
        (annotated(segmentation=[[0, 0, 90, 90, 0, 90] * 40_000]), "annotation 1 has a polygon .* too long"),
        (annotated(segmentation=[[0, 0, float("inf"), 9, 9, 9]]), r"annotation 1 has polygons \[\[0, 0, Infinity"),
        (annotated(segmentation=[7, 8]), r"annotation 1 has polygons \[7, 8\]"),
        (annotated(segmentation={"size": [96, 128], "counts": [5, 5]}), "do not fill its 96×128 pixels"),
        (annotated(segmentation={"size": [96, 128], "counts": [-5, 96 * 128 + 5]}), "do not fill its 96×128 pixels"),
        (annotated(segmentation={"size": [96, 128], "counts": "~~"}), "run lengths that cannot be decoded"),
        (annotated(segmentation={"size": "96", "counts": "0"}), 'run lengths {"size": "96"'),
        (annotated(image_id=77), "annotation 1 belongs to the image 77"),
        (annotated(category_id=77), "annotation 1 has the category 77"),
        (annotated(bbox=[1, 2, 0, 4]), r"box \[1.0, 2.0, 0.0, 4.0\] in an image"),
        (annotated(bbox=[500, 2, 5, 4]), "in an image of 128 × 96"),
        (annotated(segmentation={"size": [5, 5], "counts": "52203"}), "has a mask of 5×5"),
        (annotated(segmentation=[[1, 2, 3]]), "has a polygon of 3 numbers"),
        (annotated(segmentation={"size": [96, 128]}), "run lengths .*Field required"),
        (annotated(id=2), "annotation 2 is listed twice"),
        (lambda c: c["annotations"].insert(0, 7), "annotation number 1 of the list is 7. An object is needed"),
        (without("id", "images"), "image number 1 of the list has no id"),
        (without("height", "images"), "image 1 has no height"),
        (pictured(file_name=["a"]), r"image 1 has the file_name \[\"a\"\]"),
        (pictured(file_name="a\0b"), "image 1 has the file_name"),
        (pictured(file_name="x" * 5000), "x: is missing"),
        (pictured(width=10**9), "image 1 has the width 1000000000"),
        (pictured(height=-96), "image 1 has the height -96"),
    ],
)
def test_a_bad_entry_is_reported_by_the_check_and_skipped_in_training(coco, tmp_path, change, reason):
    content = copy.deepcopy(coco.content)
    change(content)
    root = coco(json.dumps(content))
    problems = "\n".join(map(str, check_coco(root).problems))
    assert re.search(reason, problems), problems
    if reason.startswith(("image", "x: is missing")):
        with pytest.raises(DataError, match="1 images cannot be used"):
            cache_regions(*coco_files(root, "train"), tmp_path / "cache", side=20)
        return
    regions = cache_regions(*coco_files(root, "train"), tmp_path / "cache", side=20)
    left_out = {a["id"] for a in coco.content["annotations"]} - set(regions.annotation_ids.tolist())
    assert left_out == {1} - {"is 7" in reason}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "3", '"images"', '{"images": 3, "annotations": [], "categories": []}', "[" * 200_000,
     '{"images":[],"annotations":[],"categories":' + "[" * 200_000,
     '{"images": [], "annotations": [], "categories": [7]}',
     '{"images": [], "annotations": [], "categories": [{"id": 1, "name": []}]}', "\x00\x01\x02"],
)  # fmt: skip
def test_a_file_of_another_kind_is_rejected_in_one_line(coco, text):
    root = coco(text)
    with pytest.raises(DataError, match=r"instances_train\.json"):
        read_coco(*coco_files(root, "train"))
    problems = [str(p) for p in check_coco(root).problems]
    assert any(p.count("instances_train.json") == 1 and "\n" not in p for p in problems)


def test_compressed_run_lengths_are_decoded_as_pycocotools_does():
    draw = np.random.default_rng(0)
    for height, width, share in [(1, 1, 0.5), (7, 5, 0.5), (40, 60, 0.02), (40, 60, 0.97), (300, 200, 0.5), (9, 9, 0)]:
        mask = (draw.random((height, width)) < share).astype(np.uint8)
        code = coco_mask.encode(np.asfortranarray(mask))
        text = {"size": [height, width], "counts": code["counts"].decode()}
        np.testing.assert_array_equal(decode_mask(text, height, width), mask)
    blocks = np.zeros((500, 700), np.uint8)
    blocks[100:400, 50:650] = 1
    code = coco_mask.encode(np.asfortranarray(blocks))
    np.testing.assert_array_equal(
        decode_mask({"size": [500, 700], "counts": code["counts"].decode()}, 500, 700), blocks
    )
