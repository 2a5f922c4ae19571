"""Differentiable operators on matrices, one a file."""

from matbackprop.divided_differences import SpectralFunction
from matbackprop.functional._affinity import affinity, normalized_affinity, normalized_cut_value
from matbackprop.functional._eigh import eigh
from matbackprop.functional._linear_solve import conjugate_gradient_solve, gaussian_crf, linear_solve
from matbackprop.functional._matrix_function import (
    matrix_exp,
    matrix_function,
    matrix_inv_sqrt,
    matrix_inverse,
    matrix_log,
    matrix_power,
    matrix_sqrt,
)
from matbackprop.functional._normalized_cut import normalized_cut_j1, normalized_cut_j2, normalized_cut_soft
from matbackprop.functional._projector import projector, spectral_projector
from matbackprop.functional._rank_report import RankReport, rank_report
from matbackprop.functional._second_order_pool import second_order_pool
from matbackprop.functional._spectral_embedding import spectral_embedding
from matbackprop.functional._svd import svd
from matbackprop.functional._ties import raise_deferred
from matbackprop.functional._triangle import unvectorize_symmetric, vectorize_symmetric

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
