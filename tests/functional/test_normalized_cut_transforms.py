"""Derivatives and transformations of normalized cuts that the table of all operators does not contain."""

from functools import partial

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from helpers.cuts import OBJECTIVES, features, lambda_matrix, regions
from matbackprop._torch import WHOLE_GRAPHS

NAMES = list(OBJECTIVES)
M, D, K = 9, 2, 3


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_with_ignored_rows(name, device):
    """The table of all operators has weights for J₁ and J₂, and none for the soft objective."""
    labels = regions(2, M, k=K, ignored=0.2, device=device)
    inputs = (features(2, M, D, device=device), 0.5 + features(2, M, seed=1, device=device))[: 1 + (name == "soft")]

    def function(f, weight=None):
        return OBJECTIVES[name][0](f, labels, weight=weight, num_labels=K)

    assert gradcheck(function, tuple(x.requires_grad_() for x in inputs), check_forward_ad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize("name", ["j1", "j2"])
def test_derivatives_of_rank_deficient_features_along_variations_that_keep_the_rank(name):
    """F = XY with two columns in X has rank 2 of 4 for any X and Y."""
    labels, function = regions(M, k=K), OBJECTIVES[name][0]
    inputs = (features(M, 2).requires_grad_(), features(2, 4, seed=1).requires_grad_())
    assert gradcheck(lambda x, y: function(x @ y, labels), inputs, check_forward_ad=True)
    assert gradgradcheck(lambda x, y: function(x @ y, labels), inputs)


@pytest.mark.parametrize("name", NAMES)
def test_annotators_and_packing_have_gradients(name):
    labels = torch.stack([regions(M, k=K, seed=s) for s in range(2)])
    labels[:, 5:8] = torch.arange(K)
    function = OBJECTIVES[name][0]
    assert gradcheck(lambda f: function(f, labels, offsets=[0, 5, M], num_labels=K), features(M, D).requires_grad_())


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", NAMES)
def test_compilation_and_vmap_with_annotators_weights_and_packing(name):
    function = OBJECTIVES[name][0]
    labels = torch.stack([regions(M, k=K, seed=s) for s in range(2)])
    labels[:, 5:8] = torch.arange(K)
    weight = 0.5 + features(M, seed=1)
    keywords = {"offsets": [0, 5, M], "num_labels": K, "weight": weight}
    if name == "j1":
        keywords["lam"] = lambda_matrix(D)

    def loss(f):
        return function(f, labels, **keywords).sum()

    plain, compiled = features(M, D).requires_grad_(), features(M, D).requires_grad_()
    loss(plain).backward()
    torch.compile(loss, fullgraph=WHOLE_GRAPHS, backend="aot_eager")(compiled).backward()
    torch.testing.assert_close(compiled.grad, plain.grad)
    several = torch.func.vmap(torch.func.grad(loss))(torch.stack([plain.detach(), 2 * plain.detach()]))
    torch.testing.assert_close(several[0], plain.grad)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", NAMES)
def test_wide_spectra_are_refined_in_every_mode(name):
    """At a singular ratio of 1e-6 a Gram matrix determines gradients to 1e-4 only."""
    f, labels = 1 + 1e-6 * features(12, 3), regions(12, k=3)
    loss = partial(OBJECTIVES[name][0], labels=labels, num_labels=3, **({"ridge": 1e-11} if name == "soft" else {}))
    x = f.clone().requires_grad_()
    (eager,) = torch.autograd.grad(loss(x), x)
    (compiled,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(x), x)
    (batched,) = torch.func.vmap(torch.func.grad(loss))(f.unsqueeze(0))
    for gradient in (compiled, batched):
        assert (gradient - eager).norm() < 1e-8 * eager.norm()
