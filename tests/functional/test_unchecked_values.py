"""Undetermined results: an error if values are checked, NaN if they are not; one rule for rank-deficient matrices."""

import pytest
import torch
from torch.func import jacrev, vmap

import matbackprop as mb
from helpers.matrices import generator, symmetric, to_complex, with_singular_values
from matbackprop._torch import WHOLE_GRAPHS
from matbackprop.errors import DomainError, LabelError, NonFiniteError, NumericalWarning, SymmetryError, TieError
from matbackprop.numerics import zero_tolerance

INDEFINITE = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)
ASYMMETRIC = torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=torch.float64)
NEGATIVE = torch.tensor([[1.0, 0.0], [-3.0, 1.0], [0.5, 1.0]], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 1])


WRONG_LABELS = torch.tensor([0, 2, 1])


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def mapped(function):
    return lambda *args: vmap(function)(*(t.unsqueeze(0) for t in args))


# An operator, inputs for which it is undefined, and the error.
UNDEFINED = {
    "linear_solve": (lambda a, **o: mb.linear_solve(a, a[..., 0], symmetric=True, **o), INDEFINITE, DomainError),
    "linear_solve_by_lu": (lambda a, **o: mb.linear_solve(a, a[..., 0], **o), torch.ones(2, 2), DomainError),
    "generalized_eigh": (lambda a, **o: mb.generalized_eigh(a, a, **o)[0], INDEFINITE, DomainError),
    "matrix_log": (mb.matrix_log, INDEFINITE, DomainError),
    "matrix_inverse": (mb.matrix_inverse, torch.ones(2, 2), DomainError),
    "matrix_exp": (mb.matrix_exp, ASYMMETRIC, SymmetryError),
    "matrix_clamp": (mb.matrix_clamp, ASYMMETRIC, SymmetryError),
    "eigh": (lambda a, **o: mb.eigh(a, **o)[0], ASYMMETRIC, SymmetryError),
    "inverse_root": (lambda a, **o: mb.inverse_root(a, 2, **o), INDEFINITE, DomainError),
    "spectral_projector": (lambda a, **o: mb.spectral_projector(a, rank=1, **o), torch.zeros(3, 3), TieError),
    "low_rank": (lambda a, **o: mb.low_rank(a, 1, **o), torch.eye(3), TieError),
    "polar": (lambda a, **o: mb.polar(a, **o).Q, torch.ones(3, 2), DomainError),
    "project_rotation": (mb.project_rotation, -torch.eye(3), DomainError),
    "normalized_affinity": (mb.normalized_affinity, NEGATIVE @ NEGATIVE.mT, DomainError),
    "spectral_embedding": (lambda f, **o: mb.spectral_embedding(f, 1, **o)[1], NEGATIVE, DomainError),
    "normalized_cut_j1": (
        lambda f, **o: mb.normalized_cut_j1(f, LABELS, num_labels=2, **o),
        NEGATIVE,
        DomainError,
    ),
    "label_of_j2": (
        lambda f, **o: mb.normalized_cut_j2(f, WRONG_LABELS, num_labels=2, **o),
        NEGATIVE.abs(),
        LabelError,
    ),
    "label_of_cut": (
        lambda f, **o: mb.normalized_cut_value(f @ f.mT, WRONG_LABELS, num_labels=2, **o),
        NEGATIVE.abs(),
        LabelError,
    ),
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_undefined_results_are_errors_if_checked_and_nan_if_not(name):
    operator, a, error = UNDEFINED[name]
    with pytest.raises(error):
        operator(a)
    a = a.clone().requires_grad_()
    out = operator(a, check=False)
    assert out.isnan().any()
    (grad,) = torch.autograd.grad(out.sum(), a)
    assert not grad.isfinite().all()
    assert mapped(operator)(a.detach()).isnan().any()


@pytest.mark.skipif(not WHOLE_GRAPHS, reason="before torch 2.11 the operators run outside compiled graphs")
@pytest.mark.parametrize(
    "name", ["linear_solve", "matrix_log", "matrix_exp", "spectral_projector", "normalized_cut_j1"]
)
def test_nan_in_a_compiled_graph(name):
    operator, a, _ = UNDEFINED[name]
    torch._dynamo.reset()
    assert compiled(operator)(a).isnan().any()


def test_the_bad_matrix_of_a_batch_alone_becomes_nan():
    a = torch.stack([ASYMMETRIC, torch.eye(2, dtype=torch.float64)])
    out = mb.matrix_exp(a, check=False)
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1], torch.e * torch.eye(2, dtype=torch.float64))


INFINITE = torch.full((1, 1), -torch.inf, dtype=torch.float64)
TALL = torch.tensor([[torch.inf, 1.0], [2.0, 3.0], [4.0, 5.0]], dtype=torch.float64)
NON_FINITE = {
    "matrix_exp": (mb.matrix_exp, INFINITE),
    "user_defined": (
        lambda a, **o: mb.matrix_function(a, (torch.arctan, lambda x: 1 / (1 + x * x)), **o),
        INFINITE,
    ),
    "svd": (lambda a, **o: mb.svd(a, **o).U, torch.diag(torch.tensor([1.0, torch.inf, 1.0], dtype=torch.float64))),
    "projector": (mb.projector, TALL),
    "projector_symmetric": (lambda a, **o: mb.projector(a, symmetric=True, **o), INFINITE),
    "spectral_projector": (lambda a, **o: mb.spectral_projector(a, rank=0, **o), INFINITE),
    "procrustes": (lambda x, **o: mb.procrustes(x, torch.ones_like(x), **o), TALL[:, :1]),
    "exponent": (lambda p, **o: mb.matrix_power(0.5 * torch.eye(2), p, **o), torch.tensor(torch.inf)),
    "exponent_of_pencil": (
        lambda p, **o: mb.generalized_matrix_function(torch.eye(2), 2 * torch.eye(2), "power", exponent=p, **o),
        torch.tensor(torch.inf),
    ),
    "exponent_of_pooling": (
        lambda p, **o: mb.second_order_pool(torch.ones(1, 2) / 4, function="power", exponent=p, **o),
        torch.tensor(torch.inf),
    ),
    "batch_norm": (
        lambda v, **o: mb.spd.batch_norm(torch.eye(2), torch.eye(2), variance=v, **o),
        torch.tensor(torch.inf),
    ),
}


NOT_A_NUMBER = torch.full((3, 2), torch.nan, dtype=torch.float64)
DECOMPOSED = {
    "matrix_log": lambda a: mb.matrix_log(a.mT @ a, check=False),
    "eigh": lambda a: mb.eigh(a.mT @ a, check=False).eigenvalues,
    "svd": lambda a: mb.svd(a, check=False).S,
    "svd_float32": lambda a: mb.svd(a.float(), check=False).S,
    "polar": lambda a: mb.polar(a, check=False).Q,
    "polar_complex_wide": lambda a: mb.polar(torch.complex(a, a.flip(-1)).mT, check=False).Q,
    "pinv": lambda a: mb.pinv(a, check=False),
    "second_order_pool": lambda a: mb.second_order_pool(a, check=False),
    "spectral_embedding": lambda a: mb.spectral_embedding(a.abs(), 1, check=False)[1],
    "frechet_distance": lambda a: mb.spd.frechet_distance(a, a, check=False),
}


@pytest.mark.parametrize("name", DECOMPOSED)
def test_lapack_receives_no_matrix_that_is_not_finite(name):
    """LAPACK raises an error, which would discard the other matrices of a batch."""
    a = torch.stack([NEGATIVE, NOT_A_NUMBER]).requires_grad_()
    expected = DECOMPOSED[name](NEGATIVE)
    for out in (DECOMPOSED[name](a), vmap(DECOMPOSED[name])(a)):
        torch.testing.assert_close(out[0], expected)
        assert out[1].isnan().all()
        (grad,) = torch.autograd.grad(out.abs().sum(), a)
        assert grad[1].isnan().any()


INVALID_ARGUMENTS = {
    "negative_weight": lambda **o: mb.normalized_cut_j2(NEGATIVE, LABELS, weight=-torch.ones(3), **o),
    "infinite_weight": lambda **o: mb.normalized_cut_soft(
        NEGATIVE, LABELS, weight=torch.tensor([-torch.inf, 1, 1]), **o
    ),
    "parameter": lambda **o: mb.matrix_function(
        torch.eye(2),
        (lambda x, t: 1 / (1 + t * x), lambda x, t: -t / (1 + t * x) ** 2),
        params=(torch.tensor(torch.inf),),
        **o,
    ),
    "weight_of_pooling_by_svd": lambda **o: mb.second_order_pool(
        NEGATIVE, weight=torch.tensor([-1.0, 1, 1]), method="svd", **o
    ),
    "weight_of_points": lambda **o: mb.procrustes(NEGATIVE, NEGATIVE.sin(), weight=torch.tensor([-1.0, 1, 1]), **o),
    "weight_of_embedding": lambda **o: mb.spectral_embedding(NEGATIVE.abs(), 1, weight=torch.tensor([-0.1, 1, 1]), **o)[
        0
    ],
    "weight_of_mean": lambda **o: mb.spd.mean(
        torch.stack([torch.eye(2), 2 * torch.eye(2)]), torch.tensor([-1.0, 3]), metric="log_euclidean", **o
    ),
    "negative_eps": lambda **o: mb.second_order_pool(NEGATIVE, eps=torch.tensor(-0.1), function="exp", **o),
    "infinite_eps": lambda **o: mb.second_order_pool(NEGATIVE, eps=torch.tensor(torch.inf), function="inv_sqrt", **o),
    "covariance": lambda **o: mb.whiten(NEGATIVE, method="pca", mean=torch.zeros(2), covariance=INDEFINITE, **o),
}


@pytest.mark.parametrize("name", INVALID_ARGUMENTS)
def test_invalid_arguments_are_errors_if_checked_and_nan_if_not(name):
    with pytest.raises((NonFiniteError, DomainError)):
        INVALID_ARGUMENTS[name]()
    assert INVALID_ARGUMENTS[name](check=False).isnan().all()


def test_second_derivatives_of_pooling_with_too_few_digits_are_nan_if_unchecked():
    f = NEGATIVE.mT * torch.tensor([[1e9], [1.0]])
    loss = lambda f: mb.second_order_pool(f)[..., 0, :].sum()  # noqa: E731
    assert jacrev(loss)(f).isfinite().all()
    assert jacrev(jacrev(loss))(f).isnan().any()
    with pytest.raises(DomainError, match="too few correct digits"):
        torch.autograd.functional.hessian(loss, f)


@pytest.mark.parametrize("name", NON_FINITE)
def test_non_finite_inputs_are_errors_if_checked_and_nan_if_not(name):
    operator, a = NON_FINITE[name]
    with pytest.raises(NonFiniteError):
        operator(a)
    assert operator(a, check=False).isnan().any()
    assert mapped(operator)(a).isnan().any()


@pytest.mark.parametrize(
    "operator",
    [
        lambda f, **o: mb.second_order_pool(f, eps=1e297, **o),
        lambda f, **o: mb.whiten(f, eps=1e297, **o),
        lambda f, **o: mb.spd.exp_map(f.mT @ f / 1e150, f.mT @ f / 1e150, **o),
    ],
    ids=["second_order_pool", "whiten", "spd.exp_map"],
)
def test_products_that_leave_the_range_are_nan_if_unchecked(operator):
    f = 1e150 * NEGATIVE.abs()
    assert operator(f, check=False).isnan().any()
    assert mapped(operator)(f).isnan().any()
    assert mb.normalized_cut_j1(f, LABELS, check=False).isnan()


# --- rank-deficient Gram matrices -------------------------------------------------------------------------------------


def _grams(dtype=torch.float64, n=4, count=60):
    f = torch.randn(count, n, n // 2, generator=generator(0), dtype=dtype)
    return f @ f.mT


REFUSED = {
    "matrix_log": mb.matrix_log,
    "matrix_inv_sqrt": mb.matrix_inv_sqrt,
    "matrix_inverse": mb.matrix_inverse,
    "matrix_power": lambda a: mb.matrix_power(a, -0.3),
    "inverse_root": lambda a: mb.inverse_root(a, 4),
    "linear_solve": lambda a: mb.linear_solve(a, a[..., 0]),
    "linear_solve_symmetric": lambda a: mb.linear_solve(a, a[..., 0], symmetric=True),
    "generalized_eigh": lambda a: mb.generalized_eigh(torch.eye(a.shape[-1], dtype=a.dtype), a),
    "generalized_matrix_function": lambda a: mb.generalized_matrix_function(a, 2 * torch.eye(4).to(a), "inv_sqrt"),
    "gradient_of_sqrt": lambda a: mb.matrix_sqrt(a.requires_grad_()).sum().backward(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", REFUSED)
def test_rank_deficient_gram_matrices_are_rejected_for_any_sign_of_rounding(name, dtype):
    for a in _grams(dtype):
        with pytest.raises(DomainError):
            REFUSED[name](a.clone())


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(("dtype", "least"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 0.02)])
def test_small_eigenvalues_above_the_tolerance_are_accepted(name, dtype, least):
    assert least > zero_tolerance(dtype, torch.float64, 4)
    REFUSED[name](torch.diag(torch.tensor([1.0, 0.5, 2 * least, 2 * least])).to(dtype))


def test_scales_of_channels_do_not_make_a_system_singular():
    """D·A·D with scales from 1e-8 to 1e8: the pivots of a Cholesky factor are compared with the diagonal."""
    d = torch.logspace(-8, 8, 4, dtype=torch.float64)
    a = symmetric((0.5, 1.0, 1.5, 2.0))
    scaled = d.unsqueeze(-1) * a * d
    x = mb.linear_solve(0.5 * (scaled + scaled.mT), d * a.sum(-1), symmetric=True)
    torch.testing.assert_close(d * x, torch.ones(4, dtype=torch.float64), rtol=1e-12, atol=0)


def test_the_root_of_a_rank_deficient_matrix_has_a_value():
    for a in _grams(count=5):
        root = mb.matrix_sqrt(a)
        torch.testing.assert_close(root @ root, a)


@pytest.mark.parametrize("p", [1.5, 2.5, 0.3])
def test_positive_powers_of_singular_matrices(p):
    """The first derivative exists for p > 1 and the second for p > 2."""
    q = torch.linalg.qr(torch.randn(4, 4, generator=generator(1), dtype=torch.float64))[0]
    lam = torch.tensor([0.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    a = ((q * lam) @ q.mT).requires_grad_()
    out = mb.matrix_power(a, p)
    torch.testing.assert_close(out.detach(), (q * lam**p) @ q.mT)
    if p < 1:
        with pytest.raises(DomainError, match="infinite derivative"):
            torch.autograd.grad(out.sum(), a)
        return
    (grad,) = torch.autograd.grad(out.trace(), a, create_graph=True)
    torch.testing.assert_close(grad.detach(), p * (q * lam ** (p - 1)) @ q.mT, rtol=1e-10, atol=1e-10)
    if p > 2:
        (second,) = torch.autograd.grad(grad.trace(), a)
        torch.testing.assert_close(second, p * (p - 1) * (q * lam ** (p - 2)) @ q.mT, rtol=1e-10, atol=1e-10)
    else:
        with pytest.raises(DomainError, match="derivative of power"):
            torch.autograd.grad(grad.trace(), a)


def test_low_rank_of_a_matrix_of_lower_rank_is_the_matrix():
    for a in _grams(count=5):
        for check in (None, False):
            torch.testing.assert_close(mb.low_rank(a, 3, check=check), a)
        with pytest.raises(DomainError, match="Use a smaller rank"):
            mb.low_rank(a.requires_grad_(), 3).sum().backward()
        assert torch.autograd.grad(mb.low_rank(a, 3, check=False).sum(), a)[0].isnan().any()


def test_the_projector_on_all_vectors_is_constant():
    a = torch.diag(torch.tensor([1e6, 1.0, 1e-6], dtype=torch.float64)) @ symmetric((0.5, 1.0, 1.5))
    a.requires_grad_()
    onto = mb.projector(a)
    assert torch.equal(onto, torch.eye(3, dtype=torch.float64))
    (grad,) = torch.autograd.grad(onto[0, 1], a, create_graph=True)
    assert not grad.any() and not torch.autograd.grad(grad.sum(), a)[0].any()


# --- symmetry ---------------------------------------------------------------------------------------------------------


def test_a_large_entry_does_not_hide_the_asymmetry_of_small_ones():
    a = torch.tensor([[1e10, 0, 0], [0, 1, 2], [0, 0, 1]], dtype=torch.float64)
    with pytest.raises(SymmetryError, match=r"differs from its transpose by up to 2"):
        mb.matrix_sqrt(a)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rounding_of_products_is_no_asymmetry(dtype):
    """D·A·D, S^(−½)AS^(−½) and X diag(λ) Xᵀ are symmetric up to rounding."""
    for seed in range(20):
        x = torch.randn(6, 6, generator=generator(seed), dtype=dtype)
        a = x @ x.mT
        d = torch.logspace(-3, 3, 6, dtype=dtype)
        root = mb.matrix_inv_sqrt(a + torch.eye(6, dtype=dtype))
        for product in (
            x @ torch.diag(d) @ x.mT,
            root @ a @ root,
            (d * a.mT).mT * d,
            x @ torch.diag(d - d.mean()) @ x.mT,
        ):
            mb.eigh(product)


# --- needless refusals and crashes ---------------------------------------------------------------------------------


def test_vmap_over_a_later_argument_only():
    a, f = symmetric((0.5, 1.0, 1.5)), with_singular_values(4, 3, (1.0, 2.0, 3.0)).abs()
    two = torch.tensor([0.3, 0.7], dtype=torch.float64)
    weights = torch.rand(2, 4, generator=generator(0), dtype=torch.float64) + 0.1
    labels = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]])
    for function, batch in (
        (lambda p: mb.matrix_power(a, p), two),
        (lambda w: mb.second_order_pool(f, weight=w), weights),
        (lambda w: mb.whiten(f, weight=w), weights),
        (lambda w: mb.procrustes(f, f.sin(), weight=w), weights),
        (lambda b: mb.linear_solve(a, b), weights[:, :3]),
        (lambda y: mb.normalized_cut_j2(f, y, num_labels=2), labels),
        (lambda w: mb.normalized_cut_soft(f, labels[0], num_labels=2, weight=w), weights),
        (lambda x: mb.normalized_cut_j1(f, labels[0], num_labels=2, lam=x), torch.stack([a, 2 * a.abs()]).abs()),
        (lambda y: mb.normalized_cut_value(f @ f.mT, y, num_labels=2), labels),
        (lambda b: mb.generalized_eigh(a, b).eigenvalues, torch.stack([a, 2 * a])),
    ):
        torch.testing.assert_close(vmap(function)(batch), torch.stack([function(x) for x in batch]))


@pytest.mark.parametrize("shape", [(0, 0), (2, 0, 0), (0, 3, 3), (3, 0), (0, 3)])
@pytest.mark.parametrize("kind", [torch.float64, torch.complex128])
def test_backward_of_empty_decompositions(shape, kind):
    a = torch.zeros(shape, dtype=kind, requires_grad=True)
    if shape[-1] == shape[-2]:
        lam, u = mb.eigh(a)
        (lam.sum() + u.abs().sum()).backward()
        assert a.grad.shape == a.shape
    u, s, vh = mb.svd(a)
    (u.abs().sum() + s.sum() + vh.abs().sum()).backward()
    assert a.grad.shape == a.shape


def test_polar_in_bfloat16_at_condition_200():
    a = with_singular_values(4, 3, (1.0, 0.1, 0.005)).bfloat16()
    q = mb.polar(a).Q.double()
    torch.testing.assert_close(q.mT @ q, torch.eye(3, dtype=torch.float64), rtol=0, atol=0.02)


def test_whitening_of_pixels_in_float32():
    x = torch.randint(0, 256, (500, 3), generator=generator(0)).float()
    y = mb.whiten(x, precision=torch.float32)
    torch.testing.assert_close(y.mT @ y / 500, torch.eye(3), rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", ["fused", "svd", "eig"])
@pytest.mark.parametrize("shape", [(20, 12, 12), (5, 8, 12), (5, 12, 8)])
def test_pooling_is_symmetric_bitwise(shape, method):
    f = torch.rand(*shape, generator=generator(0), dtype=torch.float64)
    for x in (f, to_complex(f)):
        c = mb.second_order_pool(x, method=method)
        assert torch.equal(c, c.mH)


def test_feature_maps_of_convolutions_are_detected():
    maps = torch.rand(2, 16, 7, 7, generator=generator(0))
    with pytest.warns(NumericalWarning, match=r"flatten\(2\)\.mT"):
        mb.second_order_pool(maps)
    assert mb.second_order_pool(maps.flatten(2).mT).shape == (2, 16, 16)


def test_non_finite_input_is_a_runtime_error_as_in_torch():
    with pytest.raises(RuntimeError):
        mb.eigh(torch.full((2, 2), torch.nan))
    assert issubclass(NonFiniteError, ValueError)


def test_no_gradient_is_lost_between_jacobians():
    a = symmetric("separated")
    assert jacrev(mb.matrix_log)(a).isfinite().all()
