"""Other ways to segment an image, under one signature: an image uint8 ``(3, h, w)`` → a list of label maps.

``BASELINES`` names them; ``run_baseline`` scores one on a data set.
"""

from matbackprop.reproduce.baselines.clustering import KS, ncut_pytorch, sklearn_spectral
from matbackprop.reproduce.baselines.felzenszwalb import felzenszwalb
from matbackprop.reproduce.baselines.humans import humans_leave_one_out
from matbackprop.reproduce.baselines.multiscale_ncut import multiscale_ncut
from matbackprop.reproduce.baselines.run import BASELINES, HUMANS, run_baseline
from matbackprop.reproduce.baselines.simple import fixed_grids, one_region

__all__ = [
    "BASELINES",
    "HUMANS",
    "KS",
    "felzenszwalb",
    "fixed_grids",
    "humans_leave_one_out",
    "multiscale_ncut",
    "ncut_pytorch",
    "one_region",
    "run_baseline",
    "sklearn_spectral",
]
