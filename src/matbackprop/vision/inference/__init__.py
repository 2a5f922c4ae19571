"""Load trained models, segment photographs and classify regions."""

from matbackprop.vision.devices import choose_device
from matbackprop.vision.inference.classifying import classify, classify_regions, name_regions
from matbackprop.vision.inference.loading import load_classifier, load_model, load_segmenter
from matbackprop.vision.inference.onnx_export import export_onnx
from matbackprop.vision.inference.segmenting import Segments, segment, segment_frames, segment_photograph

__all__ = ["Segments", "choose_device", "classify", "classify_regions", "export_onnx", "load_classifier",
           "load_model", "load_segmenter", "name_regions", "segment", "segment_frames",
           "segment_photograph"]  # fmt: skip
