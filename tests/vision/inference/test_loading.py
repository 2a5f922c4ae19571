"""The segmenters that come with the package."""

from pathlib import Path

import numpy as np
import skimage.data

import matbackprop
from matbackprop.vision.inference import loading

FOLDER = Path(loading.__file__).parent / loading.BOX


def test_the_box_is_small_and_says_where_it_comes_from():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 4e6
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(word in card for word in ("matbackprop train ncuts", "BSDS", "Apache-2.0", "EfficientNet-Lite2"))


def test_the_accurate_segmenter_is_in_the_package_with_its_card():
    folder = FOLDER / "accurate"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 7e6
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert all(
        word in card for word in ("--preset hypercolumns-tiny-vit", "BSDS", "apache-2.0", "MobileSAM", ".860 (.731)")
    )
    cat = skimage.data.chelsea()
    result = matbackprop.segment(cat, "box/accurate")
    assert result.network and result.labels(6).max() == 5
    assert (result.labels(6) != matbackprop.segment(cat).labels(6)).any()


def test_the_box_segments_unless_told_otherwise():
    cat = skimage.data.chelsea()
    result = matbackprop.segment(cat)
    assert result.network and result.labels().shape == cat.shape[:2]
    np.testing.assert_array_equal(result.labels(6), matbackprop.segment(cat, loading.load_segmenter()).labels(6))
    without = matbackprop.segment(cat, model=None)
    assert not without.network and (without.labels(6) != result.labels(6)).any()
