"""ContourNet: shapes, positions of its cells, saving and loading."""

import pytest
import torch

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.vision.models.config import ContourModelConfig
from matbackprop.vision.models.contours import _PIXELS, ContourNet, _Grid, _resample
from matbackprop.vision.training.config import CONTOURS_PRESETS

SMALL = ContourModelConfig("alexnet", ("relu1", "relu2", "relu5"), "none", zoom=1.0, width=12, stem=6)


def test_output_and_every_level_have_the_size_of_the_image():
    net = ContourNet(SMALL).eval()
    logits = net(torch.rand(2, 3, 50, 67))
    assert [tuple(one.shape) for one in logits] == [(2, 50, 67)] * 4
    contours = net.contours(torch.rand(1, 3, 50, 67))
    assert contours.min() >= 0 and contours.max() <= 1


@pytest.mark.parametrize("backbone", ["tiny-vit", "efficientnet-lite2"])
def test_a_network_trains_on_every_level(backbone):
    taps = {"tiny-vit": ("layer0", "neck"), "efficientnet-lite2": ("stage1", "stage3")}[backbone]
    net = ContourNet(backbone=backbone, taps=taps, width=12, stem=6)
    sum(one.mean() for one in net(torch.rand(1, 3, 32, 48))).backward()
    assert all(p.grad is not None for name, p in net.named_parameters() if "side" in name or "fuse" in name)


@pytest.mark.parametrize("preset", ["smoke", "tiny-vit", "efficientnet-lite2"])
def test_the_networks_of_the_presets_are_valid(preset):
    net = ContourNet(CONTOURS_PRESETS[preset].model).eval()
    with torch.no_grad():
        assert net.contours(torch.rand(1, 3, 32, 48)).shape == (1, 32, 48)


@pytest.mark.parametrize("width", [1, 5, 6, 7, 12, 20, 32, 48, 64])
def test_any_width(width):
    groups = ContourNet(SMALL, width=width).smooth[0][1].num_groups
    assert width % groups == 0 and (groups == 1 or width // groups >= 6)


def test_resampling_uses_the_centers_of_cells():
    ramp = 3.0 + 4.0 * torch.arange(10.0)  # cell i is centered on pixel 3 + 4i
    there = _resample(ramp.expand(1, 1, 10, 10), _Grid(4.0, 3.0), _PIXELS, (40, 40))[0, 0, 0]
    torch.testing.assert_close(there[3:40], torch.arange(3.0, 40.0))
    assert torch.all(there[:3] == 3.0)


def test_saved_and_loaded_networks_agree(tmp_path):
    torch.manual_seed(0)
    net, image = ContourNet(SMALL).eval(), torch.rand(1, 3, 40, 40)
    net.save_pretrained(tmp_path)
    assert torch.equal(ContourNet.from_pretrained(tmp_path).contours(image), net.contours(image))
    net.save_pretrained(tmp_path / "small", dtype=torch.int8)
    close = ContourNet.from_pretrained(tmp_path / "small").contours(image)
    assert (close - net.contours(image)).abs().max() < 0.02


def test_wrong_input():
    with pytest.raises(ShapeError, match="at least one pixel"):
        ContourNet(SMALL)(torch.rand(1, 3, 0, 40))
    with pytest.raises(ConfigurationError, match="taps is empty"):
        ContourNet(SMALL, taps=())
