"""Structured matrix layers for PyTorch whose gradients are exact, finite and fast.

Importing the package is cheap: the operators, and PyTorch with them, are loaded when the first of them is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matbackprop import nn
    from matbackprop.functional import (
        RankReport,
        affinity,
        conjugate_gradient_solve,
        eigh,
        gaussian_crf,
        linear_solve,
        matrix_exp,
        matrix_function,
        matrix_inv_sqrt,
        matrix_inverse,
        matrix_log,
        matrix_power,
        matrix_sqrt,
        normalized_affinity,
        normalized_cut_j1,
        normalized_cut_j2,
        normalized_cut_soft,
        normalized_cut_value,
        projector,
        rank_report,
        second_order_pool,
        spectral_embedding,
        spectral_projector,
        svd,
        unvectorize_symmetric,
        vectorize_symmetric,
    )
    from matbackprop.inference import classify as classify
    from matbackprop.inference import segment as segment

__version__ = "0.1.0"

__all__ = [
    "RankReport",
    "__version__",
    "affinity",
    "conjugate_gradient_solve",
    "eigh",
    "gaussian_crf",
    "linear_solve",
    "matrix_exp",
    "matrix_function",
    "matrix_inv_sqrt",
    "matrix_inverse",
    "matrix_log",
    "matrix_power",
    "matrix_sqrt",
    "nn",
    "normalized_affinity",
    "normalized_cut_j1",
    "normalized_cut_j2",
    "normalized_cut_soft",
    "normalized_cut_value",
    "projector",
    "rank_report",
    "second_order_pool",
    "spectral_embedding",
    "spectral_projector",
    "svd",
    "unvectorize_symmetric",
    "vectorize_symmetric",
]

_MODULES = {"divided_differences", "errors", "functional", "nn", "numerics", "solvers"}

_INFERENCE = {"classify", "segment"}
"""Functions on pictures. They need the extra ``train``, so that ``from matbackprop import *`` leaves them out."""

if not TYPE_CHECKING:  # a type checker that saw it would believe in every name

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name not in __all__ and name not in _INFERENCE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in _INFERENCE:
            try:
                value = getattr(import_module(f"{__name__}.inference"), name)
            except ModuleNotFoundError as error:
                from matbackprop.errors import MissingExtraError

                raise MissingExtraError(
                    f"matbackprop.{name} needs {error.name}: pip install 'matbackprop[train]'"
                ) from error
        else:
            value = getattr(import_module(f"{__name__}.functional"), name)
        globals()[name] = value  # found without this function from now on
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES, *_INFERENCE})
