"""Superpixels, by scikit-image on the CPU and by a kernel on CUDA, and the graph of neighbouring regions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from matbackprop.cuda.compiler import Module, Source
from matbackprop.cuda.fallback import kernels_may_take
from matbackprop.errors import ConfigurationError, ShapeError, needs


def rgb_to_lab(image: Tensor) -> Tensor:
    """Convert sRGB (*b, 3, h, w) in [0, 1] to CIE Lab (D65), L in [0, 100].

    Example:
        >>> rgb_to_lab(torch.ones(3, 1, 1)).flatten().round(decimals=1).abs()
        tensor([100.,   0.,   0.])
    """
    linear = torch.where(image > 0.04045, ((image.clamp(min=0) + 0.055) / 1.055) ** 2.4, image / 12.92)
    matrix = image.new_tensor(
        [
            [0.412453 / 0.95047, 0.357580 / 0.95047, 0.180423 / 0.95047],
            [0.212671, 0.715160, 0.072169],
            [0.019334 / 1.08883, 0.119193 / 1.08883, 0.950227 / 1.08883],
        ]
    )
    xyz = torch.einsum("ij,...jhw->...ihw", matrix, linear)
    f = torch.where(xyz > 0.008856, xyz.clamp(min=1e-8) ** (1 / 3), 7.787 * xyz + 16 / 116)
    x, y, z = f.unbind(-3)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -3)


class RegionGraph(NamedTuple):
    """Which regions of a partition touch.

    Attributes:
        areas: (S,) pixels of each region.
        edges: (E, 2) pairs i < j of regions that share a border, sorted.
        lengths: (E,) number of neighbouring pixel pairs across the border.
        pairs: (P,) for each such pixel pair its edge, horizontal pairs first, both in raster order.
    """

    areas: NDArray[np.int64]
    edges: NDArray[np.int64]
    lengths: NDArray[np.int64]
    pairs: NDArray[np.int64]


COMPACTNESS = 8.0  # weight of the distance in space against that in colour
SMOOTHING = 0.7  # deviation, in pixels, of the Gaussian before SLIC


def is_tiny(height: int, width: int, count: int) -> bool:
    """Whether an image is too small for SLIC, so that squares are its superpixels."""
    return height * width <= 4 * count or min(height, width) < 4


def too_few(regions: NDArray[np.integer], count: int) -> bool:
    """Whether SLIC left less than a third of the superpixels wanted: on noise its pieces fall apart and are united."""
    return bool(3 * np.count_nonzero(np.bincount(regions.ravel())) < count)


def number_regions(regions: NDArray[np.integer]) -> NDArray[np.int32]:
    """Number regions from 0 without gaps, in the order of their numbers."""
    used = np.bincount(regions.ravel()) > 0
    return (np.cumsum(used, dtype=np.int32) - 1)[regions]


def slic_superpixels(image: ArrayLike, count: int = 600) -> NDArray[np.int32]:
    """Divide an RGB image into about ``count`` connected superpixels (SLIC).

    Args:
        image: (h, w, 3) uint8, or floating point in [0, 1].
        count: wanted number of superpixels; images with fewer pixels get fewer.

    Returns:
        int32 map (h, w), numbered from 0 without gaps.

    Raises:
        MissingExtraError: scikit-image is not installed.

    References:
        R. Achanta et al., SLIC superpixels compared to state-of-the-art superpixel methods, PAMI 2012.
    """
    array = np.asarray(image)
    if array.ndim != 3 or array.shape[-1] != 3 or 0 in array.shape:
        raise ShapeError(f"image must be (h, w, 3) with at least one pixel, got {array.shape}.")
    if count < 1:
        raise ConfigurationError(f"count must be positive, got {count}.")
    height, width = array.shape[:2]
    if is_tiny(height, width, count):
        side = max(1, round(float(np.sqrt(height * width / count))))
        rows, columns = np.arange(height) // side, np.arange(width) // side
        return (rows[:, None] * (columns[-1] + 1) + columns).astype(np.int32)
    with needs("superpixels need scikit-image", "'matbackprop[train]'"):
        from skimage.segmentation import slic
    for stronger in (1, 4, 16):  # weigh space more until enough are left
        weight = COMPACTNESS * stronger
        out = slic(array, n_segments=count, compactness=weight, sigma=SMOOTHING, start_label=0, channel_axis=-1)
        if not too_few(out, count):
            break
    return number_regions(out)


def region_graph(regions: ArrayLike) -> RegionGraph:
    """Build the graph of 4-neighbouring regions of a partition (h, w) numbered from 0.

    Example:
        >>> region_graph([[0, 0, 1], [2, 2, 1]]).edges.tolist()
        [[0, 1], [0, 2], [1, 2]]
    """
    r = np.asarray(regions)
    if r.ndim != 2 or r.size == 0 or not np.issubdtype(r.dtype, np.integer):
        raise ShapeError(f"regions must be a non-empty integer map (h, w), got {r.dtype} {r.shape}.")
    count = int(r.max()) + 1
    sides = []
    for one, other in ((r[:, :-1].ravel(), r[:, 1:].ravel()), (r[:-1].ravel(), r[1:].ravel())):
        # Few pixels lie at a border: all that follows looks only at those.
        across = np.flatnonzero(one != other)
        sides.append((one[across], other[across]))
    a, b = (np.concatenate(side).astype(np.int64) for side in zip(*sides, strict=True))
    key = np.minimum(a, b) * count + np.maximum(a, b)
    unique, pairs, lengths = np.unique(key, return_inverse=True, return_counts=True)
    edges = np.stack([unique // count, unique % count], 1)
    areas = np.bincount(r.ravel().astype(np.int64, copy=False), minlength=count)
    return RegionGraph(areas, edges, lengths.astype(np.int64), pairs.astype(np.int64))


def border_mean(regions: ArrayLike, graph: RegionGraph, values: ArrayLike) -> NDArray[np.float64]:
    """Mean of a map (h, w) along the border of each edge of ``graph``, over the pixels on both sides."""
    r, v = np.asarray(regions), np.asarray(values, dtype=np.float64)
    if v.shape != r.shape:
        raise ShapeError(f"values must have the regions' shape {r.shape}, got {v.shape}.")
    horizontal, vertical = r[:, :-1] != r[:, 1:], r[:-1] != r[1:]
    across = np.concatenate([(v[:, :-1] + v[:, 1:])[horizontal], (v[:-1] + v[1:])[vertical]])
    sums = np.bincount(graph.pairs, weights=across, minlength=len(graph.edges))
    return 0.5 * sums / graph.lengths


def region_means(regions: ArrayLike, values: ArrayLike) -> NDArray[np.float64]:
    """Mean of a map (h, w, e) in every region: (S, e); regions without a pixel get zeros."""
    r = np.asarray(regions)
    v, size = np.asarray(values).reshape(*r.shape, -1), int(r.max()) + 1
    sums = np.zeros((size, v.shape[-1] + 1))
    rows = max(1, (1 << 22) // r.shape[1])  # in strips, because large photographs have large maps
    for strip, part in ((r[i : i + rows].ravel(), v[i : i + rows]) for i in range(0, len(r), rows)):
        for c, column in enumerate(part.reshape(strip.size, -1).T):
            sums[:, c] += np.bincount(strip, column, size)
        sums[:, -1] += np.bincount(strip, minlength=size)
    return sums[:, :-1] / np.maximum(sums[:, -1:], 1)


SOURCE = Source("slic.cu")
_THREADS = 128
_ITERATIONS = 10
_FIXED = 2.0**40
"""Colours are summed in units of 2⁻⁴⁰: of less than 2⁵ each, 2¹⁸ of them fit into 64 bits."""


def works_on(images: Tensor, count: int) -> bool:
    """Whether :func:`assign_superpixels` can be used: CUDA, not too few pixels, and scikit-image's connectivity."""
    height, width = images.shape[-2:]
    if images.device.type != "cuda" or is_tiny(height, width, count) or height * width > 2**18 * count // 16:
        return False
    try:
        from skimage.segmentation._slic import _enforce_label_connectivity_cython  # noqa: F401
    except ImportError:  # not part of its public names: without it all of SLIC is left to the CPU
        return False
    return kernels_may_take(images)


def _centres(height: int, width: int, count: int) -> tuple[NDArray[np.int64], tuple[int, int]]:
    """Where SLIC starts, (k, 2) rows and columns, and the steps between them."""
    from skimage.util import regular_grid

    _, down, right = regular_grid((1, height, width), count)
    rows, columns = np.arange(height)[down], np.arange(width)[right]
    grid = np.stack(np.meshgrid(rows, columns, indexing="ij"), -1).reshape(-1, 2)
    return grid, (int(down.step or 1), int(right.step or 1))


def _smooth(maps: Tensor, sigma: float) -> Tensor:
    """Gaussian of maps (b, c, h, w) with mirrored borders, cut off after four deviations."""
    reach = int(4 * sigma + 0.5)
    places = torch.arange(-reach, reach + 1, device=maps.device, dtype=maps.dtype)
    kernel = torch.exp(-0.5 * (places / sigma) ** 2)
    kernel = kernel / kernel.sum()
    for dimension in (2, 3):
        size = maps.shape[dimension]
        index = torch.arange(-reach, size + reach, device=maps.device) % (2 * size)
        index = torch.where(index < size, index, 2 * size - 1 - index)
        padded = maps.index_select(dimension, index)
        maps = sum(k * padded.narrow(dimension, i, size) for i, k in enumerate(kernel.unbind()))  # type: ignore[assignment]
    return maps


def _colours(images: Tensor) -> Tensor:
    """What pixels are compared by besides their place: smoothed Lab colours (b, 3, h, w) of the stretched image."""
    x = images.double() / 255 if images.dtype == torch.uint8 else images.double()
    low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
    x = (x - low) / torch.where(high > low, high - low, 1.0)
    return _smooth(rgb_to_lab(x), SMOOTHING) / COMPACTNESS


def assign_superpixels(images: Tensor, count: int = 600, *, kernels: Module | None = None) -> Tensor:
    """Find which of SLIC's centres each pixel of some images belongs to; regions need not be connected yet.

    Args:
        images: (b, 3, h, w) uint8, or floating point in [0, 1], for which :func:`works_on` holds.
        count: wanted number of superpixels.
        kernels: compiled elsewhere.

    Returns:
        int64 maps (b, h, w) on the images' device.
    """
    b, _, height, width = images.shape
    device = images.device
    kernels = kernels or SOURCE.on(images.get_device())
    start, steps = _centres(height, width, count)
    k = len(start)
    reach = _centres(height, width, k)[1]
    colour = _colours(images).contiguous()
    rows = torch.arange(height, device=device).view(-1, 1).expand(height, width)
    columns = torch.arange(width, device=device).expand(height, width)
    places = torch.stack([rows, columns]).flatten(1).expand(b, -1, -1)
    numbers = torch.cat([places, (colour.flatten(2) * _FIXED).round().long(), torch.ones_like(places[:, :1])], 1)
    numbers = numbers.movedim(1, 2).reshape(-1, 6)
    units = torch.tensor([1.0, 1.0, _FIXED, _FIXED, _FIXED], dtype=torch.float64, device=device)
    limits = torch.tensor([height, width], device=device)
    span = torch.tensor(reach, device=device) * 2
    offsets = torch.arange(b, device=device).view(-1, 1, 1) * k
    centres = torch.zeros(b, k, 5, dtype=torch.float64, device=device)
    centres[..., :2] = torch.from_numpy(start).to(device)
    labels = torch.empty(b, height, width, dtype=torch.int64, device=device)
    weight, blocks = 1.0 / max(steps) ** 2, -(-labels.numel() // _THREADS)
    for turn in range(_ITERATIONS):
        low = (centres[..., :2] - span).clamp(min=0).nan_to_num(0).long()
        high = torch.minimum((centres[..., :2] + span + 1).nan_to_num(0).long(), limits)
        windows = torch.stack([low, high], -1).int().contiguous()
        addresses = (colour.data_ptr(), centres.data_ptr(), windows.data_ptr(), labels.data_ptr())
        kernels.launch("slic_assign", (blocks,), _THREADS, 0, (*addresses, b, height, width, k, weight))
        if turn + 1 < _ITERATIONS:
            sums = torch.zeros(b * k, 6, dtype=torch.int64, device=device)
            sums.index_add_(0, (labels + offsets).view(-1), numbers)
            centres = (sums[:, :5].double() / units / sums[:, 5:]).view(b, k, 5)  # nan where nothing is left
    return labels


def connect_superpixels(assigned: NDArray[np.integer], image: ArrayLike, count: int = 600) -> NDArray[np.int32]:
    """Make the regions of one image connected, as SLIC ends: small pieces go to a neighbour (CPU).

    Args:
        assigned: (h, w), of :func:`assign_superpixels`.
        image: (h, w, 3), of which they are.
        count: as for :func:`assign_superpixels`.

    Returns:
        What :func:`slic_superpixels` finds.
    """
    from skimage.segmentation._slic import _enforce_label_connectivity_cython

    height, width = assigned.shape
    size = assigned.size / len(_centres(height, width, count)[0])
    labels = np.ascontiguousarray(assigned[None], dtype=np.intp)
    out = _enforce_label_connectivity_cython(labels, int(0.5 * size), int(3 * size), start_label=0)[0]
    if too_few(out, count):
        return slic_superpixels(image, count)
    return number_regions(out)


def slic_of(image: Tensor, count: int = 600) -> NDArray[np.int32]:
    """:func:`slic_superpixels` of a tensor (3, h, w), on its device where that can be."""
    array = image.movedim(0, -1).cpu().numpy()
    if not works_on(image, count):
        return slic_superpixels(array, count)
    assigned = assign_superpixels(image.unsqueeze(0), count)[0]
    return connect_superpixels(assigned.int().cpu().numpy(), array, count)
