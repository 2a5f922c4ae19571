"""Trained networks as ONNX files, for programs without Python or torch.

ONNX has no eigendecomposition. A classifier's file is complete all the same: the matrix functions of its second-order
layers are computed by products of matrices in double precision (Newton-Schulz square roots, and a series for the
logarithm of the last of eight), which is exact to rounding while ε is at least 1e-10 of the pooled matrix. The file
of a contour network ends with the contours; watershed and merging stay in Python
(:func:`matbackprop.vision.segmentation.watershed_regions`, :func:`~matbackprop.vision.segmentation.merge_contours`).
The file of a DeepNCuts model ends with the features F, which
:func:`matbackprop.vision.segmentation.segment_features` clusters.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from matbackprop.errors import ConfigurationError, needs
from matbackprop.functional import vectorize_symmetric
from matbackprop.nn import SecondOrderPool
from matbackprop.vision.data.pictures import MAX_PIXELS
from matbackprop.vision.files import atomic_write
from matbackprop.vision.inference.loading import Segmenter
from matbackprop.vision.models.backbones.base import IMAGENET_MEAN, IMAGENET_STD
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.models.deep_o2p import RegionClassifier

_ROOTS = (40, 26, 18, 14, 12, 10, 9, 9)
"""Steps of the square roots one after the other: eigenvalues from 1e-10 on grow by 9/4 in each until they are near 1,
then converge quadratically; each root starts from the previous one."""
_TERMS = 20


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
        raise ConfigurationError(f"the file of an exported network ends in .onnx, got {path}.")
    if min(size) < 1 or size[0] * size[1] > MAX_PIXELS:
        raise ConfigurationError(f"images have from 1 to {MAX_PIXELS} pixels, got size {size[0]}×{size[1]}.")
    with needs("writing ONNX files needs onnxscript", "'matbackprop[onnx]'"):
        import onnxscript  # noqa: F401
    path.parent.mkdir(parents=True, exist_ok=True)  # before the work, which would be lost
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder; name a file.")
    network: nn.Module
    if isinstance(model, RegionClassifier):
        network, inputs, outputs = _Classifier(model), ["image"], ["scores"]
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
    """A segmenter whose only output is its contours or features."""

    def __init__(self, model: Segmenter) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).float().cpu().eval()

    def forward(self, image: Tensor) -> Tensor:
        return self.model.contours(image) if isinstance(self.model, ContourNet) else self.model(image)


class _Classifier(nn.Module):
    """A classifier with second-order layers of matrix products."""

    def __init__(self, model: RegionClassifier) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).float().cpu().eval()
        for pooling in self.model.poolings().values():
            pooling.layer = _ProductPool(pooling.layer)  # type: ignore[assignment]

    def forward(self, image: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.model(image, mask)


class _ProductPool(nn.Module):
    """A :class:`SecondOrderPool` by matrix products: triangles of g(Fᵀ diag(w) F + εI)."""

    def __init__(self, layer: SecondOrderPool) -> None:
        super().__init__()
        self.eps = layer.eps if layer.log_eps is None else float(layer.log_eps.detach().exp())
        self.center = bool(layer.center)
        exponent: Any = layer.exponent
        self.power = {"log": None, "sqrt": 0.5}[str(layer.function)] if exponent is None else float(exponent)

    def forward(self, f: Tensor, weight: Tensor | None = None) -> Tensor:
        f = f.double()
        if weight is None:
            weight = torch.ones_like(f[..., 0])
        if weight.ndim == 3:  # several supports share one map
            f = f.unsqueeze(1)
        w = weight.double().unsqueeze(-1)
        if self.center:
            f = f - (w * f).sum(-2, keepdim=True) / w.sum(-2, keepdim=True)
        a = (w * f).mT @ f + self.eps * torch.eye(f.shape[-1], dtype=f.dtype)
        return vectorize_symmetric(_logarithm(a) if self.power is None else _power(a, self.power)).float()


def _root(y: Tensor, steps: int) -> Tensor:
    """Square roots of symmetric matrices with eigenvalues in (0, 1], by the coupled Newton-Schulz iteration."""
    identity = torch.eye(y.shape[-1], dtype=y.dtype)
    z = identity.expand_as(y)
    for _ in range(steps):
        t = 1.5 * identity - 0.5 * (z @ y)
        y, z = y @ t, t @ z
    return y


def _scaled(a: Tensor) -> tuple[Tensor, Tensor]:
    scale = a.square().sum((-2, -1), keepdim=True).sqrt()
    return a / scale, scale


def _logarithm(a: Tensor) -> Tensor:
    """Matrix logarithm: log A = log s·I + 2⁸ log (A/s)^(1/2⁸), s the norm of A."""
    b, scale = _scaled(a)
    for steps in _ROOTS:
        b = _root(b, steps)
    identity = torch.eye(a.shape[-1], dtype=a.dtype)
    rest = identity - b
    total = rest / _TERMS
    for n in range(_TERMS - 1, 0, -1):  # −log(I − X) = X + X²/2 + …, from the last term on
        total = rest @ (identity / n + total)
    return scale.log() * identity - 2 ** len(_ROOTS) * total


def _power(a: Tensor, power: float) -> Tensor:
    """Matrix power: a square root, or exp(p log A) by scaling and squaring."""
    if power == 0.5:
        b, scale = _scaled(a)
        return _root(b, _ROOTS[0]) * scale.sqrt()
    identity = torch.eye(a.shape[-1], dtype=a.dtype)
    x = _logarithm(a) * (power / 2**8)
    total = identity + x / 12
    for n in range(11, 0, -1):
        total = identity + x @ total / n
    for _ in range(8):
        total = total @ total
    return total
