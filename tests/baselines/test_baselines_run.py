"""``run_baselines`` on a small data set in the BSDS layout: the files it writes and what it refuses."""

import json

import numpy as np
import pytest
from PIL import Image

from matbackprop.baselines import HUMANS, run_baselines
from matbackprop.data.bsds import BSDS
from matbackprop.errors import ConfigurationError
from matbackprop.metrics import evaluate_segmentations


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


def test_summary_files(root, tmp_path):
    seen = []
    out = tmp_path / "out"
    summaries = run_baselines(
        root, out, ["one_region", HUMANS], command="make it", progress=lambda *step: seen.append(step)
    )
    data = BSDS(root, "val")
    expected = evaluate_segmentations(
        {sample.id: [np.zeros((16, 24), int)] for sample in data},
        {sample.id: sample.segmentations for sample in data},
        boundary=True,
    )
    assert summaries["one_region"]["scores"] == pytest.approx(expected)
    stored = json.loads((out / "one_region.json").read_text())
    assert stored == json.loads(json.dumps(summaries["one_region"]))
    assert stored["command"] == "make it" and stored["images"] == 3 and stored["split"] == "bsds300-test"
    assert [row["id"] for row in stored["per_image"]] == ["a", "b", "c"]
    assert stored["seconds_per_image"] >= 0 and "matbackprop" in stored["versions"]
    people = json.loads((out / "humans.json").read_text())
    mean = np.mean([row["paper_best"] for row in people["per_image"]])
    assert people["scores"]["paper_best"] == pytest.approx(mean)
    assert seen[0] == ("one_region", 1, 3) and seen[-1] == (HUMANS, 3, 3)


def test_limit_and_own_data_set(root, tmp_path):
    summaries = run_baselines(BSDS(root, "val"), tmp_path / "out", ["fixed_grids"], 2, boundary=False)
    assert summaries["fixed_grids"]["images"] == 2 and "boundary_ods" not in summaries["fixed_grids"]["scores"]


def test_unknown_method(root, tmp_path):
    with pytest.raises(ConfigurationError, match=r"\['watershed'\].*multiscale_ncut"):
        run_baselines(root, tmp_path, ["watershed"])
    with pytest.raises(ConfigurationError, match="limit"):
        run_baselines(root, tmp_path, limit=0)
