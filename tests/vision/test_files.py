"""Files that survive: atomic writes, locks, and removing only what we wrote."""

import errno
import multiprocessing

import pytest

from matbackprop.errors import ConfigurationError, DataError
from matbackprop.vision.files import atomic_write, locked, read_bytes, remove_written, show


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


def _try(path, answers):
    try:
        with locked(path, "it is taken"):
            answers.put("locked")
    except ConfigurationError as error:
        answers.put(str(error))


def test_one_process_at_a_time_holds_a_lock(tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def ask():
        process = context.Process(target=_try, args=(tmp_path / ".lock", answers))
        process.start()
        process.join(30)
        return answers.get(timeout=30)

    with locked(tmp_path / ".lock", "it is taken"):
        assert ask() == "it is taken"
    assert ask() == "locked"


@pytest.fixture
def ours(tmp_path):
    """A folder of ours with two files, one of them in a folder of its own."""
    folder = tmp_path / "ours"
    (folder / "deep").mkdir(parents=True)
    for name in (".mark", "a.bin", "deep/b.bin"):
        (folder / name).write_text(name)
    return folder


WRITTEN = ["*.bin", "deep/*.bin"]


def test_a_folder_of_ours_is_removed(ours):
    remove_written(ours, ".mark", WRITTEN)
    assert not ours.exists()


def test_what_is_kept_keeps_its_folder(ours):
    remove_written(ours, ".mark", WRITTEN, keep=["a.bin"])
    assert sorted(p.name for p in ours.iterdir()) == [".mark", "a.bin"]


def test_a_folder_without_our_mark_is_not_removed(ours):
    (ours / ".mark").unlink()
    with pytest.raises(ConfigurationError, match=r"has no \.mark"):
        remove_written(ours, ".mark", WRITTEN)
    assert (ours / "deep" / "b.bin").exists()


@pytest.mark.parametrize("name", ["notes.txt", "deep/notes.txt", "deep/deeper/c.txt", "b.binary"])
def test_a_file_of_somebody_else_keeps_everything(ours, name):
    (ours / name).parent.mkdir(exist_ok=True)
    (ours / name).write_text("theirs")
    with pytest.raises(ConfigurationError, match=name):
        remove_written(ours, ".mark", WRITTEN)
    assert (ours / "a.bin").exists() and (ours / name).read_text() == "theirs"


@pytest.mark.parametrize("target", ["file", "folder"])
def test_links_are_not_followed(ours, tmp_path, target):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "b.bin").write_text("theirs")
    (ours / "link.bin").symlink_to(elsewhere / "b.bin" if target == "file" else elsewhere)
    with pytest.raises(ConfigurationError, match=r"link\.bin"):
        remove_written(ours, ".mark", WRITTEN)
    assert (elsewhere / "b.bin").read_text() == "theirs" and (ours / "a.bin").exists()


def test_anything_is_shown_in_a_few_words():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert show(deep) == "a deeply nested list"
    assert show({1, 2}) == "{1, 2}"
    assert len(show("x" * 1000)) <= 60


def test_a_file_that_is_too_large_or_a_folder_is_refused_by_name(tmp_path):
    (tmp_path / "large").write_bytes(bytes(100))
    with pytest.raises(DataError, match=r"large has 100 bytes, far more .* at most 10 are read"):
        read_bytes(tmp_path / "large", 10)
    with pytest.raises(DataError, match=r"cannot read .*: it is a folder"):
        read_bytes(tmp_path, 10)
