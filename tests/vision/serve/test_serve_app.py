"""The page starts on this machine, answers, and loads nothing from elsewhere."""

import socket
import urllib.request

import numpy as np
import pytest
from PIL import Image

gr = pytest.importorskip("gradio")

from matbackprop.errors import ConfigurationError  # noqa: E402
from matbackprop.vision.serve import app, guard  # noqa: E402
from matbackprop.vision.serve.analysis import Segmenter  # noqa: E402
from matbackprop.vision.serve.app import MAX_OPEN, build, launch  # noqa: E402


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
def visit(page):
    return next(b.value for b in page.blocks.values() if isinstance(b, gr.State))


@pytest.fixture(scope="module")
def picture():
    image = np.full((48, 64, 3), 30, np.uint8)
    image[:, 32:] = (220, 120, 20)
    return image


def upload(folder, image, name="photo.png"):
    Image.fromarray(image).save(folder / name)
    return str(folder / name)


def opened(page, visit, *files):
    return _function(page, "add_photographs")(visit, list(files), "borders")


def test_a_photograph_gives_every_view(page, visit, folder, picture):
    drop, strip, said, slider, now, stage, tree, archive, levels, vectors, spectrum = opened(
        page, visit, upload(folder, picture)
    )
    assert drop is None and [name for _, name in strip["value"]][:2] == ["photo.png", "coffee.jpg"]
    assert said == "**photo.png**. Suggested: 2 regions." and slider["value"] == 2
    assert (stage["width"], stage["height"], sum(stage["runs"][1::2])) == (64, 48, 64 * 48)
    assert stage["alt"] == "The photograph photo.png divided into 2 regions"
    assert tree.count("<rect") == 40 and archive["visible"] is False
    assert len(levels) == 8 and len(vectors) >= 2 and "<polyline" in spectrum
    moved = _function(page, "move_slider")(now, 5, "borders")
    assert len(moved[1]["colours"]) == 5
    assert len(_function(page, "undo")(moved[0], "borders")[1]["colours"]) == 2


def test_photographs_keep_what_was_done_to_them_and_few_stay_in_memory(page, visit, folder, picture):
    files = [upload(folder, picture, f"{n}.png") for n in range(6)]
    now = opened(page, visit, *files)[4]
    now = _function(page, "move_slider")(now, 7, "borders")[0]
    choose = _function(page, "choose")
    for index in (1, 0):
        now = choose(now, "borders", gr.SelectData(target=None, data={"index": index, "value": None}))[2]
    assert now.photograph.name == "0.png" and now.analysis.shown.count() == 7
    for index in range(1, 6):
        now = choose(now, "borders", gr.SelectData(target=None, data={"index": index, "value": None}))[2]
    assert len(now.analyses) == MAX_OPEN and now.photograph.name == "5.png"


def test_files_are_written_into_the_page_s_folder(page, visit, folder, picture):
    now = opened(page, visit, upload(folder, picture, "mug.png"))[4]
    answer = _function(page, "export")(now, ["svg"])
    assert answer["value"].startswith(str(folder)) and answer["value"].endswith("mug.zip") and answer["visible"]
    assert _function(page, "export")(visit, ["svg"])["visible"] is False


def test_nobody_keeps_the_others_waiting_with_endless_photographs(page, visit, folder, picture, monkeypatch):
    files = [upload(folder, picture, f"{n}.png") for n in range(3)]
    monkeypatch.setattr(app, "MAX_PHOTOGRAPHS", 2)
    answer = opened(page, visit, *files)
    assert "1 of 3 photographs were left out" in answer[2] and len(answer[4].photographs) == 2
    monkeypatch.setattr(app, "READING", -1.0)
    assert opened(page, visit, *files)[2] == "⚠ 3 of 3 photographs were left out."


def test_a_full_page_writes_nothing_more(page, visit, folder, picture, monkeypatch):
    file = upload(folder, picture, "mug.png")
    now = opened(page, visit, file)[4]
    monkeypatch.setattr(guard, "MAX_KEPT", 0)
    before = sorted(folder.rglob("*"))
    with pytest.raises(gr.Error, match="too many files"):
        _function(page, "export")(now, ["svg"])
    assert opened(page, visit, file)[2] == "⚠ 1 of 1 photographs were left out."
    assert sorted(folder.rglob("*")) == before


def test_sixteen_bits_are_rescaled_and_that_is_said(page, visit, folder):
    grey = np.zeros((48, 64), np.uint16)
    grey[:, 32:] = 4000
    _, _, said, _, now, *_ = opened(page, visit, upload(folder, grey, "deep.png"))
    assert "values from 0 to 4000 rescaled" in said
    assert now.analysis.photograph[0, [0, -1], 0].tolist() == [0, 255]


def test_a_bad_file_is_one_sentence_without_its_temporary_path_and_changes_nothing(page, visit, folder, picture):
    def no_picture():
        (folder / "bad.jpg").write_text("no picture")
        return str(folder / "bad.jpg")

    for bad, sentence in (
        (no_picture, "bad.jpg is not a picture that can be read"),
        (lambda: upload(folder, np.zeros((4, 4, 3), np.uint8), "tiny.png"), "each side needs 16"),
    ):
        said = opened(page, visit, bad())[2]
        assert sentence in said and str(folder) not in said
        good = opened(page, visit, bad(), upload(folder, picture, "good.png"))
        assert sentence in good[2] and good[4].photograph.name == "good.png"


def test_keys_and_the_number_box_move_the_picture_too(page):
    events = [t for f in page.fns.values() if f.fn is not None and f.fn.__name__ == "move_slider" for t in f.targets]
    assert [name for _, name in events] == ["input"]


def test_a_click_divides_unites_or_names_the_region(page, visit, folder, picture):
    now = opened(page, visit, upload(folder, picture))[4]
    event = gr.SelectData(target=None, data={"index": [10, 10], "value": None})
    click = _function(page, "click")
    split = click(now, "split", "", "borders", event)
    assert len(split[1]["colours"]) == 3
    assert len(click(split[0], "merge", "", "borders", event)[1]["colours"]) == 2
    *_, guesses = named = click(now, "name", "", "borders", event)
    assert guesses["cup"] == pytest.approx(0.5, abs=0.05) and sorted(named[1]["names"]) == ["", "cup"]
    assert "wall" in click(now, "name", "wall", "borders", event)[1]["names"]


@pytest.mark.filterwarnings("ignore")
def test_the_page_answers_on_this_machine_only_and_bounds_what_it_keeps(page, folder):
    address = launch(page, folder, port=0)
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
def test_a_port_that_is_taken_is_one_line(page, folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match="choose another with --port"):
            launch(page, folder, port=taken.getsockname()[1])
