"""A pytest plugin that replaces pyRiemann's functions of positive definite matrices by those of this package.

pyRiemann checks the arguments if it has a check; this package computes values and gradients. Its means are converged,
so initial values and tolerances are ignored.
"""

import sys
import warnings

import numpy as np
import torch
from pyriemann.geometry import base, distance, geodesic, mean, tangentspace
from pyriemann.geometry._check import check_init, check_weights

import matbackprop as mb
from matbackprop import spd

NAMES = {"riemann": "affine_invariant", "logeuclid": "log_euclidean", "wasserstein": "bures_wasserstein"}


def on_arrays(function):
    """Make a function of tensors accept NumPy arrays."""

    def call(*args, **kwargs):
        numpy = any(isinstance(a, np.ndarray) for a in args)
        out = function(*(torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in args), **kwargs)
        return out.detach().numpy()[()] if numpy else out  # a number if NumPy would return one

    return call


def _derivative(function):
    def call(x, at):
        at, x = torch.broadcast_tensors(at, x.to(at.dtype))
        return torch.func.jvp(function, (at.contiguous(),), (x.contiguous(),))[1]

    return call


def _mean(metric):
    def call(X, *, tol=None, maxiter=300, init=None, sample_weight=None, **_):
        weight = check_weights(sample_weight, X.shape[-3], like=X)
        if init is not None:
            check_init(init, X.shape[-1], like=X)
        weight = torch.as_tensor(weight).expand(X.shape[:-2])
        try:
            return on_arrays(lambda x: spd.mean(x, weight, metric=metric, max_iterations=max(maxiter, 300)))(X)
        finally:
            if maxiter < 2:  # pyRiemann documents this error
                warnings.warn("Convergence not reached", stacklevel=2)

    return call


def _geodesic(metric):
    def call(A, B, alpha=0.5):
        alpha = geodesic._check_alpha(alpha, A, axis=())
        return on_arrays(lambda a, b: spd.geodesic(a, b, torch.as_tensor(alpha, dtype=torch.float64), metric=metric))(
            A, B
        )

    return call


def _exp_map_riemann(X, Cref, *, Cm12=False):
    def call(v, p):
        if not Cm12:
            root = mb.matrix_sqrt(p)
            v = root @ v @ root
        return spd.exp_map(p, v)

    return on_arrays(call)(X, Cref)


def _log_map_riemann(X, Cref, *, C12=False):
    def call(q, p):
        out = spd.log_map(p, q)
        if C12:
            return out
        root = mb.matrix_inv_sqrt(p)
        return root @ out @ root

    return on_arrays(call)(X, Cref)


OURS = {
    base.logm: on_arrays(mb.matrix_log),
    base.expm: on_arrays(mb.matrix_exp),
    base.sqrtm: on_arrays(mb.matrix_sqrt),
    base.invsqrtm: on_arrays(mb.matrix_inv_sqrt),
    base.powm: on_arrays(lambda C, alpha: mb.matrix_power(C, alpha)),
    base.ddlogm: on_arrays(_derivative(mb.matrix_log)),
    base.ddexpm: on_arrays(_derivative(mb.matrix_exp)),
    tangentspace.exp_map_riemann: _exp_map_riemann,
    tangentspace.log_map_riemann: _log_map_riemann,
}
for theirs, metric in NAMES.items():
    OURS[getattr(distance, f"distance_{theirs}")] = on_arrays(
        lambda A, B, squared=False, metric=metric: spd.distance(A, B, metric=metric, squared=squared)
    )
    OURS[getattr(geodesic, f"geodesic_{theirs}")] = _geodesic(metric)
    OURS[getattr(mean, f"mean_{theirs}")] = _mean(metric)
    if theirs != "riemann":
        OURS[getattr(tangentspace, f"exp_map_{theirs}")] = on_arrays(
            lambda X, Cref, metric=metric, **_: spd.exp_map(Cref, X, metric=metric)
        )
        OURS[getattr(tangentspace, f"log_map_{theirs}")] = on_arrays(
            lambda X, Cref, metric=metric, **_: spd.log_map(Cref, X, metric=metric)
        )


def put_in_place(package, ours):
    """Replace functions in all modules of a package, also in tables."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != package:
            continue
        for space in (vars(module), *(v for v in vars(module).values() if isinstance(v, dict))):
            for key, value in list(space.items()):
                if callable(value) and getattr(value, "__hash__", None) and value in ours:
                    space[key] = ours[value]


for original, replacement in OURS.items():
    replacement.__name__, replacement.__doc__ = original.__name__, original.__doc__
put_in_place("pyriemann", OURS)
