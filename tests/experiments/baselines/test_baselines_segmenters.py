"""Every baseline under the common signature, on synthetic images."""

import numpy as np
import pytest
import torch

from experiments.baselines import BASELINES, fixed_grids, humans_leave_one_out
from matbackprop.vision.metrics import region_scores


@pytest.fixture(autouse=True)
def _skip_missing_peer(request):
    if "ncut_pytorch" in request.node.name:
        pytest.importorskip("ncut_pytorch")


def scene(height=96, width=128, noise=4.0, seed=0):
    """A bright disc and a dark bar on a gray ground, with their label map."""
    y, x = np.mgrid[:height, :width]
    labels = np.zeros((height, width), int)
    labels[(y - height / 2) ** 2 + (x - width / 3) ** 2 < (height / 4) ** 2] = 1
    labels[:, int(width * 0.75) :] = 2
    colors = np.array([[120, 120, 120], [230, 210, 60], [20, 30, 90]])[labels]
    colors = colors + np.random.default_rng(seed).normal(0, noise, colors.shape)
    return torch.from_numpy(colors.clip(0, 255).astype(np.uint8)).permute(2, 0, 1).contiguous(), labels


@pytest.mark.parametrize("name", ["sklearn_spectral", "ncut_pytorch", "felzenszwalb"])
def test_methods_find_the_objects(name):
    image, labels = scene()
    scores = region_scores(BASELINES[name](image), [labels])
    blind = region_scores(fixed_grids(image), [labels])
    assert scores.covering.max() > max(0.75, blind.covering.max() + 0.1)


@pytest.mark.parametrize("name", list(BASELINES))
def test_methods_are_deterministic_and_return_eight_maps_of_the_image_size(name):
    image, _ = scene(48, 64)
    first = BASELINES[name](image)
    torch.manual_seed(123)
    np.random.seed(123)  # noqa: NPY002
    for one, two in zip(first, BASELINES[name](image), strict=True):
        assert torch.equal(one, two) and one.shape == image.shape[1:] and one.dtype == torch.int64
    assert len(first) == (1 if name == "one_region" else 8)


def test_leave_one_out_scores_of_human_maps():
    half, whole = [[0, 0, 1, 1]], [[0, 0, 0, 0]]
    row = humans_leave_one_out("a", [half, half, whole])
    # half covers whole by 1/2 and whole covers half by 1/2; half covers half by 1.
    assert row["paper_best"] == pytest.approx((1 + 1 + 0.5) / 3)
    assert row["paper_average"] == pytest.approx((0.75 + 0.75 + 0.5) / 3)
    assert row["annotators"] == 3
