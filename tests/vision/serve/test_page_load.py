"""A few visitors at once, some of them hostile; ``python benchmarks/page_load.py`` sends thousands of requests."""

import json
import time

import pytest

pytest.importorskip("gradio")

from helpers import page_load
from matbackprop.vision.serve import guard
from matbackprop.vision.serve.analysis import Segmenter
from matbackprop.vision.serve.app import build, launch

JSON = {"Content-Type": "application/json"}
pytestmark = pytest.mark.filterwarnings("ignore")  # of Gradio's server and its threads


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def page(folder):
    segmenter = Segmenter()
    page = build(segmenter, segmenter.methods, folder)
    yield page
    page.close()


@pytest.fixture(scope="module")
def address(page, folder):
    return launch(page, folder, port=0)


@pytest.mark.parametrize("kind", page_load.KINDS, ids=lambda kind: kind.__name__)
def test_a_visitor_gets_only_what_is_theirs(kind, address, monkeypatch):
    monkeypatch.setattr(page_load, "KINDS", {kind: 1})
    tally = page_load.besiege(address, 2, 2)
    assert not tally.wrong


def test_nothing_is_kept_of_a_session_that_waits_for_nothing(page, address):
    client = page_load.Client(address, 0, page_load.Tally())
    for _ in range(3):
        assert b"process_completed" in client.call("undo", [None, "borders"], client.session)[1]
    deadline = time.monotonic() + 10
    kept = page._queue.pending_event_ids_session, page._queue.pending_messages_per_session
    while any(client.session in one for one in kept) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(client.session in one for one in kept)


def test_every_way_to_files_of_the_machine_is_closed(address):
    client = page_load.Client(address, 0, page_load.Tally())
    for path in page_load.STOLEN:
        status, said = client.ask("GET", path)
        assert status == 404 and said == b"There is nothing here.", path


def test_uploads_wait_while_the_page_holds_too_much(address, folder, monkeypatch):
    monkeypatch.setattr(guard, "MAX_KEPT", 0)
    client = page_load.Client(address, 0, page_load.Tally())
    assert client.upload(page_load.photograph(0)) == (507, b"The page holds too many files for now. Try again later.")


def test_other_sites_cannot_send_what_a_browser_would_carry(address):
    client = page_load.Client(address, 0, page_load.Tally())
    for place in ("upload", "queue/join", "reset"):
        answer = client.ask("POST", f"/gradio_api/{place}", b"{}", {"Sec-Fetch-Site": "cross-site"})
        assert answer == (403, b"Only the page itself may ask for this."), place


def test_half_a_character_which_no_answer_could_hold_is_refused(address):
    client = page_load.Client(address, 0, page_load.Tally())
    data = [None, "name", "a \\ud800 b", "borders"]
    body = json.dumps({"fn_index": client.functions["click"]["id"], "data": data, "session_hash": "half"})
    answer = client.ask("POST", "/gradio_api/queue/join", body.replace("\\\\", "\\").encode(), JSON)
    assert answer == (400, b"This is not a request of the page.")
    whole = client.ask("POST", "/gradio_api/queue/join", body.replace("\\\\ud800", "\\ud83d\\ude00").encode(), JSON)
    assert whole[0] == 200


def test_a_request_that_takes_too_long_is_given_up(address, monkeypatch):
    monkeypatch.setattr(guard, "MAX_SECONDS", 0.0)
    client = object.__new__(page_load.Client)
    client.host, client.cookie = address.removeprefix("http://").rstrip("/"), ""
    status, said = client.ask("GET", "/config")
    assert status == 503 and said.startswith(b"This took longer than 0 seconds")


def test_a_page_for_others_is_warned_of(folder, caplog):
    segmenter = Segmenter()
    page = build(segmenter, segmenter.methods, folder)
    launch(page, folder, host="0.0.0.0", port=0)
    page.close()
    assert "no accounts and no encryption" in caplog.text
