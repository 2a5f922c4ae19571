"""Features to label maps: quality on an easy image, upsampling, determinism and bad input."""

import pytest
import torch
from torch.nn import functional as nnf

from helpers.label_maps import same_partition
from matbackprop.errors import ConfigurationError, NonFiniteError, ShapeError
from matbackprop.vision.segmentation import NCutSpace, SoftSpace, segment_features
from matbackprop.vision.segmentation.clustering import center_scores, cluster_scores


def quadrants(h=8, w=12, d=5, noise=0.05, seed=0):
    """Four rectangles with different features, as non-negative maps."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(h)[:, None] >= h // 2) * 2 + (torch.arange(w)[None] >= w // 2).long()
    f = nnf.one_hot(labels, d).float() + noise * torch.rand(h, w, d, generator=generator)
    return f, labels


@pytest.mark.parametrize("space", [NCutSpace(), SoftSpace()], ids=["ncut", "soft"])
def test_quadrants_are_found(space):
    f, labels = quadrants()
    actual = segment_features(f, [2, 4], size=(40, 60), space=space)
    assert actual.labels.shape == (2, 40, 60)
    big = labels.repeat_interleave(5, 0).repeat_interleave(5, 1)
    agree = torch.stack([actual.labels[1].flatten(), big.flatten()]).unique(dim=1, return_counts=True)[1]
    assert agree.sort(descending=True).values[:4].sum() > 0.9 * big.numel()


def test_upsampled_scores_are_scores_of_upsampled_points():
    generator = torch.Generator().manual_seed(1)
    points, centers = torch.randn(4 * 5, 3, generator=generator), torch.randn(1, 6, 3, generator=generator)

    def up(x):
        maps = x.view(1, 4, 5, -1).movedim(-1, 1)
        return nnf.interpolate(maps, size=(13, 17), mode="bilinear").movedim(1, -1).reshape(13 * 17, -1)

    torch.testing.assert_close(up(center_scores(points, centers)), center_scores(up(points), centers))


def test_split_separates_unconnected_regions():
    f = torch.zeros(4, 9, 2)
    f[..., 0] = 1
    f[:, 3:6] = torch.tensor([0.0, 1.0])
    assert segment_features(f, [2]).labels.max() == 2
    assert segment_features(f, [2], split=False).labels.max() == 1


def test_same_seed_same_maps_and_batches_do_not_mix():
    f = torch.rand(2, 6, 7, 5, generator=torch.Generator().manual_seed(2))
    both = segment_features(f, [2, 3, 5], size=(20, 21), seed=3)
    assert torch.equal(both.labels, segment_features(f, [2, 3, 5], size=(20, 21), seed=3).labels)
    assert torch.equal(both.labels[1], segment_features(f[1], [2, 3, 5], size=(20, 21), seed=3).labels)


def test_half_precision_features_are_accepted():
    f, _ = quadrants(noise=0.0)
    assert torch.equal(segment_features(f.bfloat16(), [4]).labels, segment_features(f, [4]).labels)


@pytest.mark.parametrize("space", [NCutSpace(), SoftSpace()], ids=["ncut", "soft"])
def test_all_zero_features_are_one_region(space):
    actual = segment_features(torch.zeros(3, 4, 5), [2, 6], size=(9, 8), space=space)
    assert (actual.labels == 0).all()


@pytest.mark.parametrize("space", [NCutSpace(), SoftSpace()], ids=["ncut", "soft"])
def test_more_segments_than_channels(space):
    actual = segment_features(quadrants(d=5)[0][..., :4], [4, 30], space=space, split=False)
    assert actual.labels[1].max() < 30


def test_one_cell_and_one_channel():
    actual = segment_features(torch.ones(1, 1, 1), [2, 20], size=(5, 7))
    assert (actual.labels == 0).all() and actual.labels.shape == (2, 5, 7)
    assert segment_features(torch.rand(3, 3, 1), [2]).labels.shape == (1, 3, 3)


def test_bad_input_is_reported():
    with pytest.raises(ShapeError, match="h, w, d"):
        segment_features(torch.rand(12, 3), [2])
    with pytest.raises(ShapeError, match="at least one cell"):
        segment_features(torch.rand(0, 4, 3), [2])
    with pytest.raises(ConfigurationError, match="space"):
        segment_features(torch.rand(3, 3, 3), [2], space="soft")


def test_nan_is_rejected_with_usable_advice():
    with pytest.raises(NonFiniteError, match="1 non-finite of 8 entries") as caught:
        segment_features(torch.tensor([1.0, torch.nan, *[1.0] * 6]).view(2, 2, 2), [2])
    assert "check=" not in str(caught.value)


def test_each_space_uses_its_own_argument():
    f, _ = quadrants(noise=0.6)
    lam = torch.diag(torch.tensor([9.0, 1.0, 1.0, 1.0, 0.1]))
    plain, other = (segment_features(f, [4], space=NCutSpace(x)).embedding.eigenvalues for x in (None, lam))
    assert not torch.allclose(plain, other)
    plain, other = (segment_features(f, [4], space=SoftSpace(x)).embedding.eigenvalues for x in (0.3, 3.0))
    assert (plain > other).all()


def test_a_learned_lambda_leaves_no_graph():
    lam = torch.eye(5).requires_grad_()
    assert not segment_features(quadrants()[0], [3], space=NCutSpace(lam)).embedding.points.requires_grad


def test_an_offset_of_the_features_does_not_reduce_the_accuracy_of_scores():
    """Scores are rounded to single precision before they are upsampled; around 1e4 that would be too coarse."""
    f, labels = quadrants(noise=0.0)
    points = f.flatten(0, 1).double() * 1e-2 + 1e4
    (scores,) = cluster_scores(points, points, torch.ones(96), [4], leading=False)
    actual = scores.float().argmax(-1)
    assert same_partition(actual, labels)
