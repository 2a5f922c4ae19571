"""Files that survive: writing at once or not at all, reading within limits, one process per folder, and removing only
what we wrote."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from matbackprop.errors import ConfigurationError, DataError

__all__ = [
    "atomic_file",
    "atomic_folder",
    "atomic_write",
    "check_removable",
    "fsync_folder",
    "locked",
    "parse_json",
    "plain_numbers",
    "read_bytes",
    "read_json",
    "remove_written",
    "shorten",
    "show",
]

_JSON = 1 << 24  # bytes; what a parser makes of them takes twenty times as many
_SURROGATE = re.compile(rb"\\u[dD][89abAB-Fc-f]")


def read_bytes(path: str | Path, limit: int, error: type[Exception] = DataError) -> bytes:
    """Read a regular file of at most ``limit`` bytes; a named pipe or a device may never end.

    Raises:
        error: there is no such file, it is of another kind, too large, or the system refuses it.
    """
    path = Path(path)
    try:
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise error(f"cannot read {path}: {f'it is {kind}' if path.exists() else 'no such file'}.")
        size = path.stat().st_size
        if size > limit:
            raise error(f"{path} has {size} bytes, far more than such a file takes; at most {limit} are read.")
        return path.read_bytes()
    except OSError as reason:
        raise error(f"cannot read {path}: {reason.strerror}.") from reason


def read_json(
    path: str | Path, kind: type = dict, *, error: type[Exception] = DataError, limit: int = _JSON, what: str = ""
) -> Any:
    """Read a JSON file of which nothing is known.

    Args:
        path: the file.
        kind: what it holds, ``dict`` or ``list``.
        error: what is raised for a bad one.
        limit: most bytes that are read.
        what: what the file should be, such as "a COCO instances file", for the message.

    Raises:
        error: the file cannot be read, is too large, not JSON or nested too deeply, or holds something other than
            ``kind``.
    """
    return parse_json(read_bytes(path, limit, error), str(path), kind, error=error, what=what)


def parse_json(data: bytes, name: str, kind: type = dict, *, error: type[Exception] = DataError, what: str = "") -> Any:
    """Parse what was read already; ``name`` says where it is from. Otherwise as :func:`read_json`."""
    bad = f"is not {what}" if what else "is damaged"
    try:
        content = json.loads(data)
        if _SURROGATE.search(data):  # half a character, which can be neither written nor printed
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError:
        raise error(f"{name} {bad}: its lists are nested too deeply.") from None
    except ValueError as reason:
        raise error(f"{name} {bad} ({type(reason).__name__}: {str(reason)[:200]}).") from reason
    if not isinstance(content, kind):
        needed = "a list" if kind is list else "an object"
        raise error(f"{name} {bad}: it holds {show(content)} instead of {needed}.")
    return content


def plain_numbers(value: Any) -> Any:
    """Return a value that JSON can hold: tensors and numpy scalars as numbers, NaN and Inf as null."""
    if hasattr(value, "item") and callable(value.item):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): plain_numbers(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_numbers(v) for v in value]
    if isinstance(value, Path):
        return value.as_posix()
    return value


def show(value: Any, length: int = 60) -> str:
    """A value from a file, short enough for a message.

    Example:
        >>> show([1, None]), show("x" * 99, length=8)
        ('[1, null]', '"xxxxxx…')
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    except RecursionError:
        text = "a deeply nested list"
    return shorten(text, length)


def shorten(text: str, length: int = 60) -> str:
    """The beginning of a text, for a message."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` when it is written: at every moment, also after a crash, either the
    old or the new one is there."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    name = path.name if len(os.fsencode(path.name)) < 230 else path.name[:50]  # systems take 255 bytes
    temporary = path.with_name(f".{name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)):  # None: the disk is full
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            temporary.unlink()
    fsync_folder(path.parent)


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """Write a file by :func:`atomic_file`."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """An empty folder to write to, which appears as ``path`` when the body has ended well.

    Where another process was first meanwhile, its folder is kept.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        try:
            temporary.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    except OSError as error:
        if error.errno is not None and error.filename is None:  # the disk is full
            error.filename = str(path)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
