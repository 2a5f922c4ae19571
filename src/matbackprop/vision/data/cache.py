"""Caches of arrays on disk: written once, then memory-mapped.

A cache is a folder with one ``.npy`` file per array, ``meta.json`` and a ``CACHEDIR.TAG`` of matbackprop. It is written
under a temporary name and renamed when complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from matbackprop.errors import DataError
from matbackprop.vision.files import atomic_folder, plain_numbers, read_bytes, read_json

FORMAT = 2

_TAG = "CACHEDIR.TAG"
_TAG_TEXT = """Signature: 8a477f597d28d172789f06886806bc55
# This folder was written by matbackprop and is rebuilt when needed; see https://bford.info/cachedir/.
"""
_REMOVE = "Remove the folder; it is rebuilt when needed."


def default_cache_folder() -> Path:
    """Return ``$MATBACKPROP_CACHE``, or ``matbackprop`` in the user's cache folder."""
    chosen = os.environ.get("MATBACKPROP_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "matbackprop"


def cache_key(config: Mapping[str, Any]) -> str:
    """Return a hash of a configuration that does not depend on the order of its keys.

    Example:
        >>> cache_key({"side": 200, "crop": True}) == cache_key({"crop": True, "side": 200})
        True
    """
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    plain = plain_numbers(value)
    if plain is value:
        raise DataError(f"A cache key cannot contain {type(value).__name__} {value!r}. Use numbers, text and paths.")
    return plain


@dataclass(frozen=True)
class Cache:
    """An open cache."""

    path: Path
    arrays: dict[str, np.ndarray]
    """Name → read-only memory map."""
    meta: dict[str, Any]
    """The ``meta`` argument of :func:`write_cache`."""

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(a.nbytes for a in self.arrays.values())


def write_cache(
    path: str | Path, arrays: Mapping[str, np.ndarray | Iterable[np.ndarray]], meta: Mapping[str, Any]
) -> None:
    """Write arrays once. If another process has created the folder meanwhile, its folder is kept.

    Args:
        path: folder of the cache.
        arrays: name → array, or iterable of chunks that are concatenated along the first dimension. Iterables are
            consumed in this order, so a later one may depend on an earlier one.
        meta: any JSON value; read after the last array is written.

    Raises:
        DataError: chunks differ in dtype or shape, hold Python objects, or there are none.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "cache"
        >>> write_cache(path, {"x": [np.zeros((2, 3)), np.ones((1, 3))]}, {"side": 3})
        >>> open_cache(path).arrays["x"].shape
        (3, 3)
    """
    with atomic_folder(path) as folder:
        for name, chunks in arrays.items():
            _write_array(folder / f"{name}.npy", [chunks] if isinstance(chunks, np.ndarray) else chunks)
        checksums = {name: _checksum(folder / f"{name}.npy") for name in arrays}
        (folder / _TAG).write_text(_TAG_TEXT)
        content = {"format": FORMAT, "sha256": checksums, "meta": dict(meta)}
        (folder / "meta.json").write_text(json.dumps(content, indent=1, default=_plain))


def _write_array(path: Path, chunks: Iterable[np.ndarray]) -> None:
    first: np.ndarray | None = None
    rows = 0
    with path.open("wb") as file:
        for chunk in chunks:
            if first is None:
                first = chunk
                _write_header(file, 0, first)
            if chunk.ndim == 0 or chunk.dtype.hasobject or (chunk.dtype, chunk.shape[1:]) != (
                first.dtype, first.shape[1:]
            ):  # fmt: skip
                raise DataError(
                    f"Chunks of {path.stem!r} do not match: {first.dtype} {first.shape} and {chunk.dtype} "
                    f"{chunk.shape}. All need one numeric dtype and equal dimensions after the first."
                )
            file.write(np.ascontiguousarray(chunk).data if chunk.size else b"")
            rows += len(chunk)
        if first is None:
            raise DataError(f"The array {path.stem!r} has no chunks. Pass at least one.")
        file.seek(0)
        _write_header(file, rows, first)  # of the same length: NumPy leaves space for the first dimension to grow
        file.flush()
        os.fsync(file.fileno())


def _write_header(file: Any, rows: int, chunk: np.ndarray) -> None:
    description = np.lib.format.dtype_to_descr(chunk.dtype)
    header = {"descr": description, "fortran_order": False, "shape": (rows, *chunk.shape[1:])}
    np.lib.format.write_array_header_1_0(file, header)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_cache(path: str | Path, verify: bool = False) -> Cache:
    """Open a cache; ``verify`` also compares the checksums, which reads every file.

    Raises:
        DataError: there is no cache, it is damaged, or it was written by another version.
    """
    path = Path(path)
    if not (path / "meta.json").is_file():
        raise DataError(f"{path} is not a cache: meta.json is missing.")
    try:
        content = read_json(path / "meta.json", limit=1 << 28)  # one entry per image
    except DataError as error:
        raise DataError(f"{error} {_REMOVE}") from error
    checksums, meta = content.get("sha256"), content.get("meta")
    if content.get("format") != FORMAT or not isinstance(checksums, dict) or not isinstance(meta, dict):
        raise DataError(f"{path} was written by another version or is damaged. {_REMOVE}")
    arrays = {}
    for name, checksum in checksums.items():
        file = path / f"{name}.npy"
        try:
            if file.parent != path or not file.is_file():  # opening a named pipe would wait
                raise ValueError("no such file")
            arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False)
            if verify and _checksum(file) != checksum:
                raise ValueError("its checksum differs")
        except (OSError, ValueError, OverflowError, EOFError) as error:
            raise DataError(f"{file} is damaged or missing: {error}. {_REMOVE}") from error
    return Cache(path, arrays, meta)


def _is_ours(folder: Path) -> bool:
    try:
        return read_bytes(folder / _TAG, 1 << 12) == _TAG_TEXT.encode()
    except DataError:
        return False


def remove_cache(folder: str | Path) -> None:
    """Remove a cache. If the folder is not a cache or holds other files, raise and remove nothing."""
    folder = Path(folder)
    if not _is_ours(folder):
        raise DataError(f"{folder} was not removed: matbackprop did not write it.")
    for path in folder.iterdir():
        ours = path.name in (_TAG, "meta.json") or path.suffix in (".npy", ".bin")
        if path.is_symlink() or path.is_dir() or not ours:
            raise DataError(f"{folder} was not removed: matbackprop did not write {path.name}. Move it elsewhere.")
    shutil.rmtree(folder)


def cache_folders(folder: str | Path) -> list[Path]:
    """Return the folders of all caches below a folder."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is not a folder. Name the folder of the caches.")
    parents = (tag.parent for tag in sorted(folder.rglob(_TAG)))
    visible = (p for p in parents if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    return [p for p in visible if _is_ours(p)]


def dataset_folder(name: Literal["coco", "BSDS500"], root: Path | None, made: int, cache: Path | None) -> Path:
    """Return the folder of a recipe's data set: generated, given by the user, or under ``MATBACKPROP_DATA``.

    Args:
        name: folder under ``MATBACKPROP_DATA``, and the layout.
        root: folder given by the user, or None.
        made: number of training images to generate instead, with fewer validation images; 0 for none.
        cache: folder of generated images; None for the default cache.

    Raises:
        DataError: there is no data set.

    Example:
        >>> dataset_folder("coco", Path("somewhere"), made=0, cache=None).name
        'somewhere'
    """
    if made:
        from matbackprop.vision.data.shapes import write_shapes_bsds, write_shapes_coco

        folder = (cache or default_cache_folder()) / f"shapes-{name.lower()}-{made}"
        if not folder.exists():
            with atomic_folder(folder) as scratch:
                if name == "coco":
                    write_shapes_coco(scratch, train=made, val=max(made // 4, 1))
                else:
                    write_shapes_bsds(scratch, train=made, val=max(made // 2, 1))
        return folder
    if root is not None:
        return root
    if "MATBACKPROP_DATA" not in os.environ:
        raise DataError(
            f"No data set was given. Pass --data.root FOLDER (in the layout of {name}), set MATBACKPROP_DATA to the "
            f"folder that holds {name}/, or generate images with --data.made 64."
        )
    return Path(os.environ["MATBACKPROP_DATA"]) / name
