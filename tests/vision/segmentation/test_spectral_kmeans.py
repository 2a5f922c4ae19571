"""Weighted K-means: distortion, quality, determinism and edge cases."""

import pytest
import torch
from sklearn.cluster import KMeans as Oracle

from helpers.label_maps import same_partition
from matbackprop.errors import ShapeError
from matbackprop.vision.segmentation import NCutSpace, weighted_kmeans


def blobs(n=60, k=4, e=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centers = 10 * torch.rand(k, e, generator=generator)
    labels = torch.arange(n) % k
    return centers[labels] + 0.1 * torch.randn(n, e, generator=generator), labels


def test_distortion_is_the_distance_of_projectors():
    f = torch.rand(50, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    points, degree, _ = NCutSpace().embed(f, 4)
    actual = weighted_kmeans(points, degree, [2, 4], leading=True)
    for i, k in enumerate((2, 4)):
        u = points[:, :k] * degree.sqrt()[:, None]
        e = torch.nn.functional.one_hot(actual.labels[i], k).double() * degree.sqrt()[:, None]
        other = e @ torch.linalg.pinv(e)
        expected = 0.5 * (u @ u.mT - other).square().sum()
        torch.testing.assert_close(actual.distortion[i], expected, rtol=1e-12, atol=1e-13)


def test_every_k_is_as_good_as_scikit_learn():
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(2))
    w = torch.rand(200, generator=torch.Generator().manual_seed(3))
    ks = [1, 2, 5, 9]
    actual = weighted_kmeans(x, w, ks, restarts=10, iterations=100)
    for i, k in enumerate(ks):
        oracle = Oracle(k, n_init=10, random_state=0).fit(x.numpy(), sample_weight=w.numpy())
        assert actual.distortion[i] <= 1.02 * oracle.inertia_
        assert actual.labels[i].max() < k


def test_blobs_are_found_and_centers_are_weighted_means():
    x, labels = blobs()
    w = torch.rand(60, generator=torch.Generator().manual_seed(4))
    actual = weighted_kmeans(x, w, [4])
    assert same_partition(actual.labels[0], labels)
    for j in range(4):
        mine = actual.labels[0] == j
        mean = (w[mine, None] * x[mine]).sum(0) / w[mine].sum()
        torch.testing.assert_close(actual.centers[0, j], mean, rtol=1e-6, atol=1e-6)


def test_same_seed_same_result_and_batches_do_not_mix():
    x = torch.randn(3, 80, 5, generator=torch.Generator().manual_seed(5))
    w = torch.rand(3, 80, generator=torch.Generator().manual_seed(6))
    together = weighted_kmeans(x, w, [3, 7], seed=1)
    again = weighted_kmeans(x, w, [3, 7], seed=1)
    assert torch.equal(together.labels, again.labels)
    for i in range(3):
        alone = weighted_kmeans(x[i], w[i], [3, 7], seed=1)
        assert torch.equal(alone.labels, together.labels[i])
        torch.testing.assert_close(alone.distortion, together.distortion[i])


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e8])
def test_an_offset_of_the_points_does_not_reduce_accuracy(offset):
    x = torch.tensor([[0.0], [0.01], [1.0], [1.01]], dtype=torch.float64) + offset
    actual = weighted_kmeans(x, torch.ones(4), [1, 2])
    one, *two = (((part - part.mean()) ** 2).sum() for part in (x, x[:2], x[2:]))
    # A mean is rounded to 1.5e-8 of an offset of 1e8, which enters squared.
    torch.testing.assert_close(actual.distortion, torch.stack([one, sum(two)]), rtol=1e-12, atol=1e-14)
    means = torch.stack([x[:2].mean(), x[2:].mean()])
    torch.testing.assert_close(actual.centers[1, :, 0].sort().values, means, rtol=1e-14, atol=1e-14)


def test_leading_uses_the_first_coordinates_only():
    x, _ = blobs(e=2)
    noisy = torch.cat([x, 100 * torch.randn(60, 3, generator=torch.Generator().manual_seed(7))], 1)
    actual = weighted_kmeans(noisy, torch.ones(60), [2], leading=True)
    torch.testing.assert_close(actual.distortion, weighted_kmeans(x, torch.ones(60), [2]).distortion)
    assert (actual.centers[0, :2, 2:] == 0).all()


def test_fewer_points_than_clusters_leave_clusters_empty():
    actual = weighted_kmeans(torch.tensor([[0.0], [0.0], [1.0]]), torch.ones(3), [5])
    assert actual.distortion[0] == 0 and len(actual.labels[0].unique()) == 2


def test_all_zero_weights_count_as_equal():
    x, labels = blobs()
    assert same_partition(weighted_kmeans(x, torch.zeros(60), [4]).labels[0], labels)


def test_shapes_must_fit():
    with pytest.raises(ShapeError, match="weights"):
        weighted_kmeans(torch.zeros(3, 1), torch.ones(4), [2])
    with pytest.raises(ShapeError):
        weighted_kmeans(torch.zeros(0, 1), torch.ones(0), [2])
