"""The gradient explorer: reference, methods, training and texts."""

import numpy as np
import pytest
import torch

from matbackprop.vision.serve.gradients import (
    FUNCTIONS,
    GAPS,
    METHODS,
    TIE,
    _direction,
    errors,
    explore,
    gap_text,
    gradient,
    matrix,
    train,
    truth,
)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("spectrum", ["evenly spaced", "whitened features"])
def test_the_reference_is_the_derivative_of_the_function(function, spectrum):
    """Central differences of SciPy's logm and sqrtm, with separate and with repeated eigenvalues."""
    linalg = pytest.importorskip("scipy.linalg")
    a = matrix(spectrum, 0).numpy()
    g = {"log": linalg.logm, "sqrt": linalg.sqrtm}[function]
    slope, weights = truth(torch.from_numpy(a), function), _direction().numpy()
    step = np.random.default_rng(0).standard_normal(a.shape)
    step = (step + step.T) * np.sqrt(np.outer(np.diag(a), np.diag(a))) * 1e-5
    actual = (weights * (g(a + step) - g(a - step))).sum() / 2
    assert actual.real == pytest.approx((slope * step).sum(), rel=1e-5)


def test_our_error_is_rounding_at_every_gap_and_that_of_autograd_grows():
    for function in FUNCTIONS:
        actual = errors("evenly spaced", function, "float64")
        assert max(actual["matbackprop"]) < 2e-14
        autograd = actual["torch.linalg.eigh + autograd"]
        assert autograd[GAPS.index(0)] < 1e-12 and not max(autograd) < 1e-4


def test_zero_channels_stop_training_with_autograd_only():
    runs = train("four dead channels", -4, "log", "float32")
    assert runs["torch.linalg.eigh + autograd"].failed == 1
    for name in ("matbackprop", "the paper's formulas", "Taylor series, 9 terms"):
        assert runs[name].failed is None and runs[name].losses[-1] < 1e-3 * runs[name].losses[0]


def test_a_gap_of_zero_is_a_tie_and_taylor_is_accurate_far_from_one():
    values = torch.linalg.eigvalsh(matrix("from 10⁻³ to 10³", TIE))
    assert float((values[4] - values[3]) / values[3]) < 1e-12
    a = torch.diag(torch.logspace(-3, 9, 8, dtype=torch.float64))
    expected = gradient("matbackprop", a, "sqrt")
    assert torch.allclose(gradient("Taylor series, 9 terms", a, "sqrt"), expected, rtol=1e-6, atol=0)


def test_output_names_every_method_and_shows_nan():
    sentence, page = explore("four dead channels", TIE, "sqrt", "float64")
    assert all(name.replace("'", "&#x27;") in page for name in METHODS) and "NaN in step 1" in page
    assert page.count("<svg") == page.count("aria-label") == 2
    assert sentence.startswith("Two eigenvalues are equal: autograd through eigh returns NaN; ")
    assert gap_text(-12) == "10⁻¹²" and gap_text(TIE) == "0"
