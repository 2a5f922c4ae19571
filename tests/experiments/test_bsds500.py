"""BSDS500's protocol: training on joined splits, exported maps, one map for all images, published rows."""

import numpy as np
import pytest
from scipy.io import loadmat

from experiments import bsds500
from experiments.bsds500 import Bsds500, Config, covering_at, one_map
from experiments.runs import Images
from matbackprop.errors import ConfigurationError, DataError
from matbackprop.vision.data.label_files import read_contour_map
from matbackprop.vision.data.shapes import write_shapes_bsds
from matbackprop.vision.metrics import score_image


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two training, two validation and two test images of shapes."""
    folder = tmp_path_factory.mktemp("bsds")
    write_shapes_bsds(folder, train=2, val=2, size=(48, 64))
    for kind in ("images", "groundTruth"):
        [val] = folder.rglob(f"{kind}/val")
        (val.parent / "test").mkdir()
        for path in val.iterdir():
            (val.parent / "test" / f"t{path.name}").write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def config(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bsds500")
    return Config(
        out=folder / "out", rows=("smoke",), seeds=(0,), levels=9, workers=1, accelerator="cpu",
        data=Images(root=root, cache=folder / "cache"), override=("engine.max_epochs=1", "data.crop=32"),
    )  # fmt: skip


def test_all_scores_of_the_protocol_are_written(config, monkeypatch):
    monkeypatch.chdir(config.out.parent)
    bsds500.main(config)
    table = Bsds500(config)
    for name in bsds500.PARTS:
        run = table.results.runs("smoke", name)[0]
        metrics = run["metrics"]
        assert metrics["images"] == metrics["scored"] == 2 and len(metrics["curve"]["precision"]) == 9
        assert set(bsds500.COLUMNS.values()) <= set(metrics["scores"]) and "covering_default_view" in metrics["scores"]
        folder = table.work("smoke", 0) / f"test-{name}"
        drawn, soft = (sorted((folder / kind).iterdir()) for kind in ("ucm2", "contours"))
        assert [path.stem for path in drawn] == [path.stem for path in soft] and len(drawn) == 2
        assert loadmat(drawn[0])["ucm2"].shape == (97, 129) and read_contour_map(soft[0]).shape == (48, 64)
        assert run["provenance"]["configuration"]["training"]["data"]["split"] == "train+val"
    text = (config.out / "table.md").read_text()
    for averaged in bsds500.PARTS.values():
        assert f"| contours, smoke | 2 of test | 9 | {averaged} |" in text
    assert "| gPb-owt-ucm | 200 of test |" in text and "| People, leave one out | 2 of test | 1 |" in text
    monkeypatch.setattr(Bsds500, "model", None)  # would fail if it were called
    bsds500.main(config)  # the test images are scored once


def test_one_map_is_at_the_common_threshold():
    half, whole = np.arange(8).reshape(1, 8) // 4, np.zeros((1, 8), int)
    scores = [score_image("a", [half, whole], [half, whole]), score_image("b", [half, whole], [half])]
    assert covering_at(scores, 0) > covering_at(scores, 1)
    actual = one_map(scores)
    assert actual["one_best"] == 1 and actual["one_average"] == pytest.approx((0.75 + 1) / 2)
    assert actual["eight_best"] == 1 and actual["eight_average"] >= actual["one_average"]


def test_bad_options_are_reported(tmp_path):
    with pytest.raises(ConfigurationError, match="Unknown row 'vgg'"):
        Bsds500(Config(rows=("vgg",)))
    with pytest.raises(DataError, match="no finished run"):
        Bsds500(Config(out=tmp_path)).summarize()
