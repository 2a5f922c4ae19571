"""Caches of arrays on disk, written once and then memory-mapped.

A cache is a folder with one ``.npy`` file per array and ``meta.json``. It is written under a temporary name and renamed
when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from matbackprop.errors import DataError
from matbackprop.vision.files import atomic_folder, plain_numbers, read_json

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


def write_cache(
    path: str | Path, arrays: Mapping[str, np.ndarray | Iterable[np.ndarray]], meta: Mapping[str, Any]
) -> None:
    """Write arrays once. If another process has created the folder in the meantime, its folder is kept.

    Args:
        path: folder of the cache.
        arrays: name → array, or iterable of chunks that are concatenated along the first dimension. Iterables are
            consumed in this order, so a later one may depend on an earlier one.
        meta: any JSON value; read after the last array is written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "cache"
        >>> write_cache(path, {"x": [np.zeros((2, 3)), np.ones((1, 3))]}, {"side": 3})
        >>> open_cache(path).arrays["x"].shape
        (3, 3)
    """
    with atomic_folder(path) as folder:
        for name, chunks in arrays.items():
            with (folder / f"{name}.npy").open("wb") as file:
                _write_chunks(file, [chunks] if isinstance(chunks, np.ndarray) else chunks)
        content = {"arrays": list(arrays), "meta": dict(meta)}
        (folder / "meta.json").write_text(json.dumps(content, indent=1, default=_plain))


def _write_chunks(file: BinaryIO, chunks: Iterable[np.ndarray]) -> None:
    rows = 0
    for chunk in chunks:
        if rows == 0:
            header = {"descr": np.lib.format.dtype_to_descr(chunk.dtype), "fortran_order": False}
            np.lib.format.write_array_header_1_0(file, {**header, "shape": (0, *chunk.shape[1:])})
        file.write(chunk.tobytes())
        rows += len(chunk)
    file.seek(0)  # NumPy leaves space in the header for the first dimension to grow
    np.lib.format.write_array_header_1_0(file, {**header, "shape": (rows, *chunk.shape[1:])})
    file.flush()
    os.fsync(file.fileno())


def open_cache(path: str | Path) -> Cache:
    """Open a cache.

    Raises:
        DataError: there is no cache, or it is damaged.
    """
    path = Path(path)
    if not (path / "meta.json").is_file():
        raise DataError(f"{path} is not a cache: meta.json is missing. {_REMOVE}")
    try:
        content = read_json(path / "meta.json", limit=1 << 28)
    except DataError as error:
        raise DataError(f"{error} {_REMOVE}") from error
    names, meta = content.get("arrays"), content.get("meta")
    if not isinstance(names, list) or not isinstance(meta, dict):
        raise DataError(f"{path} was written by another version or is damaged. {_REMOVE}")
    arrays = {}
    for name in names:
        file = path / f"{name}.npy"
        try:
            if file.parent != path or not file.is_file():  # opening a named pipe would wait
                raise ValueError("no such file")
            arrays[str(name)] = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, OverflowError, EOFError) as error:
            raise DataError(f"{file} is damaged or missing: {error}. {_REMOVE}") from error
    return Cache(path, arrays, meta)


def dataset_folder(name: Literal["coco", "BSDS500"], root: Path | None, generate: int, cache: Path | None) -> Path:
    """Return the folder of a recipe's data set: generated, given by the user, or under ``MATBACKPROP_DATA``.

    Args:
        name: folder under ``MATBACKPROP_DATA``, and the layout.
        root: folder given by the user, or None.
        generate: number of training images to generate instead, with fewer validation images; 0 for none.
        cache: folder of generated images; None for the default cache.

    Raises:
        DataError: there is no data set.

    Example:
        >>> dataset_folder("coco", Path("somewhere"), generate=0, cache=None).name
        'somewhere'
    """
    if generate:
        from matbackprop.vision.data.shapes import write_shapes_bsds, write_shapes_coco

        folder = (cache or default_cache_folder()) / f"shapes-{name.lower()}-{generate}"
        if not folder.exists():
            with atomic_folder(folder) as scratch:
                if name == "coco":
                    write_shapes_coco(scratch, train=generate, val=max(generate // 4, 1))
                else:
                    write_shapes_bsds(scratch, train=generate, val=max(generate // 2, 1))
        return folder
    if root is not None:
        return root
    if "MATBACKPROP_DATA" not in os.environ:
        raise DataError(
            f"No data set was given. Pass --data.root FOLDER (in the layout of {name}), set MATBACKPROP_DATA to the "
            f"folder that holds {name}/, or generate images with --data.generate 64."
        )
    return Path(os.environ["MATBACKPROP_DATA"]) / name
