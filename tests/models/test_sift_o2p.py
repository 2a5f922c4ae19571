"""SIFT-O2P: what its descriptor sees and what it does not."""

import pytest
import torch

from matbackprop.errors import ConfigurationError
from matbackprop.models.backbone import normalize
from matbackprop.models.sift_o2p import SiftO2P

pytest.importorskip("kornia")


def picture(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(2, 3, 48, 48, generator=draw)


def model(**more):
    return SiftO2P(3, bin_sizes=(4,), canvas=48, **more)


def test_the_descriptor_sees_structure_inside_the_mask_only():
    image, other = picture(), picture()
    mask = torch.zeros(2, 48, 48)
    mask[:, :, :16] = 1
    other[:, :, :, 40:] = 0.5  # further than a descriptor reaches
    sift = model()
    one, two = (sift.describe(normalize(x), mask) for x in (image, other))
    assert one.shape == (2, 8256)
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    whole = model(support="all")
    assert not torch.allclose(whole.describe(normalize(image), mask), whole.describe(normalize(other), mask), atol=1e-2)


def test_the_descriptor_does_not_see_brightness_and_contrast():
    mask = torch.ones(2, 48, 48)
    sift = model()
    one = sift.describe(normalize(picture()), mask)
    two = sift.describe(normalize(0.5 * picture() + 0.2), mask)
    torch.testing.assert_close(one, two, rtol=1e-2, atol=2e-2)


def test_an_empty_mask_pools_everything():
    sift, image = model(), normalize(picture())
    torch.testing.assert_close(
        sift.describe(image, torch.zeros(2, 48, 48)), sift.describe(image, torch.ones(2, 48, 48)), rtol=1e-3, atol=1e-3
    )


def test_the_classifier_works_on_standardised_descriptors():
    torch.manual_seed(0)
    sift = model()
    vectors = 3 + 2 * torch.randn(50, 8256)
    sift.calibrate(vectors)
    standard = (vectors - sift.mean) / sift.deviation
    assert standard.mean(0).abs().max() < 1e-4
    assert standard.square().mean().item() == pytest.approx(1, abs=1e-3)
    torch.nn.init.normal_(sift.classifier.weight)
    torch.testing.assert_close(sift.classify(vectors), sift.classifier(standard))
    image, mask = normalize(picture()), torch.ones(2, 48, 48)
    torch.testing.assert_close(sift(image, mask), sift.classify(sift.describe(image, mask)))


def test_scales_are_needed():
    with pytest.raises(ConfigurationError, match="bin_sizes is empty"):
        SiftO2P(3, bin_sizes=())
