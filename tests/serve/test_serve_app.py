"""The page starts on this machine, answers, and loads nothing from elsewhere."""

import urllib.request

import numpy as np
import pytest

gr = pytest.importorskip("gradio")

from matbackprop.serve.analysis import Segmenter  # noqa: E402
from matbackprop.serve.app import build, launch  # noqa: E402


@pytest.fixture(scope="module")
def page():
    segmenter = Segmenter()
    return build(segmenter, segmenter.methods, about=segmenter.about, classify=lambda image, mask: {"cup": mask.mean()})


def _function(page, name):
    return next(f.fn for f in page.fns.values() if f.fn is not None and f.fn.__name__ == name)


@pytest.fixture(scope="module")
def picture():
    image = np.full((48, 64, 3), 30, np.uint8)
    image[:, 32:] = (220, 120, 20)
    return image


def test_a_photograph_gives_every_view(page, picture):
    analysis, outlined, painted, said, path, levels, vectors, spectrum = _function(page, "analyse_photograph")(
        picture, "merge", 2
    )
    assert outlined.shape == painted.shape == picture.shape
    assert said == "2 regions" and path.endswith("labels_2.png")
    assert len(levels) == 8 and len(vectors) >= 2 and spectrum.ndim == 3
    assert _function(page, "regions")(analysis, 5)[2] == "5 regions"


def test_an_empty_page_and_a_tiny_photograph_are_handled(page):
    empty = _function(page, "analyse_photograph")(None, "merge", 8)
    assert empty[0] is None and empty[5] == []
    with pytest.raises(gr.Error, match="16 a side"):
        _function(page, "analyse_photograph")(np.zeros((4, 4, 3), np.uint8), "merge", 8)


def test_a_click_names_the_region(page, picture):
    analysis = _function(page, "analyse_photograph")(picture, "merge", 2)[0]
    event = gr.SelectData(target=None, data={"index": [10, 10], "value": None})
    shown, names = _function(page, "name_region")(analysis, 2, event)
    assert names["cup"] == pytest.approx(0.5, abs=0.05)
    np.testing.assert_array_equal(shown[10, 10], picture[10, 10])
    assert (shown[10, 50] != picture[10, 50]).any()


@pytest.mark.filterwarnings("ignore")
def test_the_page_answers_on_this_machine_only(page):
    address = launch(page, port=0, wait=False)
    try:
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=30) as answer:
            text = answer.read().decode()
        assert "matbackprop" in text and "What is it?" in text
        assert "fonts.googleapis.com" not in text
        assert page.analytics_enabled is False
    finally:
        page.close()
