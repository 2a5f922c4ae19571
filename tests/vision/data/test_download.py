"""Downloads from a local server: resumed, checked, extracted, and with a way by hand where there is no network."""

import hashlib
import http.server
import io
import tarfile
import threading
import zipfile

import pytest

from matbackprop.errors import DataError
from matbackprop.vision.data.download import DATASETS, Archive, download, download_dataset, extract

DATA = bytes(range(256)) * 5000
SHA = hashlib.sha256(DATA).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves files from memory with ranges; ``cut`` ends the first answers early, ``fail`` answers 500 first."""

    files: dict[str, bytes] = {}
    cut = 0
    fail = 0
    seen: list[str | None] = []

    def do_GET(self):
        wanted = self.headers.get("Range")
        Handler.seen.append(wanted)
        if Handler.fail:
            Handler.fail -= 1
            self.send_error(500)
            return
        if self.path not in self.files:
            self.send_error(404)
            return
        data, start = self.files[self.path], 0
        if wanted:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(data):
                self.send_error(416)
                return
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if Handler.cut:
            Handler.cut -= 1
            self.wfile.write(data[start : start + 1000])
            self.wfile.flush()
            self.connection.close()
            return
        self.wfile.write(data[start:])

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("matbackprop.vision.data.download.WAIT", 0.0)


@pytest.fixture
def server():
    Handler.files, Handler.cut, Handler.fail, Handler.seen = {"/file": DATA}, 0, 0, []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def test_download_checks_and_keeps(server, tmp_path):
    target = tmp_path / "deep" / "file"
    download(f"{server}/file", target, sha256=SHA, size=len(DATA))
    assert target.read_bytes() == DATA
    download(f"{server}/file", target, sha256=SHA[:8])  # the first digits do
    assert len(Handler.seen) == 1
    assert [p.name for p in target.parent.iterdir()] == ["file"]


def test_a_broken_connection_goes_on_where_it_stopped(server, tmp_path):
    Handler.cut = 2
    download(f"{server}/file", tmp_path / "file", sha256=SHA)
    assert (tmp_path / "file").read_bytes() == DATA
    assert Handler.seen == [None, "bytes=1000-", "bytes=2000-"]


def test_an_earlier_part_is_continued(server, tmp_path):
    (tmp_path / "file.part").write_bytes(DATA[:5000])
    download(f"{server}/file", tmp_path / "file", sha256=SHA)
    assert (tmp_path / "file").read_bytes() == DATA
    assert Handler.seen == ["bytes=5000-"]


def test_a_part_that_is_too_long_is_started_again(server, tmp_path):
    (tmp_path / "file.part").write_bytes(DATA + b"x")
    download(f"{server}/file", tmp_path / "file", sha256=SHA)
    assert (tmp_path / "file").read_bytes() == DATA


def test_a_server_that_stumbles(server, tmp_path):
    Handler.fail = 1
    download(f"{server}/file", tmp_path / "file", sha256=SHA)
    assert (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sha256": "00" * 32}, "sha256 .* instead of 0000"),
        ({"md5": "11" * 16}, "md5 .* instead of 1111"),
        ({"size": 3}, f"{len(DATA)} bytes instead of 3"),
    ],
)
def test_a_wrong_file_is_removed(server, tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        download(f"{server}/file", tmp_path / "file", **options)
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_that_is_there_is_fetched_again(server, tmp_path):
    (tmp_path / "file").write_bytes(b"damaged")
    download(f"{server}/file", tmp_path / "file", sha256=SHA)
    assert (tmp_path / "file").read_bytes() == DATA


def test_addresses_that_do_not_answer(server, tmp_path):
    with pytest.raises(DataError, match="answers 404"):
        download(f"{server}/nothing", tmp_path / "file")
    with pytest.raises(DataError, match="cannot be reached"):
        download("http://127.0.0.1:9/file", tmp_path / "file")


def test_file_addresses(tmp_path):
    (tmp_path / "source").write_bytes(DATA)
    download((tmp_path / "source").as_uri(), tmp_path / "file", sha256=SHA)
    assert (tmp_path / "file").read_bytes() == DATA


def _tar(names):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 3
            packed.addfile(info, io.BytesIO(b"abc"))
    return buffer.getvalue()


def _zip(names):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for name in names:
            packed.writestr(name, "abc")
    return buffer.getvalue()


def test_a_data_set_is_fetched_once_and_laid_out(server, tmp_path, monkeypatch):
    Handler.files["/BSR.tgz"] = _tar(["BSR/BSDS500/data/images/train/1.jpg", "BSR/BSDS500/ucm2/x.mat"])
    Handler.files["/train.zip"] = _zip(["train/1.jpg"])
    archives = (Archive(f"{server}/BSR.tgz", strip=2, only="data/"), Archive(f"{server}/train.zip", into="images"))
    monkeypatch.setitem(DATASETS, "mine", archives)
    folder = download_dataset("mine", tmp_path / "set")
    assert (folder / "data/images/train/1.jpg").read_text() == "abc"
    assert (folder / "images/train/1.jpg").read_text() == "abc"
    assert not (folder / "ucm2").exists()
    count = len(Handler.seen)
    download_dataset("mine", tmp_path / "set")
    assert len(Handler.seen) == count


def test_without_a_network_the_way_by_hand_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(DATASETS, "mine", (Archive("http://127.0.0.1:9/a.zip"),))
    with pytest.raises(DataError, match=r"By hand: fetch the archives .*archives, and give the same"):
        download_dataset("mine", tmp_path / "set")
    (tmp_path / "set" / "archives").mkdir(exist_ok=True)
    (tmp_path / "set" / "archives" / "a.zip").write_bytes(_zip(["x/1.txt"]))
    download_dataset("mine", tmp_path / "set")
    assert (tmp_path / "set" / "x" / "1.txt").exists()


@pytest.mark.parametrize("make", [_tar, _zip])
def test_archives_cannot_write_elsewhere(tmp_path, make):
    path = tmp_path / "a"
    path.write_bytes(make(["../evil"]))
    with pytest.raises(DataError, match="leads out of"):
        extract(path, tmp_path / "out")
    assert not (tmp_path / "evil").exists()


def test_damaged_archives(tmp_path):
    (tmp_path / "a").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="is damaged"):
        extract(tmp_path / "a", tmp_path / "out")
    with pytest.raises(DataError, match="there is no data set 'x'"):
        download_dataset("x", tmp_path)


def test_the_official_sets():
    assert set(DATASETS) == {"bsds500", "bsds300", "coco"}
    for archive in (a for archives in DATASETS.values() for a in archives):
        assert archive.url.startswith("http")
