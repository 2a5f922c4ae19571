"""Every operator against its definition in mpmath: value, gradient, forward mode and second derivative."""

import pytest

from helpers.adversarial import ROWS, find
from helpers.judge import judge

NAMES = [row.name for row in ROWS]


def _check(name, kind, **options):
    """Return the verdicts, and the fraction of mutated answers that are called wrong."""
    found = judge(find(name, kind, **options), mutations=True)
    assert set(found["verdicts"].values()) <= {"exact", "undetermined", "clear error"}, found
    return found["verdicts"], sum(found["caught"].values()) / max(len(found["caught"]), 1)


@pytest.mark.parametrize("name", NAMES)
def test_answers_equal_the_definition(name):
    verdicts, caught = _check(name, "plain")
    assert {verdicts["value"], verdicts.get("gradient", "exact")} == {"exact"}
    assert caught > 0.8  # an error of a tenth would be noticed


@pytest.mark.quick(10)
@pytest.mark.parametrize("name", [row.name for row in ROWS if row.complex])
def test_answers_for_complex_matrices_equal_the_definition(name):
    verdicts, _ = _check(name, "plain", is_complex=True)
    assert set(verdicts.values()) == {"exact"}


@pytest.mark.quick(16)
@pytest.mark.parametrize("name", NAMES)
def test_answers_at_ties_equal_the_definition_or_are_refused(name):
    _check(name, "tied")
