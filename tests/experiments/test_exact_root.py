"""The comparison of the exact square root with Newton–Schulz steps."""

import numpy as np
import torch

from experiments import exact_root
from experiments.exact_root import Head, Maps, fit
from matbackprop import matrix_sqrt


def test_heads_start_from_the_same_parameters_and_train():
    generator = np.random.default_rng(0)
    cells = torch.from_numpy(generator.normal(size=(40, 9, 6))).half()
    labels = torch.arange(40) % 2
    cells[labels == 1, :, 0] *= 4
    maps = Maps(cells, torch.ones(40, 9), labels, np.arange(40) // 2)
    found = {root: fit(maps, maps, root, 0.03, seed=0, width=4, epochs=20) for root in exact_root.ROOTS}
    assert all(result["error"] < 20 and result["regions"] == 40 for result in found.values())
    assert Head(6, 4, 2, matrix_sqrt)(cells[:2].float(), torch.ones(2, 9)).shape == (2, 2)
