"""torch.compile of every operator, and accuracy of the formulas with the default backend.

``aot_eager`` checks tracing and the adjoint graph without generating code. The default backend, inductor, implements
elementary functions itself; all formulas that use them are compared in one kernel. To generate code for every
operator, which takes minutes, pass ``--compile-backend inductor``.
"""

import pytest
import torch
from torch.autograd import forward_ad

from helpers.operators import TRACED, case_id
from matbackprop import nn, second_order_pool
from matbackprop._torch import WHOLE_GRAPHS
from matbackprop.divided_differences import in_parameter, resolve_function


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Complex operators are traced like real ones, and compositions like their parts; a few represent all, because tracing
# takes a second each.
COMPLEX = ("complex_matrix_clamp", "complex_pool_primal_log", "complex_eigh", "complex_svd_wide", "complex_polar_wide")
COMPOSED = ("spd_distance_bures_wasserstein", "spd_exp_map_log_euclidean", "spd_log_map_log_euclidean")
SOME = (*COMPLEX, *COMPOSED, "generalized_matrix_function")
COMPILED = [case for case in TRACED if not (case.complex or case.composed) or case.name in SOME]


@pytest.mark.quick(8)
@pytest.mark.parametrize("case", COMPILED, ids=case_id)
def test_fullgraph_equals_eager(case, compile_backend, device, dtype):
    inputs = [t.requires_grad_() for t in case.inputs("separated", device, dtype)]
    compiled = torch.compile(lambda *args: case.loss(*args), fullgraph=WHOLE_GRAPHS, backend=compile_backend)
    value, expected = compiled(*inputs), case.loss(*inputs)
    torch.testing.assert_close(value, expected)
    for one, other in zip(torch.autograd.grad(value, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(one, other)


def _direction(x):
    return tuple((torch.linspace(-1, 1, t.numel()).reshape(t.shape).to(t) + t.cos()) for t in x)


TRANSFORMS = {
    "vmap": lambda loss: torch.func.vmap(loss),
    "grad": lambda loss: torch.func.grad(lambda *x: loss(*x)),
    "vmap(grad)": lambda loss: torch.func.vmap(torch.func.grad(loss)),
    "jvp": lambda loss: lambda *x: torch.func.jvp(loss, x, _direction(x))[1],
    "jvp(grad)": lambda loss: lambda *x: torch.func.jvp(torch.func.grad(loss), x, _direction(x))[1],
    "jacfwd": lambda loss: torch.func.jacfwd(loss),
    "jacrev(grad)": lambda loss: torch.func.jacrev(torch.func.grad(loss)),
    "hessian": lambda loss: torch.func.hessian(loss),
}
TRANSFORMED = [case for case in COMPILED if not case.complex and case.orders > 1]
QUICK = [case for case in TRANSFORMED if case.name == "eigh"]


def _compare_transformed(case, transform, backend):
    """torch.compile once returned zeros for tangents and second derivatives of custom Functions."""
    inputs = case.inputs("separated")
    expected = TRANSFORMS[transform](case.loss)(*inputs)
    compiled = torch.compile(TRANSFORMS[transform](case.loss), backend=backend)(*inputs)
    torch.testing.assert_close(compiled, expected)


@pytest.mark.parametrize("transform", ["jvp", "vmap(grad)", "hessian"])
@pytest.mark.parametrize("case", QUICK, ids=case_id)
def test_transformations_inside_a_compiled_function(case, transform, compile_backend):
    _compare_transformed(case, transform, compile_backend)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # jacrev(grad)
@pytest.mark.parametrize("number", range(len(TRANSFORMED)), ids=lambda number: TRANSFORMED[number].name)
def test_one_transformation_of_every_operator_inside_a_compiled_function(number, compile_backend):
    transform = list(TRANSFORMS)[number % len(TRANSFORMS)]
    _compare_transformed(TRANSFORMED[number], transform, compile_backend)


@pytest.mark.parametrize("case", QUICK, ids=case_id)
def test_dual_numbers_keep_their_tangent_in_a_compiled_function(case, compile_backend):
    inputs = case.inputs("separated")
    compiled = torch.compile(lambda *x: case.loss(*x), backend=compile_backend)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, d) for x, d in zip(inputs, _direction(inputs), strict=True)]
        one, other = (forward_ad.unpack_dual(f(*duals)).tangent for f in (compiled, case.loss))
    torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_divided_differences_are_accurate_with_inductor():
    """At gaps from zero to large ones, for every function; vectors of 16 entries, for which it generates SIMD code."""
    functions = [resolve_function(name) for name in ("log", "sqrt", "inv_sqrt", "exp", "inverse")]
    functions += [resolve_function("power", p) for p in (0.7, -1.3, 3)]
    functions.append(resolve_function((torch.tanh, lambda x: 1 - torch.tanh(x) ** 2)))

    def tables(a, b):
        first = []
        for function, p in functions:
            p = tuple(torch.full_like(a, x) for x in p)
            first += [function.value(a, *p), function.first(a, b, *p)]
            if function.name == "power":
                first.append(in_parameter(function).first(a, b, *p))
        return torch.stack(first)

    gaps = torch.tensor([0, 1e-16, 1e-14, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 1, 3, 10, 30])
    a = torch.full((16,), 0.5, dtype=torch.float64)
    b = a + gaps.double()
    torch.testing.assert_close(torch.compile(tables, fullgraph=WHOLE_GRAPHS)(a, b), tables(a, b), rtol=1e-13, atol=0)


@pytest.mark.slow
def test_a_compiled_training_step_with_inductor():
    torch.manual_seed(0)
    pool = nn.SecondOrderPool(eps=0.1, function="power", exponent=0.7, learn_exponent=True)
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    model = pool.double()
    leaves = [x, *model.parameters()]
    expected = model(x)
    grads = torch.autograd.grad(expected.square().sum(), leaves)
    out = torch.compile(model, fullgraph=WHOLE_GRAPHS)(x)
    torch.testing.assert_close(out, expected)
    for one, other in zip(torch.autograd.grad(out.square().sum(), leaves), grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.skipif(not WHOLE_GRAPHS, reason="needs torch 2.11 at least")
def test_a_module_can_be_exported():
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), nn.SecondOrderPool(), nn.MatrixFunction("exp", check=True))
    x = torch.linspace(-1, 1, 24).reshape(2, 4, 3)
    exported = torch.export.export(module, (x,)).module()
    torch.testing.assert_close(exported(x), module(x))


@pytest.mark.skipif(not WHOLE_GRAPHS, reason="needs torch 2.11 at least")
def test_checks_do_not_run_while_compiling():
    f = torch.full((2, 3), float("nan"))
    out = torch.compile(lambda x: second_order_pool(x, check=True), fullgraph=WHOLE_GRAPHS, backend="aot_eager")(f)
    assert out.isnan().any()
