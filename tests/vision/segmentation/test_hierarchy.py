"""Watershed, region graphs, merging by contour strength, levels, contour maps and edits."""

import itertools

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from helpers.label_maps import same_partition, voronoi
from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.vision.data.label_files import ucm_to_segmentations
from matbackprop.vision.segmentation import (
    Hierarchy,
    border_strengths,
    contour_map,
    merge_contours,
    region_graph,
    region_means,
    split_region,
    unite_region,
    watershed_regions,
)
from matbackprop.vision.segmentation.hierarchy import SMALL, SMOOTHING, merge_graph


def cells(h=24, w=30, count=12, seed=0):
    nearest = voronoi((h, w), count, np.random.default_rng(seed))
    return np.unique(nearest, return_inverse=True)[1].reshape(h, w)


def plain_merging(regions, contours):
    """Merge the weakest border, recomputing every border from the pixels each time."""
    label, merges, heights = regions.copy(), [], []
    while len(np.unique(label)) > 1:
        sums = {}
        for dy, dx in ((0, 1), (1, 0)):
            a, b = label[: len(label) - dy, : label.shape[1] - dx], label[dy:, dx:]
            v = np.minimum(contours[: len(label) - dy, : label.shape[1] - dx], contours[dy:, dx:])
            for i, j, x in zip(a[a != b], b[a != b], v[a != b], strict=True):
                total = sums.setdefault((min(i, j), max(i, j)), [0.0, 0])
                total[0] += float(x)
                total[1] += 1
        priced = {}
        for pair, (total, length) in sums.items():
            smaller = min((label == r).mean() for r in pair)
            priced[pair] = total / length * smaller / (smaller + SMALL)
        i, j = min(priced, key=priced.get)
        merges.append((i, j))
        heights.append(max(priced[i, j], heights[-1] if heights else 0.0))
        label[label == j] = i
    return merges, heights


@pytest.mark.parametrize("seed", range(3))
def test_merging_equals_recomputing_every_border(seed):
    regions, contours = cells(seed=seed), np.random.default_rng(seed).random((24, 30)).astype(np.float32)
    tree = merge_contours(regions, contours)
    merges, heights = plain_merging(regions, gaussian_filter(contours, SMOOTHING))
    assert tree.merges.tolist() == [list(map(int, pair)) for pair in merges]
    np.testing.assert_allclose(tree.heights, heights)
    assert (np.diff(tree.heights) >= 0).all() and tree.count == len(merges) + 1


def test_watershed_finds_the_basins_between_contours():
    contours = np.zeros((40, 60), np.float32)
    contours[:, 20] = contours[20, 20:] = 0.9
    regions = watershed_regions(contours)
    assert regions.dtype == np.int32 and regions.max() == 2
    assert len({regions[5, 5], regions[5, 50], regions[35, 50]}) == 3


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (2, 2), (3, 50)])
def test_watershed_of_tiny_and_flat_images_is_one_region(shape):
    regions = watershed_regions(np.full(shape, 0.3))
    assert regions.shape == shape and not regions.any()
    tree = merge_contours(regions, np.full(shape, 0.3))
    assert tree.count == 1 and tree.regions_at(0.0) == 1 and tree.levels([3]).tolist() == [[0]]


def test_contours_must_be_maps_of_strengths():
    for wrong in (np.zeros((2, 2, 2)), np.zeros((0, 3))):
        with pytest.raises(ShapeError, match="non-empty map"):
            watershed_regions(wrong)
    for wrong in (np.full((4, 4), 255.0), np.full((4, 4), np.nan)):
        with pytest.raises(ShapeError, match=r"\[0, 1\]"):
            watershed_regions(wrong)
    with pytest.raises(ShapeError, match="shape of the regions"):
        merge_contours(cells(), np.zeros((3, 3)))


def test_levels_follow_the_merges_one_by_one():
    graph = region_graph(cells(count=25, seed=1))
    tree = merge_graph(graph, np.random.default_rng(0).random(len(graph.edges)))
    label = np.arange(tree.count)
    for step, (keep, gone) in enumerate(tree.merges):
        label[label == gone] = keep
        (actual,) = tree.levels([tree.count - 1 - step])
        assert np.array_equal(actual, np.unique(label, return_inverse=True)[1])


def test_levels_in_any_order_and_beyond_the_number_of_regions():
    graph = region_graph(cells())
    tree = merge_graph(graph, np.linspace(0.1, 0.9, len(graph.edges)))
    a = tree.levels([7, 2, 100, 3])
    assert np.array_equal(a[1], tree.levels([2])[0]) and a[2].max() + 1 == tree.count
    fine, coarse = tree.levels([9, 4])
    assert len({(a, b) for a, b in zip(fine, coarse, strict=True)}) == 9  # nested


def test_a_height_gives_the_regions_whose_borders_are_stronger():
    tree = Hierarchy(4, np.array([[0, 1], [2, 3], [0, 2]]), np.array([0.1, 0.4, 0.4]))
    assert [tree.regions_at(h) for h in (0.0, 0.1, 0.3, 0.4, 1.0)] == [4, 3, 3, 1, 1]


@pytest.mark.parametrize("ks", [[], [0], [2.5], ["3"], [3, -1]])
def test_levels_are_whole_and_positive_numbers(ks):
    tree = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.1, 0.7]))
    with pytest.raises(ConfigurationError, match="at least one positive integer"):
        tree.levels(ks)


def test_graph_against_counting_by_hand():
    regions = cells(9, 11, 6, seed=4)
    graph = region_graph(regions)
    values = np.random.default_rng(5).random(regions.shape)
    counts, sums = {}, {}
    for y, x in itertools.product(range(9), range(11)):
        for p, q in ((y + 1, x), (y, x + 1)):
            if p < 9 and q < 11 and regions[y, x] != regions[p, q]:
                key = tuple(sorted((int(regions[y, x]), int(regions[p, q]))))
                counts[key] = counts.get(key, 0) + 1
                sums[key] = sums.get(key, 0) + min(values[y, x], values[p, q])
    assert dict(zip(map(tuple, graph.edges.tolist()), graph.lengths.tolist(), strict=True)) == counts
    expected = [sums[tuple(e)] / counts[tuple(e)] for e in graph.edges.tolist()]
    np.testing.assert_allclose(border_strengths(regions, graph, values), expected)
    assert graph.areas.tolist() == np.bincount(regions.ravel()).tolist()
    with pytest.raises(ShapeError):
        region_graph(np.zeros((2, 2)))


def test_region_means():
    regions = cells()
    values = np.random.default_rng(6).normal(size=(*regions.shape, 2))
    means = region_means(regions, values)
    np.testing.assert_allclose(means[3], values[regions == 3].mean(0))


def test_specks_are_merged_before_large_regions_with_weaker_borders():
    regions = np.zeros((100, 100), np.int64)
    regions[:, 50:] = 1
    regions[20:22, 20:22] = 2  # 4 of 10,000 pixels
    contours = np.zeros((100, 100), np.float32)
    contours[:, 45:55] = 0.6
    contours[15:27, 15:27] = 0.9
    tree = merge_contours(regions, contours)
    assert tree.merges[0].tolist() == [0, 2] and tree.heights[0] < 0.9 * 4 / 6
    assert tree.heights[1] == pytest.approx(0.6, rel=1e-3)


def test_every_threshold_of_a_contour_map_gives_a_level():
    regions = cells(30, 44, 40)
    graph = region_graph(regions)
    tree = merge_graph(graph, np.random.default_rng(0).random(len(graph.edges)))
    segmentations = ucm_to_segmentations(contour_map(regions, tree), 99)
    numbers = [tree.regions_at(threshold) for threshold in np.arange(1, 100) / 100]
    assert len(set(numbers)) > 10
    for labels, level in zip(segmentations, tree.levels(numbers), strict=True):
        assert same_partition(labels, level[regions])


def test_a_contour_map_pixel_by_pixel():
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


def test_regions_of_a_contour_map_must_fit_the_hierarchy():
    hierarchy = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.2, 0.6]))
    with pytest.raises(ShapeError, match="3 leaves of the hierarchy, got 2"):
        contour_map([[0, 1]], hierarchy)


@pytest.fixture(scope="module")
def tree():
    graph = region_graph(cells(40, 60, 50))
    return merge_graph(graph, np.random.default_rng(0).random(len(graph.edges)))


@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_dividing_the_region_that_was_merged_last_is_the_next_level(tree, k):
    coarse, fine = tree.levels([k, k + 1])
    divided = next(r for r in range(k) if len(np.unique(fine[coarse == r])) == 2)
    assert same_partition(split_region(tree, coarse, divided), fine)


@pytest.mark.parametrize("k", [2, 5, 9])
def test_uniting_one_of_the_next_pair_is_the_level_before(tree, k):
    coarse, fine = tree.levels([k - 1, k])
    pair = next(np.unique(fine[coarse == r]) for r in range(k - 1) if len(np.unique(fine[coarse == r])) == 2)
    for region in pair:
        assert same_partition(unite_region(tree, fine, int(region)), coarse)


def test_any_region_can_be_divided_and_united_again(tree):
    (labels,) = tree.levels([6])
    for region in range(6):
        split = split_region(tree, labels, region)
        if (labels == region).sum() > 1:
            assert split.max() == 6 and all(len(np.unique(labels[split == r])) == 1 for r in range(7))
            part = int(split[labels == region][0])
            assert same_partition(unite_region(tree, split, part), labels)


def test_one_region_cannot_be_united_and_the_finest_not_divided(tree):
    one, most = tree.levels([1, tree.count])
    assert same_partition(unite_region(tree, one, 0), one)
    assert same_partition(split_region(tree, most, 3), most)
