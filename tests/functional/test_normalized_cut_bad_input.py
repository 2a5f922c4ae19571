"""Each kind of bad input raises an error with a fix."""

import pytest
import torch

from helpers.cuts import OBJECTIVES, features, lambda_matrix, regions
from matbackprop import normalized_cut_j1, normalized_cut_j2, normalized_cut_soft
from matbackprop.errors import DomainError, DtypeError, LabelError, NonFiniteError, ShapeError

F, L = features(2, 10, 3), regions(2, 10)

CASES = {
    "labels too short": (F, L[:, :-1], {}, LabelError, "must have shape"),
    "labels without the batch": (F, L[0], {}, LabelError, "must have shape"),
    "annotators in the wrong place": (F, L.expand(3, 2, 10), {}, LabelError, "annotators"),
    "float labels": (F, L.float(), {}, LabelError, r"\.long\(\)"),
    "boolean labels": (F, L > 0, {}, LabelError, "integers"),
    "labels as a list": (F, L.tolist(), {}, LabelError, "torch.Tensor"),
    "labels on another device": (F, L.to("meta"), {}, LabelError, "Move one"),
    "labels below −1": (F, L - 2, {}, LabelError, "−1"),
    "labels beyond num_labels": (F, L, {"num_labels": 3}, LabelError, "num_labels=3"),
    "num_labels of zero": (F, L, {"num_labels": 0}, LabelError, "at least 1"),
    "an image without labels": (F, L.clone().index_fill_(0, torch.tensor([1]), -1), {}, LabelError, "1 of 2 images"),
    "an image whose weights are zero": (
        F,
        L,
        {"weight": torch.ones(2, 10) * torch.tensor([[1.0], [0.0]])},
        LabelError,
        "0",
    ),
    "no feature at all": (F[..., :0], L, {}, ShapeError, "at least one feature"),
    "NaN": (F.clone().index_fill_(1, torch.tensor([3]), torch.nan), L, {}, NonFiniteError, "6 of .* are non-finite"),
    "offsets that do not end at the last row": (F[0], L[0], {"offsets": [0, 4]}, ShapeError, "offsets"),
    "falling offsets": (F[0], L[0], {"offsets": [0, 7, 4, 10]}, ShapeError, "increasing"),
    "offsets with a batch": (F, L, {"offsets": [0, 10]}, ShapeError, "total"),
    "an unknown precision": (F, L, {"precision": torch.float16}, DtypeError, "precision"),
}


@pytest.mark.parametrize("name", list(OBJECTIVES))
@pytest.mark.parametrize("case", list(CASES))
def test_bad_input_is_rejected(name, case):
    f, labels, keywords, error, words = CASES[case]
    with pytest.raises(error, match=words):
        OBJECTIVES[name][0](f, labels, **keywords)


@pytest.mark.parametrize("tolerance", [-1e-3, 1.0])
def test_rank_tolerances_out_of_range(tolerance):
    for function in (normalized_cut_j1, normalized_cut_j2):
        with pytest.raises(DomainError, match="rank tolerance"):
            function(F, L, rank_tol=tolerance)


@pytest.mark.parametrize("ridge", [0.0, -0.3, float("nan"), float("inf")])
def test_a_ridge_must_be_positive_and_finite(ridge):
    with pytest.raises(DomainError, match="ridge"):
        normalized_cut_soft(F, L, ridge=ridge)


def test_j1_rejects_negative_degrees_and_j2_accepts_them():
    f = F.clone()
    f[1, 4] = -1
    with pytest.raises(DomainError, match="1 of 20 rows have a negative degree"):
        normalized_cut_j1(f, L)
    assert torch.isfinite(normalized_cut_j2(f, L)).all()


@pytest.mark.parametrize(
    ("lam", "error"),
    [
        (torch.eye(4), ShapeError),
        (torch.ones(3), ShapeError),
        (torch.eye(3).expand(5, 3, 3), ShapeError),
        (torch.eye(3, dtype=torch.int64), DtypeError),
        (torch.full((3, 3), torch.nan), NonFiniteError),
        (-lambda_matrix(3), DomainError),
    ],
)
def test_bad_lambdas(lam, error):
    with pytest.raises(error):
        normalized_cut_j1(F, L, lam=lam)


def test_compile_and_vmap_need_num_labels():
    with pytest.raises(LabelError, match="num_labels"):
        torch.func.vmap(normalized_cut_j2)(F, L)


def test_checks_of_values_can_be_switched_off():
    f = F.clone()
    f[0, 0, 0] = torch.nan
    value = normalized_cut_soft(f, L, check=False)
    assert torch.isnan(value[0])
    assert torch.isfinite(value[1])


def test_a_label_far_beyond_the_number_of_rows_is_rejected():
    labels = L.clone()
    labels[0] = 2**33
    with pytest.raises(LabelError, match="largest label is 8589934592 for 20 labeled rows"):
        normalized_cut_j2(F, labels)


def test_an_empty_packed_batch_has_no_value():
    f = torch.zeros(0, 3, requires_grad=True)
    for objective in (normalized_cut_j1, normalized_cut_j2, normalized_cut_soft):
        value = objective(f, torch.zeros(0, dtype=torch.long), offsets=[0])
        assert value.shape == (0,)
        value.sum().backward()
    assert f.grad.shape == (0, 3)
