"""The comparison of the exact square root with Newton–Schulz steps."""

from pathlib import Path

import numpy as np
import torch

from experiments import exact_root
from experiments.exact_root import Config, Head, Maps, fit, newton_schulz
from helpers.matrices import symmetric
from matbackprop import matrix_sqrt

PUBLISHED = Path(__file__).resolve().parents[2] / "results" / "exact_root"


def test_newton_schulz_converges_to_the_exact_root():
    a = symmetric((0.5, 1.0, 2.0), seed=1)
    torch.testing.assert_close(newton_schulz(a, steps=20), matrix_sqrt(a))
    assert (
        newton_schulz(symmetric((1e-4, 1.0, 2.0), seed=1)) - matrix_sqrt(symmetric((1e-4, 1.0, 2.0), seed=1))
    ).norm() > 1e-3


def test_heads_start_from_the_same_parameters_and_train():
    generator = np.random.default_rng(0)
    cells = torch.from_numpy(generator.normal(size=(40, 9, 6))).half()
    labels = torch.arange(40) % 2
    cells[labels == 1, :, 0] *= 4
    maps = Maps(cells, torch.ones(40, 9), labels, np.arange(40) // 2)
    found = {root: fit(maps, maps, root, 0.03, seed=0, width=4, epochs=20) for root in exact_root.ROOTS}
    assert all(result["error"] < 20 and result["regions"] == 40 for result in found.values())
    assert Head(6, 4, 2, matrix_sqrt)(cells[:2].float(), torch.ones(2, 9)).shape == (2, 2)


def test_the_published_table_follows_from_its_runs(tmp_path, capsys):
    (tmp_path / "results.jsonl").write_text((PUBLISHED / "results.jsonl").read_text())
    exact_root.main(Config(out=tmp_path, summary=True))
    assert (tmp_path / "table.md").read_text() == (PUBLISHED / "table.md").read_text()
