"""The paired bootstrap: its coverage, its determinism, its use of pairs."""

import numpy as np
import pytest

from matbackprop.errors import DomainError, NonFiniteError, ShapeError
from matbackprop.vision.metrics import paired_bootstrap


def test_interval_is_near_the_normal_one():
    rng = np.random.default_rng(0)
    a = rng.normal(0.7, 0.1, 400)
    b = a - rng.normal(0.02, 0.03, 400)
    interval = paired_bootstrap(a, b)
    error = (a - b).std(ddof=1) / 20
    assert interval.difference == pytest.approx((a - b).mean())
    assert interval.standard_error == pytest.approx(error)
    assert interval.low == pytest.approx((a - b).mean() - 1.96 * error, abs=2e-4)
    assert interval.high == pytest.approx((a - b).mean() + 1.96 * error, abs=2e-4)
    assert str(interval).startswith("+0.0")


def test_coverage():
    rng = np.random.default_rng(1)
    hits = 0
    for seed in range(200):
        difference = rng.normal(0.5, 1, 60)
        interval = paired_bootstrap(difference, np.zeros(60), seed=seed, confidence=0.8)
        hits += interval.low <= 0.5 <= interval.high
    assert 140 <= hits <= 180  # 160 expected, standard deviation 5.7


def test_order_and_seed():
    a, b = np.random.default_rng(2).random((2, 30))
    assert paired_bootstrap(a, b) == paired_bootstrap(list(a), list(b))
    assert paired_bootstrap(a, b).low == pytest.approx(-paired_bootstrap(b, a).high)
    assert paired_bootstrap(a, b, seed=1) != paired_bootstrap(a, b, seed=2)
    assert paired_bootstrap(a, b)._asdict()["pairs"] == 30


def test_wrong_input():
    with pytest.raises(ShapeError, match=r"\(3,\) and \(4,\)"):
        paired_bootstrap([1, 2, 3], [1, 2, 3, 4])
    with pytest.raises(ShapeError, match="≥ 2"):
        paired_bootstrap([1], [1])
    with pytest.raises(NonFiniteError, match="NaN"):
        paired_bootstrap([1, np.nan], [1, 2])
    with pytest.raises(DomainError, match="confidence"):
        paired_bootstrap([1, 2], [1, 2], confidence=95)
