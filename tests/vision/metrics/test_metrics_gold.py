"""The test images of the benchmark: published scores and boundary maps."""

import numpy as np
import pytest
from scipy.io import loadmat

from matbackprop.vision.data.label_files import index_label_files, read_label_maps
from matbackprop.vision.metrics import boundary_map, evaluate_segmentations

pytestmark = pytest.mark.data

GOLD = {
    "covering_ods": 0.654023,
    "covering_ois": 0.725074,
    "covering_best": 0.749811,
    "pri_ods": 0.826926,
    "pri_ois": 0.898299,
    "vi_ods": 1.36877,
    "vi_ois": 1.11563,
}


def read(folder):
    return {name: read_label_maps(paths[0]) for name, paths in index_label_files(folder).items()}


def test_published_scores(data_root):
    """Boundary scores are larger than the published .704614 and .708571 because the matching is larger."""
    folders = (read(data_root / "bsds_gold" / name) for name in ("segs", "groundTruth"))
    scores = evaluate_segmentations(*folders, boundary=True)
    assert {name: scores[name] for name in GOLD} == pytest.approx(GOLD, abs=1e-5)
    assert scores["boundary_ods"] == pytest.approx(0.704991, abs=5e-7)
    assert scores["boundary_ois"] == pytest.approx(0.708970, abs=5e-7)


def test_boundaries_are_the_stored_ones(data_root):
    """The .mat files contain the boundaries of each human map."""
    checked = 0
    for path in sorted((data_root / "bsds_gold/groundTruth").iterdir()):
        for cell in loadmat(path)["groundTruth"].ravel():
            np.testing.assert_array_equal(boundary_map(cell["Segmentation"][0, 0]), cell["Boundaries"][0, 0] > 0)
            checked += 1
    assert checked == 26
