"""Photographs of any size and kind to label maps."""

import numpy as np
import pytest
import torch

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.models.deep_ncuts import DeepNCuts
from matbackprop.models.photograph import segment_photograph


def halves(h=60, w=80):
    picture = np.zeros((h, w, 3), np.uint8)
    picture[:, w // 2 :] = (220, 120, 30)
    return picture


def network(**changes):
    torch.manual_seed(0)
    return DeepNCuts.variant("alexnet-relu5", hidden=8, **changes).eval()


def test_colour_alone_finds_the_halves_and_suggests_two():
    found = segment_photograph(halves(), ks=(2, 5))
    assert (found.labels[0][:, :38] == 0).all() and (found.labels[0][:, 42:] == 1).all()
    assert (found.k, found.chosen, found.network) == (2, 0, False) and found.confidence > 0.5


@pytest.mark.parametrize("size", [(1, 1), (2, 9), (5, 4)])
@pytest.mark.parametrize("method", ["merge", "cluster"])
def test_tiny_photographs(size, method):
    found = segment_photograph(halves(*size), network(), (2, 4), method=method)
    assert found.labels.shape == (2, *size)


@pytest.mark.parametrize("method", ["merge", "cluster"])
def test_large_photographs_are_segmented_small_and_returned_large(method):
    found = segment_photograph(halves(700, 900), network(superpixels=60), (2, 3), method=method, side=96)
    assert found.labels.shape == (2, 700, 900)


def test_grey_alpha_and_floating_point():
    grey = halves()[..., 0]
    assert segment_photograph(grey, ks=(2,)).labels.shape == (1, 60, 80)
    rgba = np.concatenate([halves(), np.full((60, 80, 1), 255, np.uint8)], -1)
    plain = segment_photograph(halves(), ks=(2,)).labels
    assert np.array_equal(segment_photograph(rgba, ks=(2,)).labels, plain)
    assert np.array_equal(segment_photograph(halves() / 255.0, ks=(2,)).labels, plain)


def test_one_colour_is_accepted():
    found = segment_photograph(np.full((40, 40, 3), 90, np.uint8), ks=(2,))
    assert found.labels.shape == (1, 40, 40) and 0 <= found.confidence <= 1


def test_bad_input():
    with pytest.raises(ShapeError):
        segment_photograph(np.zeros((3, 4, 5, 3)))
    with pytest.raises(ShapeError, match="int64"):
        segment_photograph(np.zeros((4, 5, 3), np.int64))
    with pytest.raises(ConfigurationError, match="network"):
        segment_photograph(halves(), method="cluster")
    with pytest.raises(ConfigurationError, match="unknown"):
        segment_photograph(halves(), method="guess")
