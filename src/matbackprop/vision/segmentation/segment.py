"""Segment images by spectral clustering of features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nnf

from matbackprop.checks import check_floating, check_matrix
from matbackprop.errors import ConfigurationError, NonFiniteError, ShapeError, needs
from matbackprop.functional._affinity import check_lambda
from matbackprop.functional._matrix_function import matrix_sqrt
from matbackprop.functional._spectral_embedding import spectral_embedding
from matbackprop.numerics import autocast_off, symmetrize
from matbackprop.solvers import batched_eigh
from matbackprop.vision.segmentation.clustering import cluster_scores
from matbackprop.vision.segmentation.hierarchy import check_ks


class Embedding(NamedTuple):
    """Weighted points in a spectral space."""

    points: Tensor  #: (*b, m, e) coordinates, in descending order of eigenvalues
    weights: Tensor  #: (*b, m) non-negative weights of the points
    eigenvalues: Tensor  #: (*b, e) in [0, 1], descending: of M = D^(−½)WD^(−½), or of the soft projector


@dataclass(frozen=True)
class NCutSpace:
    """Space of the relaxed normalized cut of W = FFᵀ or FΛFᵀ.

    With the degrees d of W and the top eigenvectors U of M = D^(−½)WD^(−½), the points are xᵢ = uᵢ/√dᵢ with weights dᵢ.
    They are piecewise constant if the cut is perfect (D^(−½)Z, not D^(½)Z as printed in the paper). K clusters use the
    first K coordinates. The cost is O(md²). Rows of zeros have point 0 and weight 0.

    Args:
        lam: symmetric positive semi-definite Λ (d, d); None for the identity. Its gradient needs a positive definite Λ.

    Example:
        >>> f = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> e = NCutSpace().embed(f, 2)
        >>> bool((e.points[0] - e.points[1]).abs().max() < 1e-12), e.points.shape
        (True, torch.Size([3, 2]))

    References:
        F. Bach, M. Jordan, Learning spectral clustering, with application to speech separation, JMLR 2006.
    """

    lam: Tensor | None = None
    leading: ClassVar[bool] = True

    def embed(self, f: Tensor, most: int) -> Embedding:
        """Embed non-negative features (*b, m, d) with min(most, m, d) coordinates, enough for ``most`` clusters.

        Raises:
            ShapeError: f is not a matrix, the shape of Λ is not (d, d), or ``most`` < 1.
            SymmetryError, DomainError: Λ is not symmetric, or not positive semi-definite.
        """
        check_matrix(f, "f")
        if most < 1:
            raise ShapeError(f"most must be at least 1, got {most}.")
        dtype = f.dtype
        if self.lam is not None:
            check_lambda(self.lam, f.shape[-1])
            f = f.to(torch.float64) @ matrix_sqrt(self.lam).to(torch.float64)
        values, vectors, degrees = spectral_embedding(f, min(most, *f.shape[-2:]))
        safe = torch.where(degrees > 0, degrees, torch.ones_like(degrees))
        points = vectors / safe.sqrt().unsqueeze(-1)
        points = points * (degrees > 0).unsqueeze(-1)
        return Embedding(points.to(dtype), degrees.clamp(min=0).to(dtype), values.to(dtype))


@dataclass(frozen=True)
class SoftSpace:
    """Space of the soft objective: the rows of F(FᵀF + (λ/d)I)^(−½), with tr FᵀF = 1 and equal weights.

    Coordinates are along the principal axes. Their eigenvalues s/(s + λ/d) are those of the soft projector Π_λ, and the
    sum of the eigenvalues is its soft rank. The points are zero if all features are zero.

    Args:
        ridge: λ of :func:`matbackprop.normalized_cut_soft`.

    Example:
        >>> f = torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> e = SoftSpace(ridge=0.3).embed(f)
        >>> torch.allclose((e.points * e.points).sum(0), e.eigenvalues)
        True
    """

    ridge: float = 0.3
    leading: ClassVar[bool] = False

    def embed(self, f: Tensor, most: int = 1) -> Embedding:
        """Embed features (*b, m, d) with d coordinates. ``most`` is not used."""
        check_matrix(f, "f")
        if not 0 < self.ridge < math.inf:
            raise ConfigurationError(f"ridge must be positive and finite, got {self.ridge}.")
        rows = f.double()  # in float32, squaring would lose small eigenvalues
        gram = symmetrize(rows.mT @ rows)
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        scale = torch.where(trace > 0, trace, torch.ones_like(trace)).rsqrt()
        values, vectors = batched_eigh(gram * (scale * scale)[..., None, None])
        values, vectors = values.flip(-1).clamp(min=0), vectors.flip(-1)
        shifted = values + self.ridge / f.shape[-1]
        points = (rows * scale[..., None, None]) @ (vectors * shifted.rsqrt().unsqueeze(-2))
        return Embedding(points.to(f.dtype), torch.ones_like(f[..., 0]), (values / shifted).to(f.dtype))


CLUSTER_KS = (2, 3, 4, 5, 6, 8, 10, 14)  #: Default numbers of clusters; chosen on training images of BSDS300.
CELLS = 2400  #: Approximate number of points to cluster.


class Segmentation(NamedTuple):
    """Segmentations of an image or of a batch."""

    labels: Tensor  #: (*b, n, H, W) int64 maps, one per K, numbered from 0
    embedding: Embedding  #: points (*b, h·w, e), weights and eigenvalues on the feature grid


def _resize(x: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Resize (*b, h·w, c) on ``grid`` to (*b, H·W, c): bilinear when enlarging, by area when reducing."""
    maps = x.reshape(-1, *grid, x.shape[-1]).movedim(-1, 1)
    if grid[0] > size[0] or grid[1] > size[1]:
        maps = nnf.adaptive_avg_pool2d(maps, size)
    elif grid != size:
        maps = nnf.interpolate(maps, size=size, mode="bilinear", align_corners=False)
    return maps.movedim(1, -1).reshape(*x.shape[:-2], size[0] * size[1], x.shape[-1])


def segment_features(
    f: Tensor,
    ks: Sequence[int] = CLUSTER_KS,
    *,
    size: tuple[int, int] | None = None,
    space: NCutSpace | SoftSpace | None = None,
    seed: int = 0,
    split: bool = True,
) -> Segmentation:
    """Segment images by clustering their features, for all K from one small eigenproblem.

    The features are embedded on their grid and clustered on a working grid. Cluster scores are upsampled to full size,
    which is equivalent to scoring upsampled coordinates because scores are affine. Each pixel is assigned to the
    cluster with the largest score, and clusters are split into connected components.

    Args:
        f: features (*b, h, w, d); non-negative for the space of the normalized cut.
        ks: n numbers of clusters.
        size: (H, W) of the label maps; None for the feature grid.
        space: :class:`NCutSpace` (default) or :class:`SoftSpace`.
        seed: seed of K-means.
        split: split clusters into connected components.

    Returns:
        :class:`Segmentation`. If all features are zero, there is one region.

    Raises:
        ShapeError: the features are not (*b, h, w, d), or a dimension is empty.
        NonFiniteError: the features contain NaN or Inf.
        ConfigurationError: ``space`` has another type.

    Example:
        >>> f = torch.zeros(6, 8, 2)
        >>> f[:, :4, 0] = 1
        >>> f[:, 4:, 1] = 1
        >>> segment_features(f, [2], size=(12, 16)).labels[0, 5]
        tensor([0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1])
    """
    sizes = check_ks(ks)
    space = NCutSpace() if space is None else space
    if not isinstance(space, NCutSpace | SoftSpace):
        raise ConfigurationError(f"space must be NCutSpace() or SoftSpace(), got {space!r}.")
    if f.ndim < 3 or 0 in f.shape[-3:]:
        raise ShapeError(f"Features must be (*b, h, w, d) with at least one cell and channel, got {tuple(f.shape)}.")
    check_floating(f, "f")
    rows, cells = f.detach().flatten(-3, -2), (f.shape[-3], f.shape[-2])
    if not bool(rows.isfinite().all()):
        raise NonFiniteError(
            f"The features have {int((~rows.isfinite()).sum())} non-finite of {rows.numel()} entries. Look for an "
            "exploding activation or a division by zero upstream."
        )
    full = cells if size is None else size
    rows = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    with torch.no_grad(), autocast_off(f.device.type):
        embedding = space.embed(rows, max(sizes))
        ratio = min(1.0, (CELLS / (full[0] * full[1])) ** 0.5)
        work = max(1, round(full[0] * ratio)), max(1, round(full[1] * ratio))
        sample = _resize(embedding.points, cells, work)
        weights = _resize(embedding.weights.unsqueeze(-1), cells, work).squeeze(-1)
        scores = cluster_scores(embedding.points, sample, weights, sizes, leading=space.leading, seed=seed)
        labels = torch.stack([_resize(score.float(), cells, full).argmax(-1).view(-1, *full) for score in scores], 1)
        if split:
            labels = connected_components(labels)
        return Segmentation(labels.view(*rows.shape[:-2], len(sizes), *full), embedding)


def connected_components(labels: Tensor, *, connectivity: int = 4) -> Tensor:
    """Split every segment of a label map into connected components, with scikit-image on the CPU.

    Args:
        labels: integer maps (*b, h, w); any integer is a label.
        connectivity: 4 or 8 neighbors.

    Returns:
        int64 maps (*b, h, w). Components are numbered from 0 in raster order of their first pixels.

    Example:
        >>> connected_components(torch.tensor([[0, 1, 0], [0, 1, 0]]))
        tensor([[0, 1, 2],
                [0, 1, 2]])
    """
    with needs("connected components need scikit-image", "'matbackprop[train]'"):
        from skimage.measure import label
    if connectivity not in (4, 8):
        raise ConfigurationError(f"connectivity must be 4 or 8, got {connectivity}.")
    if labels.ndim < 2 or labels.dtype.is_floating_point or labels.dtype.is_complex:
        raise ShapeError(f"labels must be an integer tensor (*b, h, w), got {labels.dtype} {tuple(labels.shape)}.")
    if labels.numel() == 0:
        return labels.long()
    flat = labels.detach().cpu().long().reshape(-1, *labels.shape[-2:])
    background = int(flat.min()) - 1
    parts = [
        torch.from_numpy(label(one, background=background, connectivity=connectivity // 4)) for one in flat.numpy()
    ]
    return (torch.stack(parts).long() - 1).view(labels.shape).to(labels.device)
