"""The page's events, and its application."""

import copy
import threading

import numpy as np
import pytest
from PIL import Image

gr = pytest.importorskip("gradio")

from helpers import page_load  # noqa: E402
from matbackprop.vision.serve import app  # noqa: E402
from matbackprop.vision.serve.analysis import analyze  # noqa: E402
from matbackprop.vision.serve.app import MAX_OPEN, application, build  # noqa: E402
from matbackprop.vision.serve.server import Server, listen  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def page(folder):
    return build(
        lambda pixels, name: analyze(pixels, name=name), folder, classify=lambda image, mask: {"cup": mask.mean()}
    )


def _function(page, name):
    return next(f.fn for f in page.fns.values() if f.fn is not None and f.fn.__name__ == name)


@pytest.fixture
def visit(page):
    return copy.deepcopy(next(b.value for b in page.blocks.values() if isinstance(b, gr.State)))


@pytest.fixture(scope="module")
def picture():
    image = np.full((96, 128, 3), 30, np.uint8)
    image[:, 64:] = (220, 120, 20)
    return image


def upload(folder, image, name="photo.png"):
    Image.fromarray(image).save(folder / name)
    return str(folder / name)


def opened(page, visit, *files):
    return _function(page, "add_photographs")(visit, list(files), "regions")


def chosen(index):
    return gr.SelectData(target=None, data={"index": index, "value": None})


def test_a_photograph_is_shown(page, visit, folder, picture):
    file = upload(folder, picture)
    drop, strip, message, height, now, stage = opened(page, visit, file)
    assert drop is None and [name for _, name in strip["value"]][:2] == ["photo.png", "coffee.jpg"]
    assert message == "" and height == round(now.analysis.height, 2)
    assert (stage["width"], stage["height"], sum(stage["runs"][1::2])) == (128, 96, 128 * 96)


def test_the_slider_keeps_edits_and_undo_covers_names(page, visit, folder, picture):
    opened(page, visit, upload(folder, picture))
    click, move, undo = (_function(page, name) for name in ("click", "move_slider", "undo"))
    *_, guesses = click(visit, "name", "", "regions", chosen([10, 10]))
    assert guesses["cup"] == pytest.approx(0.5, abs=0.1) and "cup" in visit.analysis.names
    _, stage = move(visit, 1.0, "regions")
    assert "cup" in stage["names"] and visit.analysis.height == 1.0
    assert not any(undo(visit, "regions")[1]["names"])
    assert "wall" in click(visit, "name", "wall", "regions", chosen([10, 10]))[1]["names"]


def test_concurrent_edits_all_count_and_later_pictures_have_later_times(page, visit, folder, picture):
    opened(page, visit, upload(folder, picture))
    click, undo = _function(page, "click"), _function(page, "undo")
    for n in range(20):
        click(visit, "name", str(n), "regions", chosen([10, 10]))
    stages = []
    threads = [threading.Thread(target=lambda: stages.append(undo(visit, "regions")[1])) for _ in range(19)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(visit.analysis.past) == 1
    last = max(stages, key=lambda stage: stage["time"])
    assert len({stage["time"] for stage in stages}) == 19 and "0" in last["names"]


def test_edits_do_not_use_the_event_stream(page):
    """The browser client misses results of queued events that start while its event stream closes."""
    queued = {f.fn.__name__ for f in page.fns.values() if f.fn is not None and f.queue}
    assert queued == {"open_page", "add_photographs", "select", "export"}


def test_photographs_keep_edits_and_few_stay_in_memory(page, visit, folder, picture):
    now = opened(page, visit, *(upload(folder, picture, f"{n}.png") for n in range(6)))[4]
    _function(page, "click")(now, "name", "wall", "regions", chosen([10, 10]))
    choose = _function(page, "select")
    for index in (1, 0):
        now = choose(now, "regions", chosen(index))[2]
    assert now.photograph.name == "0.png" and "wall" in now.analysis.names
    for index in range(1, 6):
        now = choose(now, "regions", chosen(index))[2]
    assert len(now.analyses) == MAX_OPEN and now.photograph.name == "5.png"


def test_exports_are_written_into_the_folder(page, visit, folder, picture):
    assert _function(page, "export")(visit, "svg") is None
    opened(page, visit, upload(folder, picture, "mug.png"))
    path = _function(page, "export")(visit, "svg")
    assert path.startswith(str(folder)) and path.endswith("mug.svg")


def test_reading_many_photographs_is_bounded(page, visit, folder, picture, monkeypatch):
    monkeypatch.setattr(app, "MAX_PHOTOGRAPHS", 2)
    answer = opened(page, visit, *(upload(folder, picture, f"{n}.png") for n in range(3)))
    assert "1 of 3 photographs were skipped" in answer[2] and len(answer[4].photographs) == 2


def test_a_full_disk_quota_writes_nothing(page, visit, folder, picture, monkeypatch):
    file = upload(folder, picture, "mug.png")
    now = opened(page, visit, upload(folder, picture, "other.png"))[4]
    monkeypatch.setattr(app, "MAX_KEPT", 0)
    before = sorted(folder.rglob("*"))
    with pytest.raises(gr.Error, match="too many files"):
        _function(page, "export")(now, "svg")
    assert opened(page, visit, file)[2] == "⚠ 1 of 1 photographs were skipped."
    assert sorted(folder.rglob("*")) == before


def test_rescaling_is_noted_and_bad_files_are_reported_without_their_path(page, visit, folder, picture):
    gray = np.zeros((48, 64), np.uint16)
    gray[:, 32:] = 4000
    assert "values from 0 to 4000 rescaled" in opened(page, visit, upload(folder, gray, "deep.png"))[2]
    (folder / "bad.jpg").write_text("no picture")
    message = opened(page, visit, str(folder / "bad.jpg"))[2]
    assert "bad.jpg is not an image" in message and str(folder) not in message
    tiny, good = upload(folder, np.zeros((4, 4, 3), np.uint8), "tiny.png"), upload(folder, picture, "good.png")
    answer = opened(page, visit, tiny, good)
    assert "Each side needs 16" in answer[2] and answer[4].photograph.name == "good.png"


@pytest.fixture(scope="module")
def address(page, folder):
    with listen("127.0.0.1", 0) as sock:
        server = Server(application(page), sock, folder)
        server.start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        server.close()


@pytest.mark.filterwarnings("ignore")
def test_the_page_answers_and_loads_nothing_from_elsewhere(page, folder, address):
    client = page_load.Client(address, 0, page_load.Tally())
    _, text = client.ask("GET", "/")
    assert b"A click on a region" in text and b"fonts.googleapis.com" not in text
    assert page.analytics_enabled is False and page.max_file_size == 50 * 2**20 and page.state_session_capacity == 50
    assert str(folder) == page.GRADIO_CACHE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", page_load.KINDS, ids=lambda kind: kind.__name__)
def test_visitors_get_only_their_own_files(kind, address, monkeypatch):
    monkeypatch.setattr(page_load, "KINDS", {kind: 1})
    assert not page_load.run_clients(address, 2, 2).wrong


@pytest.mark.filterwarnings("ignore")
def test_files_of_the_machine_cannot_be_fetched(address):
    client = page_load.Client(address, 0, page_load.Tally())
    for path in page_load.STOLEN:
        status, content = client.ask("GET", path)
        assert status >= 300 and b"root:" not in content, path


@pytest.mark.filterwarnings("ignore")
def test_uploads_of_one_request_are_bounded_together(address, folder, monkeypatch):
    from matbackprop.vision.serve import server

    monkeypatch.setattr(server, "MAX_KEPT", 100_000)
    client = page_load.Client(address, 0, page_load.Tally())
    try:
        status, _ = client.upload(b"\0" * 400_000)
    except OSError:  # the connection is closed while the body is being sent
        status = 507
    assert status == 507
    assert sum(path.stat().st_size for path in folder.glob("tmp*") if path.is_file()) < 400_000
