"""Models with second-order layers as torch.export programs and ONNX files."""

import warnings

import pytest
import torch
from torch import nn

from matbackprop.errors import ConfigurationError
from matbackprop.nn import (
    EIG,
    SecondOrderHead,
    SecondOrderPool,
    SecondOrderPool2d,
    _export,
    for_export,
    replace_pool,
)


def _network(**options):
    """A user's network with a second-order head."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), SecondOrderHead(8, 4, reduce=5, **options)).eval()


def _extended():
    """A network changed by replace_pool, with a last layer that is not zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
    replace_pool(model, IMAGES, reduce=5)
    for name, p in model.named_parameters():
        if "second_order.classifier" in name:
            nn.init.normal_(p)
    return model


IMAGES = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
MODELS = {"head": _network, "replaced pool": _extended}


@pytest.mark.parametrize("spread", [1.0, 1e3])
@pytest.mark.parametrize(
    "options",
    [
        {"function": "log"},
        {"function": "sqrt"},
        {"function": "inv_sqrt"},
        {"function": "inverse"},
        {"function": "power", "exponent": 0.3},
        {"center": True, "learn_eps": True},
    ],
)
@pytest.mark.parametrize("regions", [None, 1, 2])
def test_products_equal_the_decomposition(options, regions, spread):
    draw = torch.Generator().manual_seed(0)
    f = torch.randn(3, 5, 8, generator=draw) * torch.logspace(0, -3, 8) * spread  # fewer cells than channels
    weight = None if regions is None else torch.rand(*((3, 5) if regions == 1 else (3, 2, 5)), generator=draw)
    layer = SecondOrderPool(vectorize=True, **options)
    torch.testing.assert_close(for_export(layer)(f, weight), layer(f, weight), rtol=1e-5, atol=1e-5)


def test_maps_with_masks():
    layer, mask = SecondOrderPool2d(), torch.rand(2, 12, 12) > 0.3
    torch.testing.assert_close(for_export(layer)(IMAGES, mask), layer(IMAGES, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_torch_export_has_no_decomposition(name):
    model = MODELS[name]()
    program = torch.export.export(for_export(model), (IMAGES,))
    assert "linalg" not in str(program.graph)
    torch.testing.assert_close(program.module()(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_onnx_file_gives_the_same_results(name, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(_export, "_ROOTS", (18,))  # enough here, and a graph that is quick to write
    model, path = MODELS[name](), tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        torch.onnx.export(
            for_export(model),
            (IMAGES,),
            path,
            input_names=["image"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    batch = torch.cat([IMAGES, IMAGES.flip(-1)])
    (out,) = session.run(None, {"image": batch.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), model(batch).detach(), rtol=1e-4, atol=1e-4)


def test_the_model_is_unchanged():
    model = _network()
    before = model(IMAGES)
    copy = for_export(model.train())
    assert not copy.training and model.training and model[2].pool.call.__func__ is type(model[2].pool).call
    assert torch.equal(model.eval()(IMAGES), before)


def test_unsupported_layers_are_reported():
    with pytest.raises(ConfigurationError, match=r"Layer '1' \(EIG\) cannot be exported"):
        for_export(nn.Sequential(nn.Identity(), EIG()))
    with pytest.raises(ConfigurationError, match="The function 'exp' cannot be exported"):
        for_export(SecondOrderPool(function="exp"))
    with pytest.raises(ConfigurationError, match="cannot be exported"):
        for_export(SecondOrderPool(function=(torch.sin, torch.cos)))
