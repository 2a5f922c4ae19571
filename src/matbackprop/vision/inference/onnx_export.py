"""Export trained networks to ONNX.

Classifiers are exported completely; their matrix functions are replaced by matrix products
(:func:`matbackprop.nn.for_export`). Contour networks are exported up to the contours, and DeepNCuts models up to the
features. Watershed, merging and clustering are not exported (:mod:`matbackprop.vision.segmentation`).
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from matbackprop.errors import ConfigurationError, needs
from matbackprop.nn import for_export
from matbackprop.vision.data.pictures import MAX_PIXELS
from matbackprop.vision.files import atomic_write
from matbackprop.vision.models.backbones.base import IMAGENET_MEAN, IMAGENET_STD
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.models.deep_o2p import RegionClassifier

if TYPE_CHECKING:
    from matbackprop.vision.inference.loading import Segmenter


def export_onnx(model: Segmenter | RegionClassifier, path: str | Path, *, size: tuple[int, int] = (321, 481)) -> Path:
    """Write a trained network as an ONNX file.

    Args:
        model: a segmenter or a classifier. The input of a segmenter is ``image`` (b, 3, h, w), RGB in [0, 1]; its
            output is ``contours`` (b, h, w), or ``features`` (b, h', w', d) for DeepNCuts. The inputs of a classifier
            are ``image`` (b, 3, canvas, canvas), normalized and zero outside the box of the region, and ``mask``
            (b, canvas, canvas), the fraction of each pixel inside the region; its output is ``scores`` (b, classes)
            before the softmax.
        path: target file, ending in ``.onnx``.
        size: input height and width of a segmenter; a classifier has a fixed size.

    Returns:
        The path. The metadata of the file contain the arguments of the model, the class names, and the mean and
        standard deviation for normalization.

    Raises:
        ConfigurationError: the file does not end in ``.onnx``, or the size is out of range.
        MissingExtraError: onnx and onnxscript are not installed.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise ConfigurationError(f"The file of an exported network must end in .onnx, got {path}. Rename it.")
    if min(size) < 1 or size[0] * size[1] > MAX_PIXELS:
        raise ConfigurationError(f"The image must have from 1 to {MAX_PIXELS} pixels, got {size[0]}×{size[1]}.")
    with needs("writing ONNX files needs onnxscript", "'matbackprop[onnx]'"):
        import onnxscript  # noqa: F401
    path.parent.mkdir(parents=True, exist_ok=True)  # fail before the export
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder. Pass a file name.")
    network, inputs, output = _graph(model, size)
    batch = torch.export.Dim("batch", min=1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the exporter
        program = torch.onnx.export(
            network.eval(),
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=[output],
            dynamic_shapes=tuple({0: batch} for _ in inputs),
            opset_version=18,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    notes = {"class": type(model).__name__, "arguments": model.hparams_dict, "names": getattr(model, "names", None)}
    notes |= {"mean": IMAGENET_MEAN, "deviation": IMAGENET_STD}
    program.model.metadata_props.update({name: json.dumps(value) for name, value in notes.items()})
    atomic_write(path, program.model_proto.SerializeToString())
    return path


def _graph(model: Segmenter | RegionClassifier, size: tuple[int, int]) -> tuple[nn.Module, dict[str, Tensor], str]:
    """Return the network to export, examples of its inputs by name, and the name of its output."""
    if not isinstance(model, RegionClassifier):
        output = "contours" if isinstance(model, ContourNet) else "features"
        return _Segmenter(model), {"image": torch.zeros(2, 3, *size)}, output
    inputs = {"image": torch.zeros(2, 3, model.canvas, model.canvas)}
    if model.config.two_views or (model.config.support != "all" and model.descriptors()):
        inputs["mask"] = torch.ones(2, model.canvas, model.canvas)
    return for_export(model).float().cpu(), inputs, "scores"


class _Segmenter(nn.Module):
    def __init__(self, model: Segmenter) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).float().cpu().eval()

    def forward(self, image: Tensor) -> Tensor:
        return self.model.contours(image) if isinstance(self.model, ContourNet) else self.model(image)
