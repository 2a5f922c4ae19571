"""Hierarchical segmentation from contours, and spectral clustering of features.

The clustering is imported on first use, because it needs torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from matbackprop.vision.segmentation.hierarchy import (
    LEVELS,
    Hierarchy,
    contour_map,
    merge_contours,
    split_region,
    unite_region,
    watershed_regions,
)
from matbackprop.vision.segmentation.refine import refine_labels
from matbackprop.vision.segmentation.regions import RegionGraph, border_strengths, region_graph, region_means

if TYPE_CHECKING:
    from matbackprop.vision.segmentation.clustering import KMeans, weighted_kmeans
    from matbackprop.vision.segmentation.segment import (
        CLUSTER_KS,
        Embedding,
        NCutSpace,
        Segmentation,
        SoftSpace,
        connected_components,
        segment_features,
    )

__all__ = ["CLUSTER_KS", "LEVELS", "Embedding", "Hierarchy", "KMeans", "NCutSpace", "RegionGraph", "Segmentation",
           "SoftSpace", "border_strengths", "connected_components", "contour_map", "merge_contours", "refine_labels",
           "region_graph", "region_means", "segment_features", "split_region", "unite_region", "watershed_regions",
           "weighted_kmeans"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = "clustering" if name in ("KMeans", "weighted_kmeans") else "segment"
        return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
