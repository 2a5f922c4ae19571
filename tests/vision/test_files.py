"""Atomic writes, reading within limits, and removing folders that the library wrote."""

import errno

import pytest

from matbackprop.errors import ConfigurationError, DataError
from matbackprop.vision.files import atomic_write, read_bytes, remove_written, show


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    atomic_write(path, "old")

    def fail(*_):
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match=f"disk full: '{path}'"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def ours(tmp_path):
    folder = tmp_path / "ours"
    folder.mkdir()
    for name in (".mark", "a.bin", "b.bin"):
        (folder / name).write_text(name)
    return folder


def test_a_folder_with_the_mark_is_removed(ours):
    remove_written(ours, ".mark", ["*.bin"])
    assert not ours.exists()


def test_a_folder_without_the_mark_is_not_removed(ours):
    (ours / ".mark").unlink()
    with pytest.raises(ConfigurationError, match=r"has no \.mark"):
        remove_written(ours, ".mark", ["*.bin"])
    assert (ours / "b.bin").exists()


@pytest.mark.parametrize("name", ["notes.txt", "deep/a.bin", "b.binary"])
def test_a_folder_with_a_foreign_file_is_not_removed(ours, name):
    (ours / name).parent.mkdir(exist_ok=True)
    (ours / name).write_text("theirs")
    with pytest.raises(ConfigurationError, match=name.split("/")[0]):
        remove_written(ours, ".mark", ["*.bin"])
    assert (ours / "a.bin").exists() and (ours / name).read_text() == "theirs"


def test_links_are_not_followed(ours, tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (ours / "link.bin").symlink_to(tmp_path / "theirs")
    with pytest.raises(ConfigurationError, match=r"link\.bin"):
        remove_written(ours, ".mark", ["*.bin"])
    assert (tmp_path / "theirs").exists() and (ours / "a.bin").exists()


def test_values_are_shortened_for_messages():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert show(deep) == "a deeply nested list"
    assert show({1, 2}) == "{1, 2}"
    assert len(show("x" * 1000)) <= 60


def test_a_file_that_is_too_large_or_a_folder_is_refused_by_name(tmp_path):
    (tmp_path / "large").write_bytes(bytes(100))
    with pytest.raises(DataError, match=r"large has 100 bytes; at most 10 are read"):
        read_bytes(tmp_path / "large", 10)
    with pytest.raises(DataError, match=r"cannot read .*: it is a folder"):
        read_bytes(tmp_path, 10)
