"""SLIC with its K-means on a CUDA device: the superpixels of :func:`slic_superpixels`, many images at a time.

All of it is in float64, and sums are of integers, so that a device gives the same superpixels every time and those that
scikit-image finds, but for pixels that are as near to two centres as rounding can tell.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from matbackprop.cuda.compiler import Module, Source
from matbackprop.cuda.twin import kernels_may_take
from matbackprop.spectral.colour import rgb_to_lab
from matbackprop.spectral.superpixels import COMPACTNESS, SMOOTHING, is_tiny, number_regions, slic_superpixels, too_few

__all__ = ["assign_superpixels", "connect_superpixels", "slic_of", "works_on"]

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
