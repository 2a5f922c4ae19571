"""Affinity W, normalized affinity M, target Ω and the normalized cut."""

import pytest
import torch

from helpers.cuts import features, regions
from matbackprop import affinity, normalized_affinity, normalized_cut_value
from matbackprop.errors import DomainError, LabelError, NonFiniteError, ShapeError, SymmetryError


def test_normalized_affinity_and_target():
    w, labels = affinity(features(2, 8, 3)), regions(2, 8, k=3, ignored=0.2)
    m, omega = normalized_affinity(w, labels)
    torch.testing.assert_close(normalized_affinity(w), m)
    degree = w.sum(-1)
    torch.testing.assert_close(m * (degree.unsqueeze(-1) * degree.unsqueeze(-2)).sqrt(), w)
    torch.testing.assert_close(m @ degree.sqrt().unsqueeze(-1), degree.sqrt().unsqueeze(-1))  # eigenvalue 1
    same = (labels.unsqueeze(-1) == labels.unsqueeze(-2)) & (labels >= 0).unsqueeze(-1)
    torch.testing.assert_close(omega, same * (degree.unsqueeze(-1) * degree.unsqueeze(-2)).sqrt())


def test_zero_degrees_give_zero_rows_and_no_gradient():
    f = features(5, 3)
    f[2] = 0
    w = affinity(f).requires_grad_()
    m, omega = normalized_affinity(w, regions(5, k=2))
    assert (m[2] == 0).all()
    assert (omega[:, 2] == 0).all()
    (m.sum() + omega.sum()).backward()
    assert torch.isfinite(w.grad).all()


def test_cut_of_separate_groups_is_zero_and_ignored_rows_do_not_count():
    labels = torch.tensor([0, 0, 1, 1, -1])
    w = (labels.unsqueeze(-1) == labels.unsqueeze(-2)).double()
    w[4, :] = w[:, 4] = 5.0
    assert normalized_cut_value(w, labels) == 0
    torch.testing.assert_close(normalized_cut_value(w, labels), normalized_cut_value(w[:4, :4], labels[:4]))
    assert normalized_cut_value(torch.zeros(2, 3, 3), regions(2, 3, k=2)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: affinity(torch.ones(3, 2), torch.eye(3)), ShapeError),
        (lambda: affinity(torch.full((3, 2), torch.nan)), NonFiniteError),
        (lambda: affinity(torch.ones(3, 2), torch.full((2, 2), torch.inf)), NonFiniteError),
        (lambda: normalized_affinity(torch.ones(3, 2)), ShapeError),
        (lambda: normalized_affinity(-torch.ones(3, 3)), DomainError),
        (lambda: normalized_affinity(torch.ones(3, 3), torch.zeros(2).long()), LabelError),
        (lambda: normalized_affinity(torch.ones(3, 3), torch.zeros(2, 3).long()), LabelError),
        (lambda: normalized_cut_value(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([0, 1])), SymmetryError),
        (lambda: normalized_cut_value(torch.ones(2, 2), torch.tensor([-1, -1])), LabelError),
        (lambda: normalized_cut_value(torch.ones(2, 2), torch.tensor([0, 5]), num_labels=2), LabelError),
    ],
)
def test_bad_input(call, error):
    with pytest.raises(error):
        call()
