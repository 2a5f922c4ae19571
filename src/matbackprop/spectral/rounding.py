"""From coordinates to scores of clusters: K-means, and its rivals Yu–Shi discretisation and pivoted QR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from matbackprop.checks import check_matrix
from matbackprop.errors import ShapeError
from matbackprop.spectral.kmeans import center_scores, weighted_kmeans


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
