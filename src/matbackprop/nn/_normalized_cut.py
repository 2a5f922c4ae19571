"""The normalized-cut objectives as a loss module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from matbackprop.checks import check_option, wants_check
from matbackprop.errors import ConfigurationError, LabelError, ShapeError
from matbackprop.functional._normalized_cut import normalized_cut_j1, normalized_cut_j2
from matbackprop.functional._normalized_cut_soft import check_ridge, normalized_cut_soft
from matbackprop.nn._operator import Operator
from matbackprop.numerics import check_rank_tolerance, compute_dtype

_OBJECTIVES: dict[str, Callable[..., Tensor]] = {
    "j1": normalized_cut_j1,
    "j2": normalized_cut_j2,
    "soft": normalized_cut_soft,
}
_OPTIONS = {"j1": ("rank_tol", "lam"), "j2": ("rank_tol",), "soft": ("ridge",)}


class NormalizedCutLoss(Operator):
    """Loss that aligns the span of the features with a segmentation.

    Args:
        objective: ``"j1"`` (:func:`~matbackprop.normalized_cut_j1`), ``"j2"`` (:func:`~matbackprop.normalized_cut_j2`)
            or ``"soft"`` (:func:`~matbackprop.normalized_cut_soft`).
        ridge: λ of the soft objective.
        lambda_features: number of features d, to train Λ ``(d, d)`` of W = FΛFᵀ, initially the identity. Only for
            ``"j1"``; the other objectives do not depend on Λ.
        maps: whether features are maps ``(b, c, h, w)`` and labels are images ``(b, H, W)`` of any size.
        ignore_index: label of ignored elements, such as 255; −1 is always ignored.
        class_weight: weights ``(classes,)`` of the elements of each class, if labels are classes. A weight of 2 is
            equivalent to repeating the row.
        balanced: give all regions of an image the same total weight.
        num_labels: upper bound on the number of regions of an image; avoids one device synchronization.
        rank_tol: relative rank tolerance, or the dtype of the precision of the features; not for ``"soft"``.
        reduction: ``"mean"`` or ``"sum"`` over the images, or ``"none"``.
        check, precision: as in :func:`~matbackprop.matrix_function`.

    Shape:
        f ``(*batch, m, d)`` and labels ``(*batch, m)`` or ``(*batch, a, m)`` to a scalar, or to ``(*batch,)`` without
        reduction. With ``maps``: f ``(b, c, h, w)``, labels ``(b, H, W)`` or ``(b, a, H, W)`` for several annotators,
        and weight ``(b, h, w)``. Each cell has the label of its center pixel.

    Example:
        >>> import torch
        >>> from matbackprop.nn import NormalizedCutLoss
        >>> f = torch.rand(2, 6, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
        >>> labels = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, -1]])
        >>> loss = NormalizedCutLoss("soft")(f, labels)
        >>> loss.backward()
        >>> loss.shape, f.grad.shape
        (torch.Size([]), torch.Size([2, 6, 4]))
    """

    def __init__(
        self,
        objective: Literal["j1", "j2", "soft"] = "j2",
        *,
        ridge: float = 0.3,
        lambda_features: int | None = None,
        maps: bool = False,
        ignore_index: int = -1,
        class_weight: Tensor | None = None,
        balanced: bool = False,
        num_labels: int | None = None,
        rank_tol: float | torch.dtype | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        check: bool | None = None,
        precision: torch.dtype | None = None,
    ) -> None:
        check_option(objective, tuple(_OBJECTIVES), "objective")
        check_option(reduction, ("mean", "sum", "none"), "reduction")
        if lambda_features is not None and objective != "j1":
            raise ConfigurationError(
                f"lambda_features requires objective='j1', got {objective!r}. Other objectives do not depend on Λ."
            )
        if rank_tol is not None and objective == "soft":
            raise ConfigurationError("rank_tol has no effect with objective='soft'. Remove it.")
        if class_weight is not None and (class_weight.ndim != 1 or not bool((class_weight >= 0).all())):
            raise ConfigurationError(
                f"class_weight must contain one nonnegative number per class, got {tuple(class_weight.shape)}."
            )
        check_ridge(ridge)
        check_rank_tolerance(rank_tol)
        compute_dtype(precision)
        nn.Module.__init__(self)  # the function depends on an option
        self.ridge, self.rank_tol, self.num_labels = ridge, rank_tol, num_labels
        self.precision, self.check = precision, check
        self.objective, self.reduction, self.maps, self.ignore_index = objective, reduction, maps, ignore_index
        self.lambda_features, self.balanced = lambda_features, balanced
        self.class_weight: Tensor | None
        self.register_buffer("class_weight", class_weight)
        self.lam = None if lambda_features is None else nn.Parameter(torch.eye(lambda_features))

    def call(self, *data: Tensor, **more: Any) -> Tensor:
        names = ("num_labels", "precision", "check", *_OPTIONS[self.objective])
        return _OBJECTIVES[self.objective](*data, **{name: getattr(self, name) for name in names}, **more)

    def forward(
        self,
        f: Tensor,
        labels: Tensor,
        *,
        weight: Tensor | None = None,
        offsets: Tensor | Sequence[int] | None = None,
    ) -> Tensor:
        """Return the loss. ``weight`` and ``offsets`` are arguments of the objective."""
        if self.ignore_index != -1:
            labels = labels.long()  # unsigned bytes cannot hold −1
            labels = labels.masked_fill(labels == self.ignore_index, -1)
        if self.maps:
            if offsets is not None:
                raise ConfigurationError("offsets is not supported with maps=True. Remove offsets.")
            f, labels = _rows(f, labels)
            weight = None if weight is None else weight.flatten(-2)
        if self.balanced or self.class_weight is not None:
            if offsets is not None:
                raise ConfigurationError("class_weight and balanced do not support packed rows. Remove offsets.")
            weight = self._row_weights(f, labels, weight)
        value = self.call(f, labels, weight=weight, offsets=offsets)
        if self.reduction == "none":
            return value
        return value.mean() if self.reduction == "mean" else value.sum()

    def _row_weights(self, f: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
        """Weights of the rows by the size and class of their regions, in the shape of the labels."""
        place = labels.long().clamp(min=0)
        out = (labels >= 0).to(torch.promote_types(f.dtype, torch.float32))
        if self.balanced:
            regions = self.num_labels or (int(place.max()) + 1 if place.numel() else 1)
            sizes = out.new_zeros(*labels.shape[:-1], regions).scatter_add(-1, place, out)
            out = out / sizes.gather(-1, place).clamp(min=1)
        if self.class_weight is not None:
            if wants_check(self.check, f) and place.numel() and int(place.max()) >= len(self.class_weight):
                raise LabelError(
                    f"class_weight has {len(self.class_weight)} classes, but a label is {int(place.max())}. Pass one "
                    f"weight per class."
                )
            out = out * self.class_weight.to(out.dtype)[place]
        if weight is None:
            return out
        return out * (weight.unsqueeze(-2) if weight.ndim < labels.ndim else weight)


def _rows(f: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Features ``(b, c, h, w)`` and labels ``(b, …, H, W)`` as rows ``(b, h·w, c)`` and labels ``(b, …, h·w)``."""
    if f.ndim != 4 or labels.ndim not in (3, 4) or len(labels) != len(f) or 0 in labels.shape[-2:]:
        raise ShapeError(
            f"maps need features (b, c, h, w) and labels (b, H, W) or (b, a, H, W), got {tuple(f.shape)} and "
            f"{tuple(labels.shape)}."
        )
    for dim, cells in ((-2, f.shape[-2]), (-1, f.shape[-1])):
        if labels.shape[dim] != cells:
            middle = (torch.arange(cells, device=labels.device) * 2 + 1) * labels.shape[dim] // (2 * cells)
            labels = labels.index_select(dim, middle)
    return f.flatten(2).mT, labels.flatten(-2)
