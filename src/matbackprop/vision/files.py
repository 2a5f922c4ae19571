"""Read files with size limits and write files atomically."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from matbackprop.errors import DataError, Problem

_JSON = 1 << 24  # bytes; parsed JSON needs about twenty times as much memory
_SURROGATE = re.compile(rb"\\u[dD][89abAB-Fc-f]")


def check_file(path: Path, error: type[Exception] = DataError) -> None:
    """Raise ``error`` unless a path is a regular file. Pipes and devices may never end."""
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "is not a regular file" if path.exists() else "does not exist"
        raise error(f"{path} {kind}. Pass another file.")


def read_bytes(path: str | Path, limit: int, error: type[Exception] = DataError) -> bytes:
    """Read a regular file of at most ``limit`` bytes or raise ``error``."""
    path = Path(path)
    try:
        check_file(path, error)
        size = path.stat().st_size
        if size > limit:
            raise error(f"{path} has {size} bytes. Use a file of at most {limit}.")
        return path.read_bytes()
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror}.") from reason


def read_json(
    path: str | Path, kind: type = dict, *, error: type[Exception] = DataError, limit: int = _JSON, what: str = ""
) -> Any:
    """Read an untrusted JSON file that contains a ``kind``, or raise ``error``.

    ``what`` is the expected content for the message, such as "a COCO instances file".
    """
    data, name = read_bytes(path, limit, error), str(path)
    bad = f"is not {what}" if what else "is damaged"
    try:
        content = json.loads(data)
        if _SURROGATE.search(data):  # lone surrogates cannot be encoded
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError:
        raise error(f"{name} {bad}: its lists are nested too deeply.") from None
    except ValueError as reason:
        raise error(f"{name} {bad} ({type(reason).__name__}: {str(reason)[:200]}).") from reason
    if not isinstance(content, kind):
        needed = "a list" if kind is list else "an object"
        raise error(f"{name} {bad}: it contains {show(content)} instead of {needed}.")
    return content


def plain_numbers(value: Any) -> Any:
    """Convert a value for JSON: tensors and NumPy scalars to numbers, NaN and Inf to None."""
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


def is_number(value: Any) -> bool:
    """Return whether a value from JSON is a finite number that is small enough to plot."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def show(value: Any, length: int = 60) -> str:
    """Format a value from a file for an error message.

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


def as_problem(path: Path, error: DataError) -> Problem:
    """Convert an error to the problem of a file, without the path at the start of its message."""
    return Problem(path, str(error).removeprefix(str(path)).lstrip(": ").rstrip("."))


def printable(text: str) -> str:
    """Escape control characters other than line breaks. File names may contain them."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def counted(number: int, noun: str) -> str:
    """Return a number with a noun in the singular or plural.

    Example:
        >>> counted(1, "image"), counted(3, "image")
        ('1 image', '3 images')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shorten(text: str, length: int = 60) -> str:
    """Truncate a text to ``length`` characters."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` on success. After a crash, ``path`` is either old or complete."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = path.with_name(f".{path.name[:50]}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)):  # None: disk full
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            temporary.unlink()


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """Write a file with :func:`atomic_file`."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to ``path`` on success. A folder created meanwhile is kept."""
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
        if error.errno is not None and error.filename is None:  # disk full
            error.filename = str(path)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
