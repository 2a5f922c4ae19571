"""The suites behind ``matbackprop bench``."""

from matbackprop.bench.suites.decompositions import decompositions
from matbackprop.bench.suites.entry import Suite
from matbackprop.bench.suites.functions import functions
from matbackprop.bench.suites.gradient_error import gradient_error
from matbackprop.bench.suites.inverse_root import inverse_root
from matbackprop.bench.suites.ncuts import ncuts
from matbackprop.bench.suites.pooling import pooling
from matbackprop.bench.suites.segmentation import segmentation
from matbackprop.bench.suites.training_step import training_step

__all__ = ["SUITES"]

SUITES: dict[str, Suite] = {
    "pooling": pooling,
    "functions": functions,
    "decompositions": decompositions,
    "inverse-root": inverse_root,
    "ncuts": ncuts,
    "segmentation": segmentation,
    "gradient-error": gradient_error,
    "training-step": training_step,
}
"""Name → suite, in the order of the page."""
