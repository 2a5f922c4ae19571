"""Weighted K-means, batched over K, restarts and images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop.checks import check_matrix, check_weight, check_weight_values, wants_check
from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.vision.segmentation.hierarchy import check_ks


class KMeans(NamedTuple):
    """The best clustering for each K."""

    labels: Tensor  #: (*b, n, m) cluster of each point, below K; clusters can be empty
    #: (*b, n, max K, e). Only the first K rows are valid and, with ``leading``, the first K coordinates
    centers: Tensor
    distortion: Tensor  #: (*b, n) weighted sum of squared distances Σ wᵢ‖xᵢ − c‖²


def center_scores(points: Tensor, centers: Tensor) -> Tensor:
    """Compute scores x·c − ½‖c‖² (*b, m, n·K), largest for the nearest center.

    Scores are affine in x, so bilinear upsampling of scores equals scoring upsampled points.
    """
    flat = centers.flatten(-3, -2)
    return points @ flat.mT - 0.5 * (flat * flat).sum(-1).unsqueeze(-2)


def _seed_centers(x: Tensor, w: Tensor, norms: Tensor, dims: Tensor, size: int, uniforms: Tensor) -> Tensor:
    """Seed all runs with K-means++: x (B, m, e), w (B, m), norms (B, R, m), dims (R, e) → (B, R, size, e)."""
    centers = []
    chance = w.unsqueeze(1).expand_as(norms)
    closest = torch.full_like(norms, torch.inf)
    for j in range(size):
        cumulative = chance.cumsum(-1, dtype=torch.float64)
        target = uniforms[j].view(1, -1, 1) * cumulative[..., -1:]
        index = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=x.shape[1] - 1)
        center = x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1])) * dims
        centers.append(center)
        distance = norms - 2 * (center @ x.mT) + (center * center).sum(-1, keepdim=True)
        closest = torch.minimum(closest, distance.clamp(min=0))
        chance = w.unsqueeze(1) * closest
    return torch.stack(centers, 2)


def _cluster(
    x: Tensor, w: Tensor, norms: Tensor, dims: Tensor, bias: Tensor, uniforms: Tensor, *, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cluster all runs; return labels (B, m, R), centers (B, R, size, e) and scores of the labels (B, m, R)."""
    b, m, e = x.shape
    runs, size = bias.shape[-2:]
    centers = _seed_centers(x, w, norms, dims, size, uniforms)
    labels = torch.full((b, m, runs), -1, dtype=torch.long, device=x.device)
    best = torch.zeros(b, m, runs, device=x.device, dtype=x.dtype)
    for step in range(max(iterations, 1)):
        score = center_scores(x, centers).view(b, m, runs, size) + bias
        best, nearest = score.max(-1)
        if x.device.type == "cpu" and torch.equal(nearest, labels):
            break
        labels = nearest
        if step == iterations - 1:
            break
        member = torch.zeros_like(score).scatter_(-1, labels.unsqueeze(-1), w.view(b, m, 1, 1).expand(b, m, runs, 1))
        member = member.view(b, m, runs * size)
        mass = member.sum(1).view(b, runs, size, 1)
        means = (member.mT @ x).view(b, runs, size, e) * dims.view(runs, 1, e) / mass.clamp(min=1e-30)
        centers = torch.where(mass > 0, means, centers)
    return labels, centers, best


def _centered(points: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return points (B, m, e) minus their weighted mean in float64, weights with sum 1, the mean, and the sum."""
    # Float64 and centered points reduce cancellation: squared distances are differences of squared norms.
    x = points.double()
    w = weights.to(x)
    w = torch.where(w.sum(-1, keepdim=True) > 0, w, torch.ones_like(w))
    scale = w.sum(-1, keepdim=True)
    w = w / scale
    mean = w.unsqueeze(-2) @ x
    return x - mean, w, mean, scale


def weighted_kmeans(
    points: Tensor,
    weights: Tensor,
    ks: Sequence[int],
    *,
    leading: bool = False,
    restarts: int = 4,
    iterations: int = 30,
    seed: int = 0,
) -> KMeans:
    """Cluster weighted points into K clusters for every K in ``ks``, keeping the best of several restarts.

    Minimizes Σᵢ wᵢ‖xᵢ − c(i)‖². With ``leading``, K clusters use only the first K coordinates. On a normalized-cut
    embedding, the distortion is then ½‖UUᵀ − D^½E(EᵀDE)⁻¹EᵀD^½‖² (Bach and Jordan). The result is deterministic for a
    seed and does not depend on the other images of a batch.

    Args:
        points: (*b, m, e).
        weights: (*b, m) non-negative. If all weights of an image are zero, equal weights are used.
        ks: n numbers of clusters. Clusters are empty if there are fewer distinct points.
        leading: use the first K coordinates for K clusters.
        restarts: number of K-means++ restarts for each K.
        iterations: maximum number of Lloyd iterations.
        seed: seed of K-means++.

    Returns:
        :class:`KMeans`.

    Raises:
        ShapeError: the shapes are incompatible, or there are no points.
        ConfigurationError: ``ks`` is empty or contains a number below 1.

    Example:
        >>> x = torch.tensor([[0.0], [0.1], [5.0], [5.1]])
        >>> [f"{value:.3f}" for value in weighted_kmeans(x, torch.ones(4), [1, 2]).distortion]
        ['25.010', '0.010']
    """
    sizes = check_ks(ks)
    check_matrix(points, "points")
    if points.shape[-2] == 0:
        raise ShapeError(f"points must be (*b, m, e) with m > 0, got {tuple(points.shape)}.")
    check_weight(weights, points, name="weights")
    if wants_check(None, points):
        check_weight_values(weights, "weights")
    if not 0 <= seed < 2**63:
        raise ConfigurationError(f"seed must be in [0, 2⁶³), got {seed}.")
    *batch, m, e = points.shape
    n, size, runs = len(sizes), max(sizes), len(sizes) * max(restarts, 1)
    device = points.device
    x, w, mean, scale = _centered(points.reshape(-1, m, e), weights.reshape(-1, m))
    b = x.shape[0]
    run_k = torch.tensor(sizes, device=device).repeat_interleave(runs // n)
    dims = torch.ones(runs, e, device=device, dtype=x.dtype)
    if leading:
        dims = (torch.arange(e, device=device) < run_k.unsqueeze(-1)).to(x)
    bias = torch.where(torch.arange(size, device=device) < run_k.unsqueeze(-1), 0.0, -torch.inf).view(1, 1, runs, size)
    norms = dims @ (x * x).mT

    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(size, runs, generator=generator, dtype=torch.float64).to(device)
    labels, centers, best = _cluster(x, w, norms, dims, bias, uniforms, iterations=iterations)
    # ‖x − c‖² = ‖x‖² − 2 (x·c − ½‖c‖²) selects the restart; the returned distortion is computed from differences.
    distortion = (w.unsqueeze(1) * (norms - 2 * best.mT)).sum(-1)
    choice = distortion.view(b, n, -1).argmin(-1) + torch.arange(n, device=device) * (runs // n)
    rows = torch.arange(b, device=device).unsqueeze(-1)
    labels, centers, dims = labels.mT[rows, choice], centers[rows, choice], dims[choice].unsqueeze(-2)
    nearest = centers.gather(-2, labels.unsqueeze(-1).expand(b, n, m, e))
    distortion = (w.unsqueeze(1) * (dims * x.unsqueeze(1) - nearest).square().sum(-1)).sum(-1) * scale
    centers = centers + mean.unsqueeze(1) * dims
    return KMeans(
        labels.view(*batch, n, m),
        centers.view(*batch, n, size, e).to(points.dtype),
        distortion.view(*batch, n).to(points.dtype),
    )


def cluster_scores(
    points: Tensor, sample: Tensor, weights: Tensor, ks: Sequence[int], *, leading: bool, seed: int = 0
) -> list[Tensor]:
    """Compute cluster scores (*b, m, K) of points (*b, m, e) for each K, largest for the cluster of a point.

    Scores are affine in the points. Clusters are computed from a weighted sample (*b, n, e) of the same space; see
    :func:`weighted_kmeans`.
    """
    clusters = weighted_kmeans(sample, weights, ks, leading=leading, seed=seed)
    # Centering keeps all comparisons and reduces rounding errors if scores are later converted to float32.
    points = points.double()
    mean = points.mean(-2, keepdim=True)
    centers = clusters.centers.double() - mean.unsqueeze(-3)
    return [center_scores(points - mean, centers[..., i : i + 1, :k, :]) for i, k in enumerate(ks)]
