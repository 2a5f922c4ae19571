"""The segmenters in the package."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import skimage.data

import matbackprop
from matbackprop.vision.inference import loading
from matbackprop.vision.models.contours import ContourNet

FOLDER = Path(loading.__file__).parent / loading.BOX
SMALL = FOLDER / "small"


@pytest.mark.parametrize(("folder", "size", "origin"), [(FOLDER, 8e6, "MobileSAM"), (SMALL, 5e6, "EfficientNet-Lite2")])
def test_the_networks_are_small_and_have_cards(folder, size, origin):
    assert (folder / "model.safetensors").stat().st_size < size
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert all(word in card for word in ("matbackprop train contours", "BSDS", "apache-2.0", origin))
    config = json.loads((folder / "config.json").read_text())
    assert config["class"] == "ContourNet"
    assert "threshold" in config["arguments"]


def test_the_box_is_the_default_segmenter():
    cat = skimage.data.chelsea()[:200, :260]
    result = matbackprop.segment(cat)
    assert result.network and result.labels().shape == cat.shape[:2] and 2 <= result.k <= 40
    model = loading.load_segmenter()
    assert isinstance(model, ContourNet)
    np.testing.assert_array_equal(result.labels(6), matbackprop.segment(cat, model).labels(6))
    without = matbackprop.segment(cat, model=None)
    assert not without.network and (without.labels(6) != result.labels(6)).any()


def test_the_small_network_segments():
    cat = skimage.data.chelsea()[:200, :260]
    result = matbackprop.segment(cat, "box/small")
    assert result.network and 2 <= result.k <= 40
    agreement = np.corrcoef(result.contours.ravel(), matbackprop.segment(cat).contours.ravel())[0, 1]
    assert agreement > 0.7


@pytest.mark.slow
def test_loading_the_networks_does_not_import_the_compiler():
    """torch._dynamo takes seconds and 130 MB."""
    code = (
        "import sys; from matbackprop.vision.inference import load_classifier, load_segmenter; "
        "load_segmenter('box', 'cpu'), load_classifier('box', 'cpu'); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
