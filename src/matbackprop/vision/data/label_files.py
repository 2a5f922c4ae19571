"""Label maps on disk: the benchmark's .mat and .seg files, PNG and NumPy arrays, read without running any code."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal
from zipfile import ZipFile, is_zipfile

import numpy as np
from numpy.typing import NDArray

from matbackprop.errors import DataError, LabelError, ShapeError
from matbackprop.vision.data.pictures import open_picture
from matbackprop.vision.files import read_bytes, shorten
from matbackprop.vision.metrics.regions import as_label_map

#: Files that ``read_label_maps`` understands.
LABEL_SUFFIXES = (".mat", ".seg", ".png", ".npz", ".npy")

#: Pixels of the largest map; scoring takes sixty bytes for each.
MAX_PIXELS = 1 << 24
#: Labels of all maps in a file; scoring takes eight bytes for each.
MAX_LABELS = 1 << 26

#: Whether ``name_1.png``, ``name_2.png`` … are several maps of the image ``name``.
Numbered = Literal["yes", "no"]

_NUMBER = re.compile(r"(?P<name>.+)_(?P<number>[1-9][0-9]*)$")
_SINGLE = (".png", ".npy")  # files of one map each, which may be numbered


def read_label_maps(path: str | Path, *, thresholds: int = 99) -> list[NDArray[np.integer]]:
    """All label maps in one file.

    - ``.mat``: a cell ``segs`` of segmentations, a cell ``groundTruth`` of human maps, an ultrametric contour map
      ``ucm2`` (twice the size) or ``ucm``, or otherwise every two-dimensional integer array in it. Not version 7.3
      (HDF5).
    - ``.seg``: one human map of BSDS300.
    - ``.png``: one map; grey values (1 to 16 bits) and palette indices are labels, in a colour picture each colour is
      one. Contours and photographs, which have no regions, are refused.
    - ``.npz``: arrays ``(h, w)`` or stacks ``(t, h, w)`` in the order of their names, also those of ``matbackprop
      segment``; ``.npy`` likewise.

    Args:
        path: the file.
        thresholds: how many levels a contour map is cut at, evenly spaced inside (0, 1).

    Returns:
        Label maps ``(h, w)``, integer, at least one.

    Raises:
        DataError: the file is missing, damaged, of another kind, or holds no label map.
    """
    path = Path(path)
    readers: dict[str, Callable[[Path], list[NDArray[np.integer]]]] = {
        ".mat": partial(_read_mat, thresholds=thresholds),
        ".seg": lambda path: [read_seg(path)],
        ".png": _read_png,
        ".npz": _read_npz,
        ".npy": _read_npy,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path} is not a file of label maps; those that can be read are {', '.join(LABEL_SUFFIXES)}")
    if not path.is_file():
        raise DataError(f"{path} does not exist; check the name of the file")
    try:
        maps = reader(path)
    except DataError:
        raise
    except MemoryError:
        raise DataError(f"{path} cannot be read: it claims to hold more than there is memory for") from None
    except Exception as error:  # damaged files make the readers fail in a dozen ways, all of which mean the same
        raise DataError(
            f"{path} cannot be read, it seems damaged ({type(error).__name__}: {shorten(str(error), 200)})"
        ) from error
    if not maps:
        raise DataError(f"{path} holds no label map; a two-dimensional array of integers is needed")
    return maps


def _read_mat(path: Path, thresholds: int) -> list[NDArray[np.integer]]:
    content = read_mat(path)
    if isinstance(content.get("groundTruth"), np.ndarray):
        if content["groundTruth"].dtype != object:
            raise DataError(f"{path}: groundTruth is not a cell of structs with a field Segmentation")
        cells = [np.ravel(cell)[0] for cell in content["groundTruth"].ravel() if np.size(cell)]
        if not all(isinstance(cell, dict) and "Segmentation" in cell for cell in cells):
            raise DataError(f"{path}: groundTruth is not a cell of structs with a field Segmentation")
        return _all_labels([cell["Segmentation"] for cell in cells], path)
    if "segs" in content:
        segs = content["segs"]
        return _all_labels(list(segs.ravel()) if segs.dtype == object else [segs], path)
    for name in ("ucm2", "ucm"):
        if name in content:
            cuts = np.size(content[name]) // (4 if name == "ucm2" else 1) * thresholds
            if cuts > MAX_LABELS:
                raise DataError(
                    f"{path} is cut into {cuts} labels at {thresholds} levels, at most {MAX_LABELS} can be; give fewer "
                    "thresholds"
                )
            try:
                return ucm_to_segmentations(content[name], thresholds, doubled=name == "ucm2")
            except DataError as error:
                raise DataError(f"{path}: {error}") from error
    arrays = [value for _, value in sorted(content.items()) if isinstance(value, np.ndarray) and value.size > 1]
    return _all_labels([array for array in arrays if array.ndim == 2 and array.dtype.kind in "iub"], path)


def _all_labels(arrays: Sequence[Any], path: Path) -> list[NDArray[np.integer]]:
    total = sum(map(np.size, arrays))
    if total > MAX_LABELS:
        raise DataError(f"{path} holds {len(arrays)} maps of {total} labels together; at most {MAX_LABELS} are read")
    return [_labels(array, path) for array in arrays]


def _labels(array: Any, path: Path) -> NDArray[np.integer]:
    _check_size(path, *np.shape(array)[-2:])
    try:
        return as_label_map(array)
    except (ShapeError, LabelError) as error:
        raise DataError(f"{path}: {error}") from error


def ucm_to_segmentations(ucm: NDArray[Any], thresholds: int = 99, *, doubled: bool = True) -> list[NDArray[np.integer]]:
    """Cut an ultrametric contour map at evenly spaced thresholds: regions are joined over contours not above them.

    Args:
        ucm: contour strengths in [0, 1], ``(2h + 1, 2w + 1)`` when doubled, else ``(h, w)``.
        thresholds: number of thresholds i/(n + 1), i = 1 … n.
        doubled: pixels are at odd positions, contours between them.

    Returns:
        ``thresholds`` label maps ``(h, w)``, from fine to coarse.
    """
    from scipy.ndimage import label

    ucm = np.asarray(ucm, dtype=np.float64)
    if ucm.ndim != 2 or (doubled and (ucm.shape[0] % 2 == 0 or ucm.shape[1] % 2 == 0 or min(ucm.shape) < 3)):
        raise DataError(
            f"a doubled contour map has shape (2h + 1, 2w + 1), this one {ucm.shape}; is it of single size?"
        )
    if ucm.size == 0:
        raise DataError(f"a contour map has at least one pixel, this one the shape {ucm.shape}")
    levels = np.arange(1, thresholds + 1) / (thresholds + 1)
    if doubled:
        return [label(ucm <= level)[0][1::2, 1::2] for level in levels]
    return [_fill_contours(label(ucm <= level)[0]) for level in levels]


def _fill_contours(labels: NDArray[np.integer]) -> NDArray[np.integer]:
    """Give contour pixels (0) the label of the nearest region: in a map of single size they are pixels too."""
    from scipy.ndimage import distance_transform_edt

    if not labels.any():
        return labels
    nearest = distance_transform_edt(labels == 0, return_distances=False, return_indices=True)
    return labels[tuple(nearest)]


def _read_png(path: Path) -> list[NDArray[np.integer]]:
    with open_picture(path) as picture:
        _check_size(path, picture.height, picture.width)
        if picture.format != "PNG":
            raise DataError(f"is a {picture.format} file in fact; label maps must be PNG, which loses nothing")
        array = np.asarray(picture)
        palette = picture.mode == "P"
    if array.ndim == 2:
        labels = _labels(array, path)
    else:
        labels = np.zeros(array.shape[:2], dtype=np.int64)
        for channel in range(array.shape[2]):  # each colour is one label
            labels = labels * 256 + array[..., channel]
    if not palette and _is_drawn(labels):
        raise DataError(
            f"{path} holds contours or a photograph, not labels: most pixels outside its largest region are in no 2×2 "
            "block of one value. Give label maps, or an ultrametric contour map as ucm2 in a .mat file; labels that do "
            "look like this can be given as .npy"
        )
    return [labels]


def _is_drawn(labels: NDArray[np.integer]) -> bool:
    """Whether a map shows lines or shades: apart from its most frequent value, few pixels lie in a flat 2×2 block."""
    if min(labels.shape) < 16:
        return False
    values, counts = np.unique(labels, return_counts=True)
    others = labels != values[counts.argmax()]
    flat = (labels[:-1, :-1] == labels[1:, 1:]) & (labels[:-1, 1:] == labels[1:, :-1])
    flat &= labels[:-1, :-1] == labels[:-1, 1:]
    inside = np.zeros(labels.shape, dtype=bool)
    for rows in (slice(None, -1), slice(1, None)):
        for columns in (slice(None, -1), slice(1, None)):
            inside[rows, columns] |= flat
    return int((others & inside).sum()) < 0.5 * int(others.sum())


def _check_size(path: Path, *shape: int) -> None:
    if math.prod(shape) > MAX_PIXELS:
        raise DataError(f"{path} has {'×'.join(map(str, shape))} pixels; at most {MAX_PIXELS} of a label map are read")


def _read_npz(path: Path) -> list[NDArray[np.integer]]:
    if not is_zipfile(path):
        raise DataError(f"{path} cannot be read: it is not an archive of NumPy arrays, or damaged")
    with ZipFile(path) as archive:
        if sum(member.file_size for member in archive.infolist()) > MAX_BYTES:
            raise DataError(f"{path} decompresses to more than {MAX_BYTES >> 20} MB, far more than label maps take")
    with np.load(path, allow_pickle=False) as content:
        # What `matbackprop segment` writes holds more than its label maps.
        names = ["labels"] if {"labels", "ks"} <= set(content.files) else sorted(content.files, key=_natural)
        return _all_labels([labels for name in names for labels in _stack(content[name])], path)


def _read_npy(path: Path) -> list[NDArray[np.integer]]:
    with path.open("rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise DataError(f"{path} cannot be read: it is not a NumPy array, or damaged")
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path} has more than {MAX_BYTES >> 20} MB, far more than label maps take")
    return _all_labels(_stack(np.load(path, allow_pickle=False)), path)


def _stack(array: NDArray[Any]) -> list[NDArray[Any]]:
    return list(array) if array.ndim == 3 else [array]


def _natural(name: str) -> list[tuple[bool, int | str]]:
    """Sort key in which ``arr_10`` comes after ``arr_2``."""
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name) if part]


def read_seg(path: str | Path) -> NDArray[np.int64]:
    """A human map of BSDS300 from its text file.

    The header has lines such as ``width 481``, ``height 321`` and ``segments 12`` and ends with ``data``. Each line
    after it is ``segment row first last``: the pixels first … last (inclusive, all from 0) of a row belong to a
    segment. DataError is raised where a header field is missing, a run lies outside the image or overlaps another, or
    pixels are left without a label.
    """
    path = Path(path)
    head, mark, body = read_bytes(path, 1 << 24).decode("ascii").partition("\ndata")
    if not mark:
        raise DataError(f"{path}: the line 'data' is missing; is it a BSDS300 .seg file?")
    fields = dict(line.split(maxsplit=1) for line in head.splitlines() if len(line.split(maxsplit=1)) == 2)
    missing = [name for name in ("width", "height", "segments") if not fields.get(name, "").strip().isdigit()]
    if missing:
        raise DataError(f"{path}: the header has no number for {', '.join(missing)}")
    width, height, segments = (int(fields[name]) for name in ("width", "height", "segments"))
    _check_size(path, height, width)
    runs = np.array([int(number) for number in body.split()], dtype=np.int64)
    if runs.size == 0 or runs.size % 4 or width * height == 0:
        raise DataError(f"{path}: {runs.size} numbers after 'data'; each line holds 'segment row first last'")
    segment, row, first, last = runs.reshape(-1, 4).T
    inside = (segment >= 0) & (segment < segments) & (row >= 0) & (row < height) & (first >= 0) & (first <= last)
    inside &= last < width
    if not inside.all():
        worst = runs.reshape(-1, 4)[~inside][0]
        raise DataError(f"{path}: the run {worst.tolist()} does not fit {segments} segments of {height}×{width} pixels")
    length = last - first + 1
    starts = np.cumsum(length) - length
    pixels = np.arange(length.sum()) - np.repeat(starts - first - row * width, length)
    counts = np.bincount(pixels, minlength=height * width)
    if (counts != 1).any():
        raise DataError(
            f"{path}: {int((counts == 0).sum())} pixels have no label and {int((counts > 1).sum())} several; "
            "the file seems cut off or damaged"
        )
    labels = np.empty(height * width, dtype=np.int64)
    labels[pixels] = np.repeat(segment, length)
    return labels.reshape(height, width)


def index_label_files(
    folder: str | Path, *, names: Collection[str] | None = None, numbered: Numbered = "yes"
) -> dict[str, list[Path]]:
    """Files of label maps in a folder and its subfolders, by the image they belong to.

    The image is the file's name without its ending, and without the ``-ucm2`` of contour maps that ``matbackprop
    segment`` wrote. Files of one name in several subfolders (one for each annotator,
    as in BSDS300) and numbered pictures ``name_1.png``, ``name_2.png`` … belong to one image.

    Args:
        folder: where to look.
        names: the known images; a file whose whole name is one of them is not taken as numbered.
        numbered: whether a final ``_1``, ``_2`` … of ``.png`` and ``.npy`` files is a number and not a part of the
            name.

    Returns:
        Sorted files for each image name, sorted by name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; give the folder that holds the label maps")
    files_of: dict[str, list[Path]] = {}
    files = [path for path in folder.rglob("*") if path.suffix.lower() in LABEL_SUFFIXES and path.is_file()]
    for path in sorted(files, key=lambda path: _natural(str(path))):
        files_of.setdefault(_image_name(path, names, numbered), []).append(path)
    for name, paths in files_of.items():
        kinds = sorted({path.suffix.lower() for path in paths})
        if len(kinds) > 1:
            raise DataError(
                f"{name} has label maps in files of several kinds ({', '.join(kinds)}) under {folder}; keep one"
            )
    return dict(sorted(files_of.items()))


def _image_name(path: Path, names: Collection[str] | None, numbered: Numbered) -> str:
    if path.suffix.lower() == ".mat" and not (names is not None and path.stem in names):
        return path.stem.removesuffix("-ucm2")
    if numbered == "no" or path.suffix.lower() not in _SINGLE or (names is not None and path.stem in names):
        return path.stem
    match = _NUMBER.match(path.stem)
    return match["name"] if match else path.stem


MAX_BYTES = 1 << 28
"""Most bytes that a file may decompress to; a human's maps of an image take a few million."""

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
        DataError: the file is damaged, decompresses to more than :data:`MAX_BYTES`, or is of another version.
    """
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path} has more than {MAX_BYTES >> 20} MB, far more than label maps take")
    with path.open("rb") as file:
        head = file.read(128)
        if head.startswith((b"MATLAB 7.3", b"\x89HDF")):
            raise DataError(f"{path} is a MATLAB 7.3 (HDF5) file; save it again with save(…, '-v7')")
        if len(head) < 128 or head[126:] not in (b"IM", b"MI"):
            raise DataError(f"{path} cannot be read: it is not a MATLAB file of version 5 to 7")
        data = file.read()
    try:
        return _Reader("<" if head[126:] == b"IM" else ">").variables(memoryview(data))
    except _DamagedError as error:
        raise DataError(f"{path} cannot be read, it {error}") from None


class _DamagedError(Exception):
    """Why a file cannot be read, as the end of a sentence."""


class _Reader:
    """Reads variables in one byte order, and counts what they decompress to."""

    def __init__(self, order: str) -> None:
        self.order = order
        self.left = MAX_BYTES
        self.elements_left = _ELEMENTS

    def variables(self, data: memoryview) -> dict[str, Any]:
        variables: dict[str, Any] = {}
        for kind, payload in self.elements(data):
            if kind == _COMPRESSED:
                content = list(self.elements(self.decompress(payload)))
                kind, payload = content[0] if content else (0, payload)
            if kind == _MATRIX:
                name, value = self.matrix(payload, 0)
                variables[name] = value
        return variables

    def decompress(self, data: memoryview) -> memoryview:
        stream = zlib.decompressobj()
        try:
            content = stream.decompress(data, self.left + 1)
        except zlib.error as error:
            raise _DamagedError(f"seems damaged ({error})") from None
        self.left -= len(content)
        if self.left < 0:
            raise _DamagedError(f"decompresses to more than {MAX_BYTES >> 20} MB, far more than label maps take")
        return memoryview(content)

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
