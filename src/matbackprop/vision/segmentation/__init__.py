"""Features → spectral embedding → clusterings for every K → label maps; and merging of regions into a hierarchy."""

from matbackprop.vision.segmentation.clustering import (
    KMeans,
    KMeansRounding,
    PivotedQRRounding,
    YuShiRounding,
    pivoted_qr_rotation,
    weighted_kmeans,
    yu_shi_rotation,
)
from matbackprop.vision.segmentation.hierarchy import (
    MERGE_KS,
    Hierarchy,
    MergeCost,
    contour_map,
    merge_regions,
    number_strengths,
)
from matbackprop.vision.segmentation.segment import (
    CLUSTER_KS,
    Embedding,
    KChoice,
    NCutSpace,
    Segmentation,
    SoftSpace,
    choose_k,
    connected_components,
    ncut_embedding,
    segment_features,
    soft_embedding,
)
from matbackprop.vision.segmentation.superpixels import (
    RegionGraph,
    border_mean,
    region_graph,
    region_means,
    rgb_to_lab,
    slic_superpixels,
)

__all__ = ["CLUSTER_KS", "MERGE_KS", "Embedding", "Hierarchy", "KChoice", "KMeans", "KMeansRounding", "MergeCost",
           "NCutSpace", "PivotedQRRounding", "RegionGraph", "Segmentation", "SoftSpace", "YuShiRounding",
           "border_mean", "choose_k", "connected_components", "contour_map", "merge_regions", "ncut_embedding",
           "number_strengths", "pivoted_qr_rotation", "region_graph", "region_means", "rgb_to_lab", "segment_features",
           "slic_superpixels", "soft_embedding", "weighted_kmeans", "yu_shi_rotation"]  # fmt: skip
