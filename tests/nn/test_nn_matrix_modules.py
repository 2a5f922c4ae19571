"""Modules equal their functions, survive pickling and state dicts, and train their parameters."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch

import matbackprop as mb
from helpers.cuts import features, regions
from helpers.matrices import relu_features, symmetric
from matbackprop import nn
from matbackprop.errors import ConfigurationError, DomainError, DtypeError, ShapeError

MATRIX = symmetric("separated", 2)
FEATURES = relu_features(4, 6, 2)
F, L = features(3, 12, 4), regions(3, 12)
A, C = F.mT @ F, F[..., 1] + 0.1
B = symmetric((0.7, 1.0, 1.6, 2.5), 2, seed=5)
POWER = {"eps": 0.1, "function": "power"}
TRAINED = nn.SecondOrderPool(exponent=0.5, learn_eps=True, learn_exponent=True, **POWER)


def trained_pool(f):
    return mb.second_order_pool(f, eps=torch.tensor(0.1).log().exp(), function="power", exponent=torch.tensor(0.5))


# Module, function of the same inputs and keywords, inputs, keywords of the call.
MODULES = {
    "SVD": (nn.SVD(), mb.svd, (FEATURES,)),
    "SVD full": (nn.SVD(True, ties="drop"), partial(mb.svd, full_matrices=True, ties="drop"), (FEATURES,)),
    "EIG": (nn.EIG(ties="broaden", broadening=1e-4), partial(mb.eigh, ties="broaden", broadening=1e-4), (MATRIX,)),
    "GeneralizedEigh": (nn.GeneralizedEigh(), mb.generalized_eigh, (MATRIX, B)),
    "GeneralizedMatrixFunction": (
        nn.GeneralizedMatrixFunction("log"),
        partial(mb.generalized_matrix_function, function="log"),
        (MATRIX, B),
    ),
    "TopkEigh": (nn.TopkEigh(2, largest=False), partial(mb.topk_eigh, k=2, largest=False), (MATRIX,)),
    "TopkSubspace": (nn.TopkSubspace(2), partial(mb.topk_subspace, k=2), (MATRIX[0],)),
    "Polar": (nn.Polar(), mb.polar, (F,)),
    "ProjectRotation": (nn.ProjectRotation(), mb.project_rotation, (F[:, :4],)),
    "Procrustes": (nn.Procrustes(reflection=True), partial(mb.procrustes, reflection=True), (F, F.flip(0))),
    "LowRank": (nn.LowRank(2), partial(mb.low_rank, rank=2), (F,)),
    "Projector": (nn.Projector(rank_tol=1e-3), partial(mb.projector, rank_tol=1e-3), (F,)),
    "Projector symmetric": (nn.Projector(symmetric=True), partial(mb.projector, symmetric=True), (A,)),
    "SpectralProjector": (nn.SpectralProjector(rank=2), partial(mb.spectral_projector, rank=2), (A,)),
    "SpectralProjector threshold": (
        nn.SpectralProjector(threshold=1.0),
        partial(mb.spectral_projector, threshold=1.0),
        (A,),
    ),
    "LinearSolve": (nn.LinearSolve(), mb.linear_solve, (A, F[:, :4])),
    "InverseRoot": (nn.InverseRoot(4, eps=0.1), partial(mb.inverse_root, p=4, eps=0.1), (MATRIX,)),
    "MatrixFunction": (nn.MatrixFunction("exp"), mb.matrix_exp, (MATRIX,)),
    "MatrixLog": (nn.MatrixLog(), mb.matrix_log, (MATRIX,)),
    "MatrixSqrt": (nn.MatrixSqrt(), mb.matrix_sqrt, (MATRIX,)),
    "MatrixInvSqrt": (nn.MatrixInvSqrt(), mb.matrix_inv_sqrt, (MATRIX,)),
    "MatrixExp": (nn.MatrixExp(precision=torch.float32), partial(mb.matrix_exp, precision=torch.float32), (MATRIX,)),
    "MatrixInverse": (nn.MatrixInverse(), mb.matrix_inverse, (MATRIX,)),
    "MatrixClamp": (nn.MatrixClamp(1.3), partial(mb.matrix_clamp, least=1.3), (MATRIX,)),
    "MatrixPower": (nn.MatrixPower(0.25), partial(mb.matrix_power, p=0.25), (MATRIX,)),
    "SecondOrderPool": (nn.SecondOrderPool(), mb.second_order_pool, (FEATURES,)),
    "SecondOrderPool vectorized": (
        nn.SecondOrderPool(eps=0.1, function="sqrt", center=True, vectorize=True),
        lambda f: mb.vectorize_symmetric(mb.second_order_pool(f, eps=0.1, function="sqrt", center=True)),
        (FEATURES,),
    ),
    "SecondOrderPool learning": (TRAINED, trained_pool, (FEATURES,)),
    "SecondOrderPool eig": (nn.SecondOrderPool(method="eig"), partial(mb.second_order_pool, method="eig"), (FEATURES,)),
    "Whitening": (nn.Whitening(6, affine=False, track_running_stats=False), mb.whiten, (FEATURES[0],)),
    "NormalizedCutLoss J1": (nn.NormalizedCutLoss("j1"), lambda *x: mb.normalized_cut_j1(*x).mean(), (F, L)),
    "NormalizedCutLoss J2": (
        nn.NormalizedCutLoss("j2", reduction="sum", num_labels=9),
        lambda *x: mb.normalized_cut_j2(*x).sum(),
        (F, L),
    ),
    "NormalizedCutLoss soft": (
        nn.NormalizedCutLoss("soft", ridge=0.7, reduction="none"),
        partial(mb.normalized_cut_soft, ridge=0.7),
        (F, L),
        {"weight": C},
    ),
    "NormalizedCutLoss with lambda": (
        nn.NormalizedCutLoss("j1", lambda_features=4),
        lambda *x: mb.normalized_cut_j1(*x, lam=torch.eye(4)).mean(),
        (F, L),
    ),
    "NormalizedCutLoss packed": (
        nn.NormalizedCutLoss(reduction="none"),
        mb.normalized_cut_j2,
        (F[0], L[0]),
        {"offsets": [0, 7, 12]},
    ),
}


def _tuple(out):
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("name", MODULES)
def test_modules_equal_functions_and_survive_pickling_and_state_dicts(name):
    module, function, inputs, *keywords = MODULES[name]
    more = dict(*keywords)
    outs = _tuple(module(*inputs, **more))
    for one, other in zip(outs, _tuple(function(*inputs, **more)), strict=True):
        torch.testing.assert_close(one, other)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    for copied in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert repr(copied) == repr(module) and type(module).__name__ in repr(module)
        copied.load_state_dict(torch.load(buffer))
        buffer.seek(0)
        for one, other in zip(_tuple(copied(*inputs, **more)), outs, strict=True):
            assert torch.equal(one, other)


def test_every_module_has_a_row():
    composed = {"SecondOrderHead", "SecondOrderPool2d", "for_export", "replace_pool"}
    public = {name for name in vars(nn) if name[0] != "_" and name not in composed}
    assert public == {name.partition(" ")[0] for name in MODULES}


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
