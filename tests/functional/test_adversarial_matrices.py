"""The first cases of the adversarial matrices; ``python -m benchmarks adversarial_matrices`` judges 20,000."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import adversarial
from helpers.operators import CASES

EACH = 2


@pytest.mark.quick(4)
@pytest.mark.parametrize("row", range(len(adversarial.ROWS)), ids=[row.name for row in adversarial.ROWS])
@pytest.mark.filterwarnings("ignore")
def test_results_are_exact_or_refused_with_a_clear_error(row):
    for number in range(row, EACH * len(adversarial.ROWS), len(adversarial.ROWS)):
        record = adversarial.judge(0, number)
        assert record["verdict"] in ("exact", "undetermined", "clear error"), record


def test_every_operator_has_a_reference():
    """Complex rows repeat real ones."""
    assert {case.name for case in CASES if not case.name.startswith("complex_")} <= {
        row.name for row in adversarial.ROWS
    }


def test_wrong_values_wrong_gradients_and_unclear_errors_are_detected(monkeypatch):
    """Replace the logarithm by wrong implementations."""
    plain = ("plain", 1.0, torch.float64)
    logarithms = range(0, 10**6, len(adversarial.ROWS))
    draws = ((n, adversarial.make(0, n)[0].draw) for n in logarithms)
    number = next(n for n, d in draws if (d.kind, d.scale, d.dtype) == plain and d.n > 1)
    right = adversarial.mb.matrix_log
    row = adversarial.ROWS[0]

    def verdict(call):
        rows = [adversarial.Row(row.name, row.draw, row.truth, call, symmetric=(0,)), *adversarial.ROWS[1:]]
        monkeypatch.setattr(adversarial, "ROWS", rows)
        return adversarial.judge(0, number)["verdict"]

    def unclear(a):
        raise KeyError("p")

    assert verdict(right) == "exact"
    assert verdict(lambda a: right(a) * (1 + 1e-5)) == "silently wrong"
    assert verdict(lambda a: right(a) + 1e-6 * (a - a.detach())) == "silently wrong"
    assert verdict(unclear) == "unclear error"
    assert verdict(lambda a: torch.full_like(right(a), torch.nan)) == "silently wrong"


def _infinite(sign):
    return lambda a: torch.diag_embed(sign * torch.inf * a.diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize(
    ("name", "kind", "scale", "answer", "verdict"),
    [
        ("matrix_inverse", "singular", 1.0, lambda a: torch.full_like(a, 1e17), "undetermined"),
        ("matrix_inverse", "singular", 1.0, lambda a: torch.full_like(a, torch.inf), "undetermined"),
        ("matrix_inverse", "singular", 1.0, lambda a: torch.full_like(a, 7.0), "silently wrong"),
        ("matrix_inverse", "singular", 1.0, lambda a: torch.full_like(a, torch.nan), "silently wrong"),
        ("matrix_cube", "diagonal", 1e150, _infinite(1), "exact"),
        ("matrix_cube", "diagonal", 1e150, _infinite(-1), "silently wrong"),
        ("matrix_cube", "diagonal", 1e30, _infinite(1), "silently wrong"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_only_large_numbers_near_a_pole_and_overflow_to_infinity_are_accepted(
    monkeypatch, name, kind, scale, answer, verdict
):
    index, row = next((i, row) for i, row in enumerate(adversarial.ROWS) if row.name == name)
    changed = replace(row, call=lambda a: answer(a.detach()), orders=0)
    monkeypatch.setattr(adversarial, "ROWS", [*adversarial.ROWS[:index], changed, *adversarial.ROWS[index + 1 :]])
    selected = (kind, scale, torch.float64)
    for number in range(index, 10**6, len(adversarial.ROWS)):
        case, _ = adversarial.make(0, number)
        if (case.draw.kind, case.draw.scale, case.dtype) == selected and _suits(case):
            break
    assert adversarial.judge(0, number)["verdict"] == verdict


def _suits(case):
    """Whether the matrix has several rows and is singular only up to rounding."""
    a = case.arrays[0]
    return len(a) > 2 and (case.draw.kind != "singular" or 0 < abs(np.linalg.eigvalsh(a)).min() < 1e-15)
