"""The first of the adversarial matrices; ``python -m benchmarks adversarial_matrices`` judges 20,000."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import matbackprop as mb
from helpers import adversarial
from helpers.adversarial import ROWS
from helpers.judge import MODES, judge
from helpers.operators import CASES

pytestmark = pytest.mark.filterwarnings("ignore")
RIGHT = {"exact", "undetermined", "clear error"}


@pytest.mark.quick(4)
@pytest.mark.parametrize("row", range(len(ROWS)), ids=[row.name for row in ROWS])
def test_answers_are_exact_or_rejected_with_a_clear_error(row):
    record = adversarial.record(0, row, mutations=False)
    assert set(record["verdicts"].values()) <= RIGHT, record


def test_every_operator_has_a_reference():
    """Complex rows repeat real ones."""
    names = {case.name for case in CASES if not case.name.startswith("complex_")}
    assert names <= {row.name for row in ROWS}


def _caught(numbers):
    """Per dtype: how many mutated answers were called wrong, and how many there were."""
    counts = {}
    for number in numbers:
        record = adversarial.record(0, number)
        counts.setdefault(record["dtype"], Counter()).update(record["caught"].values())
    return {dtype: (found[True], found.total()) for dtype, found in counts.items()}


def test_mutated_answers_are_called_wrong():
    """Answers times 1.1, negated, transposed, or without their diagonal."""
    counts = _caught(range(0, 2 * len(ROWS), 11))
    assert {"float64", "float32", "bfloat16"} <= set(counts)
    for dtype, (found, total) in counts.items():
        assert found >= 0.95 * total, (dtype, found, total)


def _problem(name, kind, mode="eager", dtype=torch.float64, orders=2, call=None):
    """A problem with another operator."""
    problem = adversarial.find(name, kind, mode, dtype)
    problem.row = replace(problem.row, orders=orders, call=call or problem.row.call)
    return problem


@pytest.mark.parametrize(
    ("kind", "call", "verdict"),
    [
        ("plain", mb.matrix_log, "exact"),
        ("plain", lambda a: mb.matrix_log(a) * (1 + 1e-5), "silently wrong"),
        ("plain", lambda a: mb.matrix_log(a) + 1e-6 * (a - a.detach()), "silently wrong"),
        ("plain", lambda a: torch.full_like(a, torch.nan), "silently wrong"),
        ("plain", lambda a: {}["p"], "unclear error"),
        ("plain", lambda a: mb.matrix_log(-a), "needless error"),
        ("indefinite", lambda a: a, "silently wrong"),
        ("indefinite", mb.matrix_log, "clear error"),
    ],
)
def test_wrong_values_gradients_and_errors_of_the_logarithm_are_detected(kind, call, verdict):
    found = judge(_problem("matrix_log", kind, call=call))
    assert verdict in found["verdicts"].values(), found


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [(1e17, "undetermined"), (torch.inf, "undetermined"), (7.0, "silently wrong"), (torch.nan, "silently wrong")],
)
def test_answers_near_a_pole_must_be_large(answer, verdict):
    problem = _problem("matrix_inverse", "singular", orders=0, call=lambda a: torch.full_like(a, answer))
    assert judge(problem)["verdicts"]["value"] == verdict


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "eager"])
def test_every_mode_calls_the_operator_and_its_derivatives(mode):
    found = judge(_problem("matrix_sqrt", "plain", mode), mutations=True)
    assert set(found["verdicts"].values()) == {"exact"}, found
    assert len(found["verdicts"]) == (2 if mode == "compile" else 4)
    assert all(found["caught"].values())


@pytest.mark.parametrize("factor", [2.0**200, 2.0**-200])
def test_large_outputs_do_not_hide_faults_of_small_ones(factor):
    """The degrees have the size factor², the eigenvalues and eigenvectors the size 1."""

    def call(f, **options):
        values, u, degrees = mb.spectral_embedding(f, 2, **options)
        return values, u + 1e-5 * (f - f.detach())[..., :2] / factor, degrees

    for wrong in (False, True):
        problem = _problem("spectral_embedding", "plain", call=call if wrong else None)
        found = judge(replace(problem, arrays=[factor * a for a in problem.arrays]), mutations=not wrong)
        verdict = "silently wrong" if wrong else "exact"
        assert [found["verdicts"][name] for name in ("gradient", "tangent")] == [verdict] * 2, found
        assert all(found["caught"].values())


@pytest.mark.parametrize(("error", "verdict"), [(0.0, "exact"), (1e-5, "silently wrong")])
def test_derivatives_that_vanish_are_judged(error, verdict):
    """The projector on the columns of an invertible matrix is constant."""
    problem = _problem("projector", "plain", call=lambda a: mb.projector(a) + error * (a - a.detach()))
    found = judge(replace(problem, arrays=[np.diag([1.0, 2.0, 3.0]) + 0.5], layout=""))
    assert [found["verdicts"][name] for name in ("gradient", "tangent")] == [verdict] * 2, found


def test_nan_is_a_refusal_only_if_values_are_not_checked():
    for mode, verdict in (("eager", "silently wrong"), ("unchecked", "clear error")):
        problem = _problem("matrix_log", "indefinite", mode, orders=0, call=lambda a, check=None: a * torch.nan)
        assert judge(problem)["verdicts"]["value"] == verdict


def test_bfloat16_derivatives_that_are_a_tenth_too_large_are_detected():
    class Larger(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return 1.1 * g

    def call(a):
        return Larger.apply(mb.matrix_exp(a)) if a.requires_grad else mb.matrix_exp(a)

    found = judge(_problem("matrix_exp", "plain", dtype=torch.bfloat16, call=call))
    assert found["verdicts"]["gradient"] == "silently wrong", found
