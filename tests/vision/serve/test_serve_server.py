"""The server refuses other sites, limits requests and files, and removes old files."""

import contextlib
import http.client
import os
import threading
import time

import pytest

pytest.importorskip("uvicorn")

from matbackprop.errors import ConfigurationError
from matbackprop.vision.serve import server as module
from matbackprop.vision.serve.server import Server, listen, remove_old

pytestmark = pytest.mark.filterwarnings("ignore")  # of uvicorn's threads


async def echo(scope, receive, send):
    """Answers with the number of bytes that it received."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    count, more = 0, True
    while more:
        message = await receive()
        count, more = count + len(message.get("body", b"")), message.get("more_body", False)
    if scope["path"] == "/fail":
        raise RuntimeError("secret")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(count).encode()})


@pytest.fixture
def address(tmp_path):
    with listen("127.0.0.1", 0) as sock:
        server = Server(echo, sock, tmp_path)
        server.start()
        yield sock.getsockname()
        server.close()


def ask(address, method="GET", body=None, path="/", **headers):
    connection = http.client.HTTPConnection(*address, timeout=20)
    with contextlib.suppress(ConnectionError):  # refused while the body is being sent
        connection.request(method, path, body, {name.title(): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_other_hosts_and_origins_are_rejected(address):
    assert ask(address) == (200, b"0") and ask(address, host="localhost:7860")[0] == 200
    assert ask(address, host="evil.example")[0] == 403 and ask(address, host="127.0.0.1.evil.example")[0] == 403
    own = f"http://{address[0]}:{address[1]}"
    assert ask(address, "POST", b"abc", origin=own) == (200, b"3")
    for origin in ("http://evil.example", "null", f"http://{address[0]}:1"):
        assert ask(address, "POST", b"abc", origin=origin) == (403, b"Requests from other sites are refused.")


def test_errors_have_no_details(address):
    assert ask(address, path="/fail") == (500, b"Internal Server Error")


def test_large_requests_and_requests_without_a_length_are_rejected(address, monkeypatch):
    monkeypatch.setattr(module, "MAX_REQUEST", 1000)
    assert ask(address, "POST", b"a" * 1000) == (200, b"1000")
    assert ask(address, "POST", b"a" * 1001)[0] == 413
    assert ask(address, "POST", iter([b"a" * 600] * 3))[0] == 411


def test_files_have_a_largest_total_size_including_the_request(address, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "MAX_KEPT", 5000)
    (tmp_path / "upload").write_bytes(b"a" * 3000)
    assert ask(address, "POST", b"a" * 1000) == (200, b"1000")
    assert ask(address, "POST", b"a" * 3000)[0] == 507
    (tmp_path / "upload").unlink()
    assert ask(address, "POST", b"a" * 3000) == (200, b"3000")  # the refused bytes are no longer counted


def test_old_files_are_removed_without_a_visit(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "AGE", 0.4)
    for name in ("samples/coffee.jpg", "0123/upload.png", "tmpabc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    with listen("127.0.0.1", 0) as sock:
        server = Server(echo, sock, tmp_path)
        server.start()
        threading.Thread(target=server.wait, daemon=True).start()
        deadline = time.monotonic() + 20
        while len(list(tmp_path.iterdir())) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        server.close()
    assert [path.name for path in tmp_path.iterdir()] == ["samples"]


def test_new_files_are_kept_and_counted(tmp_path):
    for name, age in (("new", 0), ("old", module.AGE + 60)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"a" * 10)
        os.utime(tmp_path / name / "file", (time.time() - age,) * 2)
    assert remove_old(tmp_path) == 10
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_port_that_is_taken_is_one_line(address):
    with pytest.raises(ConfigurationError, match=r"cannot listen on 127\.0\.0\.1, port .*Choose another"):
        listen(*address)
    with pytest.raises(ConfigurationError, match="cannot listen on nowhere"):
        listen("nowhere.invalid", 0)
