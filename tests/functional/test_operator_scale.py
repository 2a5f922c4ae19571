"""Intermediate overflow is refused, and other results are right at any scale."""

import pytest
import torch

import matbackprop as mb
from matbackprop.errors import DomainError

EYE, LABELS = torch.eye(4, dtype=torch.float64), torch.arange(4)
CUTS = {
    "J1": lambda f, **o: mb.normalized_cut_j1(f, LABELS.expand(f.shape[:-1]), **o),
    "J2": lambda f, **o: mb.normalized_cut_j2(f, LABELS.expand(f.shape[:-1]), **o),
    "soft": lambda f, **o: mb.normalized_cut_soft(f, LABELS.expand(f.shape[:-1]), **o),
    "embedding": lambda f, **o: mb.spectral_embedding(f, 4, ties="drop", **o)[0],
}


FREE = {name: call for name, call in CUTS.items() if name != "embedding"} | {
    "projector": mb.projector,
    "spectral projector": lambda a: mb.spectral_projector(a @ (0.25 * LABELS.diag() + 0.1 * EYE), rank=2),
    "polar": lambda a: mb.polar(a).Q,
    "rotation": mb.project_rotation,
    "procrustes": lambda x: mb.procrustes(x, x.flip(-1)),
    "cut value": lambda f: mb.normalized_cut_value(f @ EYE, LABELS.expand(f.shape[:-1])),
}


@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e-90, 1e90, 1e170, 1e300])
def test_features_whose_degrees_overflow_are_rejected(scale):
    """Regression: the embedding's eigenvalues of 1e170·I were 0 instead of 1."""
    with pytest.raises(DomainError, match="Scale it"):
        CUTS["embedding"](scale * EYE)
    with pytest.raises(DomainError, match="Scale it"):  # one image of a batch
        CUTS["embedding"](torch.stack([EYE, scale * EYE]))


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("scale", [1e-310, 1e-300, 1e-170, 1e170, 1e300, 1.2e308])
def test_scale_invariant_operators_do_not_overflow(name, scale):
    """Regression: J2 of 1e170·I was 2 instead of 0, and the projector of 1.2e308·I was 0."""
    torch.testing.assert_close(FREE[name](scale * EYE), FREE[name](EYE))
    torch.testing.assert_close(FREE[name](torch.stack([EYE, scale * EYE]))[1], FREE[name](EYE))


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("scale", [1e-70, 1e-8, 1e8, 1e70])
def test_scale_invariant_operators_are_equal_at_every_scale(name, scale):
    f = torch.rand(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.testing.assert_close(CUTS[name](scale * f), CUTS[name](f))
    plain, scaled = (torch.autograd.grad(CUTS[name](s * f).sum(), f)[0] for s in (1.0, scale))
    torch.testing.assert_close(scaled, plain, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(CUTS[name](0 * f), CUTS[name](0 * EYE))  # zero is accepted


def test_thresholds_of_spectral_projectors_scale_with_the_matrix():
    a = torch.stack([1e-200 * EYE, EYE, 1e200 * LABELS.double().diag()]).requires_grad_()
    onto = mb.spectral_projector(a, threshold=1.5e200)
    torch.testing.assert_close(onto, torch.stack([0 * EYE, 0 * EYE, (LABELS > 1).double().diag()]))
    (grad,) = torch.autograd.grad(onto[2, 1, 2], a)
    torch.testing.assert_close(1e200 * grad[2, 1, 2], torch.tensor(0.5, dtype=torch.float64))


def test_float32_computation_checks_the_range_of_float32():
    with pytest.raises(DomainError, match="float32"):
        mb.spectral_embedding(1e12 * EYE.float(), 4, ties="drop", precision=torch.float32)
    torch.testing.assert_close(mb.spectral_embedding(1e12 * EYE.float(), 4, ties="drop")[0], torch.ones(4))
    for precision in (torch.float32, torch.float64):
        value = mb.normalized_cut_j2(1e12 * EYE.float(), LABELS, precision=precision)
        torch.testing.assert_close(value, torch.tensor(0.0))


UNDERFLOWS = {
    "sqrt": mb.matrix_sqrt,
    "eigh": lambda a, **o: mb.eigh(a, **o)[0],
    "svd": lambda a, **o: mb.svd(a, **o)[1],
    "solve": lambda b, **o: mb.linear_solve(EYE, b, **o),
    "lstsq": lambda b, **o: mb.lstsq(EYE, b, **o),
    "lyapunov": lambda a, **o: mb.lyapunov(a, 0 * EYE, **o),
}


@pytest.mark.parametrize("scale", [1e-60, 1e-42, 1e60])
@pytest.mark.parametrize("name", UNDERFLOWS)
def test_float64_matrices_out_of_the_range_of_float32_are_rejected_scaled_or_nan(name, scale):
    call = UNDERFLOWS[name]
    try:
        out = call(scale * EYE, precision=torch.float32)
        torch.testing.assert_close(out, call(scale * EYE), rtol=1e-5, atol=0)
    except DomainError as error:
        assert "float32" in str(error)
    assert call(scale * EYE, precision=torch.float32, check=False).isnan().all()


def test_moments_and_weights_that_underflow_give_nan_if_unchecked():
    x, y = 1e-160 * (EYE + 0.1), 1e-160 * (EYE - 0.3)
    assert torch.func.vmap(mb.procrustes)(x[None], y[None]).isnan().all()
    torch.testing.assert_close(mb.procrustes(x, y), mb.procrustes(1e160 * x, 1e160 * y))
    for scale in (1e-200, 1e200):
        weight = torch.full((4,), scale, dtype=torch.float64)
        assert mb.normalized_cut_j1(EYE + 0.1, LABELS, num_labels=4, weight=weight, check=False).isnan()


def test_pooling_rejects_squares_that_overflow():
    for sign in (1, -1):
        with pytest.raises(DomainError, match="Scale it"):
            mb.second_order_pool(sign * 1e170 * EYE)
    expected = torch.diag_embed(torch.full((4,), 1e-3, dtype=torch.float64).log())
    torch.testing.assert_close(mb.second_order_pool(1e-170 * EYE), expected)


def test_intermediate_overflow_of_a_gradient_is_rejected():
    """Near ties of huge matrices: the gradient is finite, but an intermediate result is not."""
    a = (1e300 * torch.diag(torch.tensor([1.0, 1.0 + 1e-12, 2.0], dtype=torch.float64))).requires_grad_()
    _, u = mb.eigh(a)
    with pytest.raises(DomainError, match="Scale them"):
        (1e300 * u[1, 0]).backward()


def test_functions_of_the_largest_matrices_are_finite():
    a = torch.tensor([[1.2e308, -1.2e308], [-1.2e308, 1.2e308]], dtype=torch.float64).mul(0.7)
    torch.testing.assert_close(mb.matrix_power(a, 1), a)


def test_an_eigenvalue_beyond_the_range_is_reported():
    """Its inverse root would be added as zero."""
    a = torch.full((2, 2), 1.2e308, dtype=torch.float64) + torch.diag(torch.tensor([1e300, 0.0], dtype=torch.float64))
    with pytest.raises(DomainError, match="An eigenvalue of a overflows"):
        mb.matrix_inv_sqrt(a)
