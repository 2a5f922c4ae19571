"""Connected components of label maps: union-find on CUDA, hooking on other accelerators, scikit-image's on the CPU."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from matbackprop.cuda.compiler import Source
from matbackprop.cuda.twin import kernels_may_take
from matbackprop.errors import ConfigurationError, ShapeError

SOURCE = Source("components.cu")
_THREADS = 256


def _components_torch(labels: Tensor, connectivity: int) -> Tensor:
    """Hooking and pointer jumping on (n, h, w): every pixel ends at the first pixel of its component."""
    n, h, w = labels.shape
    index = torch.arange(h * w, device=labels.device).view(1, h, w).expand(n, h, w)
    offsets = torch.arange(n, device=labels.device).view(n, 1, 1) * (h * w)
    index = index + offsets
    shifts = [(0, 1), (1, 0)] + ([(1, 1), (1, -1)] if connectivity == 8 else [])
    pairs = []
    for dy, dx in shifts:
        here = (slice(None), slice(0, h - dy), slice(max(0, -dx), w - max(0, dx)))
        there = (slice(None), slice(dy, h), slice(max(0, dx), w + min(0, dx)))
        same = labels[here] == labels[there]
        pairs.append((index[here][same], index[there][same]))
    first = torch.cat([p for p, _ in pairs])
    second = torch.cat([q for _, q in pairs])
    parent = index.reshape(-1).clone()
    while True:
        a, b = parent[first], parent[second]
        low, high = torch.minimum(a, b), torch.maximum(a, b)
        hooked = parent.scatter_reduce(0, high, low, "amin")
        hooked = hooked.scatter_reduce(0, first, low, "amin").scatter_reduce(0, second, low, "amin")
        for _ in range(4):
            hooked = hooked[hooked]
        if torch.equal(hooked, parent):
            break
        parent = hooked
    return _number(parent, index.reshape(-1), labels.shape)


def _number(root: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """Number the components of each map from 0, by their first pixels; ``root`` names the first pixel of each pixel."""
    rank = (root == index).view(shape[0], -1).cumsum(-1) - 1
    return rank.reshape(-1)[root].view(shape)


def _components_cuda(labels: Tensor, connectivity: int) -> Tensor:
    """Union-find on (n, h, w) in three kernels, without waiting for the device."""
    h, w = labels.shape[1:]
    count = labels.numel()
    flat = labels.to(torch.int64).contiguous()
    parent = torch.empty(count, dtype=torch.int32, device=labels.device)
    root = torch.empty(count, dtype=torch.int64, device=labels.device)
    kernels = SOURCE.on(labels.get_device())
    grid, p = (-(-count // _THREADS),), parent.data_ptr()
    kernels.launch("components_start", grid, _THREADS, 0, (p, count))
    arguments = (flat.data_ptr(), p, count, h, w, int(connectivity == 8))
    kernels.launch("components_unite", grid, _THREADS, 0, arguments)
    kernels.launch("components_finish", grid, _THREADS, 0, (p, root.data_ptr(), count))
    return _number(root, torch.arange(count, device=labels.device), labels.shape)


def _components_skimage(labels: Tensor, connectivity: int) -> Tensor:
    """scikit-image's own, map by map on the CPU."""
    from skimage.measure import label

    shifted = labels.numpy()
    if shifted.min() < 1:
        shifted = shifted - shifted.min() + 1
    out = np.stack([label(one, background=0, connectivity=1 if connectivity == 4 else 2) for one in shifted]) - 1
    return torch.from_numpy(out).long()


def connected_components(labels: Tensor, *, connectivity: int = 4) -> Tensor:
    """Split every segment of a label map into its connected components.

    Kernels of the package find them on CUDA, scikit-image on the CPU where it is installed, torch elsewhere.

    Args:
        labels: integer maps (*b, h, w); any integer is a label.
        connectivity: 4 or 8 neighbours.

    Returns:
        int64 maps (*b, h, w), numbered from 0 in each map in the raster order of the components' first pixels.

    Example:
        >>> connected_components(torch.tensor([[0, 1, 0], [0, 1, 0]]))
        tensor([[0, 1, 2],
                [0, 1, 2]])
    """
    if connectivity not in (4, 8):
        raise ConfigurationError(f"connectivity must be 4 or 8, got {connectivity}.")
    if labels.ndim < 2 or labels.dtype.is_floating_point or labels.dtype.is_complex:
        raise ShapeError(f"labels must be an integer tensor (*b, h, w), got {labels.dtype} {tuple(labels.shape)}.")
    if labels.numel() == 0:
        return labels.long()
    flat = labels.reshape(-1, *labels.shape[-2:])
    if labels.is_cpu and find_spec("skimage") is not None:
        find = _components_skimage
    elif labels.numel() < 2**31 and kernels_may_take(flat):
        find = _components_cuda
    else:
        find = _components_torch
    return find(flat, connectivity).view(labels.shape)
