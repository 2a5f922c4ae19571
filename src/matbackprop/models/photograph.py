"""Segmenting one photograph of any size, with a trained network or without any."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional as nnf

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.models.colour_merging import merge_by_colour
from matbackprop.models.deep_ncuts import DeepNCuts, Merging, default_ks
from matbackprop.spectral import choose_k

__all__ = ["Photograph", "segment_photograph"]


@dataclass(frozen=True)
class Photograph:
    """Segmentations of one photograph.

    Attributes:
        labels: (n, h, w) int32 maps at the photograph's own size, numbered from 0.
        ks: what was asked for: numbers of clusters, or of regions.
        chosen: index of the map whose number is nearest to the one that the spectrum suggests.
        k: the suggested number.
        confidence: in [0, 1], how much the spectrum supports it.
        method: ``"cluster"`` or ``"merge"``.
        network: whether a network was used, or colour and contrast alone.
        seconds: wall time.
    """

    labels: NDArray[np.int32]
    ks: tuple[int, ...]
    chosen: int
    k: int
    confidence: float
    method: str
    network: bool
    seconds: float


def _pixels(image: ArrayLike) -> NDArray[np.uint8]:
    array = np.asarray(image)
    if array.ndim == 2:
        array = np.repeat(array[..., None], 3, -1)
    if array.ndim != 3 or array.shape[-1] not in (3, 4) or 0 in array.shape:
        raise ShapeError(f"a photograph is (h, w), (h, w, 3) or (h, w, 4) with at least one pixel, got {array.shape}.")
    array = array[..., :3]
    if array.dtype == np.uint8:
        return array
    if np.issubdtype(array.dtype, np.floating):
        return (np.clip(np.nan_to_num(array), 0, 1) * 255).round().astype(np.uint8)
    raise ShapeError(f"a photograph holds uint8, or floating point in [0, 1]; got {array.dtype}.")


def _shrink(image: Tensor, side: int) -> Tensor:
    """Bring the longer side of (3, h, w) bytes down to ``side``; smaller images stay as they are."""
    height, width = image.shape[-2:]
    if max(height, width) <= side:
        return image
    ratio = side / max(height, width)
    size = max(1, round(height * ratio)), max(1, round(width * ratio))
    small = nnf.interpolate(image.unsqueeze(0).float(), size=size, mode="bilinear", antialias=True)[0]
    return small.round().clamp(0, 255).to(torch.uint8)


def segment_photograph(
    image: ArrayLike,
    model: DeepNCuts | None = None,
    ks: Sequence[int] | None = None,
    *,
    method: str = "merge",
    side: int = 480,
    seed: int = 0,
) -> Photograph:
    """Segment a photograph at its full size.

    Args:
        image: (h, w, 3) uint8 or floating point in [0, 1]; grey and RGBA are accepted too.
        model: a trained network; None merges superpixels by colour and contrast, without a network.
        ks: numbers of regions (``"merge"``) or of clusters (``"cluster"``); None for the eight of the method's default.
        method: ``"merge"`` for a nested hierarchy, ``"cluster"`` for K-means and connected components.
        side: larger photographs are segmented at this length of their longer side; borders are then as fine as that.
        seed: of K-means.

    Returns:
        :class:`Photograph`.

    Raises:
        ShapeError: no image.
        ConfigurationError: clustering without a network, or an unknown method.

    Example:
        >>> picture = np.zeros((40, 60, 3), np.uint8)
        >>> picture[:, 30:] = 200
        >>> found = segment_photograph(picture, ks=(2,))
        >>> bool((found.labels[0][:, :30] == 0).all()), bool((found.labels[0][:, 30:] == 1).all())
        (True, True)
    """
    started = time.perf_counter()
    if method not in ("merge", "cluster"):
        raise ConfigurationError(f"unknown method {method!r}; choose merge or cluster.")
    if method == "cluster" and model is None:
        raise ConfigurationError("clustering needs the features of a network; give a model, or choose merge.")
    ks = default_ks(method) if ks is None else ks
    pixels = _pixels(image)
    full = (pixels.shape[0], pixels.shape[1])
    small = _shrink(torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), side)
    if method == "cluster":
        assert model is not None
        found = model.cluster(small.unsqueeze(0).to(next(model.parameters()).device), ks, seed=seed, size=full)
        labels = found.labels[0].to(torch.int32).cpu().numpy()
        k, confidence = int(found.choice.k[0]), float(found.choice.confidence[0])
    else:
        merging = _merge(small, model, ks)
        k, confidence = _suggest(merging, max(ks))
        labels = _enlarge(merging.labels, full)
    chosen = int(np.abs(np.asarray(ks) - k).argmin())
    seconds = time.perf_counter() - started
    return Photograph(labels, tuple(ks), chosen, k, confidence, method, model is not None, seconds)


def _merge(image: Tensor, model: DeepNCuts | None, ks: Sequence[int]) -> Merging:
    if model is not None:
        return model.merge(image.to(next(model.parameters()).device), ks)
    return merge_by_colour(image.permute(1, 2, 0).numpy(), ks)


def _suggest(merging: Merging, most: int) -> tuple[int, float]:
    """K by the largest gap between the prices of the last merges."""
    heights = merging.hierarchy.heights
    last = heights[np.isfinite(heights)][::-1][: most + 1]  # uniting 2 regions, 3 regions, …
    if len(last) < 2:
        return min(merging.hierarchy.count, 2), 0.0
    choice = choose_k(torch.from_numpy(last.copy()), low=1)
    return int(choice.k) + 1, float(choice.confidence)


def _enlarge(labels: NDArray[np.int64], size: tuple[int, int]) -> NDArray[np.int32]:
    if labels.shape[1:] == size:
        return labels.astype(np.int32)
    maps = torch.from_numpy(labels.astype(np.float32)).unsqueeze(0)
    return nnf.interpolate(maps, size=size, mode="nearest-exact")[0].numpy().astype(np.int32)
