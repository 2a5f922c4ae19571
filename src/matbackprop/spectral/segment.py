"""Features to full-size segmentations: embed once, cluster for every K, assign at full size, split components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nnf

from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.numerics import autocast_off, check_finite, check_floating
from matbackprop.spectral.components import connected_components
from matbackprop.spectral.embedding import SPACES, Embedding, KChoice, choose_k, ncut_embedding, soft_embedding
from matbackprop.spectral.kmeans import center_scores, check_ks, weighted_kmeans
from matbackprop.spectral.rounding import pivoted_qr_rotation, yu_shi_rotation

METHODS = ("kmeans", "discretize", "pivoted_qr")
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


def working_grid(grid: tuple[int, int], size: tuple[int, int], points: int) -> tuple[int, int]:
    """The grid to run K-means on: of about ``points`` cells, no finer than the image ``size``."""
    ratio = (points / (size[0] * size[1])) ** 0.5
    if ratio >= 1:
        return size
    return max(1, round(size[0] * ratio)), max(1, round(size[1] * ratio))


def segment_features(
    f: Tensor,
    ks: Sequence[int] = CLUSTER_KS,
    *,
    size: tuple[int, int] | None = None,
    grid: tuple[int, int] | None = None,
    space: str = "ncut",
    method: str = "kmeans",
    ridge: float = 0.3,
    lam: Tensor | None = None,
    restarts: int = 4,
    iterations: int = 30,
    points: int = 2400,
    seed: int = 0,
    split: bool = True,
    connectivity: int = 4,
) -> Segmentation:
    """Segment images by clustering their features: every K from one small eigenproblem.

    F → embedding on the features' grid → clustering of the bilinearly resized coordinates on a working grid → scores of
    the centres, upsampled to full size (the same as scoring upsampled coordinates, because scores are affine) → argmax
    → connected components.

    Args:
        f: features (*b, h, w, d), or (*b, h·w, d) with ``grid``; non-negative for ``space="ncut"``.
        ks: n numbers of clusters.
        size: (H, W) of the label maps; None for the features' grid.
        grid: (h, w) when the features come flattened.
        space: ``"ncut"`` clusters D^(−½)U with degrees as weights, leading K coordinates; ``"soft"`` clusters the rows
            of F(FᵀF + (λ/d)I)^(−½) with equal weights.
        method: ``"kmeans"`` (Bach–Jordan), ``"discretize"`` (Yu–Shi) or ``"pivoted_qr"``.
        ridge: λ of the soft space.
        lam: Λ of W = FΛFᵀ for ``space="ncut"``.
        restarts: seedings of K-means.
        iterations: Lloyd steps or alternations.
        points: cells of the working grid that K-means runs on.
        seed: of K-means; the same seed gives the same maps.
        split: split connected components.
        connectivity: 4 or 8.

    Returns:
        :class:`Segmentation`. All-zero features give one region.

    Raises:
        ShapeError: the features do not fit the grid, or a dimension is empty.
        NonFiniteError: the features hold NaN or Inf.
        ConfigurationError: an unknown space or method.

    Example:
        >>> f = torch.zeros(6, 8, 2)
        >>> f[:, :4, 0] = 1
        >>> f[:, 4:, 1] = 1
        >>> segment_features(f, [2], size=(12, 16)).labels[0, 5]
        tensor([0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1])
    """
    with autocast_off(f.device.type):
        return _segment(
            f,
            check_ks(ks),
            size,
            grid,
            space,
            method,
            ridge,
            lam,
            restarts,
            iterations,
            points,
            seed,
            split,
            connectivity,
        )


def _segment(
    f: Tensor,
    sizes: list[int],
    size: tuple[int, int] | None,
    grid: tuple[int, int] | None,
    space: str,
    method: str,
    ridge: float,
    lam: Tensor | None,
    restarts: int,
    iterations: int,
    points: int,
    seed: int,
    split: bool,
    connectivity: int,
) -> Segmentation:
    if space not in SPACES:
        raise ConfigurationError(f"unknown space {space!r}; choose one of {', '.join(SPACES)}.")
    if method not in METHODS:
        raise ConfigurationError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}.")
    rows, cells = _as_grid(f.detach(), grid)
    if 0 in rows.shape[-2:]:
        raise ShapeError(f"features {tuple(f.shape)} have no cell or no channel.")
    check_finite(rows, "f")
    full = cells if size is None else size
    rows = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    most = max(sizes)
    if space == "ncut":
        # One eigenvector more than clusters, so that the last gap is known.
        whole = ncut_embedding(rows, most + 1, lam=lam)
        embedding = Embedding(whole.points[..., :most], whole.weights, whole.eigenvalues)
    else:
        embedding = soft_embedding(rows, ridge=ridge)
        if method != "kmeans":
            embedding = embedding._replace(points=embedding.points[..., :most])
    choice = choose_k(embedding.eigenvalues, low=min(2, most), high=most)

    work = working_grid(cells, full, points)
    coordinates = _resize(embedding.points, cells, work)
    weights = _resize(embedding.weights.unsqueeze(-1), cells, work).squeeze(-1)
    if method == "kmeans":
        found = weighted_kmeans(
            coordinates, weights, sizes, leading=space == "ncut", restarts=restarts, iterations=iterations, seed=seed
        )
        blocks = [found.centers[..., i, :k, :].unsqueeze(-3) for i, k in enumerate(sizes)]
        # Around the mean point, which changes no comparison: the scores are rounded to single precision below.
        points64 = embedding.points.double()
        mean = points64.mean(-2, keepdim=True)
        scores = [center_scores(points64 - mean, block.double() - mean.unsqueeze(-3)) for block in blocks]
    else:
        scores = []
        for k in sizes:
            leading = coordinates[..., :k]
            if method == "discretize":
                rotation = yu_shi_rotation(leading, iterations=iterations)
            else:
                # Damle et al. rotate the orthonormal eigenvectors, √w times the points.
                rotation = pivoted_qr_rotation(leading * weights.sqrt().unsqueeze(-1))
            scores.append(embedding.points[..., :k] @ rotation)
    maps = []
    for score in scores:
        upsampled = _to_maps(score.float(), cells)
        if full != cells:
            upsampled = nnf.interpolate(upsampled, size=full, mode="bilinear", align_corners=False)
        maps.append(upsampled.argmax(1))
    labels = torch.stack(maps, 1)
    if split:
        labels = connected_components(labels, connectivity=connectivity)
    return Segmentation(labels.view(*rows.shape[:-2], len(sizes), *full), embedding, choice)
