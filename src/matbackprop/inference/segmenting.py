"""Segmenting one photograph of any size, with a trained network or without any."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional as nnf

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.inference.colour_merging import merge_by_colour
from matbackprop.inference.drawing import draw_boundaries, paint_labels
from matbackprop.inference.number import suggest_number
from matbackprop.models.deep_ncuts import DeepNCuts, default_ks
from matbackprop.spectral import Hierarchy

__all__ = ["Segments", "segment_photograph"]


@dataclass(frozen=True, eq=False)
class Segments:
    """The segmentations of one photograph, kept small: label maps are made when they are asked for.

    Attributes:
        pixels: (h, w, 3) the photograph, RGB bytes.
        ks: numbers of regions, or of clusters, of the segmentations that :meth:`levels` gives.
        k: about how many regions people would draw in the photograph; 1 where there is nothing to see.
        confidence: how often people's number is within a factor of two of such a k; see
            :class:`~matbackprop.inference.number.Number`.
        method: ``"merge"`` or ``"cluster"``.
        network: whether a network was used, or colour and contrast alone.
        seconds: wall time.
        superpixels: (h', w') the small regions that merging starts from, at the size that was segmented; None after
            clustering.
        hierarchy: the tree of merges over the superpixels; None after clustering.
        clusterings: number of clusters → (h', w') label map; empty after merging.
    """

    pixels: NDArray[np.uint8]
    ks: tuple[int, ...]
    k: int
    confidence: float | None
    method: str
    network: bool
    seconds: float
    superpixels: NDArray[np.int32] | None = None
    hierarchy: Hierarchy | None = None
    clusterings: Mapping[int, NDArray[np.int32]] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the photograph."""
        return self.pixels.shape[0], self.pixels.shape[1]

    def labels(self, k: int | None = None) -> NDArray[np.int32]:
        """A label map (h, w), numbered from 0.

        Args:
            k: after merging, any number of regions (no more than there are superpixels). After clustering, one of
                ``ks``. None for the suggested number: after clustering, the map whose number of regions is nearest.

        Raises:
            ConfigurationError: k is not positive, or no number of clusters that was asked for.
        """
        small = self._small(k)
        height, width = self.size
        if small.shape == (height, width):
            return small
        # The cell under the middle of each pixel.
        rows = ((np.arange(height) + 0.5) * small.shape[0] / height).astype(np.int64)
        columns = ((np.arange(width) + 0.5) * small.shape[1] / width).astype(np.int64)
        return small[rows][:, columns]

    def _small(self, k: int | None) -> NDArray[np.int32]:
        if self.hierarchy is not None and self.superpixels is not None:
            return self.hierarchy.levels([self.k if k is None else k])[0].astype(np.int32)[self.superpixels]
        assert self.clusterings is not None
        if k is None:
            return min(self.clusterings.values(), key=lambda m: abs(np.log((m.max() + 1) / self.k)))
        if k not in self.clusterings:
            raise ConfigurationError(f"{k} clusters were not asked for; there are {', '.join(map(str, self.ks))}.")
        return self.clusterings[k]

    def count(self, k: int | None = None) -> int:
        """The number of regions of :meth:`labels`."""
        return int(self._small(k).max()) + 1

    def outlined(self, k: int | None = None) -> NDArray[np.uint8]:
        """The photograph with the borders of the regions, wide enough to be seen when it fills a screen."""
        return draw_boundaries(self.pixels, self.labels(k), width=max(1, round(max(self.size) / 600)))

    def painted(self, k: int | None = None) -> NDArray[np.uint8]:
        """Every region in a hue of its own."""
        return paint_labels(self.labels(k))


def segment_photograph(
    image: ArrayLike,
    model: DeepNCuts | None = None,
    ks: Sequence[int] | None = None,
    *,
    method: str = "merge",
    side: int = 480,
    seed: int = 0,
) -> Segments:
    """Segment a photograph at its full size.

    Args:
        image: (h, w, 3) uint8 or floating point in [0, 1]; grey and RGBA are accepted too.
        model: a trained network; None merges superpixels by colour and contrast, without a network.
        ks: numbers of regions (``"merge"``) or of clusters (``"cluster"``); None for the eight of the method's default.
        method: ``"merge"`` for a nested hierarchy, ``"cluster"`` for K-means and connected components.
        side: larger photographs are segmented at this length of their longer side; borders are then as fine as that.
        seed: of K-means.

    Returns:
        :class:`Segments`.

    Raises:
        ShapeError: no image.
        ConfigurationError: clustering without a network, or an unknown method.

    Example:
        >>> picture = np.zeros((40, 60, 3), np.uint8)
        >>> picture[:, 30:] = 200
        >>> result = segment_photograph(picture)
        >>> result.k, result.labels(2)[0, [0, 29, 30, 59]].tolist()
        (2, [0, 0, 1, 1])
    """
    started = time.perf_counter()
    if method not in ("merge", "cluster"):
        raise ConfigurationError(f"unknown method {method!r}; choose merge or cluster.")
    if method == "cluster" and model is None:
        raise ConfigurationError("clustering needs the features of a network; give a model, or choose merge.")
    if side < 1:
        raise ConfigurationError(f"side must be positive, got {side}.")
    ks = tuple(default_ks(method) if ks is None else ks)
    if not ks or min(ks) < 1:
        raise ConfigurationError(f"ks must name at least one positive number of regions, got {list(ks)}.")
    pixels = _pixels(image)
    small = _shrink(torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), side)
    merging = merge_by_colour(small.permute(1, 2, 0).numpy(), ks)
    k, confidence = suggest_number(merging.hierarchy)
    clusterings = None
    if model is not None:
        on_device = small.to(next(model.parameters()).device)
        if method == "cluster":
            maps = model.cluster(on_device.unsqueeze(0), ks, seed=seed).labels[0].to(torch.int32).cpu().numpy()
            clusterings = dict(zip(ks, maps, strict=True))
        else:
            merging = model.merge(on_device, ks)
    return Segments(
        pixels,
        ks,
        k,
        confidence,
        method,
        model is not None,
        time.perf_counter() - started,
        None if clusterings else merging.superpixels,
        None if clusterings else merging.hierarchy,
        clusterings,
    )


def _pixels(image: ArrayLike) -> NDArray[np.uint8]:
    array = np.asarray(image)
    if array.ndim == 2:
        array = np.repeat(array[..., None], 3, -1)
    if array.ndim != 3 or array.shape[-1] not in (3, 4) or 0 in array.shape:
        raise ShapeError(f"a photograph is (h, w), (h, w, 3) or (h, w, 4) with at least one pixel, got {array.shape}.")
    array = array[..., :3]
    if array.dtype == np.uint8:
        return array
    if np.issubdtype(array.dtype, np.floating) and array.min() >= 0 and array.max() <= 1:  # NaN is neither
        return (array * 255).round().astype(np.uint8)
    raise ShapeError(
        f"a photograph holds uint8, or floating point in [0, 1]; got {array.dtype} from {array.min()} to {array.max()}."
    )


def _shrink(image: Tensor, side: int) -> Tensor:
    """Bring the longer side of (3, h, w) bytes down to ``side``; smaller images stay as they are."""
    height, width = image.shape[-2:]
    if max(height, width) <= side:
        return image
    ratio = side / max(height, width)
    size = max(1, round(height * ratio)), max(1, round(width * ratio))
    return nnf.interpolate(image.unsqueeze(0), size=size, mode="bilinear", antialias=True)[0]
