"""Networks as ONNX files, run by onnxruntime."""

import json

import pytest
import torch

from matbackprop.cli import main
from matbackprop.errors import ConfigurationError
from matbackprop.nn import _export
from matbackprop.vision.inference import load_model
from matbackprop.vision.inference.onnx_export import export_onnx
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.models.deep_ncuts import DeepNCuts
from matbackprop.vision.models.deep_o2p import RegionClassifier


def run(path, **inputs):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    outputs = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    return [torch.from_numpy(one) for one in outputs], session.get_modelmeta().custom_metadata_map


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"head": "both", "average": True, "two_views": True, "support": "mask+all", "background": "keep"}
        | {"function": "sqrt"},
        {"head": "fc", "hidden": 8},
    ],
)
def test_a_classifier_gives_the_same_scores_in_onnxruntime(arguments, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(_export, "_ROOTS", (18,))  # enough for these features, and a graph that is quick to write
    torch.manual_seed(0)
    pooled = {} if arguments["head"] == "fc" else {"reduce": 6, "taps": ("relu5",)}
    model = RegionClassifier(3, canvas=67, names=["a", "b", "c"], **pooled, **arguments).eval()
    image, mask = torch.randn(3, 3, 67, 67), (torch.rand(3, 67, 67) > 0.3).float()
    model.calibrate([(image, mask)])
    torch.nn.init.normal_(model.classifier.weight)
    path = export_onnx(model, tmp_path / "classifier.onnx")
    masked = {"mask": mask} if "two_views" in arguments else {}
    (scores,), notes = run(path, image=image, **masked)
    with torch.no_grad():
        torch.testing.assert_close(scores, model(image, mask), rtol=1e-3, atol=1e-3)
    assert json.loads(notes["names"]) == ["a", "b", "c"] and json.loads(notes["arguments"])["canvas"] == 67


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["contours", "features"])
def test_a_segmenter_gives_the_same_contours_or_features(tmp_path, kind):
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    if kind == "contours":
        model = ContourNet(backbone="alexnet", taps=("relu1", "relu5"), width=12, stem=6).eval()
    else:
        model = DeepNCuts(variant="alexnet-relu5", hidden=16, channels=8).eval()
    image = torch.rand(3, 3, 64, 96)  # any number of images
    path = export_onnx(model, tmp_path / "deep" / "segmenter.onnx", size=(64, 96))
    (actual,), notes = run(path, image=image)
    with torch.no_grad():
        expected = model.contours(image) if kind == "contours" else model(image)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert json.loads(notes["class"]) == type(model).__name__


def test_the_command_writes_a_file_of_either_kind(tmp_path, capsys):
    pytest.importorskip("onnxscript")
    model = RegionClassifier(2, head="fc", average=True, canvas=67, names=["cup", "plate"])
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(SystemExit, match="0"):
        main(["export", str(tmp_path / "model"), "--out", str(tmp_path / "cup.onnx")])
    assert "cup.onnx: 9.9 MB" in capsys.readouterr().out
    image = torch.rand(1, 3, 67, 67)
    (scores,), _ = run(tmp_path / "cup.onnx", image=image)
    with torch.no_grad():
        torch.testing.assert_close(scores, load_model(tmp_path / "model")(image), rtol=1e-3, atol=1e-3)
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(tmp_path / "nothing"), "--out", str(tmp_path / "no.onnx")])
    assert not (tmp_path / "no.onnx").exists()


def test_bad_requests_are_reported_and_write_nothing(tmp_path):
    model = RegionClassifier(2, head="fc", average=True, canvas=67)
    with pytest.raises(ConfigurationError, match=r"must end in \.onnx"):
        export_onnx(model, tmp_path / "network.pt")
    with pytest.raises(ConfigurationError, match="from 1 to 50000000 pixels, got 0×5"):
        export_onnx(model, tmp_path / "network.onnx", size=(0, 5))
    assert not list(tmp_path.iterdir())
