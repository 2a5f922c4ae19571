"""Load trained models, segment photographs and classify regions. The modules are imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matbackprop.vision.inference.classifying import classify, classify_regions, name_regions
    from matbackprop.vision.inference.loading import load_classifier, load_model, load_segmenter
    from matbackprop.vision.inference.onnx_export import export_onnx
    from matbackprop.vision.inference.segmenting import segment, segment_photograph
    from matbackprop.vision.inference.segments import Segments

__all__ = ["Segments", "classify", "classify_regions", "export_onnx", "load_classifier",
           "load_model", "load_segmenter", "name_regions", "segment", "segment_photograph"]  # fmt: skip

_MODULES = {
    "segments": ("Segments",),
    "loading": ("load_classifier", "load_model", "load_segmenter"),
    "segmenting": ("segment", "segment_photograph"),
    "classifying": ("classify", "classify_regions", "name_regions"),
    "onnx_export": ("export_onnx",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
