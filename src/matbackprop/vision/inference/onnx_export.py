"""Trained networks as ONNX files, for programs without Python or torch.

The file of a classifier is complete: its matrix functions are matrix products (:func:`matbackprop.nn.for_export`). The
file of a contour network ends with contours, that of a DeepNCuts model with features; watershed, merging and clustering
remain in Python (:mod:`matbackprop.vision.segmentation`).
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from matbackprop.errors import ConfigurationError, needs
from matbackprop.nn import for_export
from matbackprop.vision.data.pictures import MAX_PIXELS
from matbackprop.vision.files import atomic_write
from matbackprop.vision.inference.loading import Segmenter
from matbackprop.vision.models.backbones.base import IMAGENET_MEAN, IMAGENET_STD
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.models.deep_o2p import RegionClassifier


def export_onnx(
    model: Segmenter | RegionClassifier, path: str | Path, *, size: tuple[int, int] = (321, 481), opset: int = 18
) -> Path:
    """Write a trained network as an ONNX file.

    Args:
        model: a segmenter: ``image`` (b, 3, h, w), RGB in [0, 1] → ``contours`` (b, h, w), or of DeepNCuts
            ``features`` (b, h', w', d). Or a classifier: ``image`` (b, 3, canvas, canvas), normalized and
            zero outside of the region's box, and ``mask`` (b, canvas, canvas), the fraction of each pixel inside the
            region → ``scores`` (b, classes) before the softmax.
        path: the file, ending in ``.onnx``.
        size: height and width of a segmenter's images; a classifier has a fixed size.
        opset: version of ONNX's operators.

    Returns:
        The path. The file's metadata hold the model's arguments, the names of the classes, and mean and deviation of
        normalized pixels.

    Raises:
        ConfigurationError: the file does not end in ``.onnx``, or the size is not positive or enormous.
        MissingExtraError: onnx and onnxscript are not installed.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise ConfigurationError(f"The file of an exported network must end in .onnx, got {path}. Rename it.")
    if min(size) < 1 or size[0] * size[1] > MAX_PIXELS:
        raise ConfigurationError(f"The image must have from 1 to {MAX_PIXELS} pixels, got {size[0]}×{size[1]}.")
    with needs("writing ONNX files needs onnxscript", "'matbackprop[onnx]'"):
        import onnxscript  # noqa: F401
    path.parent.mkdir(parents=True, exist_ok=True)  # an error here costs no time
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder. Pass a file name.")
    network: nn.Module
    if isinstance(model, RegionClassifier):
        network, inputs, outputs = for_export(model).float().cpu(), ["image"], ["scores"]
        example = [torch.zeros(2, 3, model.canvas, model.canvas)]
        if model.config.two_views or (model.config.support != "all" and model.descriptors()):
            inputs.append("mask")
            example.append(torch.ones(2, model.canvas, model.canvas))
    else:
        contours = isinstance(model, ContourNet)
        network, inputs, outputs = _Segmenter(model), ["image"], ["contours" if contours else "features"]
        example = [torch.zeros(2, 3, *size)]
    batch = torch.export.Dim("batch", min=1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # a warning of the exporter
        program = torch.onnx.export(
            network.eval(),
            tuple(example),
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=tuple({0: batch} for _ in example),
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    notes = {"class": type(model).__name__, "arguments": model.hparams_dict, "names": getattr(model, "names", None)}
    notes |= {"mean": IMAGENET_MEAN, "deviation": IMAGENET_STD}
    program.model.metadata_props.update({name: json.dumps(value) for name, value in notes.items()})
    atomic_write(path, program.model_proto.SerializeToString())
    return path


class _Segmenter(nn.Module):
    def __init__(self, model: Segmenter) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).float().cpu().eval()

    def forward(self, image: Tensor) -> Tensor:
        return self.model.contours(image) if isinstance(self.model, ContourNet) else self.model(image)
