"""Hierarchies as contour maps: cut at any threshold they give the hierarchy's levels back."""

import numpy as np
import pytest
from scipy import ndimage

from matbackprop.errors import ShapeError
from matbackprop.vision.data.label_files import read_label_maps, ucm_to_segmentations
from matbackprop.vision.metrics import compact_labels
from matbackprop.vision.segmentation import Hierarchy, contour_map, merge_regions, number_strengths, region_graph


def same_partition(one, other):
    pairs = np.unique(np.stack([np.ravel(one), np.ravel(other)]), axis=1).shape[1]
    return pairs == len(np.unique(one)) == len(np.unique(other))


@pytest.fixture
def tree():
    """Regions of many shapes, and a hierarchy over them."""
    rng = np.random.default_rng(0)
    seeds = rng.random((40, 2)) * (30, 44)
    y, x = np.mgrid[:30, :44]
    nearest = ((y[..., None] - seeds[:, 0]) ** 2 + (x[..., None] - seeds[:, 1]) ** 2).argmin(-1)
    regions, count = compact_labels(nearest)
    return regions, merge_regions(rng.normal(size=(count, 3)), region_graph(regions))


def test_every_threshold_gives_a_level(tree):
    regions, hierarchy = tree
    segmentations = ucm_to_segmentations(contour_map(regions, hierarchy), 99)
    numbers = [len(np.unique(labels)) for labels in segmentations]
    assert numbers[0] == hierarchy.count and numbers[-1] == 1 and set(range(2, 9)) <= set(numbers)
    for labels, level in zip(segmentations, hierarchy.levels(numbers), strict=True):
        assert same_partition(labels, level[regions])
    assert numbers[89] == 2 and numbers[49] == 32  # 1000^.1 and 1000^.5


def test_the_benchmarks_labelling_over_eight_neighbours_gives_the_same_regions(tree):
    regions, hierarchy = tree
    drawn = contour_map(regions, hierarchy)
    for threshold in (0.1, 0.5, 0.6, 0.7, 0.8, 0.9):
        labels = ndimage.label(drawn <= threshold, np.ones((3, 3)))[0][1::2, 1::2]
        assert same_partition(labels, hierarchy.levels([len(np.unique(labels))])[0][regions])


def test_strengths_may_be_heights(tree):
    regions, hierarchy = tree
    heights = hierarchy.heights / hierarchy.heights[-1] * 0.995
    for threshold, labels in zip(np.arange(1, 100) / 100, ucm_to_segmentations(
        contour_map(regions, hierarchy, heights), 99
    ), strict=True):  # fmt: skip
        level = hierarchy.levels([1 + int((heights > threshold).sum())])[0]
        assert same_partition(labels, level[regions])


def test_the_layout_pixel_by_pixel():
    hierarchy = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.2, 0.6]))
    drawn = contour_map([[0, 1], [2, 1]], hierarchy, hierarchy.heights)
    assert drawn.tolist() == [
        [0.0, 0.0, 0.2, 0.0, 0.0],
        [0.0, 0.0, 0.2, 0.0, 0.0],
        [0.6, 0.6, 0.6, 0.0, 0.0],
        [0.0, 0.0, 0.6, 0.0, 0.0],
        [0.0, 0.0, 0.6, 0.0, 0.0],
    ]


def test_it_is_read_back_from_a_mat_file(tree, tmp_path):
    from scipy.io import savemat

    regions, hierarchy = tree
    savemat(tmp_path / "a.mat", {"ucm2": contour_map(regions, hierarchy)})
    maps = list(read_label_maps(tmp_path / "a.mat", thresholds=9))
    assert len(maps) == 9 and same_partition(maps[-1], hierarchy.levels([2])[0][regions])


def test_one_region_has_no_contour():
    hierarchy = Hierarchy(1, np.empty((0, 2), int), np.empty(0))
    assert not contour_map(np.zeros((2, 3), int), hierarchy).any()
    assert len(number_strengths(1)) == 0


def test_what_does_not_fit():
    hierarchy = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.2, 0.6]))
    with pytest.raises(ShapeError, match="the map has 2 regions"):
        contour_map([[0, 1]], hierarchy)
    with pytest.raises(ShapeError, match="one strength per merge"):
        contour_map([[0, 1, 2]], hierarchy, [0.5])
    with pytest.raises(ShapeError, match="strengths decrease"):
        contour_map([[0, 1, 2]], hierarchy, [0.5, 0.4])
