"""Differentiable operators on matrices, one a file."""

from matbackprop.divided_differences import SpectralFunction
from matbackprop.functional._ties import raise_deferred
from matbackprop.functional.affinity import affinity, normalized_affinity, normalized_cut_value
from matbackprop.functional.eigh import eigh
from matbackprop.functional.linear_solve import conjugate_gradient_solve, gaussian_crf, linear_solve
from matbackprop.functional.matrix_function import (
    matrix_exp,
    matrix_function,
    matrix_inv_sqrt,
    matrix_inverse,
    matrix_log,
    matrix_power,
    matrix_sqrt,
)
from matbackprop.functional.normalized_cut import normalized_cut_j1, normalized_cut_j2, normalized_cut_soft
from matbackprop.functional.projector import projector, spectral_projector
from matbackprop.functional.rank_report import RankReport, rank_report
from matbackprop.functional.second_order_pool import second_order_pool
from matbackprop.functional.spectral_embedding import spectral_embedding
from matbackprop.functional.svd import svd
from matbackprop.functional.triangle import unvectorize_symmetric, vectorize_symmetric

__all__ = [
    "RankReport",
    "SpectralFunction",
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
    "normalized_affinity",
    "normalized_cut_j1",
    "normalized_cut_j2",
    "normalized_cut_soft",
    "normalized_cut_value",
    "projector",
    "raise_deferred",
    "rank_report",
    "second_order_pool",
    "spectral_embedding",
    "spectral_projector",
    "svd",
    "unvectorize_symmetric",
    "vectorize_symmetric",
]
