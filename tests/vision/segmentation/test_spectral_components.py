"""Connected components against flood fill."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from matbackprop.errors import ConfigurationError, MissingExtraError, ShapeError
from matbackprop.vision.inference.segmenting import gradient_contours
from matbackprop.vision.segmentation import connected_components, watershed_regions


def flood(labels, connectivity):
    """Components by flood fill in raster order."""
    h, w = labels.shape
    steps = [(0, 1), (0, -1), (1, 0), (-1, 0)]
    if connectivity == 8:
        steps += [(1, 1), (1, -1), (-1, 1), (-1, -1)]
    out = torch.full((h, w), -1)
    count = 0
    for start in range(h * w):
        y, x = divmod(start, w)
        if out[y, x] >= 0:
            continue
        stack, out[y, x] = [(y, x)], count
        while stack:
            a, b = stack.pop()
            for dy, dx in steps:
                p, q = a + dy, b + dx
                if 0 <= p < h and 0 <= q < w and out[p, q] < 0 and labels[p, q] == labels[a, b]:
                    out[p, q] = count
                    stack.append((p, q))
        count += 1
    return out


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.sampled_from([4, 8]), st.integers(0, 99))
def test_components_equal_flood_fill(h, w, kinds, connectivity, seed):
    labels = torch.randint(-1, kinds, (h, w), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(connected_components(labels, connectivity=connectivity), flood(labels, connectivity))


def test_a_long_winding_region_is_one_component(device):
    spiral = torch.zeros(41, 41, dtype=torch.long, device=device)
    spiral[1::2] = 1
    spiral[1::4, -1] = 0
    spiral[3::4, 0] = 0
    actual = connected_components(spiral)
    assert len(actual[spiral == 0].unique()) == 1


def test_batches_are_numbered_each_from_zero():
    labels = torch.randint(0, 3, (2, 3, 12, 17), generator=torch.Generator().manual_seed(1))
    actual = connected_components(labels)
    assert (actual.amin((-1, -2)) == 0).all() and torch.equal(actual[1, 2], connected_components(labels[1, 2]))


def test_bad_input():
    with pytest.raises(ShapeError, match="integer"):
        connected_components(torch.zeros(3, 3))
    with pytest.raises(ConfigurationError, match="connectivity"):
        connected_components(torch.zeros(3, 3, dtype=torch.long), connectivity=6)
    assert connected_components(torch.zeros(0, 3, 3, dtype=torch.long)).shape == (0, 3, 3)


def test_without_scikit_image_the_extra_is_reported(monkeypatch):
    for name in ("skimage", "skimage.color", "skimage.measure", "skimage.morphology", "skimage.segmentation"):
        monkeypatch.setitem(sys.modules, name, None)
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for call in (
        lambda: connected_components(torch.zeros(2, 3, dtype=torch.long)),
        lambda: watershed_regions(np.zeros((64, 64))),
        lambda: gradient_contours(image),
    ):
        with pytest.raises(MissingExtraError, match=r"matbackprop\[train\]"):
            call()
