"""Downloads from a local server: checked, extracted, and with instructions if there is no network."""

import hashlib
import http.server
import io
import tarfile
import threading
import zipfile

import pytest

from matbackprop.errors import DataError
from matbackprop.vision import progress
from matbackprop.vision.data.download import DATASETS, Archive, download, download_dataset

DATA = bytes(range(256)) * 5000
SHA = hashlib.sha256(DATA).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves files from memory; ``cut`` ends the first answers early."""

    files: dict[str, bytes] = {}
    cut = 0
    count = 0

    def do_GET(self):
        Handler.count += 1
        if self.path not in self.files:
            self.send_error(404)
            return
        data = self.files[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:1000] if Handler.cut else data)
        Handler.cut = max(Handler.cut - 1, 0)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    Handler.files, Handler.cut, Handler.count = {"/file": DATA}, 0, 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def test_progress_is_reported_in_megabytes(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    Handler.files["/file"] = bytes(3 << 20)
    download(f"{server}/file", tmp_path / "file")
    assert "Downloading file, MB: 1 of 3" in capsys.readouterr().err


def test_a_file_is_downloaded_once(server, tmp_path):
    target = tmp_path / "deep" / "file"
    download(f"{server}/file", target, sha256=SHA)
    assert target.read_bytes() == DATA
    download(f"{server}/file", target, sha256=SHA[:8])
    assert Handler.count == 1
    target.write_bytes(b"damaged")
    download(f"{server}/file", target, sha256=SHA)
    assert target.read_bytes() == DATA and Handler.count == 2
    assert [p.name for p in target.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("options", [{"sha256": "00" * 32}, {"md5": "11" * 16}])
def test_a_file_with_a_wrong_checksum_is_removed(server, tmp_path, options):
    with pytest.raises(DataError, match=r"checksum .* is wrong"):
        download(f"{server}/file", tmp_path / "file", **options)
    assert not list(tmp_path.iterdir())


def test_failed_downloads_give_instructions(server, tmp_path):
    for url in (f"{server}/nothing", "http://127.0.0.1:9/file"):
        with pytest.raises(DataError, match=r"Without a network, download it on another machine to .*file and rerun"):
            download(url, tmp_path / "file")
    Handler.cut = 1
    with pytest.raises(DataError, match="could not be downloaded"):
        download(f"{server}/file", tmp_path / "file")
    assert not list(tmp_path.iterdir())


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


def test_a_data_set_is_downloaded_once_and_laid_out(server, tmp_path, monkeypatch):
    Handler.files["/BSR.tgz"] = _tar(["BSR/BSDS500/data/images/train/1.jpg", "BSR/BSDS500/ucm2/x.mat"])
    Handler.files["/train.zip"] = _zip(["train/1.jpg"])
    archives = (
        Archive(f"{server}/BSR.tgz", "BSR/BSDS500/data", "data"),
        Archive(f"{server}/train.zip", "train", "images/train"),
    )
    monkeypatch.setitem(DATASETS, "mine", archives)
    folder = download_dataset("mine", tmp_path / "set")
    assert (folder / "data/images/train/1.jpg").read_text() == "abc"
    assert (folder / "images/train/1.jpg").read_text() == "abc"
    assert not (folder / "ucm2").exists() and not list((folder / "archives").iterdir())
    download_dataset("mine", tmp_path / "set")
    assert Handler.count == 2


def test_an_archive_from_another_machine_is_used(tmp_path, monkeypatch):
    monkeypatch.setitem(DATASETS, "mine", (Archive("http://127.0.0.1:9/a.zip", "x", "y"),))
    with pytest.raises(DataError, match=r"another machine to .*set/archives/a\.zip"):
        download_dataset("mine", tmp_path / "set")
    (tmp_path / "set" / "archives" / "a.zip").write_bytes(_zip(["x/1.txt"]))
    download_dataset("mine", tmp_path / "set")
    assert (tmp_path / "set" / "y" / "1.txt").exists()


@pytest.mark.parametrize(("name", "make"), [("a.tgz", _tar), ("a.zip", _zip), ("b.zip", lambda names: b"nonsense")])
def test_archives_are_rejected_if_damaged_and_cannot_write_elsewhere(tmp_path, monkeypatch, name, make):
    monkeypatch.setitem(DATASETS, "mine", (Archive(f"http://127.0.0.1:9/{name}", "x", "y"),))
    (tmp_path / "set" / "archives").mkdir(parents=True)
    (tmp_path / "set" / "archives" / name).write_bytes(make(["../evil"]))
    with pytest.raises(DataError, match="is damaged or has no folder x"):
        download_dataset("mine", tmp_path / "set")
    assert not list(tmp_path.rglob("evil"))
