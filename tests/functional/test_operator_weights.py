"""One rule for weights in every operator that takes them: a mask or floating point, one per row, never negative."""

import pytest
import torch

from matbackprop import normalized_cut_j1, normalized_cut_j2, normalized_cut_soft, second_order_pool, spectral_embedding
from matbackprop.errors import DeviceError, DomainError, DtypeError, NonFiniteError, ShapeError
from matbackprop.vision.segmentation import weighted_kmeans

LABELS = torch.tensor([0, 1, 1, 0])
OPERATORS = {
    "pool": lambda f, w: second_order_pool(f, weight=w),
    "j1": lambda f, w: normalized_cut_j1(f, LABELS, weight=w),
    "j2": lambda f, w: normalized_cut_j2(f, LABELS, weight=w),
    "soft": lambda f, w: normalized_cut_soft(f, LABELS, weight=w),
    "spectral_embedding": lambda f, w: spectral_embedding(f, 2, weight=w),
    "weighted_kmeans": lambda f, w: weighted_kmeans(f, w, [2]),
}


def features():
    return torch.rand(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (torch.tensor([1.0, 1.0, -1.0, 1.0]), DomainError, "weights? must not be negative, got -1"),
        (torch.tensor([1.0, torch.nan, 1.0, 1.0]), NonFiniteError, "weight"),
        ([1.0, 1.0, 1.0, 1.0], DtypeError, r"weights? (must be a torch\.Tensor|.*got list)"),
        (torch.ones(4, dtype=torch.int64), DtypeError, r"torch.int64. Convert it with .bool\(\)"),
        (torch.ones(3), ShapeError, "weight"),
        (torch.ones(4, device="meta"), DeviceError, "weights? is on meta and the features are on cpu"),
    ],
    ids=["negative", "NaN", "list", "integers", "too few", "another device"],
)
def test_bad_weights_are_rejected(name, weight, error, message):
    with pytest.raises(error, match=message):
        OPERATORS[name](features(), weight)


@pytest.mark.parametrize("name", OPERATORS)
def test_masks_equal_weights_of_zeros_and_ones(name):
    mask = torch.tensor([True, True, False, True])

    def first(out):
        return out[0] if isinstance(out, tuple) else out

    masked, weighted = (first(OPERATORS[name](features(), w)) for w in (mask, mask.double()))
    torch.testing.assert_close(masked, weighted, rtol=0, atol=0)
