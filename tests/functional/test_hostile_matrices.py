"""The seeded beginning of the suite of hostile matrices; benchmarks/hostile_matrices.py judges 20,000 cases."""

import pytest
import torch

from helpers import hostile
from helpers.operators import CASES

EACH = 2


@pytest.mark.parametrize("row", range(len(hostile.ROWS)), ids=[row.name for row in hostile.ROWS])
@pytest.mark.filterwarnings("ignore")
def test_no_answer_is_wrong_in_silence_and_each_error_says_what_to_do(row):
    for number in range(row, EACH * len(hostile.ROWS), len(hostile.ROWS)):
        record = hostile.judge(0, number)
        assert record["verdict"] in ("exact", "undetermined", "clear error"), record


def test_every_operator_has_its_truth():
    """Complex rows are twins of real ones."""
    assert {case.name for case in CASES if not case.name.startswith("complex_")} <= {row.name for row in hostile.ROWS}


def test_the_suite_notices_a_wrong_value_a_wrong_gradient_and_an_unclear_error(monkeypatch):
    """A program that is wrong in one way at a time: in the logarithm of a plain matrix."""
    plain = ("plain", 1.0, torch.float64)
    logarithms = range(0, 10**6, len(hostile.ROWS))
    draws = ((n, hostile.make(0, n)[0].draw) for n in logarithms)
    number = next(n for n, d in draws if (d.kind, d.scale, d.dtype) == plain and d.n > 1)
    right = hostile.mb.matrix_log
    row = hostile.ROWS[0]

    def verdict(call):
        rows = [hostile.Row(row.name, row.draw, row.truth, call, symmetric=(0,)), *hostile.ROWS[1:]]
        monkeypatch.setattr(hostile, "ROWS", rows)
        return hostile.judge(0, number)["verdict"]

    def unclear(a):
        raise KeyError("p")

    assert verdict(right) == "exact"
    assert verdict(lambda a: right(a) * (1 + 1e-5)) == "silently wrong"
    assert verdict(lambda a: right(a) + 1e-6 * (a - a.detach())) == "silently wrong"
    assert verdict(unclear) == "unclear error"
    assert verdict(lambda a: torch.full_like(right(a), torch.nan)) == "silently wrong"
