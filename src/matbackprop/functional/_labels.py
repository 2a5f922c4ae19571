"""Labels of rows: checks, packed images of different sizes, and sums over regions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import values_checkable
from matbackprop.checks import (
    check_finite,
    check_matrix,
    check_weight,
    check_weight_values,
    into_range,
    nan_where,
    out_of_range,
    wants_check,
)
from matbackprop.errors import LabelError, ShapeError
from matbackprop.numerics import compute_dtype

# Largest number of entries of a one-hot matrix on a GPU; larger sums use scatter_add.
_ONE_HOT_LIMIT = 16_000_000
_MOST_LABELS = 2**16
# Longer images are split on a GPU, because one tall product would leave most of it idle.
_PIECE = 1024


class LabeledRows(NamedTuple):
    """Features, row weights and labels, ready for sums over rows; with annotators the batch is ``(*batch, a)``."""

    f: Tensor  # (*batch, m, d) in the dtype of the computation
    weight: Tensor  # (*batch, m), zero for ignored rows
    region: Tensor  # labels (*batch, m) in 0 … num_labels−1, arbitrary if the weight is zero
    num_labels: int  # number of columns of E


class LabeledImages(NamedTuple):
    """Checked features, labels and weights, with images of different sizes padded."""

    f: Tensor  # (*batch, m, d) in the dtype of the argument
    labels: Tensor  # (*batch, m) or (*batch, a, m); rows with label −1 are ignored
    weight: Tensor | None  # broadcastable to the labels
    num_labels: int  # number of columns of E
    dtype: torch.dtype  # of the computation
    checked: bool = False  # whether values have been checked

    @property
    def annotators(self) -> bool:
        return self.labels.ndim == self.f.ndim

    def rows(self, rescale: bool = True) -> LabeledRows:
        """Return the rows in the dtype of the computation, ignored ones with weight 0.

        ``rescale`` scales features and weights to avoid overflow. Without checks, features become NaN if they are out
        of range or a weight or label is invalid.
        """
        f, mass, labeled, k = self.f, self.weight, (self.labels >= 0).to(self.dtype), self.num_labels
        if rescale and not self.checked:
            f = nan_where(out_of_range(f, self.dtype, "products"), f)
        elif rescale:
            f = into_range(f, self.dtype)
            if mass is not None and mass.dtype != torch.bool:
                mass = into_range(mass.unsqueeze(-2), self.dtype).squeeze(-2)
        f = f.to(self.dtype)
        if self.annotators:
            f = f.unsqueeze(-3).expand(*self.labels.shape, f.shape[-1])
        if not self.checked:
            f = nan_where(out_of_labels(self.labels, k), f)
        if not self.checked and mass is not None:
            f = nan_where(~((mass >= 0) & mass.isfinite()).all(-1), f)
            if rescale and mass.dtype != torch.bool:
                f = nan_where(out_of_range(mass.unsqueeze(-2), self.dtype, "products"), f)
        weight = labeled if mass is None else labeled * mass.to(self.dtype)
        return LabeledRows(f, weight, self.labels.clamp(0, k - 1).long(), k)

    def average(self, value: Tensor) -> Tensor:
        """Return the mean over the annotators with labels, in the dtype of ``f``; those with only −1 are padding."""
        if self.annotators:
            counts = counting_rows(self.labels, self.weight).any(-1).to(value.dtype)
            value = (value * counts).sum(-1) / counts.sum(-1).clamp(min=1)
        return value.to(self.f.dtype)


def counting_rows(labels: Tensor, weight: Tensor | None) -> Tensor:
    """Return which rows have a label and a positive weight."""
    return labels >= 0 if weight is None else (labels >= 0) & (weight > 0)


def check_labels(labels: Tensor, rows: Tensor) -> None:
    """Raise unless ``labels`` are integers ``(*batch, m)`` or ``(*batch, a, m)`` on the device of ``rows``."""
    if not isinstance(labels, Tensor):
        raise LabelError(f"labels must be an integer torch.Tensor, got {type(labels).__name__}.")
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise LabelError(f"labels must be integers (region numbers, −1 ignored), got {labels.dtype}. Use .long().")
    if labels.device != rows.device:
        raise LabelError(f"labels are on {labels.device}, the features on {rows.device}. Move one of them with .to().")
    batch, m = rows.shape[:-2], rows.shape[-2]
    plain = tuple(labels.shape) == (*batch, m)
    several = labels.ndim == rows.ndim and labels.shape[:-2] == batch and labels.shape[-1] == m
    if not (plain or several):
        sizes = "(" + "".join(f"{n}, " for n in batch)
        raise LabelError(
            f"labels must have shape {(*batch, m)}, or {sizes}annotators, {m}) for several annotators, for "
            f"features of shape {tuple(rows.shape)}, got {tuple(labels.shape)}."
        )


def count_labels(labels: Tensor, num_labels: int | None) -> int:
    """Return the number of columns of E: ``num_labels``, or one more than the largest label.

    With ``num_labels=None``, reading the largest label of a CUDA tensor synchronizes once.
    """
    if num_labels is not None:
        if num_labels < 1:
            raise LabelError(f"num_labels must be at least 1, got {num_labels}.")
        return int(num_labels)
    if labels.is_meta or labels.numel() == 0:
        return 1
    if not values_checkable(labels):
        raise LabelError(
            "The largest label cannot be read under torch.compile or vmap. Pass num_labels, an upper bound on the "
            "number of regions."
        )
    count = max(int(labels.max()) + 1, 1)
    if count > max(labels.numel(), _MOST_LABELS):  # every label needs memory for the sums over its region
        raise LabelError(
            f"The largest label is {count - 1} for {labels.numel()} labeled rows. Number the regions from 0 without "
            f"gaps, for example with torch.unique(labels, return_inverse=True), or pass num_labels."
        )
    return count


def out_of_labels(labels: Tensor, num_labels: int) -> Tensor:
    """Return which images ``(*batch,)`` have a label outside −1 … num_labels−1."""
    return ((labels < -1) | (labels >= num_labels)).any(-1)


def check_label_values(labels: Tensor, weight: Tensor | None, num_labels: int, annotators: bool) -> None:
    """Raise if a label is out of range or an image has no labeled row of positive weight."""
    if labels.numel() == 0:
        return
    low, high = map(int, labels.aminmax())
    if low < -1 or high >= num_labels:
        raise LabelError(
            f"labels must be in −1 … {num_labels - 1} (num_labels={num_labels}), got values from {low} to {high}. "
            f"Mark rows to ignore with −1."
        )
    labeled = counting_rows(labels, weight)
    present = labeled.flatten(-2).any(-1) if annotators else labeled.any(-1)
    if not bool(present.all()):
        raise LabelError(
            f"{int((~present).sum())} of {max(present.numel(), 1)} images have no labeled row (all labels −1 or all "
            f"weights 0), and their cut is undefined. Remove them, or pass check=False for a value and gradient of 0."
        )


def _sizes(offsets: Tensor | Sequence[int], total: int) -> list[int]:
    ends = [int(o) for o in (offsets.tolist() if isinstance(offsets, Tensor) else offsets)]
    if len(ends) < 1 or ends[0] != 0 or ends[-1] != total or any(b < a for a, b in itertools.pairwise(ends)):
        raise ShapeError(
            f"offsets must be n + 1 increasing integers from 0 to the number of packed rows, {total}, got {ends}."
        )
    return [b - a for a, b in itertools.pairwise(ends)]


def _pad_packed(
    f: Tensor, labels: Tensor, weight: Tensor | None, offsets: Tensor | Sequence[int]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Convert packed images, rows ``offsets[i]:offsets[i+1]`` each, to a batch padded with label −1 and weight 0.

    ``f`` is ``(total, d)``; labels and weights are ``(total,)`` or ``(a, total)``.
    """
    if f.ndim != 2:
        raise ShapeError(
            f"packed features must have shape (total, d), got {tuple(f.shape)}. Remove the batch dimension."
        )
    sizes = _sizes(offsets, f.shape[0])
    n, longest = len(sizes), max(sizes, default=0)
    lengths, first = torch.tensor([sizes, [i * longest for i in range(n)]], dtype=torch.int64).to(f.device)
    before = lengths.cumsum(0) - lengths
    slots = torch.arange(f.shape[0], device=f.device)
    slots = slots + (first - before).repeat_interleave(lengths, output_size=f.shape[0])

    def pad(x: Tensor, fill: float) -> Tensor:
        padded = x.new_full((n * longest, *x.shape[1:]), fill).index_copy(0, slots, x)
        return padded.reshape(n, longest, *x.shape[1:])

    labels = pad(labels.movedim(-1, 0), -1).movedim(1, -1)
    return pad(f, 0), labels, None if weight is None else pad(weight.movedim(-1, 0), 0).movedim(1, -1)


def labeled_images(
    f: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    offsets: Tensor | Sequence[int] | None,
    num_labels: int | None,
    precision: torch.dtype | None,
    check: bool | None,
) -> LabeledImages:
    """Check features, labels and weights, and pad packed images, for every objective of labeled rows."""
    check_matrix(f, "f")
    if f.shape[-1] == 0:
        raise ShapeError(f"f must have at least one feature (*batch, m, d ≥ 1), got shape {tuple(f.shape)}.")
    check_labels(labels, f)
    if weight is not None:
        per_label = isinstance(weight, Tensor) and weight.shape == labels.shape
        check_weight(weight, labels.unsqueeze(-1) if per_label else f)
    if offsets is not None:
        f, labels, weight = _pad_packed(f, labels, weight, offsets)
    if weight is not None and weight.ndim < labels.ndim:
        weight = weight.unsqueeze(-2)
    images = LabeledImages(f, labels, weight, count_labels(labels, num_labels), compute_dtype(precision))
    if not wants_check(check, f, labels, weight):
        return images
    check_finite(f, "f")
    if weight is not None:
        check_weight_values(weight)
    check_label_values(labels, weight, images.num_labels, images.annotators)
    return images._replace(checked=True)


def _flat(index: Tensor, k: int) -> Tensor:
    """Return region numbers ``(batch · m,)`` that are unique in the batch."""
    if index.ndim == 1:
        return index
    images = index.shape[:-1].numel()
    first = k * torch.arange(images, device=index.device).unsqueeze(-1)
    return (index.reshape(images, index.shape[-1]) + first).reshape(-1)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Gather rows of x ``(*batch, k, d)`` by index ``(*batch, m)``: E x, ``(*batch, m, d)``."""
    k, d = x.shape[-2:]
    if x.device.type == "cuda" and x.requires_grad and index.numel() * k <= _ONE_HOT_LIMIT:
        return indicators(index, k, x.dtype) @ x  # with a deterministic derivative, unlike index_select
    return x.reshape(x.shape[:-1].numel(), d).index_select(0, _flat(index, k)).reshape(*index.shape, d)


def indicators(index: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """E ``(*batch, m, k)``; rows with an index of −1 are zero."""
    return (index.unsqueeze(-1) == torch.arange(k, device=index.device)).to(dtype)


def region_sums(x: Tensor, index: Tensor, k: int) -> Tensor:
    """Sums of the rows of x ``(*batch, m, d)`` over regions: ``(*batch, k, d)``, that is Eᵀx.

    On a GPU it is a product with E, one deterministic launch, unless E would be large.
    """
    if x.device.type == "cuda" and index.numel() * k <= _ONE_HOT_LIMIT:
        return tall_product(indicators(index, k, x.dtype), x)
    batch, d = index.shape[:-1], x.shape[-1]
    flat = _flat(index, k)
    zero = x.new_zeros(batch.numel() * k, d)
    return zero.scatter_add(0, flat.unsqueeze(-1).expand(-1, d), x.reshape(len(flat), d)).reshape(*batch, k, d)


def tall_product(x: Tensor, y: Tensor) -> Tensor:
    """xᵀy for tall x ``(*batch, m, p)`` and y ``(*batch, m, q)``, in pieces on a GPU."""
    m = x.shape[-2]
    if x.device.type != "cuda" or m < 4 * _PIECE:
        return x.mT @ y
    pieces = m // _PIECE
    whole = pieces * _PIECE

    def cut(z: Tensor) -> Tensor:
        return z[..., :whole, :].unflatten(-2, (pieces, _PIECE))

    return (cut(x).mT @ cut(y)).sum(-3) + x[..., whole:, :].mT @ y[..., whole:, :]
