"""DeepNCuts: grids, geometry, heads, saving, segmenting, and images of odd sizes."""

import pytest
import torch
from torch import nn

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.vision.models.backbones.base import LayerStack
from matbackprop.vision.models.config import VARIANTS
from matbackprop.vision.models.deep_ncuts import DeepNCuts


def small(name, **changes):
    changes = {"hidden": 8, **changes}
    torch.manual_seed(0)
    return DeepNCuts(variant=name, **changes).eval()


def image(h=48, w=64, seed=0):
    return torch.rand(1, 3, h, w, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "stride"), [("alexnet-relu5", 16), ("vgg16-relu4", 8), ("vgg16-relu5", 16)])
def test_grid_and_channels(name, stride):
    features = small(name)(image())
    assert features.shape == (1, 48 // stride, 64 // stride, 20) and (features >= 0).all()


@pytest.mark.parametrize("head", ["paper", "none"])
def test_one_map_of_an_enlarged_image_is_finer_and_in_the_same_place(head):
    model = small("vgg16-relu5", zoom=2.0, taps=("relu3_1",), head=head).eval()
    with torch.no_grad():
        x = torch.full((1, 3, 64, 80), 0.4)
        y = x.clone()
        y[..., 20:28, 40:48] = 1.0
        change = (model(y) - model(x)).abs().sum(-1)[0]
    assert change.shape == (32, 40)  # the map's stride is 4
    rows, columns = (torch.arange(n) * 2 + 0.5 for n in change.shape)
    assert abs((change.sum(1) * rows).sum() / change.sum() - 23.5) < 1.5
    assert abs((change.sum(0) * columns).sum() / change.sum() - 43.5) < 1.5


@pytest.mark.parametrize(
    ("name", "tap"),
    [("alexnet", "relu5"), ("vgg16", "relu4_1"), ("efficientnet-lite2", "stage3"), ("efficientnet-lite2", "stage5")],
)
def test_cells_are_centered_on_their_blocks(name, tap):
    """The gradient of one cell is centered on the cell's block of pixels.

    Positive weights avoid cancellation, and means instead of maxima avoid asymmetry.
    """
    model = DeepNCuts(backbone=name, taps=(tap,), head="none").eval()
    for parameter_name, parameter in model.backbone.named_parameters():
        weight = 0.01 if parameter.ndim > 1 else 1.0
        nn.init.constant_(parameter, weight if parameter_name.endswith("weight") else 0.0)
    for parent in model.backbone.modules():
        for child_name, layer in parent.named_children():
            if isinstance(layer, nn.MaxPool2d):
                setattr(parent, child_name, nn.AvgPool2d(layer.kernel_size, layer.stride))
    stride = model.stride
    x = torch.full((1, 3, 13 * stride, 15 * stride), 0.9, requires_grad=True)
    features = model(x)
    assert features.shape[1:3] == (13, 15)
    features[0, 6, 7].sum().backward()
    weight = x.grad[0].sum(0)
    y = (weight.sum(1) * torch.arange(x.shape[-2])).sum() / weight.sum()
    z = (weight.sum(0) * torch.arange(x.shape[-1])).sum() / weight.sum()
    assert abs(y - (6.5 * stride - 0.5)) < 1 and abs(z - (7.5 * stride - 0.5)) < 1


@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("size", [(1, 1), (3, 50), (37, 23)])
def test_tiny_images(name, size):
    model = small(name)
    actual = model.cluster(image(*size), (2, 5))
    assert actual.labels.shape == (1, 2, *size) and torch.isfinite(actual.embedding.points).all()


def test_bytes_and_floats_agree():
    model = small("alexnet-relu5")
    x = torch.randint(0, 256, (1, 3, 40, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(x), model(x.float() / 255))


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 4, 8, 8), (0, 3, 8, 8), (1, 3, 0, 8)])
def test_invalid_batches_are_rejected(shape):
    with pytest.raises(ShapeError, match=r"b, 3, h, w"):
        small("alexnet-relu5")(torch.zeros(shape))


def test_learned_affinity_is_positive_semidefinite_and_used():
    model = small("alexnet-relu5", affinity="lambda", channels=6)
    with torch.no_grad():
        model.factor.copy_(torch.randn(6, 6, generator=torch.Generator().manual_seed(2)).abs())
    assert torch.linalg.eigvalsh(model.lam).min() >= -1e-6
    plain = small("alexnet-relu5", channels=6)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k != "factor"})
    x = image()
    assert not torch.allclose(
        model.cluster(x, (3,)).embedding.eigenvalues, plain.cluster(x, (3,)).embedding.eigenvalues
    )


def test_saving_and_loading(tmp_path):
    model = small("alexnet-relu5", ridge=0.7)
    model.save_pretrained(tmp_path)
    again = DeepNCuts.from_pretrained(tmp_path)
    assert again.ridge == 0.7
    torch.testing.assert_close(again(image()), model(image()))


def test_a_user_defined_backbone():
    layers = nn.Sequential(nn.Conv2d(3, 7, 3, stride=2, padding=1), nn.ReLU())
    own = LayerStack(layers, {"out": 1})
    model = DeepNCuts(network=own, taps=("out",), hidden=8, channels=5).eval()
    assert model(image()).shape == (1, 24, 32, 5)
    assert model.cluster(image(), (2, 3)).labels.shape == (1, 2, 48, 64)


@pytest.mark.parametrize("changes", [
    {"head": "transformer"}, {"space": "fourier"}, {"affinity": "rbf"}, {"taps": ("relu9",)}, {"backbone": "resnet"},
    {"taps": ("relu5_3", "relu4_3")}, {"zoom": 0.5},
])  # fmt: skip
def test_contradictory_arguments(changes):
    with pytest.raises(ConfigurationError):
        DeepNCuts(**changes)
    with pytest.raises(ConfigurationError, match="variant is 'resnet'"):
        DeepNCuts(variant="resnet")


def test_clusters_in_another_space_than_that_of_the_model():
    model, other = small("alexnet-relu5", channels=6), small("alexnet-relu5", channels=6, space="soft")
    x = image(96, 128)
    actual = {space: model.cluster(x, (3, 5), space=space).labels for space in (None, "ncut", "soft")}
    assert torch.equal(actual[None], actual["ncut"]) and not torch.equal(actual["ncut"], actual["soft"])
    assert torch.equal(actual["soft"], other.cluster(x, (3, 5)).labels)
