"""A pytest plugin that replaces spd_learn's functions of positive definite matrices by those of this package.

The conventions of spd_learn are kept: eigenvalues are clamped to its thresholds, with its warning, before a logarithm,
a root or a power, and log-Euclidean maps are differences of logarithms, not velocities.
"""

import warnings

import spd_learn
import torch
from ours_in_pyriemann import put_in_place
from spd_learn.functional import core, frechet, metrics
from spd_learn.functional.numerical import get_epsilon, numerical_config

import matbackprop as mb
from matbackprop import spd

assert spd_learn.modules


def _raised(x, kind, warn=False):
    """X with eigenvalues clamped to spd_learn's threshold; X itself if none is below."""
    least = get_epsilon(x.dtype, kind)
    smallest = torch.linalg.eigvalsh((x + x.mH).detach() / 2).min() if x.numel() else least + 1
    if smallest > least:
        return x
    if warn and numerical_config.warn_on_clamp:
        warnings.warn(
            f"Eigenvalue clamping occurred in matrix_log: threshold ({least:.2e}) > min eigenvalue ({smallest:.2e}). "
            f"This might lead to inaccurate results.",
            UserWarning,
            stacklevel=2,
        )
    return mb.matrix_clamp(x, float(least), check=False)


def _scaled_softplus(x):
    return torch.nn.functional.softplus(x * 0.6931471805599453) / 0.6931471805599453


def _own(g, derivative):
    return lambda x: mb.matrix_function(x, (g, derivative), check=False)


def _power(x, p):
    """spd_learn's exponent broadcasts over eigenvalues, that of this package over matrices."""
    if isinstance(p, torch.Tensor):
        p = p.real.squeeze(-1) if p.ndim == x.ndim - 1 and p.shape[-1] == 1 else p.real
    return mb.matrix_power(_raised(x, "eigval_power"), p, check=False)


APPLY = {
    core.matrix_log: lambda x: mb.matrix_log(_raised(x, "eigval_log", warn=True), check=False),
    core.matrix_exp: lambda x: mb.matrix_exp(x, check=False),
    core.matrix_sqrt: lambda x: mb.matrix_sqrt(_raised(x, "eigval_sqrt"), check=False),
    core.matrix_inv_sqrt: lambda x: mb.matrix_inv_sqrt(_raised(x, "eigval_inv_sqrt"), check=False),
    core.matrix_sqrt_inv: lambda x: mb.matrix_functions(
        _raised(x, "eigval_inv_sqrt"), ["sqrt", "inv_sqrt"], check=False
    ),
    core.matrix_power: _power,
    core.clamp_eigvals: lambda x, least: mb.matrix_clamp(x, float(least), check=False),
    core.matrix_softplus: _own(_scaled_softplus, lambda x: torch.sigmoid(x * 0.6931471805599453)),
    core.matrix_inv_softplus: _own(lambda x: torch.log2(torch.exp2(x) - 1), lambda x: 1 / (1 - torch.exp2(-x))),
    core.abs_eigvals: _own(torch.abs, torch.sign),
}
for function, ours in APPLY.items():
    function.apply = staticmethod(ours)


def _geodesic(metric):
    def call(A, B, t):
        return spd.geodesic(A, B, t.to(A.dtype) if isinstance(t, torch.Tensor) else t, metric=metric, check=False)

    return call


def _derivative(function, x, v):
    return torch.func.jvp(lambda a: function(a, check=False), (x.expand(v.shape),), (v,))[1]


put_in_place(
    "spd_learn",
    {
        metrics.airm_distance: lambda A, B: spd.distance(A, B, check=False),
        metrics.airm_geodesic: _geodesic("affine_invariant"),
        metrics.exp_map_airm: lambda P, V, t=1.0: spd.exp_map(P, t * V, check=False),
        metrics.log_map_airm: lambda P, Q: spd.log_map(P, Q, check=False),
        metrics.log_euclidean_distance: lambda A, B: spd.distance(A, B, metric="log_euclidean", check=False),
        metrics.log_euclidean_geodesic: _geodesic("log_euclidean"),
        metrics.bures_wasserstein_distance: lambda A, B: spd.distance(A, B, metric="bures_wasserstein", check=False),
        metrics.bures_wasserstein_geodesic: _geodesic("bures_wasserstein"),
        frechet.frechet_derivative_log: lambda P, V: _derivative(mb.matrix_log, P, V),
        frechet.frechet_derivative_exp: lambda X, W: _derivative(mb.matrix_exp, X, W),
        core.orthogonal_polar_factor: lambda W: mb.polar(W).Q,
    },
)
