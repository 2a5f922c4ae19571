"""What the page shows of a photograph."""

import json
import pickle
import re
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from matbackprop.errors import DataError
from matbackprop.vision.inference import Segments
from matbackprop.vision.inference.export import FORMATS
from matbackprop.vision.models.deep_ncuts import DeepNCuts
from matbackprop.vision.segmentation import CLUSTER_KS, MERGE_KS
from matbackprop.vision.serve.analysis import Segmenter, colour_features
from matbackprop.vision.serve.views import Analysis, fit_photograph, sample_photographs


@pytest.fixture(scope="module")
def picture():
    image = np.zeros((48, 64, 3), np.uint8)
    image[:, 32:] = (200, 40, 40)
    image[24:, 32:] = (40, 60, 220)
    return image


@pytest.fixture(scope="module")
def analysis(picture):
    return Segmenter()(picture, "merge")


def test_levels_are_what_the_picture_holds(analysis, picture):
    labels = analysis.level(3).shown.labels()
    assert len(np.unique(labels)) == 3
    for y, x in ((10, 10), (10, 50), (40, 50)):
        same = (labels == labels[y, x]).mean()
        truth = (picture == picture[y, x]).all(-1).mean()
        assert same == pytest.approx(truth, abs=0.03)
    assert [caption for _, caption in analysis.levels()] == [f"{k} regions" for k in MERGE_KS]
    assert analysis.shown.count() == analysis.segments.k


def test_what_is_drawn_has_the_photograph_s_size_and_the_regions_mean_colours(analysis, picture):
    stage = analysis.level(3).stage("photo.png")
    labels = np.repeat(stage["runs"][::2], stage["runs"][1::2]).reshape(stage["height"], stage["width"])
    np.testing.assert_array_equal(labels, analysis.level(3).shown.labels())
    np.testing.assert_allclose(stage["colours"][labels[40, 50]], picture[40, 50], atol=12)
    assert all(shown.shape == picture.shape for shown, _ in analysis.eigenvectors())


def test_the_spectrum_is_drawn_on_a_logarithmic_scale(analysis):
    drawn = replace(analysis, eigenvalues=np.array([1.0, 0.1, 0.0, 0.01])).spectrum()
    assert 'points="40.0,0.0 220.0,85.0 400.0,170.0"' in drawn and "3 eigenvalues" in drawn
    assert "No eigenvalue" in replace(analysis, eigenvalues=np.zeros(3)).spectrum()


def test_the_mask_is_the_region_under_the_pixel(analysis):
    mask = analysis.level(3).mask(x=50, y=40)
    assert mask[40, 50] and not mask[10, 50] and not mask[10, 10]


def test_a_click_divides_or_unites_the_region_under_it_and_undo_goes_back(analysis):
    two = analysis.level(2)
    right = two.mask(50, 10)
    three = two.edited(50, 10, "split")
    assert three.shown.count() == 3
    assert not np.array_equal(three.mask(50, 10), right) and (three.mask(50, 10) <= right).all()
    again = three.edited(50, 10, "merge")
    assert again.shown.count() == 2 and np.array_equal(again.mask(50, 10), right)
    assert [a.shown.count() for a in (again.undone(), again.undone().undone())] == [3, 2]
    assert analysis.undone() is analysis  # the first step cannot be undone


def test_a_name_stays_with_its_region_while_that_is_whole_and_goes_into_the_files(analysis, tmp_path):
    named = analysis.level(3).named(10, 10, " wall ")
    assert sorted(named.shown.names) == ["", "", "wall"]
    assert named.level(2).shown.names in ((), ("wall", ""), ("", "wall"))
    assert "wall" in named.edited(50, 10, "split").shown.names and not named.edited(10, 10, "split").shown.names
    assert not named.named(10, 10, "").shown.names
    coco, labelme = named.shown.to_coco(), named.shown.to_labelme()
    assert {c["name"] for c in coco["categories"]} == {"region", "wall"}
    assert "wall" in [shape["label"] for shape in labelme["shapes"]]
    assert "<title>&lt;b&gt;</title>" in analysis.level(3).named(10, 10, "<b>").shown.to_svg()


def test_the_tree_has_a_fork_per_merge_and_a_cut_at_what_is_shown(analysis):
    drawn = analysis.level(5).dendrogram(leaves=12)
    assert drawn.count("<rect") == 12 and drawn.count("V") == 2 * 11 and "cut at 5 regions" in drawn
    cut = float(re.search(r"M-2 ([\d.]+)H402", drawn)[1])
    forks = sorted(float(y) for y in re.findall(r"V([\d.]+)H", drawn))
    assert sum(y < cut for y in forks) == 4  # the forks above the cut are the four that are open


def test_files_are_packed_and_named_after_the_photograph(picture, tmp_path):
    analysis = Segmenter()(picture, "merge", "cup.jpg").level(3).edited(10, 10, "split")
    path = analysis.export(tmp_path, FORMATS)
    with zipfile.ZipFile(path) as archive:
        assert path.name == "cup.zip"
        assert {"cup-coco.json", "cup-colours.png", "cup-overlay.png", "cup.npz", "cup.svg"} < set(archive.namelist())
        coco = json.loads(archive.read("cup-coco.json"))
        labels = np.asarray(Image.open(archive.open("cup.png")))
        levels = np.load(archive.open("cup.npz"))["ks"].tolist()
    assert len(coco["annotations"]) == analysis.shown.count() == 4 and labels.max() == 3
    assert levels == list(MERGE_KS)  # of the whole hierarchy


def analysis_of(pixels, coordinates=None, maps=None):
    segments = Segments(pixels, tuple(maps or {}), 2, None, "cluster", True, 0.1, clusterings=maps)
    return Analysis(segments, np.zeros((0, 2, 2)) if coordinates is None else coordinates, np.ones(1))


def test_the_nearest_number_of_clusters_is_taken_and_clusters_are_not_edited(tmp_path):
    maps = {2: np.zeros((4, 4), np.int32), 8: np.eye(4, dtype=np.int32)}
    shown = analysis_of(np.zeros((4, 4, 3), np.uint8), maps=maps)
    assert shown.level(4).shown.count() == 1 and shown.level(7).shown.count() == 2
    assert [caption for _, caption in shown.levels()] == ["1 region", "2 regions"]
    assert shown.level(2).export(tmp_path, ("svg", "ucm2")).stat().st_size > 0  # there is no tree to draw
    assert not shown.can_edit and shown.level(7).edited(1, 1, "split").shown.count() == 2


def test_what_is_kept_of_a_visitor_is_small():
    picture = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    analysis = Segmenter()(picture, "merge")
    for k in range(2, 40):
        analysis = analysis.level(k)
    assert len(pickle.dumps(analysis)) < 3e6


def test_a_constant_coordinate_is_shown_flat():
    flat = np.ones((1, 4, 4)) + 1e-12 * np.arange(16).reshape(1, 4, 4)
    shown = analysis_of(np.zeros((8, 8, 3), np.uint8), flat)
    assert shown.eigenvectors()[0][0].std(axis=(0, 1)).max() == 0


_QUARTERS = [(slice(None), slice(0, 4)), (slice(0, 3), slice(4, 8)), (slice(3, 6), slice(4, 8))]


def test_eigenvectors_without_a_network_separate_colours(picture):
    f = colour_features(picture, stride=4)
    assert f.shape == (12, 16, 64) and float(f.min()) >= 0 and float(f.max()) <= 1
    second, third = Segmenter()(picture, "merge").coordinates[1:3]  # on a grid of 6×8 cells
    parts = [np.stack([c[rows, columns].ravel() for c in (second, third)]) for rows, columns in _QUARTERS]
    centres, spread = [part.mean(1) for part in parts], max(part.std(1).max() for part in parts)
    gaps = [np.linalg.norm(centres[i] - centres[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert min(gaps) > 3 * spread


def test_a_network_is_used_where_there_is_one(picture):
    torch.manual_seed(0)
    segmenter = Segmenter(DeepNCuts.variant("alexnet-relu5").eval())
    assert segmenter.methods == ("merge", "cluster") and "DeepNCuts" in segmenter.about
    actual = segmenter(picture, "cluster")
    assert actual.segments.ks == CLUSTER_KS and actual.shown.labels().shape == (48, 64)
    assert len(actual.levels()) == len(CLUSTER_KS)
    assert actual.coordinates.shape[1:] == segmenter.model.grid((48, 64))
    assert Segmenter().methods == ("merge",) and "colour" in Segmenter().about


def test_photographs_are_brought_to_size(tmp_path):
    assert fit_photograph(np.zeros((2000, 1000, 3), np.uint8)).shape == (800, 400, 3)
    assert fit_photograph(np.zeros((30, 40, 3), np.uint8)).shape == (30, 40, 3)
    with pytest.raises(DataError, match="each side needs 16 or more"):
        fit_photograph(np.zeros((8, 40, 3), np.uint8))
    assert all(path.is_file() for path in sample_photographs(tmp_path))
