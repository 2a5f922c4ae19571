"""The page starts on this machine, answers, and loads nothing from elsewhere."""

import socket
import urllib.request

import numpy as np
import pytest
from PIL import Image

gr = pytest.importorskip("gradio")

from matbackprop.errors import ConfigurationError  # noqa: E402
from matbackprop.serve.analysis import Segmenter  # noqa: E402
from matbackprop.serve.app import build, launch  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def page(folder):
    segmenter = Segmenter()
    return build(
        segmenter, segmenter.methods, folder, about=segmenter.about, classify=lambda image, mask: {"cup": mask.mean()}
    )


def _function(page, name):
    return next(f.fn for f in page.fns.values() if f.fn is not None and f.fn.__name__ == name)


@pytest.fixture(scope="module")
def picture():
    image = np.full((48, 64, 3), 30, np.uint8)
    image[:, 32:] = (220, 120, 20)
    return image


def upload(folder, image, name="photo.png"):
    Image.fromarray(image).save(folder / name)
    return {"path": str(folder / name)}


def test_a_photograph_gives_every_view(page, folder, picture):
    said, slider, analysis, outlined, painted, count, archive, levels, vectors, spectrum = _function(
        page, "analyse_photograph"
    )(upload(folder, picture), "merge")
    assert said == "Suggested: 2 regions." and slider["value"] == 2
    assert outlined.shape == painted.shape == picture.shape
    assert count == "2 regions" and archive["visible"] is False
    assert len(levels) == 8 and len(vectors) >= 2 and spectrum.ndim == 3
    moved = _function(page, "move_slider")(analysis, 5)
    assert moved[3] == "5 regions" and _function(page, "undo")(moved[0])[3] == "2 regions"


def test_files_are_written_into_the_page_s_folder(page, folder, picture):
    analysis = _function(page, "analyse_photograph")(upload(folder, picture, "mug.png"), "merge")[2]
    answer = _function(page, "export")(analysis, ["svg"])
    assert answer["value"].startswith(str(folder)) and answer["value"].endswith("mug.zip") and answer["visible"]
    assert _function(page, "export")(None, ["svg"])["visible"] is False


def test_sixteen_bits_are_rescaled_and_that_is_said(page, folder):
    grey = np.zeros((48, 64), np.uint16)
    grey[:, 32:] = 4000
    said, _, analysis, *_ = _function(page, "analyse_photograph")(upload(folder, grey, "deep.png"), "merge")
    assert "values from 0 to 4000 rescaled" in said
    assert analysis.photograph[0, [0, -1], 0].tolist() == [0, 255]


def test_an_empty_page_shows_nothing_and_a_bad_file_one_sentence_without_its_temporary_path(page, folder):
    analyse = _function(page, "analyse_photograph")
    said, _, analysis, *_, levels, vectors, spectrum = analyse(None, "merge")
    assert (said, analysis, levels, vectors, spectrum) == ("", None, [], [], None)
    (folder / "bad.jpg").write_text("no picture")
    for payload, sentence in (
        ({"path": str(folder / "bad.jpg")}, "bad.jpg is no picture that can be read"),
        (upload(folder, np.zeros((4, 4, 3), np.uint8), "tiny.png"), "each side needs 16"),
    ):
        said, _, analysis, *others = analyse(payload, "merge")
        assert sentence in said and str(folder) not in said and analysis is None
        assert not any(isinstance(value, str) and value for value in others)


def test_keys_and_the_number_box_move_the_picture_too(page):
    events = [t for f in page.fns.values() if f.fn is not None and f.fn.__name__ == "move_slider" for t in f.targets]
    assert [name for _, name in events] == ["input"]


def test_a_click_divides_unites_or_names_the_region(page, folder, picture):
    analysis = _function(page, "analyse_photograph")(upload(folder, picture), "merge")[2]
    event = gr.SelectData(target=None, data={"index": [10, 10], "value": None})
    click = _function(page, "click")
    split = click(analysis, "split", event)
    assert split[3] == "3 regions" and click(split[0], "merge", event)[3] == "2 regions"
    *_, shown, names = click(analysis, "name", event)
    assert names["cup"] == pytest.approx(0.5, abs=0.05)
    np.testing.assert_array_equal(shown[10, 10], picture[10, 10])
    assert (shown[10, 50] != picture[10, 50]).any()


@pytest.mark.filterwarnings("ignore")
def test_the_page_answers_on_this_machine_only_and_bounds_what_it_keeps(page, folder):
    address = launch(page, port=0, wait=False)
    try:
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=30) as answer:
            text = answer.read().decode()
        assert "matbackprop" in text and "A click on a region" in text
        assert "fonts.googleapis.com" not in text
        assert page.analytics_enabled is False
        assert page.max_file_size == 50 * 2**20 and page.state_session_capacity == 50
        assert page.delete_cache is not None and str(folder) == page.GRADIO_CACHE
    finally:
        page.close()


@pytest.mark.filterwarnings("ignore")
def test_a_port_that_is_taken_is_one_line(page):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match="choose another with --port"):
            launch(page, port=taken.getsockname()[1], wait=False)
