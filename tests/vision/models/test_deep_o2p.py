"""Region classifiers: geometry of masks, the pooled descriptor, heads, calibration, saving."""

import numpy as np
import pytest
import torch
from scipy.linalg import logm, sqrtm

from experiments import networks
from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.vision.models.backbones.base import normalize
from matbackprop.vision.models.deep_o2p import RegionClassifier, SecondOrderVector, mask_to_grid


def test_masks_are_resampled_to_the_grid_by_area():
    draw = torch.Generator().manual_seed(0)
    mask = (torch.rand(2, 227, 227, generator=draw) > 0.5).float()
    grid = mask_to_grid(mask, (13, 13), 15.0, 16)
    for i, j in ((0, 0), (4, 7), (12, 12)):
        window = mask[:, 7 + 16 * i : 23 + 16 * i, 7 + 16 * j : 23 + 16 * j]
        torch.testing.assert_close(grid[:, i, j], window.mean((-1, -2)))
    assert mask_to_grid(torch.ones(1, 20, 20), (3, 3), 3.5, 8)[0, 2, 2] == pytest.approx(0.25)  # exceeds the image


def oracle(f, weight, eps, function):
    a = f.T @ np.diag(weight) @ f + eps * np.eye(f.shape[1])
    c = {"log": logm, "sqrt": sqrtm}[function](a).real
    rows, columns = np.triu_indices(f.shape[1])
    return c[rows, columns] * np.where(rows == columns, 1, np.sqrt(2))


@pytest.mark.parametrize("function", ["log", "sqrt"])
@pytest.mark.parametrize("support", ["all", "mask", "mask+all"])
def test_the_descriptor_is_the_matrix_function_of_the_weighted_moment(function, support):
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(2, 5, 3, 4, generator=draw, dtype=torch.float64).relu().float()
    mask = torch.rand(2, 3, 4, generator=draw)
    pooling = SecondOrderVector(5, function=function, support=support, feature_scale=0.3, eps=0.01)
    got = pooling(features, mask)
    assert got.shape == (2, pooling.out_features)
    for i in range(2):
        f = 0.3 * features[i].flatten(1).T.double().numpy()
        inside = mask[i].flatten().double().numpy()
        supports = {"all": [np.ones(12)], "mask": [inside / inside.mean()]}
        supports["mask+all"] = supports["mask"] + supports["all"]
        expected = np.concatenate([oracle(f, w, 0.01, function) for w in supports[support]])
        np.testing.assert_allclose(got[i].numpy(), expected, rtol=2e-5, atol=2e-5)
    if support == "mask":
        everywhere = SecondOrderVector(5, function=function, feature_scale=0.3, eps=0.01)
        torch.testing.assert_close(pooling(features, mask * 0), everywhere(features))  # an empty mask
        with pytest.raises(ShapeError, match="Pass its mask"):
            pooling(features)


def test_a_power_of_one_half_is_the_square_root_and_trainable():
    features = torch.rand(2, 4, 3, 3, generator=torch.Generator().manual_seed(2))
    power = SecondOrderVector(4, function="power", power=0.5, learn_power=True)
    root = SecondOrderVector(4, function="sqrt")
    torch.testing.assert_close(power(features), root(features), rtol=1e-5, atol=1e-6)
    power(features).square().sum().backward()
    assert power.layer.exponent.grad.abs() > 0
    assert power.power == pytest.approx(0.5)
    fixed = SecondOrderVector(4, function="power", power=0.5)
    assert not list(fixed.parameters()) and fixed.power == 0.5


def test_calibration_standardizes_descriptors_and_happens_once():
    torch.manual_seed(0)
    model = RegionClassifier(3, head="o2p", canvas=67, taps=("relu5",), reduce=4)
    batches = [(torch.randn(6, 3, 67, 67), None) for _ in range(2)]
    model.calibrate(batches)
    pooling = model.poolings()["relu5"]
    vectors = pooling.standardized(torch.cat([pooling(model.maps(image)["relu5"]) for image, _ in batches])).detach()
    assert vectors.mean().item() == pytest.approx(0, abs=1e-4)
    assert vectors.square().mean().item() == pytest.approx(1, abs=1e-3)
    assert vectors.mean(0).abs().max() < 1e-3
    before = pooling.mean.clone()
    model.calibrate([(torch.randn(6, 3, 67, 67) + 5, None)])
    assert torch.equal(before, pooling.mean)


def test_a_projection_starts_on_the_principal_directions():
    torch.manual_seed(0)
    pooling = SecondOrderVector(5, reduce=2, feature_scale=1.0)
    maps = torch.randn(40, 5, 3, 3) * torch.tensor([0.1, 3.0, 0.2, 2.0, 0.3]).view(1, 5, 1, 1)
    pooling.project([maps[:20], maps[20:]])
    weight = pooling.reduce.weight[..., 0, 0]
    torch.testing.assert_close(weight @ weight.mT, torch.eye(2), atol=1e-5, rtol=0)
    x = maps.movedim(1, -1).reshape(-1, 5)
    values, vectors = np.linalg.eigh((x.T @ x).double().numpy())
    for row, k in zip(weight.detach().numpy(), (4, 3), strict=True):  # the largest first
        assert abs(row @ vectors[:, k]) == pytest.approx(1, abs=1e-5), values


def test_several_maps_are_pooled_side_by_side():
    torch.manual_seed(0)
    model = small("o2p", taps=("relu5", "relu2", "relu3"), reduce_rest=3)
    image, mask = torch.randn(2, 3, 67, 67), torch.rand(2, 67, 67)
    model.calibrate([(image, mask)])
    assert all(pooling.calibrated for pooling in model.poolings().values())
    assert model.classifier.in_features == 21 + 6 + 6
    maps = model.maps(image)
    assert list(maps) == ["relu5", "relu2", "relu3"]
    parts = [
        pooling.standardized(pooling(maps[tap], mask_to_grid(mask, maps[tap].shape[-2:], info.offset, info.stride)))
        for tap, pooling in model.poolings().items()
        for info in [model.backbone.info(tap)]
    ]
    torch.testing.assert_close(model(image, mask), model.classifier(torch.cat(parts, 1)))
    narrow = RegionClassifier(2, head="o2p", canvas=67, reduce=4, taps=("pool5", "relu1"))
    assert narrow.poolings()["relu1"].reduce is None  # 64 channels are fewer than 96


HEADS = ["fc", "o2p", "o2p_fc", "both"]


def small(head, **more):
    pooling = {} if head == "fc" else {"reduce": 6, "taps": ("relu5",), "support": "mask", "function": "sqrt"}
    return RegionClassifier(4, head=head, canvas=67, hidden=16, names=list("abcd"), **(pooling | more))


@pytest.mark.parametrize("more", [{}, {"taps": ("relu5", "relu2", "relu4"), "reduce_rest": 4}])
@pytest.mark.parametrize("head", HEADS)
def test_every_parameter_of_every_head_is_trained(head, more):
    torch.manual_seed(0)
    if head == "fc" and more:
        with pytest.raises(ConfigurationError, match=r"does not pool\. Remove taps"):
            small(head, **more)
        return
    model = small(head, **more)
    mask = torch.ones(2, 67, 67)
    model(torch.randn(2, 3, 67, 67), mask).square().sum().backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    # the bias of an inactive ReLU may have no gradient; whole weights must have one
    assert not [n for n in without if n.endswith("weight")]
    groups = model.parameter_groups(0.1, 0.01, 5e-4)
    grouped = [id(p) for g in groups for p in g["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    rates = {g["name"]: g["lr"] for g in groups}
    assert rates["backbone"] == pytest.approx(0.001) and rates["head"] == pytest.approx(0.1)


def test_alexnets_head_has_alexnets_topology():
    with torch.device("meta"):
        model = RegionClassifier(80, head="fc")
        pooled = RegionClassifier(80, head="o2p_fc")
    shapes = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert shapes == [(4096, 9216), (4096, 4096), (80, 4096)]
    shapes = [tuple(m.weight.shape) for m in pooled.modules() if isinstance(m, torch.nn.Linear)]
    assert shapes == [(4096, 256 * 257 // 2), (4096, 4096), (80, 4096)]


@pytest.mark.parametrize("head", HEADS)
def test_a_saved_model_gives_the_same_scores(head, tmp_path):
    torch.manual_seed(0)
    model = small(head, **({} if head == "fc" else {"taps": ("relu5", "relu3"), "reduce_rest": 5})).eval()
    image, mask = torch.randn(2, 3, 67, 67), torch.rand(2, 67, 67)
    model.calibrate([(image, mask)])
    model.save_pretrained(tmp_path / "model")
    loaded = RegionClassifier.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(loaded(image, mask), model(image, mask))
    assert loaded.names == list("abcd")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"head": "tail"}, "head is 'tail'. Input should be 'fc', 'o2p', 'o2p_fc' or 'both'"),
        ({"head": "o2p", "taps": ("relu9",)}, "Unknown feature map 'relu9'"),
        ({"head": "o2p", "taps": ("relu3", "relu8")}, "Unknown feature map 'relu8'"),
        ({"head": "o2p", "taps": ("relu3", "relu3")}, "taps contains a map twice: relu3, relu3"),
        ({"head": "o2p", "reduce": 257}, "reduce is 257. Use 1 … 256"),
        ({"head": "o2p", "function": "sin"}, "function is 'sin'. Input should be"),
        ({"head": "o2p", "support": "half"}, "support is 'half'. Input should be"),
        ({"head": "o2p", "function": "log", "learn_power": True}, "learn_power needs"),
        ({"head": "o2p", "hidden": 1 << 40}, "hidden is .*. Input should be less than or equal to 65536"),
        ({"head": "o2p", "bias": True}, "Unknown field 'bias'. Fields: average"),
        ({"head": "o2p", "taps": ("relu1+relu2",)}, "have different numbers of channels"),
        ({"head": "o2p", "average": True}, "average needs head 'fc' or 'both', got 'o2p'"),
        ({"head": "o2p", "two_views": True}, "two_views needs background 'keep'"),
        ({"head": "fc", "names": ["a"]}, "one entry per class, got 1 for 3 classes"),
    ],
)
def test_invalid_configurations_are_reported(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        RegionClassifier(3, canvas=67, **arguments)


@pytest.mark.parametrize("support", ["all", "mask", "mask+all"])
def test_first_order_is_the_average_over_the_support(support):
    torch.manual_seed(0)
    model = RegionClassifier(3, head="fc", average=True, support=support, canvas=67).eval()
    image, mask = torch.randn(2, 3, 67, 67), torch.rand(2, 67, 67)
    (actual,) = model.maps(image).values()
    info = model.backbone.info("pool5")
    inside = mask_to_grid(mask, actual.shape[-2:], info.offset, info.stride)
    means = {
        "all": [actual.mean((2, 3))],
        "mask": [(actual * inside[:, None]).sum((2, 3)) / inside.sum((1, 2))[:, None]],
    }
    means["mask+all"] = means["mask"] + means["all"]
    expected = torch.cat(means[support], 1)
    torch.testing.assert_close(model.describe(image, mask), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(image, mask), model.classifier(expected), rtol=1e-4, atol=1e-5)
    assert not model.poolings()


def test_both_orders_are_concatenated_and_standardized_separately():
    torch.manual_seed(0)
    model = small("both", average=True)
    batches = [(torch.randn(6, 3, 67, 67), torch.rand(6, 67, 67)) for _ in range(2)]
    model.calibrate(batches)
    described = torch.cat([model.describe(*batch) for batch in batches]).detach()
    assert described.shape == (12, 21 + 256) and model.classifier.in_features == 277
    for one, part in zip(model.descriptors(), described.split([21, 256], 1), strict=True):
        assert one.standardized(part).mean(0).abs().max() < 1e-3
        assert one.standardized(part).square().mean().item() == pytest.approx(1, abs=1e-3)
    model.eval()
    torch.testing.assert_close(model(*batches[0]), model.classify(model.describe(*batches[0])), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", ["fc", "both"])
def test_two_views_are_the_region_with_and_without_surroundings(head):
    torch.manual_seed(0)
    model = small(head, average=True, two_views=True, background="keep", support="mask+all").eval()
    one = small("fc", average=True).eval()
    one.backbone.load_state_dict(model.backbone.state_dict())
    image, mask = torch.randn(2, 3, 67, 67), (torch.rand(2, 67, 67) > 0.5).float()
    actual = model.maps(image, mask)["pool5"]
    torch.testing.assert_close(actual[:, :256], one.maps(image)["pool5"])
    torch.testing.assert_close(actual[:, 256:], one.maps(image * mask[:, None])["pool5"])
    model.calibrate([(image, mask)])
    assert model.average.out_features == 1024 and model(image, mask).isfinite().all()
    with pytest.raises(ShapeError, match="two_views needs the regions' masks"):
        model(image)


def test_only_the_head_of_a_frozen_network_is_trained():
    model = small("both", average=True, frozen=True)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"classifier.weight", "classifier.bias"}
    assert not model.trains_features and small("both", frozen=True).trains_features  # its layers use the whole map
    assert small("o2p", frozen=True, function="power", learn_power=True).trains_features
    groups = model.parameter_groups(0.1, 0.1, 0.0)
    assert [group["name"] for group in groups] == ["head"]


def test_bfloat16_features_are_pooled_in_full_precision():
    features = torch.rand(1, 4, 3, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    pooling = SecondOrderVector(4)
    got = pooling(features)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, pooling(features.float()))


def picture():
    return torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def sift_o2p(**more):
    pytest.importorskip("kornia")
    fields = {name.removeprefix("model."): value for name, value in networks.sift_o2p(64).items()}
    return RegionClassifier(3, canvas=64, **(fields | {"support": "mask"} | more))


def test_sift_o2p_pools_the_mean_over_all_scales_inside_the_mask():
    model, image = sift_o2p(), normalize(picture())
    mask = torch.zeros(2, 64, 64)
    mask[:, 20:50, 10:40] = 1
    maps = model.backbone(image, model.backbone.taps)
    rows, weights = [], []
    for tap, actual in maps.items():
        info = model.backbone.info(tap)
        rows.append(actual.flatten(2).mT.double())
        weights.append(mask_to_grid(mask, actual.shape[-2:], info.offset, info.stride).flatten(1).double())
    f, w = torch.cat(rows, 1), torch.cat(weights, 1)
    expected = [oracle(a.numpy(), (b / b.sum()).numpy(), 1e-3, "log") for a, b in zip(f, w, strict=True)]
    np.testing.assert_allclose(model.describe(image, mask).numpy(), np.stack(expected), atol=2e-5)
    assert not model.trains_features and small("o2p").trains_features


def test_later_layers_are_trained_from_a_map():
    model = small("both", average=True, taps=("relu4",), train_from="relu4")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trained if name.startswith("backbone")} == {
        "backbone.features.10.weight", "backbone.features.10.bias",
    }  # fmt: skip
    assert "pooled.0.reduce.weight" in trained
