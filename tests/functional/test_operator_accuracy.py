"""Gradients at bitwise equal values against definitions with 75 digits; docs/stability.md has the table."""

import pytest
import torch

from helpers.accuracy import PROMISED, ROWS, gradient_error


@pytest.mark.quick(10)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_gradient_error_is_within_the_documented_bound_at_equal_values(row):
    case = "simple" if row.make("equal") is None else "equal"
    assert gradient_error(row, case, torch.float64) <= PROMISED[torch.float64]


def test_a_wrong_gradient_is_detected():
    row = next(row for row in ROWS if row.name == "matrix_log")
    wrong = type(row)(row.name, lambda a: row.call(a) + 1e-9 * a, row.truth, row.make, row.symmetric)
    assert gradient_error(wrong, "equal", torch.float64) > PROMISED[torch.float64]
