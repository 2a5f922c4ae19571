"""Atomic writes and reading within limits."""

import errno
import os

import pytest

from matbackprop.errors import DataError
from matbackprop.vision.files import atomic_write, read_bytes
from matbackprop.vision.training.checkpoint import save_checkpoint


@pytest.mark.parametrize("write", [atomic_write, lambda path, text: save_checkpoint({"text": text}, path)])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, write):
    path = tmp_path / "file"
    write(path, "old")
    old = path.read_bytes()

    def fail(*_):
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match=f"disk full: '{path}'"):
        write(path, "new")
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_file_that_is_too_large_or_not_a_file_is_rejected_by_name(tmp_path):
    (tmp_path / "large").write_bytes(bytes(100))
    with pytest.raises(DataError, match=r"large has 100 bytes\. Use a file of at most 10"):
        read_bytes(tmp_path / "large", 10)
    with pytest.raises(DataError, match="is a folder"):
        read_bytes(tmp_path, 10)
    os.mkfifo(tmp_path / "pipe")  # reading it would block
    with pytest.raises(DataError, match="pipe is not a regular file"):
        read_bytes(tmp_path / "pipe", 10)
