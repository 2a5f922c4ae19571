"""Using trained models, or none: load one, segment photographs, name regions. Programs and pages use only this room."""

from matbackprop.vision.devices import choose_device
from matbackprop.vision.inference.classifying import classify, classify_regions, name_regions
from matbackprop.vision.inference.loading import load_classifier, load_model, load_segmenter
from matbackprop.vision.inference.onnx_export import export_onnx
from matbackprop.vision.inference.segmenting import (
    Segments,
    merge_by_colour,
    segment,
    segment_frames,
    segment_photograph,
)

__all__ = ["Segments", "choose_device", "classify", "classify_regions", "export_onnx", "load_classifier",
           "load_model", "load_segmenter", "merge_by_colour", "name_regions", "segment", "segment_frames",
           "segment_photograph"]  # fmt: skip
