"""An analyzed photograph: heights, edits that survive the slider, undo, pictures and exports."""

import json
import pickle
import zipfile

import numpy as np
import pytest
from PIL import Image

from matbackprop.errors import DataError
from matbackprop.vision.serve.analysis import VIEWS, analyze, fit_photograph, sample_photographs
from matbackprop.vision.serve.app import FORMATS


@pytest.fixture(scope="module")
def picture():
    image = np.zeros((96, 128, 3), np.uint8)
    image[:, 64:] = (200, 40, 40)
    image[48:, 64:] = (40, 60, 220)
    return image + np.random.default_rng(0).integers(0, 20, image.shape, dtype=np.uint8)  # many leaves


@pytest.fixture(scope="module")
def analysis(picture):
    return analyze(picture, name="mug.png")


def with_regions(analysis, count):
    """The analysis at a height that leaves ``count`` regions."""
    heights = analysis.tree.heights
    return analysis.at(float(heights[len(heights) - count]) if count <= len(heights) else 0.0)


def test_regions_are_those_of_the_picture(analysis, picture):
    three = with_regions(analysis, 3)
    labels = three.partition[three.leaves]
    assert three.count == len(np.unique(labels)) == 3
    for y, x in ((10, 10), (10, 110), (80, 110)):
        alike = (abs(picture.astype(int) - picture[y, x]) < 40).all(-1)
        assert (labels == labels[y, x]).mean() == pytest.approx(alike.mean(), abs=0.05)


def test_the_stage_has_the_size_the_regions_and_the_names(analysis):
    three = with_regions(analysis, 3).named(10, 10, "wall")
    stage = three.stage("photo.png")
    labels = np.repeat(stage["runs"][::2], stage["runs"][1::2]).reshape(stage["height"], stage["width"])
    np.testing.assert_array_equal(labels, three.partition[three.leaves])
    assert stage["names"][labels[10, 10]] == "wall" and stage["photo"] == "photo.png"
    assert stage["alt"] == "mug.png divided into 3 regions"
    json.dumps(stage)


@pytest.mark.parametrize("view", VIEWS[1:])
def test_contours_and_heights_are_dark_at_borders(analysis, view):
    import base64
    import io

    address = analysis.stage("photo.png", view)["photo"]
    ink = np.asarray(Image.open(io.BytesIO(base64.b64decode(address.split(",")[1]))))
    assert ink.shape == (96, 128)
    assert ink[10, 60:68].min() < 128 < ink[10, 20:40].mean()


def test_a_click_divides_or_unites_the_region_under_it(analysis):
    two = with_regions(analysis, 2)
    right = two.mask(110, 10)
    three = two.edited(110, 10, "split")
    assert three.count == 3 and (three.mask(110, 10) < right).any() and (three.mask(110, 10) <= right).all()
    again = three.edited(110, 10, "merge")
    assert analysis.at(0.0).edited(10, 10, "split").edits == ()  # a leaf cannot be divided
    assert again.count == 2 and np.array_equal(again.mask(110, 10), right)


def test_edits_and_names_survive_the_slider(analysis):
    two = with_regions(analysis, 2)
    edited = two.edited(110, 10, "split").named(10, 10, "left")
    halves = [edit.leaves for edit in edited.edits if edit.action == "split"]
    for count in (1, 3, 6):
        moved = with_regions(edited, count)
        for leaves in halves:  # no region crosses the new border
            assert not set(moved.partition[leaves]) & set(moved.partition[~leaves])
        assert np.array_equal(moved.mask(10, 10), edited.mask(10, 10))
        assert moved.names[moved.region(10, 10)] == "left"
    (edit,) = with_regions(analysis, 3).edited(110, 10, "merge").edits
    for count in (1, 3, 8):  # merged regions stay merged
        moved = with_regions(with_regions(analysis, 3).edited(110, 10, "merge"), count)
        assert len(np.unique(moved.partition[edit.leaves])) == 1
    assert with_regions(edited, 12).count > edited.count  # the halves are divided further
    assert with_regions(edited, 6).at(two.height).count == edited.count


def test_undo_reverts_edits_and_names_but_not_the_slider(analysis):
    two = with_regions(analysis, 2)
    done = with_regions(two.edited(110, 10, "split"), 3).named(10, 10, "wall")
    unnamed = done.undone()
    assert not any(unnamed.names) and unnamed.edits and unnamed.height == done.height
    assert unnamed.undone().edits == ()
    assert analysis.undone() is analysis


def test_a_region_that_is_changed_loses_its_name_and_undo_restores_it(analysis):
    named = with_regions(analysis, 2).named(110, 10, "right")
    split = named.edited(110, 10, "split")
    assert not any(split.names) and split.undone().names == named.names
    assert not any(named.named(110, 10, "").names)


@pytest.mark.parametrize("kind", FORMATS.values())
def test_exports_are_reported_after_the_photograph(analysis, tmp_path, kind):
    path = with_regions(analysis, 3).named(10, 10, "wall").export(tmp_path, kind)
    assert path.parent == tmp_path and path.name.startswith("mug")
    if kind == "png":
        assert all(name.startswith("mug") for name in zipfile.ZipFile(path).namelist())
    if kind == "coco":
        assert "wall" in path.read_text()


def test_photographs_are_reduced_and_small_ones_rejected(tmp_path):
    assert fit_photograph(np.zeros((1600, 400, 3), np.uint8)).shape == (800, 200, 3)
    with pytest.raises(DataError, match="Each side needs 16"):
        fit_photograph(np.zeros((15, 400, 3), np.uint8))
    assert sample_photographs(tmp_path / "samples")[0].name == "coffee.jpg"


def test_an_analysis_can_be_pickled(analysis):
    again = pickle.loads(pickle.dumps(analysis.named(10, 10, "wall")))
    assert "wall" in again.names
