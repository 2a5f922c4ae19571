"""Differentiable matrix operators, one per file. The names imported here are also exported by `matbackprop`.

Docstrings cite as "Ionescu et al. (2015)": C. Ionescu, O. Vantzos, C. Sminchisescu, "Training Deep Networks with
Structured Layers by Matrix Backpropagation", the extended version of their ICCV 2015 paper.
"""

from matbackprop.divided_differences import SpectralFunction as SpectralFunction
from matbackprop.functional._affinity import affinity as affinity
from matbackprop.functional._affinity import normalized_affinity as normalized_affinity
from matbackprop.functional._affinity import normalized_cut_value as normalized_cut_value
from matbackprop.functional._eigh import eigh as eigh
from matbackprop.functional._generalized_eigh import generalized_eigh as generalized_eigh
from matbackprop.functional._generalized_eigh import generalized_matrix_function as generalized_matrix_function
from matbackprop.functional._inverse_root import inverse_root as inverse_root
from matbackprop.functional._linear_solve import linear_solve as linear_solve
from matbackprop.functional._low_rank import low_rank as low_rank
from matbackprop.functional._matrix_clamp import matrix_clamp as matrix_clamp
from matbackprop.functional._matrix_function import matrix_exp as matrix_exp
from matbackprop.functional._matrix_function import matrix_function as matrix_function
from matbackprop.functional._matrix_function import matrix_functions as matrix_functions
from matbackprop.functional._matrix_function import matrix_inv_sqrt as matrix_inv_sqrt
from matbackprop.functional._matrix_function import matrix_inverse as matrix_inverse
from matbackprop.functional._matrix_function import matrix_log as matrix_log
from matbackprop.functional._matrix_function import matrix_power as matrix_power
from matbackprop.functional._matrix_function import matrix_sqrt as matrix_sqrt
from matbackprop.functional._normalized_cut import normalized_cut_j1 as normalized_cut_j1
from matbackprop.functional._normalized_cut import normalized_cut_j2 as normalized_cut_j2
from matbackprop.functional._normalized_cut_soft import normalized_cut_soft as normalized_cut_soft
from matbackprop.functional._pinv import lstsq as lstsq
from matbackprop.functional._pinv import pinv as pinv
from matbackprop.functional._polar import polar as polar
from matbackprop.functional._procrustes import procrustes as procrustes
from matbackprop.functional._procrustes import project_rotation as project_rotation
from matbackprop.functional._projector import projector as projector
from matbackprop.functional._projector import spectral_projector as spectral_projector
from matbackprop.functional._rank_report import RankReport as RankReport
from matbackprop.functional._rank_report import rank_report as rank_report
from matbackprop.functional._second_order_pool import second_order_pool as second_order_pool
from matbackprop.functional._spectral_embedding import spectral_embedding as spectral_embedding
from matbackprop.functional._svd import svd as svd
from matbackprop.functional._sylvester import lyapunov as lyapunov
from matbackprop.functional._sylvester import sylvester as sylvester
from matbackprop.functional._topk import topk_eigh as topk_eigh
from matbackprop.functional._topk import topk_subspace as topk_subspace
from matbackprop.functional._triangle import unvectorize_symmetric as unvectorize_symmetric
from matbackprop.functional._triangle import vectorize_symmetric as vectorize_symmetric
from matbackprop.functional._whiten import whiten as whiten
