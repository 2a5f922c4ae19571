"""``run_baseline`` on a small data set in the BSDS layout: its scores."""

import numpy as np
import pytest
from PIL import Image

from experiments.baselines import HUMANS, run_baseline
from matbackprop.vision.data.bsds import BSDS
from matbackprop.vision.metrics import evaluate_segmentations
from matbackprop.vision.workers import Workers


@pytest.fixture
def root(tmp_path):
    rng = np.random.default_rng(0)
    for kind in ("images", "groundTruth"):
        (tmp_path / kind / "val").mkdir(parents=True)
    for name in ("a", "b", "c"):
        Image.fromarray(rng.integers(0, 256, (16, 24, 3), dtype=np.uint8)).save(tmp_path / f"images/val/{name}.png")
        for person in (1, 2, 3):
            labels = rng.integers(0, 3, (2, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
            Image.fromarray(labels).save(tmp_path / f"groundTruth/val/{name}_{person}.png")
    return tmp_path


def test_scores_of_a_method_and_of_humans(root):
    data = BSDS(root, "val")
    actual = run_baseline("one_region", data, Workers(), boundary=True)
    expected = evaluate_segmentations(
        {sample.id: [np.zeros((16, 24), int)] for sample in data},
        {sample.id: sample.segmentations for sample in data},
        boundary=True,
    )
    assert actual["scores"] == pytest.approx(expected)
    assert list(actual["per_image"]) == ["a", "b", "c"] and actual["seconds_per_image"] >= 0
    people = run_baseline(HUMANS, data, Workers())
    mean = np.mean([best for best, _ in people["per_image"].values()])
    assert people["scores"]["paper_best"] == pytest.approx(mean, abs=1e-6)
