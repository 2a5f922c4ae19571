"""Superpixels, the graph of regions, and merging against a plain search for the cheapest pair."""

import itertools

import numpy as np
import pytest

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.vision.segmentation import (
    Hierarchy,
    MergeCost,
    RegionGraph,
    border_mean,
    merge_regions,
    region_graph,
    region_means,
    slic_superpixels,
)


def voronoi(h=24, w=30, count=14, seed=0):
    rng = np.random.default_rng(seed)
    sites = rng.uniform(0, 1, (count, 2)) * (h, w)
    y, x = np.mgrid[:h, :w]
    nearest = ((y[..., None] - sites[:, 0]) ** 2 + (x[..., None] - sites[:, 1]) ** 2).argmin(-1)
    return np.unique(nearest, return_inverse=True)[1].reshape(h, w)


def plain_merging(features, graph, boundary, cost, colours=None):
    """Sets of regions after every merge, by looking at all pairs again each time."""
    share = graph.areas / graph.areas.sum()
    parts = [frozenset([i]) for i in range(len(share))]
    edges = {tuple(e): (n, b) for e, n, b in zip(graph.edges.tolist(), graph.lengths, boundary, strict=True)}
    states = [set(parts)]
    while len(parts) > 1:
        best = None
        for p, q in itertools.combinations(sorted(parts, key=min), 2):
            across = [edges[e] for e in edges if (e[0] in p and e[1] in q) or (e[0] in q and e[1] in p)]
            if not across:
                continue
            a, b = (sum(share[i] for i in s) for s in (p, q))
            x, y = (sum(share[i] * features[i] for i in s) / sum(share[i] for i in s) for s in (p, q))
            strength = sum(n * v for n, v in across) / sum(n for n, _ in across)
            price = np.linalg.norm(x - y) ** cost.region * strength**cost.boundary * (a * b / (a + b)) ** cost.area
            outlines = [sum(n for e, (n, _) in edges.items() if (e[0] in s) != (e[1] in s)) for s in (p, q)]
            price /= (sum(n for n, _ in across) / min(outlines) + 0.05) ** cost.contact
            if colours is not None:
                c, d = (sum(share[i] * colours[i] for i in s) / sum(share[i] for i in s) for s in (p, q))
                price *= np.sqrt(np.sum((c - d) ** 2) + 2.5) ** cost.colour
            if best is None or price < best[0]:
                best = (price, p, q)
        _, p, q = best
        parts = [s for s in parts if s not in (p, q)] + [p | q]
        states.append(set(parts))
    return states


@pytest.mark.parametrize("coloured", [False, True])
@pytest.mark.parametrize("cost", [MergeCost(), MergeCost(1.0, 0.0, 0.5), MergeCost(0.3, 0.7, 0.0, 0.6, 0.9)])
def test_merging_equals_the_plain_search(cost, coloured):
    regions = voronoi()
    graph = region_graph(regions)
    rng = np.random.default_rng(1)
    features, boundary = rng.normal(size=(len(graph.areas), 3)), rng.uniform(0.05, 1, len(graph.edges))
    count = len(graph.areas)
    colours = 40 * rng.normal(size=(count, 3)) if coloured else None
    tree = merge_regions(features, graph, boundary, colours=colours, cost=cost)
    states = plain_merging(features, graph, boundary, cost, colours)
    for k in range(1, count + 1):
        (labels,) = tree.levels([k])
        actual = {frozenset(np.flatnonzero(labels == j).tolist()) for j in range(labels.max() + 1)}
        assert actual == states[count - k]


def test_colours_decide_between_regions_that_are_alike_otherwise():
    graph = region_graph([[0, 0, 1, 1, 2, 2, 3, 3]])
    colours = [[50, 0, 0], [50, 60, 0], [50, 61, 0], [50, -60, 0]]
    levels = merge_regions(np.arange(4.0)[:, None], graph, colours=colours, cost=MergeCost(1, 1, 0.0, 0.1)).levels([3])
    assert levels.tolist() == [[0, 1, 1, 2]]
    with pytest.raises(ShapeError, match="colours must be"):
        merge_regions(np.zeros((4, 1)), graph, colours=colours[:3])


def test_colours_and_contact_do_not_count_unless_asked_for():
    rng = np.random.default_rng(3)
    graph = region_graph(np.arange(24).reshape(4, 6).repeat(3, 0).repeat(2, 1))
    features, colours = rng.normal(size=(24, 2)), 40 * rng.normal(size=(24, 3))
    tree = merge_regions(features, graph, colours=colours)
    plain = merge_regions(features, graph, cost=MergeCost(0.8, 0.4, 0.27, 0.0, 0.0))
    assert np.array_equal(tree.levels([5, 12]), plain.levels([5, 12]))


def random_graph(count, edges, seed, ties=False):
    """A graph, features and boundaries; with ties, few different numbers, so that many prices are equal to the bit."""
    rng = np.random.default_rng(seed)
    pairs = np.array(list(itertools.combinations(range(count), 2)), dtype=np.int64).reshape(-1, 2)
    pairs = pairs[np.sort(rng.permutation(len(pairs))[:edges])]
    if ties:
        areas, lengths = np.full(count, 4), np.ones(len(pairs), dtype=np.int64)
        features, boundary = rng.integers(0, 3, (count, 1)).astype(float), np.full(len(pairs), 0.5)
    else:
        areas, lengths = rng.integers(1, 50, count), rng.integers(1, 9, len(pairs))
        features, boundary = rng.normal(size=(count, 5)), rng.uniform(0, 1, len(pairs))
    return RegionGraph(areas, pairs, lengths, np.empty(0, dtype=np.int64)), features, boundary


def searched_merges(features, graph, boundary, cost):
    """Merges and heights by pricing every edge anew in each step; equal prices go to the smaller pair of numbers."""
    x, area = features.copy(), graph.areas / graph.areas.sum()
    edges = {(i, j): (n, n * b) for (i, j), n, b in zip(graph.edges.tolist(), graph.lengths, boundary, strict=True)}
    alive, merges, heights, top = list(range(len(area))), [], [], 0.0
    while edges:
        prices = []
        for (i, j), (length, total) in edges.items():
            square = max(float(np.sum((x[i] - x[j]) ** 2)), 1e-18)
            size = float(area[i] * area[j] / (area[i] + area[j]))
            strength = max(float(total / length), 1e-9)
            prices.append((square ** (0.5 * cost.region) * strength**cost.boundary * size**cost.area, i, j))
        price, i, j = min(prices)
        top = max(top, price)
        merges.append((i, j))
        heights.append(top)
        alive.remove(j)
        x[i] = (area[i] * x[i] + area[j] * x[j]) / (area[i] + area[j])
        area[i] += area[j]
        united = {}
        for pair, (length, total) in edges.items():
            low, high = sorted(i if end == j else end for end in pair)
            if low != high:
                old = united.get((low, high), (0, 0.0))
                united[low, high] = (old[0] + length, old[1] + total)
        edges = united
    for other in alive[1:]:
        merges.append((alive[0], other))
        heights.append(np.inf)
    return np.array(merges, dtype=np.int64).reshape(-1, 2), np.array(heights)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("count", "edges"), [(1, 0), (2, 1), (9, 0), (12, 5), (20, 30), (20, 190), (40, 90)])
@pytest.mark.parametrize("cost", [MergeCost(), MergeCost(1.0, 0.0, 0.0), MergeCost(0.0, 0.7, 0.3)])
def test_merges_and_heights_equal_pricing_all_edges_anew(count, edges, ties, cost):
    for seed in range(3):
        graph, features, boundary = random_graph(count, edges, seed, ties)
        tree = merge_regions(features, graph, boundary, cost=cost)
        merges, heights = searched_merges(features, graph, boundary, cost)
        assert tree.count == count
        np.testing.assert_array_equal(tree.merges, merges)
        np.testing.assert_allclose(tree.heights, heights, rtol=1e-12)


def test_levels_follow_the_merges_one_by_one():
    graph, features, boundary = random_graph(25, 60, 7)
    tree = merge_regions(features, graph, boundary)
    label = np.arange(25)
    for step, (keep, gone) in enumerate(tree.merges):
        label[label == gone] = keep
        (actual,) = tree.levels([24 - step])
        assert np.array_equal(actual, np.unique(label, return_inverse=True)[1])


def test_levels_are_nested_and_heights_never_fall():
    regions = voronoi(count=20, seed=2)
    graph = region_graph(regions)
    features = np.random.default_rng(3).normal(size=(len(graph.areas), 2))
    tree = merge_regions(features, graph)
    assert (np.diff(tree.heights) >= 0).all()
    fine, coarse = tree.levels([9, 4])
    assert fine.max() == 8 and coarse.max() == 3
    assert len({(a, b) for a, b in zip(fine, coarse, strict=True)}) == 9


def test_levels_in_any_order_and_beyond_the_number_of_regions():
    graph = region_graph(voronoi())
    tree = merge_regions(np.arange(len(graph.areas), dtype=float)[:, None], graph)
    a = tree.levels([7, 2, 100, 3])
    assert np.array_equal(a[1], tree.levels([2])[0]) and a[2].max() + 1 == tree.count
    with pytest.raises(ConfigurationError):
        tree.levels([0])


def test_parts_that_do_not_touch_are_united_last():
    graph = region_graph(np.zeros((2, 2), dtype=int))._replace(areas=np.array([4, 3, 2]))
    tree = merge_regions(np.zeros((3, 1)), graph)
    assert np.isinf(tree.heights).all() and tree.levels([1]).max() == 0


def test_one_region():
    tree = merge_regions([[1.0]], region_graph(np.zeros((3, 3), dtype=int)))
    assert tree.levels([1, 5]).tolist() == [[0], [0]]


def test_shapes_must_fit_the_graph():
    graph = region_graph(voronoi())
    with pytest.raises(ShapeError, match="features"):
        merge_regions(np.zeros((3, 2)), graph)
    with pytest.raises(ShapeError, match="boundary"):
        merge_regions(np.zeros((len(graph.areas), 2)), graph, np.ones(2))


def test_graph_against_counting_by_hand():
    regions = voronoi(9, 11, 6, seed=4)
    graph = region_graph(regions)
    counts = {}
    values = np.random.default_rng(5).normal(size=regions.shape)
    sums = {}
    for y, x in itertools.product(range(9), range(11)):
        for p, q in ((y + 1, x), (y, x + 1)):
            if p < 9 and q < 11 and regions[y, x] != regions[p, q]:
                key = tuple(sorted((int(regions[y, x]), int(regions[p, q]))))
                counts[key] = counts.get(key, 0) + 1
                sums[key] = sums.get(key, 0) + 0.5 * (values[y, x] + values[p, q])
    assert dict(zip(map(tuple, graph.edges.tolist()), graph.lengths.tolist(), strict=True)) == counts
    expected = [sums[tuple(e)] / counts[tuple(e)] for e in graph.edges.tolist()]
    np.testing.assert_allclose(border_mean(regions, graph, values), expected)
    assert graph.areas.tolist() == np.bincount(regions.ravel()).tolist()
    with pytest.raises(ShapeError):
        region_graph(np.zeros((2, 2)))
    with pytest.raises(ShapeError):
        border_mean(regions, graph, values[1:])


def test_region_means():
    regions = voronoi()
    values = np.random.default_rng(6).normal(size=(*regions.shape, 2))
    means = region_means(regions, values)
    np.testing.assert_allclose(means[3], values[regions == 3].mean(0))


def test_superpixels_follow_a_step_in_colour():
    image = np.zeros((60, 80, 3), np.uint8)
    image[:, 37:] = (200, 90, 20)
    regions = slic_superpixels(image, 48)
    assert 24 <= regions.max() + 1 <= 96
    sides = [set(np.unique(regions[:, :37])), set(np.unique(regions[:, 37:]))]
    assert not sides[0] & sides[1]


@pytest.mark.parametrize("shape", [(1, 1), (1, 50), (3, 2), (5, 200)])
def test_superpixels_of_tiny_images(shape):
    regions = slic_superpixels(np.zeros((*shape, 3), np.uint8), 20)
    assert regions.shape == shape and sorted(np.unique(regions)) == list(range(regions.max() + 1))


def test_superpixels_of_noise_are_not_one():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert slic_superpixels(noise, 48).max() + 1 >= 16


def test_superpixels_refuse_what_is_no_image():
    with pytest.raises(ShapeError):
        slic_superpixels(np.zeros((4, 4)))
    with pytest.raises(ConfigurationError):
        slic_superpixels(np.zeros((4, 4, 3)), 0)


@pytest.mark.parametrize("ks", [[], [0], [2.5], ["3"], [3, -1]])
def test_levels_are_whole_and_positive_numbers(ks):
    tree = Hierarchy(3, np.array([[0, 1], [0, 2]]), np.array([0.1, 0.7]))
    with pytest.raises(ConfigurationError, match="whole and positive"):
        tree.levels(ks)
