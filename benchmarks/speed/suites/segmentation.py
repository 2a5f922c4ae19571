"""From features of one photograph-sized image to segmentations of full size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.speed import peers
from benchmarks.speed.suites.entry import Entry, Scale
from matbackprop.vision.segmentation import segment_features

_KS = (3, 5, 8, 12, 16, 20, 30, 40)
_CLUSTERS = 8
_SUPERPIXELS = 400


def scene(height: int, width: int, dims: int) -> tuple[NDArray[np.float32], Tensor]:
    """A picture of 25 flat regions with noise (h, w, 3), and its soft color features (h, w, dims) in (0, 1]."""
    generator = np.random.default_rng(0)
    sites = generator.random((25, 2)) * (height, width)
    colors = generator.random((25, 3))
    grid = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), -1)
    nearest = np.stack([((grid - s) ** 2).sum(-1) for s in sites]).argmin(0)
    image = colors[nearest] + 0.05 * generator.standard_normal((height, width, 3))
    palette = torch.from_numpy(generator.random((dims, 3)))
    pixels = torch.from_numpy(image)
    distance = (pixels.unsqueeze(-2) - palette).square().sum(-1)
    return image.clip(0, 1).astype(np.float32), torch.exp(-distance / 0.08).float()


def _sklearn(image: NDArray[np.float32]) -> Callable[[], Any]:
    cluster = peers.need("sklearn.cluster")
    extraction = peers.need("sklearn.feature_extraction.image")

    def run() -> Any:
        graph = extraction.img_to_graph(image.mean(-1))
        graph.data = np.exp(-10 * graph.data / graph.data.std()) + 1e-6
        return cluster.spectral_clustering(graph, n_clusters=_CLUSTERS, assign_labels="cluster_qr", random_state=0)

    return run


def _ncut_pytorch(f: Tensor) -> Callable[[], Any]:
    package = peers.need("ncut_pytorch")
    flat = f.reshape(-1, f.shape[-1])

    def run() -> Any:
        vectors = package.Ncut(n_eig=_CLUSTERS, device=str(f.device)).fit_transform(flat)
        return package.kway_ncut(vectors[:, :_CLUSTERS]).argmax(-1)

    return run


def _skimage(image: NDArray[np.float32]) -> Callable[[], Any]:
    graph = peers.need("skimage.graph")
    regions = peers.need("skimage.segmentation")

    def run() -> Any:
        labels = regions.slic(image, n_segments=_SUPERPIXELS, compactness=10, start_label=1)
        return graph.cut_normalized(labels, graph.rag_mean_color(image, labels, mode="similarity"))

    return run


def segmentation(device: torch.device, scale: Scale) -> Iterator[Entry]:
    """One 481×321 image; the package computes 8 segmentations at once, the others one each."""
    height, width, dims = (24, 36, 6) if scale == "quick" else (321, 481, 20)
    ks = (2, 3) if scale == "quick" else _KS
    case = f"one {width}×{height} image"
    image, f = scene(height, width, dims)

    def ours(dev: torch.device) -> Callable[[], Any]:
        x = f.to(dev)
        return lambda: segment_features(x, ks, size=(height, width))

    one = f"one segmentation, K = {_CLUSTERS}"
    yield Entry(case, "matbackprop", ours, note=f"{len(ks)} segmentations, d = {dims}")
    yield Entry(case, "ncut-pytorch", lambda dev: _ncut_pytorch(f.to(dev)), note=one)
    note = f"{one}; on the CPU, pixel-grid graph"
    yield Entry(case, "scikit-learn spectral_clustering", lambda dev: _sklearn(image), note=note)
    note = f"one segmentation; on the CPU, {_SUPERPIXELS} superpixels"
    yield Entry(case, "scikit-image cut_normalized", lambda dev: _skimage(image), note=note)
