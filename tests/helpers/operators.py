"""One table of operators: a new operator is a new row, and every property is tested on it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor
from torch.nn.functional import softplus

import matbackprop as mb
from helpers.matrices import generator, relu_features, symmetric, to_complex, with_singular_values
from matbackprop import spd
from matbackprop.spd._metrics import Metric

Make = Callable[[str], tuple[Tensor, ...]]


def real_parts(outs: tuple[Tensor, ...]) -> list[Tensor]:
    """Complex tensors as real ones with twice as many columns."""
    return [torch.cat([out.real, out.imag], -1) if out.is_complex() else out for out in outs]


def _tuple(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


@dataclass(frozen=True)
class Case:
    """An operator and the inputs on which its properties are tested.

    Args:
        name: of the row.
        call: takes the tensors that ``make`` returns, and the options ``check`` and ``precision`` if ``options`` is
            true.
        make: the inputs, float64 with a leading batch of two. ``"separated"`` has simple values, ``"repeated"`` tied
            ones.
        invariants: turns the outputs into tensors without a gauge freedom.
        exact_at_ties: whether derivatives exist at tied values.
        takes_symmetric: the first input has to be symmetric.
        options: whether the operator has ``check`` and ``precision``.
        traced: whether torch.compile and vmap can follow it.
        single: the first input alone is enough to call it, as tests of bad input and of shapes do.
        orders: how many derivatives it has; two or more unless it is a derivative itself.
        composed: built from torch operations with their derivatives.
    """

    name: str
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    make: Make
    invariants: Callable[..., tuple[Tensor, ...]] = lambda *outs: outs
    exact_at_ties: bool = True
    takes_symmetric: bool = False
    options: bool = True
    traced: bool = True
    single: bool = True
    orders: int = 2
    composed: bool = False

    def inputs(
        self, spectrum: str = "separated", device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, ...]:
        return tuple(t.clone().to(device, dtype.to_complex() if t.is_complex() else dtype) for t in self.make(spectrum))

    @property
    def complex(self) -> bool:
        return self.make("separated")[0].is_complex()

    def __call__(self, *inputs: Tensor, **options: object) -> tuple[Tensor, ...]:
        """The outputs without their gauge, as a function of the symmetric part: gradcheck perturbs single entries."""
        if self.takes_symmetric:
            inputs = (0.5 * (inputs[0] + inputs[0].mH), *inputs[1:])
        return self.invariants(*_tuple(self.call(*inputs, **options)))

    def loss(self, *inputs: Tensor, **options: object) -> Tensor:
        """A scalar that depends on every entry of every output."""
        total = inputs[0].new_zeros(()).real
        for i, out in enumerate(real_parts(self(*inputs, **options))):
            n = out.shape[-1] if out.ndim else 1
            weights = torch.linspace(-1, 1.3, max(n, 1), dtype=out.dtype, device=out.device)[:n]
            total = total + ((1 + 0.3 * i) * weights * out).sum() + out.square().sum()
        return total

    def gradients(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        inputs = tuple(t.detach().clone().requires_grad_() for t in inputs)
        return torch.autograd.grad(self.loss(*inputs), inputs)


def _matrices(spectrum: str) -> tuple[Tensor, ...]:
    values = {"separated": (0.5, 1.2, 2.1), "repeated": (1.0, 1.0, 2.0)}[spectrum]
    return (symmetric(values, 2, seed=1),)


def _features(m: int, d: int) -> Make:
    def make(spectrum: str) -> tuple[Tensor, ...]:
        k = min(m, d)
        values = torch.linspace(0.5, 1.5, k) if spectrum == "separated" else torch.ones(k)
        f = with_singular_values(m, d, values, 2, seed=2)
        if spectrum == "repeated":
            f = f.clone()
            f[1, 1] = f[1, 0]  # a duplicate row and a repeated spectrum
        return (f,)

    return make


def _of_full_rank(m: int, d: int) -> Make:
    values = {"separated": torch.linspace(0.5, 1.5, d), "repeated": torch.ones(d)}
    return lambda spectrum: (with_singular_values(m, d, values[spectrum], 2, seed=2),)


def _low_rank_inputs(spectrum: str) -> tuple[Tensor, ...]:
    values = (2.0, 1.5, 0.5) if spectrum == "separated" else (2.0, 2.0, 0.5)
    return (with_singular_values(3, 4, values, 2, seed=2),)


def _positive(m: int, d: int) -> Make:
    """Features with positive degrees."""
    return lambda spectrum: (relu_features(m, d, 2, seed=4) + 0.1,)


def _affinities(spectrum: str) -> tuple[Tensor, ...]:
    f = relu_features(4, 3, 2, seed=4) + 0.1
    return (f @ f.mT,)


def _with(make: Make, *more: Tensor) -> Make:
    return lambda spectrum: (*make(spectrum), *more)


def _double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _rand(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=generator(seed), dtype=torch.float64)


def _of_eigenpairs(lam: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    return lam, (u * lam.sin().unsqueeze(-2)) @ u.mH, u[..., :1] @ u[..., :1].mH


def _of_singular_triples(u: Tensor, s: Tensor, vh: Tensor) -> tuple[Tensor, ...]:
    k = s.shape[-1]
    u1, v1 = u[..., :k], vh[..., :k, :]
    whole, left = (u1 * s.exp().unsqueeze(-2)) @ v1, u1 @ (s.unsqueeze(-1) * u1.mH)
    out = [s, whole, left, v1.mH @ (s.sin().unsqueeze(-1) * v1)]
    if u.shape[-1] > k:
        out.append(u[..., k:] @ u[..., k:].mH)
    if vh.shape[-2] > k:
        out.append(vh[..., k:, :].mH @ vh[..., k:, :])
    return tuple(out)


def _labeled(objective: Callable[..., Tensor], *names: str) -> Callable[..., Tensor]:
    """An objective with labels, and with more inputs by name."""

    def call(x: Tensor, *more: Tensor, **options: object) -> Tensor:
        labels = torch.tensor([0, 1, 1, 0, 2], device=x.device)[: x.shape[-2]].expand(x.shape[:-1])
        return objective(x, labels, num_labels=3, **dict(zip(names, more, strict=True)), **options)

    return call


def _per_image(value: Tensor) -> tuple[Tensor, ...]:
    return (value.unsqueeze(-1),)


_ONES = _double(1, 1, 1)
_FUNCTIONS = ("log", "sqrt", "inv_sqrt", "exp", "inverse", 0.3)
_of_matrix = {"make": _matrices, "takes_symmetric": True}
_weights, _regions = _rand(2, 3, seed=5) + 0.2, _rand(2, 2, 3, seed=6) + 0.2
_eps, _power = _double(0.1, 0.3), _double(0.7).expand(2)
_svd_full = partial(mb.svd, full_matrices=True)


def _sym(a: Tensor) -> Tensor:
    return 0.5 * (a + a.mH)


def _geometry_cases() -> list[Case]:
    """The functions of two matrices, and the mean, in every metric."""
    pair = _with(_matrices, symmetric((0.7, 1.0, 1.6), 2, seed=18))

    def of_pair(name: str, make: Make = pair, **more: object) -> list[Case]:
        def called(metric: Metric) -> Callable[..., Tensor]:
            def call(a: Tensor, b: Tensor, *t: Tensor, **o: object) -> Tensor:
                return getattr(spd, name)(a, 0.25 * _sym(b), *t, metric=metric, **o)

            return call

        return [
            Case(
                f"spd_{name}_{metric}",
                called(metric),
                make,
                takes_symmetric=True,
                single=False,
                composed=True,
                orders=1 if name.endswith("map") and metric == "log_euclidean" else 2,
                **more,
            )
            for metric in get_args(Metric)
        ]

    def several(spectrum: str) -> tuple[Tensor, ...]:
        values = (0.5, 1.5) if spectrum == "separated" else (1.0, 1.0)
        return torch.stack([symmetric(values, 2, seed=27), symmetric((0.7, 1.6), 2, seed=28)], -3), _rand(2, 2, seed=29)

    means = [
        Case(
            f"spd_mean_{metric}",
            lambda a, w=None, metric=metric, **o: spd.mean(a, w, metric=metric, **o),
            several,
            takes_symmetric=True,
            traced=metric == "log_euclidean",
            composed=True,
            single=False,
        )
        for metric in get_args(Metric)
    ]
    return [
        *of_pair("distance", invariants=_per_image),
        *of_pair("geodesic", _with(pair, _double(0.3, 0.8))),
        *of_pair("exp_map"),
        *of_pair("log_map"),
        *means,
    ]


CASES = [
    Case("matrix_log", mb.matrix_log, **_of_matrix),
    Case("matrix_sqrt", mb.matrix_sqrt, **_of_matrix),
    Case("matrix_inv_sqrt", mb.matrix_inv_sqrt, **_of_matrix),
    Case("matrix_exp", mb.matrix_exp, **_of_matrix),
    Case("matrix_inverse", mb.matrix_inverse, **_of_matrix),
    Case(
        "matrix_power",
        lambda a, p=0.3, **o: mb.matrix_power(a, p, **o),
        _with(_matrices, _double(0.7, -1.3)),
        takes_symmetric=True,
    ),
    Case("matrix_cube", partial(mb.matrix_power, p=3), **_of_matrix),
    Case("matrix_power_minus_2", partial(mb.matrix_power, p=-2), **_of_matrix),
    Case("own_derivative", partial(mb.matrix_function, function=(softplus, torch.sigmoid)), **_of_matrix),
    Case("own_log", partial(mb.matrix_function, function=(torch.log, torch.reciprocal)), **_of_matrix),
    Case("matrix_functions", partial(mb.matrix_functions, functions=_FUNCTIONS), **_of_matrix),
    Case("matrix_clamp", partial(mb.matrix_clamp, least=1.3), **_of_matrix),
    Case("inverse_root", partial(mb.inverse_root, p=4, eps=0.1), **_of_matrix),
    Case("inverse_root_relative", partial(mb.inverse_root, p=2, eps=0.1, relative=True), **_of_matrix),
    Case("pool_thin_log", lambda f, e=0.1, **o: mb.second_order_pool(f, eps=e, **o), _with(_features(3, 4), _eps)),
    Case("pool_primal_log", lambda f, e=0.1, **o: mb.second_order_pool(f, eps=e, **o), _with(_features(4, 3), _eps)),
    Case(
        "pool_thin_sqrt_weighted",
        lambda f, w=None, **o: mb.second_order_pool(f, eps=0.1, function="sqrt", weight=w, **o),
        _with(_features(3, 4), _weights),
    ),
    *(
        Case(
            f"pool_{form}_weighted_power",
            lambda f, w, e, p, **o: mb.second_order_pool(f, eps=e, weight=w, function="power", exponent=p, **o),
            _with(_features(3, d), _weights, _eps, _power),
            single=False,
        )
        for form, d in (("primal", 2), ("thin", 4))
    ),
    Case(
        "pool_regions_centered",
        lambda f, w=None, **o: mb.second_order_pool(f, eps=0.1, weight=w, center=True, **o),
        _with(_features(3, 4), _regions),
    ),
    *(
        Case(f"pool_by_{by}", partial(mb.second_order_pool, method=by), _features(4, 3), exact_at_ties=False)
        for by in ("svd", "eig")
    ),
    Case("eigh", mb.eigh, invariants=_of_eigenpairs, exact_at_ties=False, **_of_matrix),
    Case("topk_eigh", partial(mb.topk_eigh, k=2), invariants=_of_eigenpairs, exact_at_ties=False, **_of_matrix),
    Case(
        "generalized_eigh",
        lambda a, b, **o: mb.generalized_eigh(a, 0.5 * (b + b.mH), **o),
        _with(_matrices, symmetric((0.7, 1.0, 1.6), 2, seed=18)),
        _of_eigenpairs,
        exact_at_ties=False,
        takes_symmetric=True,
        single=False,
    ),
    Case(
        "generalized_matrix_function",
        lambda a, b, p, **o: mb.generalized_matrix_function(a, _sym(b), "power", exponent=p, **o),
        _with(_matrices, symmetric((0.7, 1.0, 1.6), 2, seed=18), _double(0.7, -1.3)),
        takes_symmetric=True,
        single=False,
        composed=True,
    ),
    *(
        Case(
            f"whiten_{name}",
            lambda x, w=None, options=options, **o: mb.whiten(x, eps=0.1, weight=w, **options, **o),
            _with(_features(m, d), _rand(2, m, seed=19) + 0.2),
            exact_at_ties=name != "pca",
        )
        for name, m, d, options in (("thin", 3, 4, {}), ("zca", 4, 3, {}), ("pca", 5, 3, {"method": "pca"}))
    ),
    Case(
        "whiten_by_statistics",
        lambda x, mean, a, **o: mb.whiten(x, eps=0.1, mean=mean, covariance=0.5 * (a + a.mH), **o),
        lambda spectrum: (_rand(2, 4, 3, seed=20), _rand(2, 3, seed=21), *_matrices(spectrum)),
        single=False,
    ),
    Case("svd_tall", mb.svd, _features(4, 3), _of_singular_triples, exact_at_ties=False),
    Case("svd_wide", mb.svd, _features(3, 4), _of_singular_triples, exact_at_ties=False),
    Case("svd_full_tall", _svd_full, _features(4, 3), _of_singular_triples, exact_at_ties=False),
    Case("svd_full_wide", _svd_full, _features(3, 4), _of_singular_triples, exact_at_ties=False),
    Case("projector", mb.projector, _of_full_rank(4, 2)),
    Case(
        "projector_symmetric",
        lambda x, **o: mb.projector((x.unsqueeze(-2) * x.unsqueeze(-3).conj()).sum(-1), symmetric=True, **o),
        _of_full_rank(3, 2),
        single=False,
    ),
    Case("pinv_tall", mb.pinv, _of_full_rank(4, 2)),
    Case("pinv_wide", mb.pinv, lambda spectrum: (_of_full_rank(4, 2)(spectrum)[0].mT,)),
    Case(
        "pinv_deficient",
        lambda x, y, **o: mb.pinv((x.unsqueeze(-2) * y.unsqueeze(-3).conj()).sum(-1), **o),
        _with(_of_full_rank(4, 2), _rand(2, 3, 2, seed=34)),
        single=False,
    ),
    Case("lstsq", mb.lstsq, _with(_of_full_rank(4, 2), _rand(2, 4, 3, seed=35)), single=False),
    Case("spectral_projector", partial(mb.spectral_projector, rank=1), **_of_matrix),
    Case("polar_tall", mb.polar, _of_full_rank(4, 2)),
    Case("polar_wide", mb.polar, lambda spectrum: (_of_full_rank(4, 2)(spectrum)[0].mT,)),
    Case("project_rotation", mb.project_rotation, _of_full_rank(3, 3)),
    Case(
        "procrustes",
        lambda x, y, w, **o: mb.procrustes(x, y, weight=w, **o),
        lambda spectrum: (_rand(2, 4, 3, seed=15), _rand(2, 4, 3, seed=16), _rand(2, 4, seed=17) + 0.5),
        single=False,
    ),
    Case(
        "procrustes_with_reflections",
        partial(mb.procrustes, reflection=True),
        lambda spectrum: (_rand(2, 4, 3, seed=15), _rand(2, 4, 3, seed=16)),
        single=False,
    ),
    Case("low_rank", partial(mb.low_rank, rank=2), _low_rank_inputs),
    Case("affinity", mb.affinity, _with(_positive(4, 3), _rand(2, 3, 3, seed=7)), options=False),
    Case("normalized_affinity", mb.normalized_affinity, _affinities, takes_symmetric=True, options=False),
    Case(
        "normalized_cut_value",
        _labeled(mb.normalized_cut_value),
        _affinities,
        _per_image,
        takes_symmetric=True,
        options=False,
    ),
    Case(
        "normalized_cut_j1",
        _labeled(mb.normalized_cut_j1, "weight", "lam"),
        _with(_positive(5, 2), _rand(2, 5, seed=8) + 0.5, torch.eye(2).double() + 0.5 * _rand(2, 2, 2, seed=9)),
        _per_image,
        single=False,
    ),
    Case(
        "normalized_cut_j2",
        _labeled(mb.normalized_cut_j2, "weight"),
        _with(_positive(5, 2), _rand(2, 5, seed=8) + 0.5),
        _per_image,
        single=False,
    ),
    Case("normalized_cut_soft", _labeled(mb.normalized_cut_soft), _positive(5, 2), _per_image),
    Case(
        "spectral_embedding",
        partial(mb.spectral_embedding, k=2),
        _positive(5, 3),
        lambda lam, u, degree: (lam, (u * u[..., :1, :]).sin(), degree),
        exact_at_ties=False,
    ),
    Case(
        "linear_solve",
        lambda a, b=_ONES, **o: mb.linear_solve(a, b, symmetric=True, **o),
        _with(_matrices, _rand(2, 3, seed=10)),
        takes_symmetric=True,
    ),
    Case(
        "sylvester",
        lambda a, b, c, **o: mb.sylvester(a, _sym(b), c, **o),
        _with(_matrices, symmetric((0.7, 1.0), 2, seed=18), _rand(2, 3, 2, seed=31)),
        takes_symmetric=True,
        single=False,
    ),
    Case("lyapunov", mb.lyapunov, _with(_matrices, _rand(2, 3, 3, seed=32)), takes_symmetric=True, single=False),
    Case("linear_solve_by_lu", mb.linear_solve, _with(_of_full_rank(3, 3), _rand(2, 3, 2, seed=10)), single=False),
    *_geometry_cases(),
    Case("spd_bimap", spd.bimap, _with(_matrices, _rand(3, 2, seed=23).expand(2, 3, 2)), options=False, single=False),
    Case(
        "spd_frechet_distance",
        spd.frechet_distance,
        _with(_features(4, 3), _rand(2, 5, 3, seed=33)),
        invariants=_per_image,
        single=False,
        orders=1,
        composed=True,
    ),
    Case("spd_re_eig", lambda a, **o: spd.re_eig(a, 1.3, **o), **_of_matrix),
    Case("spd_log_eig", spd.log_eig, **_of_matrix),
    Case(
        "spd_batch_norm",
        lambda a, m, b, v, s, **o: spd.batch_norm(a, _sym(m), variance=v, bias=_sym(b), scale=s, **o),
        _with(
            _matrices, *(symmetric((0.7, 1.0, 1.6), 2, seed=i) for i in (24, 25)), _rand(2, seed=26), _double(1.1, 2)
        ),
        composed=True,
        takes_symmetric=True,
        single=False,
    ),
    Case("vectorize_symmetric", mb.vectorize_symmetric, _matrices, options=False),
    Case(
        "unvectorize_symmetric", mb.unvectorize_symmetric, lambda _: (relu_features(2, 6),), options=False, single=False
    ),
]

# Rows with a complex counterpart, by the number of their complex inputs.
_COMPLEX_INPUTS = {
    1: """
        matrix_functions matrix_power matrix_clamp inverse_root inverse_root_relative pool_primal_log
        pool_thin_weighted_power pool_regions_centered eigh svd_wide svd_full_tall projector projector_symmetric
        pinv_tall pinv_wide spectral_projector polar_tall polar_wide low_rank topk_eigh whiten_thin whiten_zca
        whiten_pca spd_mean_affine_invariant spd_log_eig vectorize_symmetric unvectorize_symmetric
    """,
    2: """
        generalized_eigh generalized_matrix_function pinv_deficient lstsq procrustes_with_reflections
        linear_solve_by_lu spd_distance_affine_invariant spd_geodesic_bures_wasserstein
        spd_exp_map_bures_wasserstein spd_log_map_log_euclidean spd_bimap
    """,
    3: """
        whiten_by_statistics sylvester spd_batch_norm
    """,
}
_WITH_COMPLEX = {name: count for count, names in _COMPLEX_INPUTS.items() for name in names.split()}


def _complex_case(case: Case, number: int) -> Case:
    def make(spectrum: str) -> tuple[Tensor, ...]:
        inputs = case.make(spectrum)
        return *(to_complex(t) for t in inputs[:number]), *inputs[number:]

    return replace(case, name=f"complex_{case.name}", make=make)


CASES += [_complex_case(case, _WITH_COMPLEX[case.name]) for case in CASES if case.name in _WITH_COMPLEX]

TRACED = [case for case in CASES if case.traced]
WITH_OPTIONS = [case for case in CASES if case.options]
OF_ONE_INPUT = [case for case in CASES if case.single]
OF_SYMMETRIC = [case for case in OF_ONE_INPUT if case.takes_symmetric and case.options]
SPECTRA_OF_CASES = [
    (case, spectrum)
    for case in CASES
    for spectrum in ("separated", "repeated")
    if spectrum == "separated" or case.exact_at_ties
]


def case_id(value: object) -> str:
    return value.name if isinstance(value, Case) else str(value)
