"""From coordinates to clusters: weighted K-means for all K, restarts and images at once; Yu–Shi; pivoted QR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from matbackprop.checks import check_ks, check_matrix, check_weight, check_weight_values, wants_check
from matbackprop.cuda.graphs import replayed
from matbackprop.errors import ConfigurationError, ShapeError

_REPLAY_LIMIT = 2**24  # scores of all runs; more of them keep a GPU busy by themselves


class KMeans(NamedTuple):
    """The best clustering for each K.

    Attributes:
        labels: (*b, n, m) cluster of each point, below K; some clusters may be empty.
        centers: (*b, n, max K, e); only the first K rows count, and only the leading coordinates where asked for.
        distortion: (*b, n) weighted sum of squared distances Σ wᵢ‖xᵢ − c‖².
    """

    labels: Tensor
    centers: Tensor
    distortion: Tensor


def center_scores(points: Tensor, centers: Tensor) -> Tensor:
    """Scores x·c − ½‖c‖² (*b, m, n·K), largest for the nearest centre, affine in x.

    Because they are affine, bilinear upsampling of scores equals scoring upsampled points.
    """
    flat = centers.flatten(-3, -2)
    return points @ flat.mT - 0.5 * (flat * flat).sum(-1).unsqueeze(-2)


def _gather(points: Tensor, index: Tensor) -> Tensor:
    return points.gather(1, index.unsqueeze(-1).expand(-1, -1, points.shape[-1]))


def _seed_centers(x: Tensor, w: Tensor, norms: Tensor, dims: Tensor, size: int, uniforms: Tensor) -> Tensor:
    """K-means++ for every run at once: x (B, m, e), w (B, m), norms (B, R, m), dims (R, e) → (B, R, size, e)."""
    centers = []
    share = w.unsqueeze(1).expand_as(norms)
    closest = torch.full_like(norms, torch.inf)
    for j in range(size):
        cumulative = share.cumsum(-1, dtype=torch.float64)
        target = uniforms[j].view(1, -1, 1) * cumulative[..., -1:]
        index = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=x.shape[1] - 1)
        center = _gather(x, index) * dims
        centers.append(center)
        distance = norms - 2 * (center @ x.mT) + (center * center).sum(-1, keepdim=True)
        closest = torch.minimum(closest, distance.clamp(min=0))
        share = w.unsqueeze(1) * closest
    return torch.stack(centers, 2)


def _cluster(
    x: Tensor, w: Tensor, norms: Tensor, dims: Tensor, bias: Tensor, uniforms: Tensor, *, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Seed and iterate every run: labels (B, m, R), centres (B, R, size, e) and scores of the labels (B, m, R)."""
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
    """Cluster weighted points into K clusters for every K in ``ks``, keeping the best of several seeded restarts.

    Minimises Σᵢ wᵢ‖xᵢ − c(i)‖². With ``leading`` the K-th clustering sees only the first K coordinates; on a
    normalized-cut embedding of orthonormal U its distortion is then ½‖UUᵀ − D^½E(EᵀDE)⁻¹EᵀD^½‖², Bach and Jordan's
    measure. All images, all K and all restarts run in the same few launches; sums are matrix products, so the result is
    deterministic for a seed, and an image's clustering does not depend on the others in its batch.

    Args:
        points: (*b, m, e).
        weights: (*b, m) non-negative; an image whose weights are all zero is clustered with equal weights.
        ks: n numbers of clusters. More clusters than distinct points leave clusters empty.
        leading: use the first K coordinates for K clusters.
        restarts: K-means++ seedings for each K.
        iterations: at most so many Lloyd steps.
        seed: of the seedings.

    Returns:
        :class:`KMeans`.

    Raises:
        ShapeError: the shapes do not fit or there is no point.
        ConfigurationError: ``ks`` is empty or holds a number below 1.

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
        raise ConfigurationError(f"seed must lie in [0, 2⁶³), got {seed}.")
    *batch, m, e = points.shape
    n, size, runs = len(sizes), max(sizes), len(sizes) * max(restarts, 1)
    device = points.device
    # In double and around their mean: squared distances of near points come from differences of squared norms.
    x = points.reshape(-1, m, e).double()
    w = weights.reshape(-1, m).to(x)
    b = x.shape[0]
    total = w.sum(-1, keepdim=True)
    w = torch.where(total > 0, w, torch.ones_like(w))
    scale = w.sum(-1, keepdim=True)
    w = w / scale
    mean = w.unsqueeze(-2) @ x
    x = x - mean

    run_k = torch.tensor(sizes, device=device).repeat_interleave(runs // n)
    dims = torch.ones(runs, e, device=device, dtype=x.dtype)
    if leading:
        dims = (torch.arange(e, device=device) < run_k.unsqueeze(-1)).to(x)
    bias = torch.where(torch.arange(size, device=device) < run_k.unsqueeze(-1), 0.0, -torch.inf).view(1, 1, runs, size)
    norms = dims @ (x * x).mT

    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(size, runs, generator=generator, dtype=torch.float64).to(device)
    inputs = (x, w, norms, dims, bias, uniforms)
    if x.is_cuda and b * m * runs * size <= _REPLAY_LIMIT:
        labels, centers, best = replayed(("kmeans", iterations), partial(_cluster, iterations=iterations), inputs)
    else:
        labels, centers, best = _cluster(*inputs, iterations=iterations)
    # ‖x − c‖² = ‖x‖² − 2 (x·c − ½‖c‖²) chooses among the restarts; what is returned is summed from the differences.
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


# ------------------------------------------------------------------------------------------------------------ rotations


def _check(vectors: Tensor) -> None:
    check_matrix(vectors, "vectors")
    if vectors.shape[-1] < 1 or vectors.shape[-2] < 1:
        raise ShapeError(f"vectors must be (*b, m, k) with m, k ≥ 1, got {tuple(vectors.shape)}.")


def _polar(a: Tensor) -> Tensor:
    """The orthogonal polar factor of square matrices (*b, k, k)."""
    u, _, vh = torch.linalg.svd(a)
    return u @ vh


def leading_pivots(vectors: Tensor) -> Tensor:
    """The first k pivots (*b, k) of QR with column pivoting on Vᵀ, by Gram–Schmidt over rows; V is (*b, m, k)."""
    _check(vectors)
    rest = vectors.clone()
    pivots = []
    for _ in range(vectors.shape[-1]):
        norms = (rest * rest).sum(-1)
        pivot = norms.argmax(-1, keepdim=True)
        pivots.append(pivot)
        row = rest.gather(-2, pivot.unsqueeze(-1).expand(*pivot.shape, rest.shape[-1]))
        length = (row * row).sum(-1, keepdim=True).sqrt()
        direction = torch.where(length > 0, row / torch.where(length > 0, length, 1), torch.zeros_like(row))
        rest = rest - (rest @ direction.mT) @ direction
    return torch.cat(pivots, -1)


def pivoted_qr_rotation(vectors: Tensor) -> Tensor:
    """The rotation R (*b, k, k) whose axes are aligned with clusters: labels are argmax of V R.

    Args:
        vectors: the top eigenvectors (*b, m, k).

    Example:
        >>> v = torch.eye(3).repeat_interleave(2, 0) @ torch.linalg.qr(torch.arange(9.0).view(3, 3).cos())[0]
        >>> labels = (v @ pivoted_qr_rotation(v)).argmax(-1)
        >>> bool((labels[::2] == labels[1::2]).all()), len(labels.unique())
        (True, 3)

    References:
        A. Damle, V. Minden, L. Ying, Simple, direct and efficient multi-way spectral clustering, 2019.
    """
    pivots = leading_pivots(vectors)
    rows = vectors.gather(-2, pivots.unsqueeze(-1).expand(*pivots.shape, vectors.shape[-1]))
    return _polar(rows.mT)


def yu_shi_rotation(vectors: Tensor, *, iterations: int = 20) -> Tensor:
    """The rotation R (*b, k, k) that brings the row-normalised eigenvectors nearest to an indicator matrix.

    Alternates E = one-hot argmax(XR) and R = polar(XᵀE), from the pivoted-QR rotation on.

    Args:
        vectors: coordinates (*b, m, k), for example :func:`ncut_embedding`'s points; rows are normalised here.
        iterations: number of alternations.

    References:
        S. Yu, J. Shi, Multiclass spectral clustering, ICCV 2003.
    """
    _check(vectors)
    lengths = vectors.norm(dim=-1, keepdim=True)
    x = vectors / torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    rotation = pivoted_qr_rotation(x)
    for _ in range(iterations):
        labels = (x @ rotation).argmax(-1)
        indicator = torch.zeros_like(x).scatter_(-1, labels.unsqueeze(-1), 1.0)
        rotation = _polar(x.mT @ indicator)
    return rotation


@runtime_checkable
class Rounding(Protocol):
    """Turns coordinates into scores of clusters, the largest of which names a point's cluster."""

    @property
    def cells(self) -> int:
        """About how many points the clusters are found on."""
        ...

    def scores(self, points: Tensor, sample: Tensor, weights: Tensor, ks: Sequence[int], leading: bool) -> list[Tensor]:
        """Scores (*b, m, K) for each K, affine in the points.

        Args:
            points: (*b, m, e) to score.
            sample: (*b, n, e) points of the same space that the clusters are found on.
            weights: (*b, n) of the sample.
            ks: numbers of clusters.
            leading: whether K clusters see the first K coordinates alone.
        """


@dataclass(frozen=True)
class KMeansRounding:
    """Weighted K-means (Bach and Jordan); the same seed gives the same clusters.

    Attributes:
        restarts: seedings for each K.
        iterations: Lloyd steps.
        seed: of the seedings.
        cells: about how many points the clusters are found on.
    """

    restarts: int = 4
    iterations: int = 30
    seed: int = 0
    cells: int = 2400

    def scores(self, points: Tensor, sample: Tensor, weights: Tensor, ks: Sequence[int], leading: bool) -> list[Tensor]:
        """See :class:`Rounding`."""
        clusters = weighted_kmeans(
            sample, weights, ks, leading=leading, restarts=self.restarts, iterations=self.iterations, seed=self.seed
        )
        # Around the mean point, which changes no comparison: scores may be rounded to single precision later.
        points = points.double()
        mean = points.mean(-2, keepdim=True)
        centers = clusters.centers.double() - mean.unsqueeze(-3)
        return [center_scores(points - mean, centers[..., i : i + 1, :k, :]) for i, k in enumerate(ks)]


@dataclass(frozen=True)
class YuShiRounding:
    """Discretisation of the row-normalised leading coordinates (Yu and Shi).

    Attributes:
        iterations: alternations.
        cells: about how many points the rotation is found on.
    """

    iterations: int = 30
    cells: int = 2400

    def scores(self, points: Tensor, sample: Tensor, weights: Tensor, ks: Sequence[int], leading: bool) -> list[Tensor]:
        """See :class:`Rounding`; K clusters always see the first K coordinates."""
        return [points[..., :k] @ yu_shi_rotation(sample[..., :k], iterations=self.iterations) for k in ks]


@dataclass(frozen=True)
class PivotedQRRounding:
    """The rotation that QR with column pivoting finds (Damle, Minden and Ying).

    Attributes:
        cells: about how many points the rotation is found on.
    """

    cells: int = 2400

    def scores(self, points: Tensor, sample: Tensor, weights: Tensor, ks: Sequence[int], leading: bool) -> list[Tensor]:
        """See :class:`Rounding`; K clusters always see the first K coordinates."""
        vectors = sample * weights.sqrt().unsqueeze(-1)  # the orthonormal eigenvectors themselves
        return [points[..., :k] @ pivoted_qr_rotation(vectors[..., :k]) for k in ks]
