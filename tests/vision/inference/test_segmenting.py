"""Photographs of any size and kind to label maps."""

import numpy as np
import pytest
import torch
from PIL import Image

import matbackprop
from matbackprop.errors import ConfigurationError, DataError, ShapeError
from matbackprop.vision.inference import Segments, segment, segment_photograph
from matbackprop.vision.inference.segmenting import network_contours, read_input
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.models.deep_ncuts import DeepNCuts


def halves(h=60, w=80):
    picture = np.zeros((h, w, 3), np.uint8)
    picture[:, w // 2 :] = (220, 120, 30)
    return picture


def network(**changes):
    torch.manual_seed(0)
    return DeepNCuts(variant="alexnet-relu5", hidden=8, **changes).eval()


def contour_network():
    torch.manual_seed(0)
    taps = ("relu1", "relu2", "relu5")
    return ContourNet(backbone="alexnet", taps=taps, zoom=1.0, width=12, stem=6, threshold=0.3).eval()


def test_gradients_alone_find_the_halves():
    for size in ((50, 70), (60, 80), (240, 320), (481, 321), (700, 900)):
        result = segment_photograph(halves(*size))
        truth = np.arange(size[1]) >= size[1] // 2
        assert (result.labels() == truth).mean() > 0.98
        assert (result.k, result.count(), result.network) == (2, 2, False)


def test_a_flat_picture_is_one_region():
    for shade in (0, 90, 255):
        result = segment_photograph(np.full((70, 90, 3), shade, np.uint8))
        assert (result.k, result.count()) == (1, 1) and not result.labels().any()
    noise = np.random.default_rng(0).integers(118, 138, (120, 160, 3), dtype=np.uint8)
    assert segment_photograph(noise).k == 1


@pytest.mark.parametrize("size", [(1, 1), (2, 9), (5, 4)])
@pytest.mark.parametrize("model", [None, contour_network(), network()], ids=["none", "contours", "cuts"])
def test_tiny_photographs(size, model):
    result = segment_photograph(halves(*size), model, (2, 4))
    assert [result.labels(k).shape for k in (2, 4, None)] == [size] * 3


@pytest.mark.parametrize("model", [contour_network(), network()], ids=["contours", "cuts"])
def test_large_photographs_are_segmented_small_and_returned_large(model):
    result = segment_photograph(halves(700, 900), model, (2, 3), side=96)
    assert result.labels(2).shape == (700, 900) and result.labels(2).dtype == np.int32
    assert result.small_labels(2).shape == (75, 96)


def test_the_default_view_is_the_level_at_the_threshold_of_the_network():
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    result = segment_photograph(noise, contour_network())
    assert result.threshold == 0.3 and result.k == result.hierarchy.regions_at(0.3)
    fine = result.at(0.0)
    assert fine.k == result.hierarchy.regions_at(0.0) >= result.k
    np.testing.assert_array_equal(fine.labels(), result.labels(fine.k))
    with pytest.raises(ConfigurationError, match="from 0 to 1"):
        result.at(2.0)


def test_contours_of_several_scales_and_mirror_images_are_averaged():
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    model, scales = contour_network(), (0.5, 1.0)
    plain = segment_photograph(noise, model).contours
    average = segment_photograph(noise, model, scales=scales, mirror=True).contours
    assert average.shape == plain.shape == (48, 64) and np.abs(average - plain).max() > 1e-3
    mirrored = segment_photograph(noise[:, ::-1], model, scales=scales, mirror=True).contours
    np.testing.assert_allclose(average, mirrored[:, ::-1], atol=1e-3)  # stored in half precision
    image = torch.from_numpy(noise).permute(2, 0, 1)[None]
    with torch.no_grad():
        both = [model.contours(image / 255), model.contours(image.flip(-1) / 255).flip(-1)]
    np.testing.assert_allclose(network_contours(model, image), both[0], atol=1e-5)
    np.testing.assert_allclose(network_contours(model, image, mirror=True), torch.stack(both).mean(0), atol=1e-5)


@pytest.mark.parametrize(
    ("model", "scales", "message"),
    [
        (None, (0.5, 1.0), "need a contour network"),
        (network(), (0.5,), "need a contour network"),
        (contour_network(), (), "one or several numbers"),
        (contour_network(), (1.0, 0.0), "from 0.25 to 4"),
        (contour_network(), (float("nan"),), "from 0.25 to 4"),
    ],
)
def test_bad_scales(model, scales, message):
    with pytest.raises(ConfigurationError, match=message):
        segment_photograph(halves(), model, scales=scales)


def test_any_number_of_regions_of_a_hierarchy_and_the_computed_numbers_of_clusters():
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    merged = segment_photograph(noise, ks=(2, 4))
    assert [merged.count(k) for k in (1, 2, 5, 12, 13)] == [1, 2, 5, 12, 13]
    assert merged.labels(12).max() == 11
    with pytest.raises(ConfigurationError, match="positive"):
        merged.labels(0)
    clustered = segment_photograph(noise, network(), (2, 4))
    assert clustered.k == 4 and clustered.labels().shape == (60, 80)
    with pytest.raises(ConfigurationError, match="5 clusters were not computed"):
        clustered.labels(5)


def test_borders_are_wide_enough_for_large_photographs():
    for height, width in ((40, 60), (1200, 1800)):
        result = segment_photograph(halves(height, width))
        row = (result.outlined(2) != result.pixels).any(-1)[height // 2]
        assert row.sum() == max(1, round(width / 600))
        assert abs(row.nonzero()[0].mean() - width / 2) <= 2  # refined at full resolution


def test_a_user_partition_keeps_its_names():
    result = segment_photograph(halves(120, 160), side=60)
    own = result.with_regions(np.repeat([np.arange(60) >= 30], 45, 0).astype(np.int32), ("left", ""))
    assert own.count() == 2 and own.names == ("left", "") and own.labels().shape == (120, 160)
    with pytest.raises(ShapeError, match="3 names"):
        result.with_regions(own.small_labels(), ("a", "b", "c"))


def test_bad_input():
    with pytest.raises(ShapeError):
        segment_photograph(np.zeros((3, 4, 5, 3)))
    with pytest.raises(ShapeError, match="int64"):
        segment_photograph(np.zeros((4, 5, 3), np.int64))
    for values in (np.full((4, 5, 3), 7.0), np.full((4, 5, 3), np.nan)):
        with pytest.raises(ShapeError, match=r"floating point in \[0, 1\]"):
            segment_photograph(values)
    with pytest.raises(ConfigurationError, match="2000 clusters"):
        segment_photograph(halves(), network(), (2000,))


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
        np.concatenate([pixels, np.full((60, 80, 1), 255, np.uint8)], -1),
        tensor,
        tensor.permute(2, 0, 1),
        (tensor / 255.0).permute(2, 0, 1).requires_grad_(),
        (tensor / 255.0).bfloat16(),
    ]
    expected = matbackprop.segment(pixels, None).labels(2)
    for form in forms:
        result = segment(form, None)
        assert isinstance(result, Segments) and np.array_equal(result.labels(2), expected)
    assert segment(Image.open(tmp_path / "photo.png"), None).name == "photo.png"


def test_lists_folders_and_patterns_give_lists(tmp_path):
    for name in ("b.png", "a.png"):
        Image.fromarray(halves(20, 30)).save(tmp_path / name)
    assert (
        [r.name for r in segment(tmp_path, None)]
        == [r.name for r in segment(str(tmp_path / "*.png"), None)]
        == ["a.png", "b.png"]
    )
    assert [r.size for r in segment([halves(20, 30), tmp_path / "a.png"], None)] == [(20, 30)] * 2
    with pytest.raises(DataError, match="does not exist"):
        segment(tmp_path / "c.png", None)


def test_ambiguous_channels_are_first_in_tensors_and_last_in_arrays():
    values = np.random.default_rng(0).integers(0, 256, (3, 5, 4), dtype=np.uint8)
    assert read_input(values)[0].pixels.shape == (3, 5, 3)
    assert read_input(torch.from_numpy(values))[0].pixels.shape == (5, 4, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_an_error_also_without_a_network():
    with pytest.raises(ConfigurationError, match="CUDA is not available"):
        segment(halves(), None, device="cuda")


def test_repr_of_segments_is_one_line():
    segments = segment(np.zeros((40, 60, 3), np.uint8), None)
    assert repr(segments) == "Segments('picture.png', 60×40 pixels, 1 region)"
