"""MATLAB's files of version 5 to 7, read without trusting a single number in them.

SciPy's reader is faster than this one and ends the process at some damaged files; label maps are small.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from matbackprop.errors import DataError

MAX_BYTES = 1 << 28
"""Most bytes that a file may unfold to; a human's maps of an image take a few million."""

_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_INT8, _INT32, _UINT32, _MATRIX, _COMPRESSED = 1, 5, 6, 14, 15
_CELL, _STRUCT, _NUMERIC = 1, 2, range(6, 16)
_DEEPEST = 16
_ELEMENTS = 1 << 18


def read_mat(path: Path) -> dict[str, Any]:
    """Read all variables of a file.

    Args:
        path: a file of version 5 to 7, compressed or not.

    Returns:
        Name → array with the dtype that is stored; a cell is an array of objects, a struct an array of dictionaries.
        Text, functions, objects and sparse matrices are None.

    Raises:
        DataError: the file is damaged, unfolds to more than :data:`MAX_BYTES`, or is of another version.
    """
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path} has more than {MAX_BYTES >> 20} MB, far more than label maps take")
    with path.open("rb") as file:
        head = file.read(128)
        if head.startswith((b"MATLAB 7.3", b"\x89HDF")):
            raise DataError(f"{path} is a MATLAB 7.3 (HDF5) file; save it again with save(…, '-v7')")
        if len(head) < 128 or head[126:] not in (b"IM", b"MI"):
            raise DataError(f"{path} cannot be read: it is no MATLAB file of version 5 to 7")
        data = file.read()
    try:
        return _Reader("<" if head[126:] == b"IM" else ">").variables(memoryview(data))
    except _DamagedError as error:
        raise DataError(f"{path} cannot be read, it {error}") from None


class _DamagedError(Exception):
    """Why a file cannot be read, as the end of a sentence."""


class _Reader:
    """Reads variables in one byte order, and counts what they unfold to."""

    def __init__(self, order: str) -> None:
        self.order = order
        self.left = MAX_BYTES
        self.elements_left = _ELEMENTS

    def variables(self, data: memoryview) -> dict[str, Any]:
        variables: dict[str, Any] = {}
        for kind, payload in self.elements(data):
            if kind == _COMPRESSED:
                unfolded = list(self.elements(self.unfold(payload)))
                kind, payload = unfolded[0] if unfolded else (0, payload)
            if kind == _MATRIX:
                name, value = self.matrix(payload, 0)
                variables[name] = value
        return variables

    def unfold(self, data: memoryview) -> memoryview:
        stream = zlib.decompressobj()
        try:
            unfolded = stream.decompress(data, self.left + 1)
        except zlib.error as error:
            raise _DamagedError(f"seems damaged ({error})") from None
        self.left -= len(unfolded)
        if self.left < 0:
            raise _DamagedError(f"unfolds to more than {MAX_BYTES >> 20} MB, far more than label maps take")
        return memoryview(unfolded)

    def elements(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Kinds and contents, one after the other."""
        place = 0
        while place + 8 <= len(data):
            self.elements_left -= 1
            if self.elements_left < 0:
                raise _DamagedError(f"has more than {_ELEMENTS} parts, far more than label maps take")
            first, length = (int(n) for n in np.frombuffer(data[place : place + 8], f"{self.order}u4"))
            if first >> 16:  # up to four bytes in the place of the length
                kind, length, start, step = first & 0xFFFF, first >> 16, place + 4, 8
            else:
                kind, start, step = first, place + 8, 8 + length + (-length % 8 if first != _COMPRESSED else 0)
            if start + length > len(data) or (first >> 16 and length > 4):
                raise _DamagedError("seems damaged or cut short")
            yield kind, data[start : start + length]
            place += step

    def numbers(self, element: tuple[int, memoryview], *kinds: int) -> np.ndarray:
        kind, payload = element
        if kind not in (kinds or _NUMBERS):
            raise _DamagedError(f"seems damaged (numbers of the kind {kind})")
        dtype = np.dtype(f"{self.order}{_NUMBERS[kind]}")
        if len(payload) % dtype.itemsize:
            raise _DamagedError("seems damaged (a part of a number)")
        return np.frombuffer(payload, dtype)

    def matrix(self, data: memoryview, depth: int) -> tuple[str, Any]:
        if len(data) == 0:
            return "", np.empty((0, 0))
        parts = self.elements(data)
        try:
            flags = self.numbers(next(parts), _UINT32)
            shape = tuple(int(n) for n in self.numbers(next(parts), _INT32))
            name = bytes(self.numbers(next(parts), _INT8)).decode("latin-1")
            count = math.prod(shape)
            if len(flags) != 2 or len(shape) < 2 or min(shape) < 0 or count > MAX_BYTES or depth > _DEEPEST:
                raise _DamagedError(f"seems damaged (an array of shape {shape})")
            kind = int(flags[0]) & 0xFF
            if kind in (_CELL, _STRUCT) and count > len(data):  # each takes eight bytes at least
                raise _DamagedError(f"seems damaged ({count} arrays in {len(data)} bytes)")
            if kind == _CELL:
                return name, self.objects([self.inner(parts, depth) for _ in range(count)], shape)
            if kind == _STRUCT:
                width = int(self.numbers(next(parts), _INT32)[0])
                text = bytes(self.numbers(next(parts), _INT8))
                if width < 1 or len(text) % width:
                    raise _DamagedError("seems damaged (names of fields)")
                names = [text[i : i + width].split(b"\0")[0].decode("latin-1") for i in range(0, len(text), width)]
                rows = [{field: self.inner(parts, depth) for field in names} for _ in range(count)]
                return name, self.objects(rows, shape)
            if kind not in _NUMERIC:
                return name, None
            values = self.numbers(next(parts))
        except (StopIteration, IndexError):
            raise _DamagedError("seems damaged or cut short") from None
        if len(values) != count:
            raise _DamagedError(f"seems damaged ({len(values)} numbers for the shape {shape})")
        return name, values.astype(values.dtype.newbyteorder("=")).reshape(shape, order="F")

    def inner(self, parts: Iterator[tuple[int, memoryview]], depth: int) -> Any:
        kind, payload = next(parts)
        if kind != _MATRIX:
            raise _DamagedError("seems damaged (something else where an array should be)")
        return self.matrix(payload, depth + 1)[1]

    @staticmethod
    def objects(values: list[Any], shape: tuple[int, ...]) -> np.ndarray:
        array = np.empty(len(values), dtype=object)
        for i, value in enumerate(values):
            array[i] = value
        return array.reshape(shape, order="F")
