"""Photographs of any size and kind to label maps."""

import numpy as np
import pytest
import torch
from PIL import Image

import matbackprop
from matbackprop.errors import ConfigurationError, DataError, ShapeError
from matbackprop.vision.data.bsds import BSDS
from matbackprop.vision.inference import Segments, segment, segment_photograph
from matbackprop.vision.inference.segmenting import read_input
from matbackprop.vision.models.deep_ncuts import DeepNCuts


def halves(h=60, w=80):
    picture = np.zeros((h, w, 3), np.uint8)
    picture[:, w // 2 :] = (220, 120, 30)
    return picture


def network(**changes):
    torch.manual_seed(0)
    return DeepNCuts.variant("alexnet-relu5", hidden=8, **changes).eval()


def test_colour_alone_finds_the_halves_and_suggests_two():
    for size in ((50, 70), (60, 80), (240, 320), (481, 321)):
        result = segment_photograph(halves(*size))
        truth = np.arange(size[1]) >= size[1] // 2
        assert (result.labels() == truth).mean() > 0.9
        assert (result.k, result.count(), result.network) == (2, 2, False)


def test_nothing_is_seen_in_a_picture_of_nothing():
    for shade in (0, 90, 255):
        result = segment_photograph(np.full((70, 90, 3), shade, np.uint8))
        assert (result.k, result.count(), result.confidence) == (1, 1, None) and not result.labels().any()
    noise = np.random.default_rng(0).integers(118, 138, (120, 160, 3), dtype=np.uint8)
    assert segment_photograph(noise).k == 1


@pytest.mark.parametrize("name", ["coffee", "chelsea", "astronaut", "rocket"])
def test_a_useful_number_is_suggested_for_photographs(name):
    skimage_data = pytest.importorskip("skimage.data")
    result = segment_photograph(getattr(skimage_data, name)(), side=240)
    assert 6 <= result.k <= 30 and result.count() == result.k and result.confidence in (0.87, 0.77)


@pytest.mark.parametrize("size", [(1, 1), (2, 9), (5, 4)])
@pytest.mark.parametrize("method", ["merge", "cluster"])
def test_tiny_photographs(size, method):
    result = segment_photograph(halves(*size), network(), (2, 4), method=method)
    assert [result.labels(k).shape for k in (2, 4, None)] == [size] * 3


@pytest.mark.parametrize("method", ["merge", "cluster"])
def test_large_photographs_are_segmented_small_and_returned_large(method):
    result = segment_photograph(halves(700, 900), network(superpixels=60), (2, 3), method=method, side=96)
    labels = result.labels(2)
    assert labels.shape == (700, 900)
    small = result.superpixels if method == "merge" else result.clusterings[2]
    assert small.shape == (75, 96)


def test_enlarged_labels_are_those_of_the_nearest_cell():
    result = segment_photograph(halves(50, 70), side=30)
    small = segment_photograph(np.asarray(result.pixels), side=30).small_labels(4)
    maps = torch.from_numpy(small.astype(np.float32))[None, None]
    expected = torch.nn.functional.interpolate(maps, size=(50, 70), mode="nearest-exact")[0, 0].numpy()
    np.testing.assert_array_equal(result.labels(4), expected)


def test_every_number_of_regions_can_be_had_after_merging_and_those_asked_for_after_clustering():
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    merged = segment_photograph(noise, ks=(2, 4))
    assert [merged.count(k) for k in (1, 2, 5, 12, 13)] == [1, 2, 5, 12, 13]
    with pytest.raises(ConfigurationError, match="positive"):
        merged.labels(0)
    clustered = segment_photograph(noise, network(), (2, 4), method="cluster")
    assert clustered.labels().shape == (60, 80)
    with pytest.raises(ConfigurationError, match="5 clusters were not asked for; there are 2, 4"):
        clustered.labels(5)


def test_borders_are_wide_enough_for_large_photographs():
    for height, width in ((40, 60), (1200, 1800)):
        result = segment_photograph(halves(height, width))
        row = (result.outlined(2) != result.pixels).any(-1)[height // 2]
        assert row.sum() == max(1, round(width / 600))
        assert abs(row.nonzero()[0].mean() - width / 2) <= 1 + width / 480


def test_grey_alpha_and_floating_point():
    grey = halves()[..., 0]
    assert segment_photograph(grey).labels(2).shape == (60, 80)
    rgba = np.concatenate([halves(), np.full((60, 80, 1), 255, np.uint8)], -1)
    plain = segment_photograph(halves()).labels(2)
    assert np.array_equal(segment_photograph(rgba).labels(2), plain)
    assert np.array_equal(segment_photograph(halves() / 255.0).labels(2), plain)


def test_bad_input():
    with pytest.raises(ShapeError):
        segment_photograph(np.zeros((3, 4, 5, 3)))
    with pytest.raises(ShapeError, match="int64"):
        segment_photograph(np.zeros((4, 5, 3), np.int64))
    for values in (np.full((4, 5, 3), 7.0), np.full((4, 5, 3), np.nan)):
        with pytest.raises(ShapeError, match=r"floating point in \[0, 1\]"):
            segment_photograph(values)
    with pytest.raises(ConfigurationError, match="network"):
        segment_photograph(halves(), method="cluster")
    with pytest.raises(ConfigurationError, match="unknown"):
        segment_photograph(halves(), method="guess")
    with pytest.raises(ConfigurationError, match="side"):
        segment_photograph(halves(), side=0)
    with pytest.raises(ConfigurationError, match="whole and positive"):
        segment_photograph(halves(), ks=())


@pytest.mark.slow
def test_one_picture_in_every_form_gives_the_same_regions(tmp_path):
    pixels = halves()
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    tensor = torch.from_numpy(pixels)
    forms = [
        tmp_path / "photo.png",
        str(tmp_path / "photo.png"),
        Image.fromarray(pixels),
        pixels,
        pixels.transpose(2, 0, 1),
        pixels / 255.0,
        tensor,
        tensor.permute(2, 0, 1),
        (tensor / 255.0).permute(2, 0, 1).requires_grad_(),
        (tensor / 255.0).bfloat16(),
    ]
    expected = matbackprop.segment(pixels).labels(2)
    for form in forms:
        result = segment(form)
        assert isinstance(result, Segments) and np.array_equal(result.labels(2), expected)
    assert segment(tmp_path / "photo.png").name == segment(Image.open(tmp_path / "photo.png")).name == "photo.png"


def test_lists_folders_and_patterns_give_lists(tmp_path):
    for name in ("b.png", "a.png"):
        Image.fromarray(halves(20, 30)).save(tmp_path / name)
    assert (
        [r.name for r in segment(tmp_path)] == [r.name for r in segment(str(tmp_path / "*.png"))] == ["a.png", "b.png"]
    )
    assert [r.size for r in segment([halves(20, 30), tmp_path / "a.png"])] == [(20, 30)] * 2
    with pytest.raises(DataError, match="does not exist"):
        segment(tmp_path / "c.png")


def test_where_both_ends_could_be_channels_tensors_have_them_first_and_arrays_last():
    values = np.random.default_rng(0).integers(0, 256, (3, 5, 4), dtype=np.uint8)
    assert read_input(values)[0].pixels.shape == (3, 5, 3)
    assert read_input(torch.from_numpy(values))[0].pixels.shape == (5, 4, 3)


def test_a_model_may_be_named(tmp_path):
    network().save_pretrained(tmp_path / "model")
    result = segment(halves(), str(tmp_path / "model"), (2,), device="cpu")
    assert result.network and result.count(2) == 2


@pytest.mark.data
def test_the_number_is_within_a_factor_of_two_of_people_s_on_most_training_photographs(data_root):
    data = BSDS(data_root / "BSDS500", "train")
    near = []
    for sample in (data[i] for i in range(0, 200, 20)):
        people = np.median([len(np.unique(labels)) for labels in sample.segmentations])
        near.append(0.5 <= segment_photograph(sample.image.permute(1, 2, 0).numpy()).k / people <= 2)
    assert len(near) == 10 and sum(near) >= 7


def test_segments_name_themselves_in_one_line():
    segments = segment(np.zeros((40, 60, 3), np.uint8), None)
    assert repr(segments) == "Segments('picture.png', 60×40 pixels, 1 region by merge)"
