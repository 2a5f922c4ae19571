"""Rank of the affinity and alignment of its span with a segmentation, for monitoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from matbackprop.functional._labels import labeled_images
from matbackprop.functional._normalized_cut import align
from matbackprop.numerics import autocast_off, gram_tolerance
from matbackprop.solvers import batched_svd

_ROUNDING = 1e-9  # J₂ is exactly 1/2 if one rank is missing


@dataclass(frozen=True)
class RankReport:
    """The result of :func:`rank_report`. Tensors have shape ``(*batch,)``, or ``(*batch, a)`` with annotators.

    Attributes:
        rank: numerical rank of W = FFᵀ.
        regions: number k of regions that occur.
        alignment: 1 − ‖Q_FᵀQ_Ψ‖²/k in [0, 1]; 0 if the span of the features contains all region indicators.
        j2: J₂ = ½‖Π_W − Π_Ψ‖² ≥ ½|rank − regions|.
        certified: whether J₂ < 1/2, which implies that ``rank`` and ``regions`` are equal.
        singular_values: singular values of F, descending, ``(…, d)``.
        tolerance: relative tolerance below which singular values counted as zero.
    """

    rank: Tensor
    regions: Tensor
    alignment: Tensor
    j2: Tensor
    certified: Tensor
    singular_values: Tensor
    tolerance: float

    def summary(self) -> dict[str, float]:
        """Return the means over all images, for a logger."""
        names = ("rank", "regions", "alignment", "j2", "certified")
        return {name: float(getattr(self, name).double().mean()) for name in names}


@torch.no_grad()
def rank_report(
    f: Tensor,
    labels: Tensor,
    *,
    weight: Tensor | None = None,
    offsets: Tensor | Sequence[int] | None = None,
    num_labels: int | None = None,
    rank_tol: float | torch.dtype | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> RankReport:
    """Rank of the affinity and its alignment with a segmentation, for monitoring.

    The cost is that of J₂, because ‖Q_FᵀQ_Ψ‖² = tr(Π_WΠ_Ψ) = tr(C⁺SN⁻¹Sᵀ).

    Args:
        f: features ``(*batch, m, d)``, or ``(total, d)`` with ``offsets``.
        labels: region numbers ``(*batch, m)``, or ``(*batch, a, m)`` for several annotators, which are reported
            separately. Rows with label −1 are ignored.
        weight, offsets, num_labels, rank_tol: as in :func:`~matbackprop.normalized_cut_j2`.
        check, precision: as in `matrix_function`.

    Returns:
        A :class:`RankReport` without gradients.

    Raises:
        LabelError, DomainError: as in :func:`~matbackprop.normalized_cut_j2`.

    Example:
        >>> import torch, matbackprop
        >>> labels = torch.tensor([0, 0, 1, 1, 2])
        >>> report = matbackprop.rank_report(torch.nn.functional.one_hot(labels).float(), labels)
        >>> int(report.rank), int(report.regions), bool(report.certified)
        (3, 3, True)

    Reference:
        Ionescu et al. (2015), Lemma 2, its corollary, and section 6.2.
    """
    images = labeled_images(f, labels, weight, offsets, num_labels, precision, check)
    tol = gram_tolerance(f.dtype, images.dtype, f.shape[-1], rank_tol)
    with autocast_off(f.device.type):
        alignment = align(images.rows(), tol)
        x, w, *_ = images.rows(rescale=False)
        _, sigma, _ = batched_svd(w.sqrt().unsqueeze(-1) * x)
    regions, j2 = alignment.regions, alignment.distance
    return RankReport(
        rank=alignment.rank,
        regions=regions,
        alignment=(1 - alignment.trace / regions.clamp(min=1)) * (regions > 0),
        j2=j2,
        certified=j2 < 0.5 - max(_ROUNDING, 64 * torch.finfo(j2.dtype).eps),
        singular_values=torch.nn.functional.pad(sigma, (0, x.shape[-1] - sigma.shape[-1])),
        tolerance=tol**0.5,
    )
