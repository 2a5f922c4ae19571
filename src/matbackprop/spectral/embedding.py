"""From features to the coordinates that are clustered: the normalized-cut relaxation and the soft objective's space."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from matbackprop.checks import check_matrix, check_weight, check_weight_values, wants_check
from matbackprop.errors import ConfigurationError, ShapeError
from matbackprop.functional._affinity import check_lambda
from matbackprop.functional._matrix_function import matrix_sqrt
from matbackprop.functional._spectral_embedding import spectral_embedding
from matbackprop.numerics import symmetrize
from matbackprop.solvers import batched_eigh


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
        ShapeError: f is no matrix, Λ does not fit it, or k < 1.
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


class KChoice(NamedTuple):
    """A number of segments and how much the spectrum supports it.

    Attributes:
        k: (*b,) integers, the number of segments.
        confidence: (*b,) in [0, 1]: 1 − (second largest gap)/(largest gap).
    """

    k: Tensor
    confidence: Tensor


def choose_k(eigenvalues: Tensor, *, low: int = 2, high: int | None = None) -> KChoice:
    """Choose K by the largest eigengap λ_K − λ_(K+1), low ≤ K ≤ high.

    Args:
        eigenvalues: (*b, e) descending, of :class:`Embedding`.
        low: the smallest K to consider.
        high: the largest; None for e − 1.

    Returns:
        :class:`KChoice`. A spectrum too short for a gap gives K = min(low, e) with confidence 0.

    Example:
        >>> choose_k(torch.tensor([1.0, 0.98, 0.95, 0.2, 0.1]))
        KChoice(k=tensor(3), confidence=tensor(0.8667))
    """
    e = eigenvalues.shape[-1]
    top = e - 1 if high is None else min(high, e - 1)
    if low < 1 or (high is not None and high < low):
        raise ConfigurationError(f"need 1 ≤ low ≤ high, got low={low}, high={high}.")
    if top < low:
        k = torch.full(eigenvalues.shape[:-1], min(low, e), dtype=torch.long, device=eigenvalues.device)
        return KChoice(k, torch.zeros_like(k, dtype=eigenvalues.dtype))
    gaps = (eigenvalues[..., :-1] - eigenvalues[..., 1:])[..., low - 1 : top].clamp(min=0)
    best = gaps.argmax(-1)
    largest = gaps.amax(-1)
    if gaps.shape[-1] > 1:
        second = gaps.topk(2, dim=-1).values[..., 1]
    else:
        second = torch.zeros_like(largest)
    confidence = torch.where(largest > 0, 1 - second / torch.where(largest > 0, largest, 1), torch.zeros_like(largest))
    return KChoice(best + low, confidence)
