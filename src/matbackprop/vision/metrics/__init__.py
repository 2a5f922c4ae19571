"""Segmentation metrics: covering, Rand index, variation of information, boundaries, objects and parts.

Functions on NumPy arrays evaluate one image or a data set. The torchmetrics classes compute the same scores over
batches and processes. They are imported on first use, because torchmetrics is slow to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from matbackprop.vision.metrics.bootstrap import PairedInterval, paired_bootstrap
from matbackprop.vision.metrics.boundaries import (
    boundary_counts,
    boundary_f_measure,
    boundary_map,
    contour_counts,
    f_measure,
    thin_boundaries,
    thin_contours,
)
from matbackprop.vision.metrics.evaluation import (
    ImageScores,
    boundary_curve,
    evaluate_segmentations,
    score_image,
    score_images,
    summarize,
)
from matbackprop.vision.metrics.objects_parts import objects_and_parts
from matbackprop.vision.metrics.regions import (
    RegionScores,
    as_label_map,
    compact_labels,
    rand_index,
    region_scores,
    segmentation_covering,
    variation_of_information,
)

if TYPE_CHECKING:
    from matbackprop.vision.metrics.torch_metrics import (
        BoundaryFMeasure,
        ObjectsAndParts,
        RandIndex,
        SegmentationCovering,
        VariationOfInformation,
    )

__all__ = ["BoundaryFMeasure", "ImageScores", "ObjectsAndParts", "PairedInterval", "RandIndex", "RegionScores",
           "SegmentationCovering", "VariationOfInformation", "as_label_map", "boundary_counts", "boundary_curve",
           "boundary_f_measure", "boundary_map", "compact_labels", "contour_counts", "evaluate_segmentations",
           "f_measure", "objects_and_parts", "paired_bootstrap", "rand_index", "region_scores",
           "score_image", "score_images", "segmentation_covering", "summarize", "thin_boundaries", "thin_contours",
           "variation_of_information"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("matbackprop.vision.metrics.torch_metrics"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
