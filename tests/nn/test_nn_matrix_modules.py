"""Modules equal their functions, survive pickling and state dicts, and train their parameters."""

import pickle

import pytest
import torch

import matbackprop as mb
from helpers.matrices import relu_features, symmetric
from matbackprop import nn
from matbackprop.errors import ConfigurationError, DomainError, DtypeError, ShapeError

MATRIX = symmetric("separated", 2)
FEATURES = relu_features(4, 6, 2)
MODULES = {
    "SVD": (nn.SVD(), mb.svd, FEATURES),
    "SVD full": (nn.SVD(True, ties="drop"), lambda a: mb.svd(a, True, ties="drop"), FEATURES),
    "EIG": (nn.EIG(ties="broaden", broadening=1e-4), lambda a: mb.eigh(a, ties="broaden", broadening=1e-4), MATRIX),
    "MatrixFunction": (nn.MatrixFunction("exp"), mb.matrix_exp, MATRIX),
    "MatrixLog": (nn.MatrixLog(), mb.matrix_log, MATRIX),
    "MatrixSqrt": (nn.MatrixSqrt(), mb.matrix_sqrt, MATRIX),
    "MatrixInvSqrt": (nn.MatrixInvSqrt(), mb.matrix_inv_sqrt, MATRIX),
    "MatrixExp": (nn.MatrixExp(precision=torch.float32), lambda a: mb.matrix_exp(a, precision=torch.float32), MATRIX),
    "MatrixInverse": (nn.MatrixInverse(), mb.matrix_inverse, MATRIX),
    "MatrixPower": (nn.MatrixPower(0.25), lambda a: mb.matrix_power(a, 0.25), MATRIX),
    "SecondOrderPool": (nn.SecondOrderPool(), mb.second_order_pool, FEATURES),
    "SecondOrderPool vectorized": (
        nn.SecondOrderPool(eps=0.1, function="sqrt", center=True, vectorize=True),
        lambda f: mb.vectorize_symmetric(mb.second_order_pool(f, eps=0.1, function="sqrt", center=True)),
        FEATURES,
    ),
    "SecondOrderPool learning": (
        nn.SecondOrderPool(eps=0.1, function="power", exponent=0.5, learn_eps=True, learn_exponent=True),
        lambda f: mb.second_order_pool(
            f, eps=torch.tensor(0.1).log().exp(), function="power", exponent=torch.tensor(0.5)
        ),
        FEATURES,
    ),
    "SecondOrderPool eig": (
        nn.SecondOrderPool(method="eig"),
        lambda f: mb.second_order_pool(f, method="eig"),
        FEATURES,
    ),
}


def _tuple(out):
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("name", MODULES)
def test_module_equals_function(name):
    module, function, x = MODULES[name]
    for one, other in zip(_tuple(module(x)), _tuple(function(x)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", MODULES)
def test_pickle_and_state_dict(name):
    module, _, x = MODULES[name]
    copy = pickle.loads(pickle.dumps(module))
    assert repr(copy) == repr(module)
    assert copy.state_dict().keys() == module.state_dict().keys()
    copy.load_state_dict(module.state_dict())
    for one, other in zip(_tuple(copy(x)), _tuple(module(x)), strict=True):
        assert torch.equal(one, other)


def test_weights_reach_the_module():
    regions = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = mb.second_order_pool(FEATURES, weight=regions)
    assert torch.equal(nn.SecondOrderPool()(FEATURES, regions), expected)
    assert nn.SecondOrderPool(vectorize=True)(FEATURES, regions).shape == (2, 3, 21)


def test_training_recovers_exponent_and_eps():
    """Training recovers the exponent and ε of power pooling from its outputs."""
    torch.manual_seed(0)
    target = mb.second_order_pool(FEATURES, eps=0.3, function="power", exponent=0.7)
    module = nn.SecondOrderPool(eps=0.1, function="power", exponent=0.4, learn_eps=True, learn_exponent=True).double()
    optimizer = torch.optim.LBFGS(module.parameters(), lr=1, max_iter=60, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = (module(FEATURES) - target).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert float(module.exponent.detach()) == pytest.approx(0.7, abs=1e-3)
    assert float(module.log_eps.detach().exp()) == pytest.approx(0.3, abs=1e-3)


def test_trainable_parameters():
    assert [n for n, _ in nn.MatrixPower().named_parameters()] == ["exponent"]
    fixed = nn.MatrixPower(0.3, learn=False)
    assert list(fixed.parameters()) == [] and fixed.exponent == 0.3
    assert list(nn.SecondOrderPool().state_dict()) == []
    learning = nn.SecondOrderPool(function="power", exponent=0.5, learn_eps=True, learn_exponent=True)
    assert sorted(learning.state_dict()) == ["exponent", "log_eps"]


def test_contradictory_options_are_rejected():
    with pytest.raises(ConfigurationError, match="learn_exponent"):
        nn.SecondOrderPool(learn_exponent=True)
    with pytest.raises(DomainError, match="must be positive"):
        nn.SecondOrderPool(eps=0.0, learn_eps=True)


def test_modules_move_between_dtypes():
    module = nn.MatrixPower(0.5).to(torch.bfloat16)
    out = module(MATRIX.to(torch.bfloat16))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert module.exponent.grad.dtype == torch.bfloat16


def test_fixed_exponents_accept_the_inputs_of_the_function():
    """Indefinite matrices squared, the root of a singular one, and no rounding of the exponent to float32."""
    indefinite = torch.diag(torch.tensor([-2.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(nn.MatrixPower(2, learn=False)(indefinite), indefinite @ indefinite)
    singular = torch.diag(torch.tensor([0.0, 4.0], dtype=torch.float64))
    torch.testing.assert_close(nn.MatrixPower(0.5, learn=False)(singular), singular.sqrt())
    assert torch.equal(nn.MatrixPower(0.3, learn=False)(MATRIX), mb.matrix_power(MATRIX, 0.3))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.MatrixFunction("power"), "needs exponent"),
        (lambda: nn.MatrixFunction("logarithm"), "Unknown matrix function"),
        (lambda: nn.MatrixLog(precision=torch.float16), "precision must be"),
        (lambda: nn.MatrixPower(float("nan")), "exponent must be finite"),
        (lambda: nn.MatrixPower(0.5, precision=torch.float16), "precision must be"),
        (lambda: nn.SecondOrderPool(method="foo"), "method must be"),
        (lambda: nn.SecondOrderPool(function="power"), "needs exponent"),
        (lambda: nn.SecondOrderPool(precision=torch.float16), "precision must be"),
    ],
)
def test_arguments_are_checked_when_a_module_is_built(build, message):
    with pytest.raises((DomainError, DtypeError, ConfigurationError), match=message):
        build()


def test_feature_maps_of_convolutions_are_rejected_as_rows():
    maps = torch.nn.Conv2d(3, 6, 3)(torch.rand(2, 3, 7, 9))
    pool = nn.SecondOrderPool()
    with pytest.raises(ShapeError, match=r"flatten\(2\).mT"):
        pool(maps)
    assert pool(maps.flatten(2).mT).shape == (2, 6, 6)
