"""``matbackprop export MODEL --out FILE.onnx``: write a trained network as an ONNX file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro


@dataclass
class Config:
    """Write a trained network as an ONNX file.

    A classifier is exported completely. A segmenter is exported up to its contours or features, without watershed,
    merging and clustering.
    """

    #: Folder of a trained model, a run folder, owner/name on the Hugging Face hub, or a network in the package: box or
    #: box/small (segmenters), box/classifier (classifier).
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    out: Path = Path("network.onnx")  #: File to write.
    size: tuple[int, int] = (321, 481)  #: Input height and width of a segmenter; a classifier has a fixed size.


def main(config: Config) -> dict[str, Any]:
    """Write the file."""
    from matbackprop.vision.inference.loading import load_model
    from matbackprop.vision.inference.onnx_export import export_onnx

    path = export_onnx(load_model(config.model), config.out, size=config.size)
    size = path.stat().st_size
    return {"summary": f"{path}: {size / 1e6:.1f} MB", "file": path, "bytes": size}
