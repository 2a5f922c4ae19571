"""The suites of ``python -m benchmarks speed``."""

from benchmarks.speed.suites.decompositions import decompositions
from benchmarks.speed.suites.entry import Suite
from benchmarks.speed.suites.functions import functions
from benchmarks.speed.suites.inverse_root import inverse_root
from benchmarks.speed.suites.ncuts import ncuts
from benchmarks.speed.suites.pooling import pooling
from benchmarks.speed.suites.segmentation import segmentation
from benchmarks.speed.suites.training_step import training_step

#: Name → suite, in the order of the page.
SUITES: dict[str, Suite] = {
    "pooling": pooling,
    "functions": functions,
    "decompositions": decompositions,
    "inverse-root": inverse_root,
    "ncuts": ncuts,
    "segmentation": segmentation,
    "training-step": training_step,
}
