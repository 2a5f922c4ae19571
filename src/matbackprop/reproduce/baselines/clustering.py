"""Spectral clustering with other libraries: scikit-learn on the graph of neighbours, ncut-pytorch on colour and
place."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from matbackprop.errors import MissingExtraError
from matbackprop.reproduce.baselines.simple import check_image
from matbackprop.spectral import connected_components

__all__ = ["KS", "ncut_pytorch", "shrink", "sklearn_spectral", "to_label_maps"]

#: The numbers of clusters of the eight segmentations.
KS = (2, 3, 4, 6, 8, 12, 16, 20)


def shrink(image: Tensor, factor: float) -> Tensor:
    """Scale an image down with antialiasing.

    Args:
        image: uint8 ``(3, h, w)``.
        factor: at most 1.

    Returns:
        float32 in [0, 1], ``(3, ⌈factor·h⌉, ⌈factor·w⌉)``.
    """
    size = [max(1, int(np.ceil(side * factor))) for side in image.shape[1:]]
    return F.interpolate(image[None].float() / 255, size=size, mode="bilinear", antialias=True)[0].clamp(0, 1)


def to_label_maps(labels: list[Tensor], size: tuple[int, int]) -> list[Tensor]:
    """Enlarge label maps to the image by nearest neighbour and split them into connected components.

    Args:
        labels: integers ``(gh, gw)``.
        size: of the image, ``(h, w)``.

    Returns:
        int64 maps ``(h, w)``.
    """
    large = [F.interpolate(one[None, None].double(), size=size, mode="nearest-exact")[0, 0].long() for one in labels]
    return [connected_components(one) for one in large]


def sklearn_spectral(
    image: Tensor, *, ks: tuple[int, ...] = KS, scale: float = 0.25, beta: float = 10.0, seed: int = 0
) -> list[Tensor]:
    """scikit-learn's spectral clustering of the graph of neighbouring pixels, on a smaller image.

    Neighbours are joined with exp(−βΔ/std Δ) + 10⁻⁶, Δ the difference of their grey values, as in scikit-learn's own
    example. One spectral embedding serves all K; K-means labels its first K coordinates.

    Args:
        image: uint8 ``(3, h, w)``.
        ks: numbers of clusters, one segmentation each; an image with fewer pixels gets fewer clusters.
        scale: of the smaller image.
        beta: steepness.
        seed: of the eigensolver's start and of K-means.

    Returns:
        One map for each K, int64 ``(h, w)``, split into connected components.

    Raises:
        MissingExtraError: scikit-learn is not installed.

    Reference: Shi, Malik, "Normalized cuts and image segmentation", PAMI 2000; Pedregosa et al., JMLR 2011.
    """
    try:
        from sklearn.cluster import KMeans
        from sklearn.feature_extraction.image import img_to_graph
        from sklearn.manifold import spectral_embedding
    except ImportError as error:
        raise MissingExtraError("sklearn_spectral needs scikit-learn: pip install 'matbackprop[bench]'") from error
    size = check_image(image)
    grey = shrink(image, scale).mean(0).double().numpy()
    count = min(max(ks), grey.size - 1)
    if count < 2:
        return to_label_maps([torch.zeros(grey.shape, dtype=torch.int64)] * len(ks), size)
    graph = img_to_graph(grey)
    difference = np.where(graph.row == graph.col, 0.0, np.abs(graph.data))
    graph.data = np.exp(-beta * difference / (difference.std() or 1.0)) + 1e-6
    embedding = spectral_embedding(
        graph.tocsr(), n_components=count, eigen_solver="arpack", random_state=seed, drop_first=False
    )
    labels = []
    for k in ks:
        k = min(k, count)
        clusters = KMeans(k, n_init=2, random_state=seed).fit_predict(embedding[:, :k])
        labels.append(torch.from_numpy(clusters.reshape(grey.shape)).long())
    return to_label_maps(labels, size)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators, from which ncut-pytorch and its sampler draw, and put them back afterwards."""
    state = np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            yield
    finally:
        np.random.set_state(state)  # noqa: NPY002


def ncut_pytorch(image: Tensor, *, ks: tuple[int, ...] = KS, scale: float = 0.25, seed: int = 0) -> list[Tensor]:
    """Nyström normalized cuts of ncut-pytorch on the Lab colours and places of the pixels of a smaller image.

    Args:
        image: uint8 ``(3, h, w)``.
        ks: numbers of clusters, one segmentation each.
        scale: of the smaller image.
        seed: of the library's sampling.

    Returns:
        One map for each K, int64 ``(h, w)``, split into connected components.

    Raises:
        MissingExtraError: ncut-pytorch or scikit-image is not installed.

    Reference: Yang, Gee, Shi, "Brain decodes deep nets", CVPR 2024.
    """
    try:
        from ncut_pytorch import Ncut, kway_ncut
        from skimage.color import rgb2lab
    except ImportError as error:
        raise MissingExtraError("ncut_pytorch needs ncut-pytorch: pip install 'matbackprop[bench]'") from error
    size = check_image(image)
    small = shrink(image, scale).permute(1, 2, 0).numpy()
    height, width = small.shape[:2]
    rows, columns = np.mgrid[:height, :width] / max(height, width)
    features = np.concatenate([rgb2lab(small) / 100, rows[..., None], columns[..., None]], axis=2).reshape(-1, 5)
    count = min(max(ks), len(features) - 1)
    if count < 2:
        return to_label_maps([torch.zeros(height, width, dtype=torch.int64)] * len(ks), size)
    labels = []
    with _seeded(seed):
        vectors = Ncut(n_eig=count, device="cpu").fit_transform(torch.from_numpy(features).float())
        for k in ks:
            aligned = kway_ncut(vectors[:, : min(k, count)], device="cpu")
            labels.append(aligned.argmax(-1).view(height, width).long())
    return to_label_maps(labels, size)
