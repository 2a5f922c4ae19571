"""Read label maps from .mat, .png, .npz and .npy files. Sizes are checked before decoding."""

from __future__ import annotations

import io
import math
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from matbackprop.errors import DataError, LabelError, ShapeError
from matbackprop.vision.data.pictures import open_picture
from matbackprop.vision.files import read_bytes, shorten
from matbackprop.vision.metrics.regions import as_label_map

LABEL_SUFFIXES = (".mat", ".png", ".npz", ".npy")  #: File formats of :func:`read_label_maps`.
MAX_BYTES = 1 << 28  #: Maximum size of a file, also after decompression.
MAX_MAP_PIXELS = 1 << 24  #: Maximum number of pixels of a map; evaluation needs sixty bytes per pixel.
MAX_LABELS = 1 << 26  #: Maximum total number of pixels of all maps in a file; evaluation needs eight bytes per pixel.

_NUMBER = re.compile(r"(?P<name>.+)_(?P<number>[1-9][0-9]*)$")
_SINGLE = (".png", ".npy")  # one map per file; files may be numbered


def read_label_maps(path: str | Path, *, thresholds: int = 99) -> list[NDArray[np.integer]]:
    """Read all label maps of one file.

    - ``.mat`` (version 5 to 7): a cell array ``segs`` of segmentations, a cell array ``groundTruth`` of human maps, an
      ultrametric contour map ``ucm2`` (double size), or else every two-dimensional integer array.
    - ``.png``: one map. Labels are gray values (1 to 16 bits), palette indices, or the colors of a color image.
    - ``.npz``: arrays ``(h, w)`` or stacks ``(t, h, w)`` in the order of their names, including files written by
      ``matbackprop segment``.
    - ``.npy``: one such array.

    Args:
        path: the file.
        thresholds: number of evenly spaced thresholds in (0, 1) for a contour map.

    Returns:
        Integer label maps ``(h, w)``, at least one.

    Raises:
        DataError: the file is missing, corrupted, too large, of another format, or contains no label map.
    """
    path = Path(path)
    with _readable(path):
        match path.suffix.lower():
            case ".mat":
                maps = _read_mat(path, thresholds)
            case ".png":
                maps = [_read_png(path)]
            case ".npz":
                maps = _read_npz(path)
            case ".npy":
                maps = _labels(_stack(_load_npy(path)), path)
            case _:
                raise DataError(f"{path} is not a file of label maps. Supported: {', '.join(LABEL_SUFFIXES)}.")
    if not maps:
        raise DataError(f"{path} contains no label map. A two-dimensional array of integers is needed.")
    return maps


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert errors to DataError. Readers raise many exception types for corrupted files."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {shorten(str(error), 200)}"
        raise DataError(f"{path} cannot be read. It is probably damaged ({reason}).") from error


def _load_npy(path: Path) -> NDArray[Any]:
    return np.lib.format.read_array(io.BytesIO(read_bytes(path, MAX_BYTES)), allow_pickle=False)


def _load_mat(path: Path) -> dict[str, Any]:
    from scipy.io import loadmat

    data = read_bytes(path, MAX_BYTES)
    if data.startswith((b"MATLAB 7.3", b"\x89HDF")):
        raise DataError(f"{path} is a MATLAB 7.3 (HDF5) file. Save it with save(…, '-v7').")
    _check_mat(data, "<" if data[126:128] == b"IM" else ">")
    return {name: value for name, value in sorted(loadmat(io.BytesIO(data)).items()) if isinstance(value, np.ndarray)}


def _labels(arrays: Sequence[Any], path: Path) -> list[NDArray[np.integer]]:
    total = sum(map(np.size, arrays))
    if total > MAX_LABELS:
        raise DataError(f"{path} contains {len(arrays)} maps with {total} labels. At most {MAX_LABELS} are read.")
    for array in arrays:
        _check_pixels(path, *np.shape(array)[-2:])
    try:
        return [as_label_map(array) for array in arrays]
    except (ShapeError, LabelError) as error:
        raise DataError(f"{path}: {error}") from error


def _check_pixels(path: Path, *shape: int) -> None:
    if math.prod(shape) > MAX_MAP_PIXELS:
        raise DataError(f"{path} has {'×'.join(map(str, shape))} pixels. At most {MAX_MAP_PIXELS} are read.")


def _read_mat(path: Path, thresholds: int) -> list[NDArray[np.integer]]:
    content = _load_mat(path)
    if "groundTruth" in content:
        cells = content["groundTruth"].ravel()
        if not all("Segmentation" in (np.asarray(cell).dtype.names or ()) for cell in cells):
            raise DataError(f"{path}: groundTruth is not a cell of structs with a field Segmentation.")
        return _labels([cell["Segmentation"].ravel()[0] for cell in cells if cell.size], path)
    if "segs" in content:
        segs = content["segs"]
        return _labels(list(segs.ravel()) if segs.dtype == object else [segs], path)
    if "ucm2" in content:
        cuts = np.size(content["ucm2"]) // 4 * thresholds
        if cuts > MAX_LABELS:
            raise DataError(f"{path}: {thresholds} thresholds give {cuts} labels. Use fewer thresholds.")
        try:
            return ucm_to_segmentations(content["ucm2"], thresholds)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
    arrays = [array for array in content.values() if array.size > 1 and array.ndim == 2]
    return _labels([array for array in arrays if array.dtype.kind in "iub"], path)


def _check_mat(data: bytes, order: str) -> None:
    """Check structure and decompressed size. The SciPy reader crashes on some corrupted files and has no size limit."""
    left = MAX_BYTES
    for kind, content in _elements(memoryview(data)[128:], order):
        if kind == 15:
            unpacked = zlib.decompressobj().decompress(content, left + 1)
            left -= len(unpacked)
            if left < 0:
                raise ValueError(f"it decompresses to more than {MAX_BYTES >> 20} MB")
            ((kind, content),) = _elements(memoryview(unpacked), order)
        _check_array(kind, content, order)


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    place = 0
    while place + 8 <= len(data):
        kind, length = (int(n) for n in np.frombuffer(data[place : place + 8], f"{order}u4"))
        start = place + 8
        if kind >> 16:  # up to four bytes in the place of the length
            kind, length, start = kind & 0xFFFF, kind >> 16, place + 4
        content = data[start : start + length]
        if len(content) < length or (start == place + 4 and length > 4):
            raise ValueError(f"{length} bytes of type {kind} are truncated")
        yield kind, content
        place = start + length + (0 if kind == 15 else -(start + length - place) % 8)


def _check_array(kind: int, data: memoryview, order: str) -> None:
    if kind != 14:
        raise ValueError(f"element of type {kind} instead of an array")
    if not data:
        return
    elements = list(_elements(data, order))
    kinds = [kind for kind, _ in elements]
    if kinds[:3] != [6, 5, 1] or len(elements[0][1]) != 8 or len(elements[1][1]) not in range(8, 129, 4):
        raise ValueError(f"array with elements of types {kinds[:8]}")
    flags = int(np.frombuffer(elements[0][1][:4], f"{order}u4")[0])
    head = {1: 3, 2: 5}.get(flags & 0xFF, 4 + (flags >> 11 & 1))  # cell, struct, numbers (real or complex), text
    numeric = all(kind in (*range(1, 8), 9, 12, 13, 16, 17, 18) for kind in kinds[:head])
    if len(kinds) < head or not numeric or flags & 0xFF not in (1, 2, 4, *range(6, 16)):
        raise ValueError(f"array of class {flags & 0xFF} with elements of types {kinds[:8]}")
    for inner, content in elements[head:]:
        _check_array(inner, content, order)


def ucm_to_segmentations(ucm: NDArray[Any], thresholds: int = 99) -> list[NDArray[np.integer]]:
    """Threshold an ultrametric contour map at levels i/(n + 1), i = 1 … n = ``thresholds``, from fine to coarse.

    ``ucm`` has strengths in [0, 1], ``(2h + 1, 2w + 1)``: pixels are at odd positions, contours between them. Contours
    at or below a threshold are removed. Equal neighbors in the result are the same array object.
    """
    from scipy.ndimage import label

    ucm = np.asarray(ucm)
    odd = ucm.ndim == 2 and ucm.shape[0] % 2 == ucm.shape[1] % 2 == 1 and min(ucm.shape) >= 3
    if not odd or ucm.dtype.kind not in "bufi":
        found = f"{ucm.dtype} {ucm.shape}"
        raise DataError(f"A contour map ucm2 is real (2h + 1, 2w + 1), got {found}. Save it in double size.")
    ucm = ucm.astype(np.float64)
    levels = np.arange(1, thresholds + 1) / (thresholds + 1)
    maps: list[NDArray[np.integer]] = []
    below = np.searchsorted(np.unique(ucm), levels, side="right")  # strengths removed at each level
    for i, level in enumerate(levels):
        same = i and below[i] == below[i - 1]
        maps.append(maps[-1] if same else label(ucm <= level)[0][1::2, 1::2])  # the same object is evaluated once
    return maps


def _read_png(path: Path) -> NDArray[np.integer]:
    with open_picture(path) as image:
        _check_pixels(path, image.height, image.width)
        if image.format != "PNG":
            raise DataError(f"is a {image.format} file. Save label maps as PNG, which is lossless.")
        array = np.asarray(image)
    if array.ndim == 3:  # each color is one label
        array = array.astype(np.int64) @ (256 ** np.arange(array.shape[2] - 1, -1, -1))
    return _labels([array], path)[0]


def read_contour_map(path: str | Path) -> NDArray[np.float32]:
    """Read a soft contour map: an 8- or 16-bit gray PNG, or one two-dimensional array in a .npy or .mat file.

    Integers are divided by the largest value of their type; floating-point strengths must be in [0, 1].

    Returns:
        Strengths in [0, 1], ``(h, w)``.

    Raises:
        DataError: the file is missing, corrupted, too large, or not a contour map.
    """
    path = Path(path)
    with _readable(path):
        match path.suffix.lower():
            case ".png":
                with open_picture(path) as image:
                    array = np.asarray(image)
                if array.dtype.kind == "i":  # 16 bits in old versions of Pillow
                    array = array.astype(np.uint16)
            case ".npy":
                array = _load_npy(path)
            case ".mat":
                arrays = [value for value in _load_mat(path).values() if value.size > 1]
                if len(arrays) != 1:
                    raise DataError(f"{path} contains {len(arrays)} arrays. Save the contour map alone.")
                array = arrays[0]
            case _:
                raise DataError(f"{path} is not a contour map. Supported: .png, .npy, .mat.")
    if array.ndim != 2 or array.size == 0 or array.dtype.kind not in "bufi":
        raise DataError(f"{path} contains {array.dtype} {array.shape}. A contour map must be numeric (height, width).")
    _check_pixels(path, *array.shape)
    if array.dtype.kind in "iu":
        return (array / np.iinfo(array.dtype).max).astype(np.float32)
    strengths = array.astype(np.float32)
    if not ((strengths >= 0) & (strengths <= 1)).all():
        raise DataError(f"{path} has strengths outside [0, 1]. Divide them by their largest possible value.")
    return strengths


def _read_npz(path: Path) -> list[NDArray[np.integer]]:
    data = io.BytesIO(read_bytes(path, MAX_BYTES))
    with ZipFile(data) as archive:
        if sum(member.file_size for member in archive.infolist()) > MAX_BYTES:
            raise ValueError(f"it decompresses to more than {MAX_BYTES >> 20} MB")
    with np.load(data, allow_pickle=False) as content:
        # Files of `matbackprop segment` also contain other arrays.
        names = ["labels"] if {"labels", "ks"} <= set(content.files) else sorted(content.files, key=_natural)
        return _labels([labels for name in names for labels in _stack(content[name])], path)


def _stack(array: NDArray[Any]) -> list[NDArray[Any]]:
    return list(array) if array.ndim == 3 else [array]


def _natural(name: str) -> list[tuple[bool, int | str]]:
    """Return a sort key in which ``arr_10`` comes after ``arr_2``."""
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name) if part]


def index_label_files(
    folder: str | Path, *, names: Collection[str] = (), numbered: bool = True
) -> dict[str, list[Path]]:
    """Group the label files in a folder and its subfolders by image, sorted by name.

    The image name is the file name without suffix, and without ``-ucm2`` of contour maps. Files of the same name in
    several subfolders (one per annotator) belong to one image. So do files ``name_1.png``,
    ``name_2.png`` … if ``numbered`` is true, unless their name is in ``names``.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder. Pass the folder of the label maps.")
    files_of: dict[str, list[Path]] = {}
    files = [path for path in folder.rglob("*") if path.suffix.lower() in LABEL_SUFFIXES and path.is_file()]
    for path in sorted(files, key=lambda path: _natural(str(path))):
        files_of.setdefault(_image_name(path, names, numbered), []).append(path)
    for name, paths in files_of.items():
        kinds = sorted({path.suffix.lower() for path in paths})
        if len(kinds) > 1:
            raise DataError(f"{name} has label maps of several kinds ({', '.join(kinds)}) under {folder}. Keep one.")
    return dict(sorted(files_of.items()))


def _image_name(path: Path, names: Collection[str], numbered: bool) -> str:
    if path.stem in names:
        return path.stem
    if path.suffix.lower() == ".mat":
        return path.stem.removesuffix("-ucm2")
    match = _NUMBER.match(path.stem) if numbered and path.suffix.lower() in _SINGLE else None
    return match["name"] if match else path.stem
