"""Files that survive: writing at once or not at all, one process per folder, and removing only what we wrote."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from matbackprop.errors import ConfigurationError

__all__ = ["atomic_file", "atomic_write", "check_removable", "fsync_folder", "locked", "remove_written"]


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` when it is written: at every moment, also after a crash, either the
    old or the new one is there."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """Write a file by :func:`atomic_file`."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def fsync_folder(path: Path) -> None:
    """Make renames within a folder durable."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(path: str | Path, message: str) -> Iterator[None]:
    """Hold a lock file that only one process can hold at a time; a process that is killed gives it up.

    Args:
        path: the lock file, made if need be. It is left in place, since removing it would let two processes hold it.
        message: what is raised where another process holds it: who may that be, and what to try.

    Raises:
        ConfigurationError: another process, or another thread of this one, holds the lock.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(str(path), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigurationError(message) from None
    try:
        yield
    finally:
        lock.release()


def check_removable(folder: str | Path, mark: str, written: Iterable[str]) -> list[Path]:
    """Return everything in a folder of ours, files before the folders that hold them, the mark last.

    Args:
        folder: the folder.
        mark: name of the file in it that says that it is ours.
        written: patterns of the files that we write, relative to the folder, such as ``figures/*.png``; a star stands
            for any letters but a slash.

    Raises:
        ConfigurationError: the mark is missing, or there is a link or a file that fits no pattern.
    """
    folder, written = Path(folder), [mark, *written]
    if not (folder / mark).is_file():
        raise ConfigurationError(
            f"{folder} is not removed: it has no {mark}, so matbackprop did not write it. Remove it yourself if "
            "nothing in it is needed, or name another folder."
        )
    content: list[Path] = []
    for parent, folders, files in os.walk(folder, topdown=False, onerror=_raise):
        for name in files:
            path = Path(parent, name)
            inside = path.relative_to(folder).as_posix()
            if path.is_symlink() or not any(_fits(inside, pattern) for pattern in written):
                raise _foreign(folder, path)
            if inside != mark:
                content.append(path)
        for name in folders:
            if (path := Path(parent, name)).is_symlink():
                raise _foreign(folder, path)
            content.append(path)
    return [*content, folder / mark]


def remove_written(folder: str | Path, mark: str, written: Iterable[str], *, keep: Iterable[str] = ()) -> None:
    """Remove a folder of ours, and touch nothing where it holds anything that we did not write.

    Args:
        folder: the folder.
        mark: name of the file in it that says that it is ours; it goes last, so that a removal can be repeated.
        written: patterns of the files that we write (see :func:`check_removable`).
        keep: names of files in the folder that remain, and with them the folder and its mark.

    Raises:
        ConfigurationError: the mark is missing, or there is a link or a file that fits no pattern.
    """
    folder, kept = Path(folder), {Path(folder, name) for name in keep}
    *content, last = check_removable(folder, mark, written)
    for path in content:
        if path.is_dir():
            path.rmdir()  # only if it is empty: what came in meanwhile is not ours either
        elif path not in kept:
            path.unlink(missing_ok=True)
    if not kept:
        last.unlink()
        if not folder.is_symlink():
            folder.rmdir()


def _fits(path: str, pattern: str) -> bool:
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _foreign(folder: Path, path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"{folder} is not removed: matbackprop did not write {path.relative_to(folder)}. Move it elsewhere, or name "
        "another folder."
    )


def _raise(error: OSError) -> None:
    raise error
