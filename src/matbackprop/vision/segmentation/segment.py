"""Features to full-size segmentations: embed once, cluster for every K, assign at full size, split components."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as nnf

from matbackprop.checks import check_floating, check_ks, check_matrix, check_weight, check_weight_values, wants_check
from matbackprop.errors import ConfigurationError, NonFiniteError, ShapeError
from matbackprop.functional._affinity import check_lambda
from matbackprop.functional._matrix_function import matrix_sqrt
from matbackprop.functional._spectral_embedding import spectral_embedding
from matbackprop.numerics import autocast_off, symmetrize
from matbackprop.solvers import batched_eigh
from matbackprop.vision.segmentation.clustering import cluster_scores


class Embedding(NamedTuple):
    """Weighted points in a spectral space.

    Attributes:
        points: (*b, m, e) coordinates, the most important axis first.
        weights: (*b, m) non-negative weights of the points.
        eigenvalues: (*b, e) in [0, 1], descending: of M = D^(−½)WD^(−½), or of the soft projector.
    """

    points: Tensor
    weights: Tensor
    eigenvalues: Tensor


def ncut_embedding(f: Tensor, k: int, *, lam: Tensor | None = None) -> Embedding:
    """Coordinates of the relaxed normalized cut of W = FFᵀ or FΛFᵀ, for all K ≤ k from one small eigenproblem.

    With the degrees d of W and the top eigenvectors U of M = D^(−½)WD^(−½): points xᵢ = uᵢ/√dᵢ with weights dᵢ. They
    are piecewise constant where the cut is perfect (D^(−½)Z, not D^(½)Z as printed). Costs O(md²); a row of zeros
    has degree zero: it gets the point 0 and the weight 0.

    Args:
        f: non-negative features (*b, m, d).
        k: number of eigenvectors; at most min(m, d) are returned.
        lam: symmetric positive semi-definite Λ (d, d); None for the identity. It gets a gradient where it is positive
            definite.

    Returns:
        An :class:`Embedding` with e = min(k, m, d) coordinates.

    Raises:
        ShapeError: f is not a matrix, Λ does not fit it, or k < 1.
        SymmetryError, DomainError: Λ is not symmetric, or not positive semi-definite.

    Example:
        >>> f = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> e = ncut_embedding(f, 2)
        >>> bool((e.points[0] - e.points[1]).abs().max() < 1e-12), e.points.shape
        (True, torch.Size([3, 2]))

    References:
        F. Bach, M. Jordan, Learning spectral clustering, with application to speech separation, JMLR 2006.
    """
    check_matrix(f, "f")
    if k < 1:
        raise ShapeError(f"k must be at least 1, got {k}.")
    dtype = f.dtype
    if lam is not None:
        check_lambda(lam, f.shape[-1])
        f = f.to(torch.float64) @ matrix_sqrt(lam).to(torch.float64)
    values, vectors, degrees = spectral_embedding(f, min(k, *f.shape[-2:]))
    safe = torch.where(degrees > 0, degrees, torch.ones_like(degrees))
    points = vectors / safe.sqrt().unsqueeze(-1)
    points = points * (degrees > 0).unsqueeze(-1)
    return Embedding(points.to(dtype), degrees.clamp(min=0).to(dtype), values.to(dtype))


def soft_embedding(f: Tensor, *, ridge: float = 0.3, weights: Tensor | None = None) -> Embedding:
    """Coordinates of the space that the soft objective trains: the rows of F(FᵀF + (λ/d)I)^(−½), tr FᵀF = 1.

    Neither degrees nor row norms enter; the points are expressed in the principal axes, so that leading coordinates
    carry most. Their eigenvalues s/(s + λ/d) are those of the soft projector Π_λ, and sum to its soft rank.

    Args:
        f: features (*b, m, d).
        ridge: λ of :func:`matbackprop.normalized_cut_soft`.
        weights: areas (*b, m) of the rows, so that C = Fᵀ diag(w) F; None for ones.

    Returns:
        An :class:`Embedding`; all-zero features give all-zero points.

    Example:
        >>> f = torch.randn(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> e = soft_embedding(f, ridge=0.3)
        >>> torch.allclose((e.points * e.points).sum(0), e.eigenvalues)
        True
    """
    check_matrix(f, "f")
    if not 0 < ridge < math.inf:
        raise ConfigurationError(f"ridge must be positive and finite, got {ridge}.")
    *batch, m, d = f.shape
    if weights is not None:
        check_weight(weights, f, name="weights")
        if wants_check(None, f):
            check_weight_values(weights, "weights")
    # Double throughout: small eigenvalues survive squaring, and autocast leaves doubles alone.
    rows = f.double()
    w = rows.new_ones(*batch, m) if weights is None else weights.double()
    gram = symmetrize((rows * w.unsqueeze(-1)).mT @ rows)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    scale = torch.where(trace > 0, trace, torch.ones_like(trace)).rsqrt()
    values, vectors = batched_eigh(gram * (scale * scale)[..., None, None])
    values, vectors = values.flip(-1).clamp(min=0), vectors.flip(-1)
    shifted = values + ridge / d
    points = (rows * scale[..., None, None]) @ (vectors * shifted.rsqrt().unsqueeze(-2))
    return Embedding(points.to(f.dtype), w.to(f.dtype), (values / shifted).to(f.dtype))


@dataclass(frozen=True)
class NCutSpace:
    """The space of the relaxed normalized cut: D^(−½)U with the degrees as weights, K coordinates for K clusters.

    Attributes:
        lam: Λ of W = FΛFᵀ; None for the identity.
    """

    lam: Tensor | None = None
    leading: ClassVar[bool] = True

    def embed(self, f: Tensor, most: int) -> Embedding:
        """Coordinates for up to ``most`` clusters, and one eigenvalue more, so that the last gap is known."""
        whole = ncut_embedding(f, most + 1, lam=self.lam)
        return whole._replace(points=whole.points[..., :most])


@dataclass(frozen=True)
class SoftSpace:
    """The space that the soft objective trains: the rows of F(FᵀF + (λ/d)I)^(−½) with equal weights.

    Attributes:
        ridge: λ.
    """

    ridge: float = 0.3
    leading: ClassVar[bool] = False

    def embed(self, f: Tensor, most: int) -> Embedding:
        """All coordinates of features, whatever the number of clusters."""
        return soft_embedding(f, ridge=self.ridge)


CLUSTER_KS = (2, 3, 4, 5, 6, 8, 10, 14)
"""Numbers of clusters of the eight segmentations; chosen on training images of BSDS300."""
CELLS = 2400
"""About how many points clusters are found on."""


class Segmentation(NamedTuple):
    """Segmentations of an image or of a batch.

    Attributes:
        labels: (*b, n, H, W) int64 maps, one for each K, numbered from 0.
        embedding: the points (*b, h·w, e), weights and eigenvalues on the features' own grid.
    """

    labels: Tensor
    embedding: Embedding


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


def resample(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Bring maps (b, c, h, w) to another size: bilinear when growing, by area when shrinking."""
    if maps.shape[-2:] == size:
        return maps
    if maps.shape[-2] > size[0] or maps.shape[-1] > size[1]:
        return nnf.adaptive_avg_pool2d(maps, size)
    return nnf.interpolate(maps, size=size, mode="bilinear", align_corners=False)


def _resize(x: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """(*b, h·w, c) on ``grid`` → (*b, H·W, c) by :func:`resample`."""
    return resample(_to_maps(x, grid), size).movedim(1, -1).reshape(*x.shape[:-2], size[0] * size[1], x.shape[-1])


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
    seed: int = 0,
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
        seed: of K-means.
        split: split every segment into its connected components.

    Returns:
        :class:`Segmentation`. All-zero features give one region.

    Raises:
        ShapeError: the features do not fit the grid, or a dimension is empty.
        NonFiniteError: the features hold NaN or Inf.
        ConfigurationError: ``space`` is not one of the two.

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
        work = working_grid(full, CELLS)
        sample = _resize(embedding.points, cells, work)
        weights = _resize(embedding.weights.unsqueeze(-1), cells, work).squeeze(-1)
        scores = cluster_scores(embedding.points, sample, weights, sizes, leading=space.leading, seed=seed)
        labels = torch.stack([_labels_at(score, cells, full) for score in scores], 1)
        if split:
            labels = connected_components(labels)
        return Segmentation(labels.view(*rows.shape[:-2], len(sizes), *full), embedding)


def _labels_at(scores: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """The cluster of the largest score (*b, h·w, K) at every pixel: (B, H, W)."""
    maps = _to_maps(scores.float(), grid)
    if size != grid:
        maps = nnf.interpolate(maps, size=size, mode="bilinear", align_corners=False)
    return maps.argmax(1)


# ----------------------------------------------------------------------------------------------------------- components


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
    rank = (parent == index.reshape(-1)).view(n, -1).cumsum(-1) - 1  # from 0 in each map, by first pixels
    return rank.reshape(-1)[parent].view(labels.shape)


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

    scikit-image finds them on the CPU if it is installed, torch elsewhere.

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
    find = _components_skimage if labels.is_cpu and find_spec("skimage") is not None else _components_torch
    return find(flat, connectivity).view(labels.shape)
