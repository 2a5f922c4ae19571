"""Hierarchies as contour maps: thresholds restore the levels of the hierarchy."""

import numpy as np
import pytest

from helpers.label_maps import voronoi
from matbackprop.errors import ShapeError
from matbackprop.vision.data.label_files import ucm_to_segmentations
from matbackprop.vision.metrics import compact_labels
from matbackprop.vision.segmentation import Hierarchy, contour_map, region_graph
from matbackprop.vision.segmentation.hierarchy import merge_graph


def same_partition(one, other):
    pairs = np.unique(np.stack([np.ravel(one), np.ravel(other)]), axis=1).shape[1]
    return pairs == len(np.unique(one)) == len(np.unique(other))


@pytest.fixture
def tree():
    """Regions of many shapes, and a hierarchy over them."""
    rng = np.random.default_rng(0)
    regions, count = compact_labels(voronoi((30, 44), 40, rng))
    graph = region_graph(regions)
    assert len(graph.areas) == count
    return regions, merge_graph(graph, rng.random(len(graph.edges)))


def test_every_threshold_gives_a_level(tree):
    regions, hierarchy = tree
    segmentations = ucm_to_segmentations(contour_map(regions, hierarchy), 99)
    numbers = [hierarchy.regions_at(threshold) for threshold in np.arange(1, 100) / 100]
    assert len(set(numbers)) > 10
    for labels, level in zip(segmentations, hierarchy.levels(numbers), strict=True):
        assert same_partition(labels, level[regions])


def test_the_layout_pixel_by_pixel():
    hierarchy = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.2, 0.6]))
    drawn = contour_map([[0, 1], [2, 1]], hierarchy)
    assert drawn.tolist() == [
        [0.0, 0.0, 0.2, 0.0, 0.0],
        [0.0, 0.0, 0.2, 0.0, 0.0],
        [0.6, 0.6, 0.6, 0.0, 0.0],
        [0.0, 0.0, 0.6, 0.0, 0.0],
        [0.0, 0.0, 0.6, 0.0, 0.0],
    ]


def test_one_region_has_no_contour():
    hierarchy = Hierarchy(1, np.empty((0, 2), int), np.empty(0))
    assert not contour_map(np.zeros((2, 3), int), hierarchy).any()


def test_regions_must_fit_the_hierarchy():
    hierarchy = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.2, 0.6]))
    with pytest.raises(ShapeError, match="3 leaves of the hierarchy, got 2"):
        contour_map([[0, 1]], hierarchy)
