"""Segmenting sets of images: the same maps as image by image, in any process, and without waiting."""

import numpy as np
import pytest
import torch
from skimage.segmentation import slic

from matbackprop.errors import ConfigurationError
from matbackprop.vision.data.bsds import BSDSSample, collect, prepare_image
from matbackprop.vision.inference import image_sets
from matbackprop.vision.inference.image_sets import segment_images
from matbackprop.vision.models.deep_ncuts import DeepNCuts
from matbackprop.vision.workers import Workers

KS = (2, 5, 9)


def sample(name, h, w, seed):
    tiles = torch.rand(1, 3, 6, 8, generator=torch.Generator().manual_seed(seed))
    image = torch.nn.functional.interpolate(tiles, size=(h, w), mode="bicubic").clamp(0, 1)[0]
    return BSDSSample(name, (image * 255).byte(), [])


@pytest.fixture(scope="module")
def images():
    sizes = [(48, 64), (64, 48), (48, 64), (48, 64), (64, 48)]
    return collect([prepare_image(sample(f"i{n}", h, w, n), 40) for n, (h, w) in enumerate(sizes)])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    taps = ("relu2_2", "relu3_3")
    return DeepNCuts(variant="hypercolumns", taps=taps, hidden=8, channels=4, superpixels=40).eval()


@pytest.mark.parametrize("prepared", [True, False])
def test_batches_give_the_maps_of_single_images(model, images, prepared):
    labels = segment_images(model, images, method="merge", ks=KS, batch_size=2, prepared=prepared).labels
    assert set(labels) == set(images.ids)
    for one in images:
        expected = model.merge(torch.from_numpy(one.image), KS).labels
        assert labels[one.id].dtype == np.int32 and labels[one.id].shape == (3, *one.superpixels.shape)
        assert [m.max() + 1 for m in labels[one.id]] == list(KS)
        assert np.array_equal(labels[one.id], expected)


@pytest.mark.slow
def test_processes_give_the_maps_of_one_process(model, images):
    here = segment_images(model, images, method="merge", ks=KS, batch_size=2).labels
    with Workers(2) as workers:
        there = segment_images(model, images, method="merge", ks=KS, batch_size=2, workers=workers).labels
    assert list(here) == list(there)
    assert all(np.array_equal(here[name], there[name]) for name in here)


def test_superpixels_assigned_on_a_device_give_the_same_maps(model, images, monkeypatch):
    def assign(batch, count):
        options = {"n_segments": count, "compactness": 8.0, "sigma": 0.7, "start_label": 0, "channel_axis": -1}
        actual = [slic(one.movedim(0, -1).numpy(), enforce_connectivity=False, **options) for one in batch]
        return torch.from_numpy(np.stack(actual))

    expected = segment_images(model, images, method="merge", ks=KS, batch_size=2).labels
    monkeypatch.setattr(image_sets, "works_on", lambda batch, count: True)
    monkeypatch.setattr(image_sets, "assign_superpixels", assign)
    monkeypatch.setattr(image_sets, "slic_superpixels", None)  # not from the beginning
    actual = segment_images(model, images, method="merge", ks=KS, batch_size=2).labels
    assert list(actual) == list(expected)
    assert all(np.array_equal(actual[name], expected[name]) for name in actual)


def test_nothing_waits_for_more_than_it_needs(model, images, monkeypatch):
    events = []

    class Recorded(Workers):
        def submit(self, function, *arguments):
            events.append(function.__name__)
            return super().submit(function, *arguments)

    points = DeepNCuts.region_points
    monkeypatch.setattr(DeepNCuts, "region_points", lambda *a: (events.append("network"), points(*a))[1])
    segment_images(model, images, method="merge", ks=KS, batch_size=2, workers=Recorded())
    per_batch = [2, 1, 2]
    assert events == ["_superpixels"] * 5 + [e for n in per_batch for e in ["network"] + ["_levels"] * n]


def test_an_unknown_method_is_refused(model, images):
    with pytest.raises(ConfigurationError, match="cluster or merge"):
        segment_images(model, images, method="split")
