"""Tie policies of the decomposition layers: exact without a gauge, an error or NaN with one."""

import warnings

import pytest
import torch
from torch.autograd import forward_ad

import matbackprop as mb
from helpers.matrices import orthogonal, symmetric, with_singular_values
from matbackprop._torch import WHOLE_GRAPHS
from matbackprop.errors import GaugeWarning, TieError


def _tied_projector_loss(a, **options):
    """Depends on the tied eigenspace as a whole: no gauge."""
    _, u = mb.eigh(a, **options)
    block = u[..., :2]
    return (block @ block.mT * torch.arange(16.0, dtype=a.dtype).reshape(4, 4)).sum()


def _one_vector_loss(a, **options):
    """Depends on one vector inside the tie: gauge."""
    _, u = mb.eigh(a, **options)
    return (u[..., 0] * torch.arange(4.0, dtype=a.dtype, device=a.device)).square().sum()


@pytest.mark.parametrize("ties", ["drop", "broaden"])
def test_a_loss_of_an_eigenspace_is_exact_at_a_tie(ties):
    """The projector on a tied eigenspace: the cross-block formula, by finite differences along symmetric directions."""
    a = symmetric("repeated").requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (grad,) = torch.autograd.grad(_tied_projector_loss(a, ties=ties), a)
    step = 1e-6 * symmetric("separated", seed=9)
    difference = (_tied_projector_loss(a + step) - _tied_projector_loss(a - step)).detach() / 2
    torch.testing.assert_close((grad * step).sum(), difference, rtol=1e-5, atol=0)


def test_raise_is_the_default():
    a = symmetric("repeated").requires_grad_()
    with pytest.raises(TieError, match=r"loss of eigh uses vectors of a repeated .* ties=\"drop\""):
        _one_vector_loss(a).backward()


@pytest.mark.parametrize("scale", [2.0, 1.0])
@pytest.mark.parametrize("direction", [[[1.0, 2.0], [2.0, -1.0]], [[1.0, 0.5], [0.5, 1.0]]])
def test_undetermined_gradients_at_a_tie_are_rejected(scale, direction):
    """log A through the factors: the loss does not depend on the basis, but part of its gradient is 0/0 here.

    At the identity, where log is zero, the vectors receive zero gradients.
    """
    direction = torch.tensor(direction, dtype=torch.float64)
    a = (scale * torch.eye(2, dtype=torch.float64)).requires_grad_()
    lam, u = mb.eigh(a)
    with pytest.raises(TieError):
        (((u * lam.log()) @ u.mT) * direction).sum().backward()
    (mb.matrix_log(a) * direction).sum().backward()
    torch.testing.assert_close(a.grad, direction / scale)
    u, s, vh = mb.svd(a)
    with pytest.raises(TieError):
        (((u * s.log()) @ vh) * direction).sum().backward()


def test_a_near_tie_within_the_rounding_of_the_data_is_rejected():
    """The smallest eigenvalues differ by less than float32 resolves: the gradient would be silently wrong."""
    q = orthogonal(4)
    target = (
        q[:, 2] + 1e-4 * q[:, 1]
    ).float()  # nearly independent of the tied vector, which rotates 1e7 times as fast
    a = (q * torch.tensor([1e-8, 3e-8, 0.5, 1.0], dtype=torch.float64)) @ q.mT
    a = (0.5 * (a + a.mT)).float().requires_grad_()
    with pytest.raises(TieError):
        (mb.eigh(a)[1][..., 0] * target).sum().backward()


def test_ties_of_unused_vectors_are_accepted():
    """The leading vector of a matrix of low rank, whose other eigenvalues are all zero, by its closed form."""
    f = with_singular_values(6, 6, (3.0, 2.0, 0.0, 0.0, 0.0, 0.0))
    target = torch.arange(6.0, dtype=torch.float64)
    a = (f @ f.mT).requires_grad_()
    lam, u = mb.eigh(a)
    loss = lam[-1].log() * (u[:, -1] * target).sum().square()
    (grad,) = torch.autograd.grad(loss, a)
    step = 1e-6 * symmetric((1.0, 0.5, 0.2, -0.3, -0.6, -1.0), seed=3)

    def value(x):
        lam, u = torch.linalg.eigh(x)
        return lam[-1].log() * (u[:, -1] * target).sum().square()

    difference = (value(a.detach() + step) - value(a.detach() - step)) / 2
    torch.testing.assert_close((grad * step).sum(), difference, rtol=1e-5, atol=0)
    x = with_singular_values(6, 4, (3.0, 2.0, 0.0, 0.0)).requires_grad_()
    u, s, vh = mb.svd(x)
    (s[0] * u[:, 0].sum() * vh[0].sum()).backward()
    assert x.grad.isfinite().all()


def test_results_have_the_field_names_of_torch():
    a = symmetric("separated")
    assert mb.eigh(a)._fields == ("eigenvalues", "eigenvectors")
    assert mb.svd(a)._fields == ("U", "S", "Vh")
    assert torch.equal(mb.eigh(a).eigenvalues, mb.eigh(a)[0])


@pytest.mark.parametrize("ties", ["drop", "broaden"])
def test_other_policies_warn_and_stay_finite(ties):
    a = symmetric("repeated").requires_grad_()
    with pytest.warns(GaugeWarning, match=f'ties="{ties}"'):
        _one_vector_loss(a, ties=ties).backward()
    assert a.grad.isfinite().all()


def test_check_false_does_not_warn():
    a = symmetric("repeated").requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _one_vector_loss(a, ties="drop", check=False).backward()
    assert a.grad.isfinite().all()


def test_eigenvalues_alone_have_a_gradient_at_a_tie():
    """Symmetric functions of the eigenvalues are smooth: the gradient of their sum is the identity."""
    a = symmetric("identity").requires_grad_()
    mb.eigh(a)[0].sum().backward()
    torch.testing.assert_close(a.grad, torch.eye(4, dtype=torch.float64))


def test_broadening_approaches_the_exact_gradient():
    a = symmetric("separated").requires_grad_()
    exact, wide, narrow = (
        torch.autograd.grad(_one_vector_loss(a, **options), a)[0]
        for options in ({}, {"ties": "broaden", "broadening": 1e-2}, {"ties": "broaden", "broadening": 1e-5})
    )
    assert (narrow - exact).norm() < 1e-8 * exact.norm()
    assert 1e-6 * exact.norm() < (wide - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize(
    "operator",
    [
        lambda a: mb.eigh(a).eigenvectors ** 2,
        lambda a: mb.svd(a).U ** 2,
        lambda a: mb.topk_eigh(a, 2).eigenvectors ** 2,
    ],
    ids=["eigh", "svd", "topk_eigh"],
)
def test_small_variations_of_a_tied_pair_count_in_forward_mode(operator):
    """In units in which the others are large, its gap and its variation are below the rounding of the data."""
    a = torch.diag(torch.tensor([1e8, 2.0, 1.0]))
    direction = torch.tensor([[1e8, 0, 0], [0, 0, 0.5], [0, 0.5, 0]])
    with forward_ad.dual_level(), pytest.raises(TieError):
        operator(forward_ad.make_dual(a, direction))
    assert torch.func.jvp(operator, (a,), (direction,))[1].isnan().any()
    torch.func.jvp(operator, (a,), (a,))


def test_the_tolerance_follows_the_dtype():
    """A gap of 1e-9 is a tie for float32 data and none for float64."""
    q = orthogonal(4)
    a = (q * torch.tensor([1.0, 1.0 + 1e-9, 2.0, 3.0], dtype=torch.float64)) @ q.mT
    a = 0.5 * (a + a.mT)
    _one_vector_loss(a.clone().requires_grad_()).backward()
    with pytest.raises(TieError):
        _one_vector_loss(a.float().requires_grad_()).backward()
    with pytest.raises(TieError):
        _one_vector_loss(a.clone().requires_grad_(), tie_tol=1e-6).backward()


def test_forward_mode_reports_an_undetermined_variation():
    a, da = symmetric("repeated"), symmetric("separated", seed=4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, da)
        with pytest.raises(TieError):
            mb.eigh(dual)
        lam, _ = mb.eigh(dual, ties="drop", check=False)
        tangent = torch.autograd.forward_ad.unpack_dual(lam).tangent
    assert tangent.isfinite().all()


SVD_TIES = {
    "repeated": with_singular_values(5, 3, (2.0, 2.0, 1.0)),
    "two zeros": with_singular_values(4, 4, (2.0, 1.0, 0.0, 0.0)),
    "zero beside the complement": with_singular_values(5, 3, (2.0, 1.0, 0.0)),
    "zero, wide": with_singular_values(3, 5, (2.0, 1.0, 0.0)),
}


@pytest.mark.parametrize("name", SVD_TIES)
def test_svd_policies(name):
    a = SVD_TIES[name].clone().requires_grad_()
    target = torch.arange(float(a.shape[0]), dtype=torch.float64)

    def gauge_loss(**options):
        u, _, vh = mb.svd(a, **options)
        return (u[:, 0] * target).square().sum() + (u[:, -1] * target).square().sum() + vh[-1, 0] ** 2

    with pytest.raises(TieError, match="loss of svd"):
        gauge_loss().backward()
    with pytest.warns(GaugeWarning):
        (grad,) = torch.autograd.grad(gauge_loss(ties="drop"), a)
    assert grad.isfinite().all()
    (grad,) = torch.autograd.grad(gauge_loss(ties="broaden", check=False), a)
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", SVD_TIES)
def test_svd_without_gauge_passes(name):
    """A loss of the singular values does not depend on the gauge."""
    a = SVD_TIES[name].clone().requires_grad_()
    _, s, _ = mb.svd(a, ties="raise")
    (grad,) = torch.autograd.grad(s.square().sum(), a)
    torch.testing.assert_close(grad, 2 * a.detach())


def test_loss_depending_on_the_null_basis_is_rejected():
    a = with_singular_values(5, 2, (2.0, 1.0)).requires_grad_()
    u, _, _ = mb.svd(a, full_matrices=True)
    with pytest.raises(TieError):
        u[0, 2].backward()
    u, _, _ = mb.svd(a, full_matrices=True)
    (u[:, 2:] @ u[:, 2:].mT).square().sum().backward()  # the projector does not depend on the basis


def test_the_papers_gauge_for_the_null_basis():
    """dU₂ = −U₁ dU₁ᵀ U₂, so that U₂ᵀdU₂ = 0."""
    a = with_singular_values(5, 2, (2.0, 1.0))
    da = torch.linspace(-1, 1, 10, dtype=torch.float64).reshape(5, 2)
    (u, _, _), (du, _, _) = torch.func.jvp(lambda x: mb.svd(x, full_matrices=True), (a,), (da,))
    torch.testing.assert_close(u[:, 2:].mT @ du[:, 2:], torch.zeros(3, 3, dtype=torch.float64))
    torch.testing.assert_close(du[:, 2:], -u[:, :2] @ du[:, :2].mT @ u[:, 2:])


UNCHECKED = {
    "vmap": lambda loss, a: torch.func.vmap(torch.func.grad(loss))(a.unsqueeze(0))[0],
    "grad": lambda loss, a: torch.func.grad(loss)(a),
    "jacrev": lambda loss, a: torch.func.jacrev(loss)(a),
    "jacfwd": lambda loss, a: torch.func.jacfwd(loss)(a),
}


def _topk_loss(a, **options):
    """One vector inside a tie of the leading pairs."""
    return (mb.topk_eigh(a, 2, largest=False, **options).eigenvectors[..., 0] * torch.arange(4.0)).square().sum()


def _svd_loss(a, **options):
    u, _, _ = mb.svd(a, **options)
    return (u[..., 1] * torch.arange(4.0)).square().sum()


LOSSES = {
    "eigh": (_one_vector_loss, symmetric("repeated"), symmetric("separated")),
    "topk_eigh": (_topk_loss, symmetric("repeated"), symmetric("separated")),
    "svd": (
        _svd_loss,
        with_singular_values(4, 3, (3.0, 2.0, 2.0)),
        with_singular_values(4, 3, (3.0, 2.0, 1.0)),
    ),
}


@pytest.mark.parametrize("way", UNCHECKED)
@pytest.mark.parametrize("name", LOSSES)
def test_a_tie_that_cannot_be_reported_makes_the_gradient_nan(name, way):
    """Under torch.func values cannot be checked. Regression: "raise" acted as "drop"."""
    loss, tied, apart = LOSSES[name]
    assert UNCHECKED[way](loss, tied).isnan().any()
    separate = apart.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(separate), separate)
    torch.testing.assert_close(UNCHECKED[way](loss, apart), expected)
    assert UNCHECKED[way](lambda a: loss(a, ties="drop"), tied).isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_tie_makes_the_gradient_nan_without_checks_and_in_a_compiled_graph(name):
    loss, tied, _ = LOSSES[name]
    a = tied.clone().requires_grad_()
    loss(a, check=False).backward()
    assert a.grad.isnan().any()
    if WHOLE_GRAPHS:  # earlier versions of torch run the operators outside compiled graphs
        compiled = torch.compile(loss, backend="aot_eager")
        (grad,) = torch.autograd.grad(compiled(a), a)
        assert grad.isnan().any()


def test_only_the_tied_matrix_of_a_batch_becomes_nan():
    a = torch.stack([symmetric("repeated"), symmetric("separated")]).requires_grad_()
    (grad,) = torch.autograd.grad(_one_vector_loss(a, check=False), a)
    assert grad[0].isnan().all()
    assert grad[1].isfinite().all()


@pytest.mark.cuda
def test_ties_become_nan_without_synchronization(device):
    a = symmetric("repeated").to(device).requires_grad_()
    loss = _one_vector_loss(a)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (grad,) = torch.autograd.grad(loss, a)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert grad.isnan().any()
