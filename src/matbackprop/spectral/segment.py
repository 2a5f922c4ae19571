"""Features to full-size segmentations: embed once, cluster for every K, assign at full size, split components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nnf

from matbackprop.checks import check_floating
from matbackprop.errors import ConfigurationError, NonFiniteError, ShapeError
from matbackprop.numerics import autocast_off
from matbackprop.spectral.clustering import KMeansRounding, Rounding, check_ks
from matbackprop.spectral.components import connected_components
from matbackprop.spectral.embedding import Embedding, KChoice, NCutSpace, SoftSpace, choose_k

CLUSTER_KS = (2, 3, 4, 5, 6, 8, 10, 14)
"""Numbers of clusters of the eight segmentations; chosen on training images of BSDS300."""


class Segmentation(NamedTuple):
    """Segmentations of an image or of a batch.

    Attributes:
        labels: (*b, n, H, W) int64 maps, one for each K, numbered from 0.
        embedding: the points (*b, h·w, e), weights and eigenvalues on the features' own grid.
        choice: K by the largest eigengap and its confidence.
    """

    labels: Tensor
    embedding: Embedding
    choice: KChoice


def _as_grid(f: Tensor, grid: tuple[int, int] | None) -> tuple[Tensor, tuple[int, int]]:
    """Return features as (*b, h·w, d) and their grid."""
    check_floating(f, "f")
    if grid is None:
        if f.ndim < 3:
            raise ShapeError(f"features must be (*b, h, w, d), or (*b, m, d) with grid=(h, w); got {tuple(f.shape)}.")
        return f.flatten(-3, -2), (f.shape[-3], f.shape[-2])
    if f.ndim < 2 or f.shape[-2] != grid[0] * grid[1]:
        raise ShapeError(
            f"features {tuple(f.shape)} do not fit the grid {grid}: the last but one dimension must be h·w."
        )
    return f, grid


def _to_maps(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """(*b, h·w, c) → (B, c, h, w)."""
    return x.reshape(-1, *grid, x.shape[-1]).movedim(-1, 1)


def _resize(x: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """(*b, h·w, c) on ``grid`` → (*b, H·W, c): bilinear when growing, by area when shrinking."""
    if size == grid:
        return x
    maps = _to_maps(x, grid)
    if size[0] < grid[0] or size[1] < grid[1]:
        maps = nnf.adaptive_avg_pool2d(maps, size)
    else:
        maps = nnf.interpolate(maps, size=size, mode="bilinear", align_corners=False)
    return maps.movedim(1, -1).reshape(*x.shape[:-2], size[0] * size[1], x.shape[-1])


def working_grid(size: tuple[int, int], cells: int) -> tuple[int, int]:
    """The grid that clusters are found on: of about ``cells`` cells, no finer than the image ``size``."""
    ratio = (cells / (size[0] * size[1])) ** 0.5
    if ratio >= 1:
        return size
    return max(1, round(size[0] * ratio)), max(1, round(size[1] * ratio))


def segment_features(
    f: Tensor,
    ks: Sequence[int] = CLUSTER_KS,
    *,
    size: tuple[int, int] | None = None,
    grid: tuple[int, int] | None = None,
    space: NCutSpace | SoftSpace | None = None,
    rounding: Rounding | None = None,
    split: bool = True,
) -> Segmentation:
    """Segment images by clustering their features: every K from one small eigenproblem.

    F → embedding on the features' grid → clustering of the bilinearly resized coordinates on a working grid → scores of
    the clusters, upsampled to full size (the same as scoring upsampled coordinates, because scores are affine) → argmax
    → connected components.

    Args:
        f: features (*b, h, w, d), or (*b, h·w, d) with ``grid``; non-negative for the normalized cut's space.
        ks: n numbers of clusters.
        size: (H, W) of the label maps; None for the features' grid.
        grid: (h, w) when the features come flattened.
        space: :class:`NCutSpace` by default, or :class:`SoftSpace`, with their own arguments.
        rounding: :class:`KMeansRounding` by default, :class:`YuShiRounding` or :class:`PivotedQRRounding`, with their
            own arguments.
        split: split every segment into its connected components.

    Returns:
        :class:`Segmentation`. All-zero features give one region.

    Raises:
        ShapeError: the features do not fit the grid, or a dimension is empty.
        NonFiniteError: the features hold NaN or Inf.
        ConfigurationError: what is given as space or rounding is none.

    Example:
        >>> f = torch.zeros(6, 8, 2)
        >>> f[:, :4, 0] = 1
        >>> f[:, 4:, 1] = 1
        >>> segment_features(f, [2], size=(12, 16)).labels[0, 5]
        tensor([0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1])
    """
    sizes = check_ks(ks)
    space = NCutSpace() if space is None else space
    rounding = KMeansRounding() if rounding is None else rounding
    if not isinstance(space, NCutSpace | SoftSpace):
        raise ConfigurationError(f"space must be NCutSpace() or SoftSpace(), got {space!r}.")
    if not isinstance(rounding, Rounding):
        raise ConfigurationError(
            f"rounding must be KMeansRounding(), YuShiRounding() or PivotedQRRounding(), got {rounding!r}."
        )
    rows, cells = _as_grid(f.detach(), grid)
    if 0 in rows.shape[-2:]:
        raise ShapeError(f"features {tuple(f.shape)} have no cell or no channel.")
    if not bool(rows.isfinite().all()):
        raise NonFiniteError(
            f"features hold {int((~rows.isfinite()).sum())} non-finite of {rows.numel()} entries and have no "
            f"segmentation; look for an exploding activation or a division by zero upstream."
        )
    full = cells if size is None else size
    rows = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    with torch.no_grad(), autocast_off(f.device.type):
        most = max(sizes)
        embedding = space.embed(rows, most)
        choice = choose_k(embedding.eigenvalues, low=min(2, most), high=most)
        work = working_grid(full, rounding.cells)
        sample = _resize(embedding.points, cells, work)
        weights = _resize(embedding.weights.unsqueeze(-1), cells, work).squeeze(-1)
        scores = rounding.scores(embedding.points, sample, weights, sizes, space.leading)
        labels = torch.stack([_labels_at(score, cells, full) for score in scores], 1)
        if split:
            labels = connected_components(labels)
        return Segmentation(labels.view(*rows.shape[:-2], len(sizes), *full), embedding, choice)


def _labels_at(scores: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """The cluster of the largest score (*b, h·w, K) at every pixel: (B, H, W)."""
    maps = _to_maps(scores.float(), grid)
    if size != grid:
        maps = nnf.interpolate(maps, size=size, mode="bilinear", align_corners=False)
    return maps.argmax(1)
