"""Arrays written once and memory-mapped ever after: decoded images, cropped regions, descriptors.

A cache is a folder with ``meta.json``, one raw file ``<name>.bin`` per array, and ``CACHEDIR.TAG``, which tells us that
the folder is ours and backup programs that it can be made again. It is written under another name and renamed when it
is whole, so a cache that is there is complete. Every array carries checksums of its blocks, which :meth:`Cache.verify`
compares; opening compares the sizes, which costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from matbackprop.errors import DataError
from matbackprop.vision.devices import processors
from matbackprop.vision.files import atomic_folder, atomic_write, read_bytes, read_json, remove_written, show

FORMAT = 1
DTYPES = ("|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")
"""What a cache may hold: numbers, whose bytes are safe to map whatever they are."""

_TAG = "CACHEDIR.TAG"
_TAG_TEXT = """Signature: 8a477f597d28d172789f06886806bc55
# This folder was written by matbackprop and is made again when it is needed; see https://bford.info/cachedir/.
"""
_BLOCK = 1 << 26


def default_cache_folder() -> Path:
    """Return where caches live: ``$MATBACKPROP_CACHE``, or ``matbackprop`` in the user's cache folder."""
    chosen = os.environ.get("MATBACKPROP_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "matbackprop"


def cache_key(config: Mapping[str, Any]) -> str:
    """Return a short name for a configuration: the same for the same values in any order.

    Example:
        >>> cache_key({"side": 200, "crop": True}) == cache_key({"crop": True, "side": 200})
        True
    """
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return value.as_posix()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise DataError(f"a cache's configuration cannot hold a {type(value).__name__}: {value!r}.")


@dataclass(frozen=True)
class Cache:
    """An open cache."""

    path: Path
    """Its folder."""
    arrays: dict[str, np.ndarray]
    """Name → read-only memory map."""
    meta: dict[str, Any]
    """What :func:`write_cache` was given."""
    _entries: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(a.nbytes for a in self.arrays.values())

    def verify(self) -> None:
        """Compare all checksums; where an array is damaged, DataError names it and the first bad block."""
        for name, entry in self._entries.items():
            present = _checksums(self.path / f"{name}.bin")
            for number, (is_now, was) in enumerate(zip(present, entry["checksums"], strict=True)):
                if is_now != was:
                    raise DataError(
                        f"the cache {self.path} is damaged: {name}.bin differs from its checksum in meta.json, in the "
                        f"bytes from {number * _BLOCK} on. Remove the folder; it is made again when it is needed."
                    )


def write_cache(
    path: str | Path, arrays: Mapping[str, np.ndarray | Iterable[np.ndarray]], meta: Mapping[str, Any]
) -> None:
    """Write arrays once. Where the folder already exists, made meanwhile by another process, that one is kept.

    Args:
        path: folder of the cache.
        arrays: name → array, or iterable of chunks that are joined along the first dimension. They are consumed one
            after the other in this order, so a later iterable may depend on an earlier one having been consumed.
        meta: anything that JSON can hold; read after the last array has been written.

    Raises:
        DataError: chunks of different dtypes or shapes; no chunks at all.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "cache"
        >>> write_cache(path, {"x": [np.zeros((2, 3)), np.ones((1, 3))]}, {"side": 3})
        >>> open_cache(path).arrays["x"].shape
        (3, 3)
    """
    with atomic_folder(path) as folder:
        entries = {name: _write_array(folder / f"{name}.bin", name, chunks) for name, chunks in arrays.items()}
        (folder / _TAG).write_text(_TAG_TEXT)
        content = {"format": FORMAT, "arrays": entries, "meta": dict(meta)}
        atomic_write(folder / "meta.json", json.dumps(content, indent=1, default=_plain))


def _write_array(path: Path, name: str, chunks: np.ndarray | Iterable[np.ndarray]) -> dict[str, Any]:
    dtype: np.dtype | None = None
    tail: tuple[int, ...] = ()
    rows = 0
    with path.open("wb") as file:
        for chunk in [chunks] if isinstance(chunks, np.ndarray) else chunks:
            chunk = np.ascontiguousarray(chunk) if np.ndim(chunk) else np.asarray(chunk)
            if dtype is None:
                dtype, tail = chunk.dtype, chunk.shape[1:]
                if dtype.str not in DTYPES:
                    raise DataError(f"the array {name!r} holds {dtype}; a cache holds numbers: {', '.join(DTYPES)}.")
            if chunk.ndim == 0 or chunk.dtype != dtype or chunk.shape[1:] != tail:
                raise DataError(
                    f"the chunks of {name!r} do not fit together: first (n, {', '.join(map(str, tail))}) {dtype}, then "
                    f"{chunk.shape} {chunk.dtype}. A chunk has a first dimension for its rows."
                )
            file.write(chunk.data if chunk.size else b"")
            rows += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    if dtype is None:
        raise DataError(f"the array {name!r} has no chunk, so that its dtype and shape are unknown.")
    return {"dtype": dtype.str, "shape": [rows, *tail], "checksums": _checksums(path)}


def _checksums(path: Path) -> list[str]:
    """Return the SHA-256 of each block of a file, computed in parallel."""
    size = path.stat().st_size

    def one(start: int) -> str:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(_BLOCK)).hexdigest()

    with ThreadPoolExecutor(min(8, processors())) as pool:
        return list(pool.map(one, range(0, size, _BLOCK)))


def open_cache(path: str | Path, verify: bool = False) -> Cache:
    """Open a cache; ``verify`` compares the checksums too, which reads everything once.

    Raises:
        DataError: there is no cache, it is damaged, or it was written by another version.
    """
    path = Path(path)
    content = _read_meta(path)
    arrays: dict[str, np.ndarray] = {}
    for name, entry in content["arrays"].items():
        dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
        file = path / f"{name}.bin"
        needed = dtype.itemsize * math.prod(shape)
        size = file.stat().st_size if file.is_file() else -1
        if size != needed:
            raise DataError(
                f"the cache {path} is damaged: {file.name} "
                + ("is missing" if size < 0 else f"has {size} bytes, by meta.json {needed}")
                + ". Remove the folder; it is made again when it is needed."
            )
        # An empty file cannot be mapped.
        arrays[name] = np.memmap(file, dtype, "r", shape=shape) if needed else np.empty(shape, dtype)
    cache = Cache(path, arrays, content["meta"], content["arrays"])
    if verify:
        cache.verify()
    return cache


def _read_meta(path: Path) -> dict[str, Any]:
    """Read and check ``meta.json``: nothing that follows depends on a file that could say anything."""
    file = path / "meta.json"
    if not file.is_file():
        raise DataError(f"there is no cache in {path}: it has no meta.json.")
    try:
        content = read_json(file, limit=1 << 28)  # one entry per image
    except DataError as error:
        raise DataError(f"{error} Remove the folder; it is made again.") from error
    if not isinstance(content.get("arrays"), dict):
        raise DataError(f"{file} does not describe a cache; matbackprop did not write it, or it is damaged.")
    if content.get("format") != FORMAT:
        raise DataError(
            f"{file} has format {show(content.get('format'))}, this version reads {FORMAT}. Remove the folder; it is "
            "made again."
        )
    if not isinstance(content.get("meta"), dict):
        raise DataError(f"{file} is damaged: it has no object 'meta'. Remove the folder; it is made again.")
    for name, entry in content["arrays"].items():
        reason = _array_problem(name, entry)
        if reason is not None:
            raise DataError(f"{file} is damaged: the array {name!r} {reason}. Remove the folder; it is made again.")
    return content


def _array_problem(name: str, entry: Any) -> str | None:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name):
        return "has a name that no cache gives"
    if not isinstance(entry, dict) or entry.get("dtype") not in DTYPES:
        return f"is none of the dtypes {', '.join(DTYPES)}"
    shape, checksums = entry.get("shape"), entry.get("checksums")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        return "has no shape"
    blocks = -(-np.dtype(entry["dtype"]).itemsize * math.prod(shape) // _BLOCK)
    if not isinstance(checksums, list) or len(checksums) != blocks:
        return f"has no {blocks} checksums"
    return None


def _is_ours(folder: Path) -> bool:
    """Whether a cache wrote this folder: its tag says so or, before there were tags, a ``meta.json`` of our form."""
    try:
        if (folder / _TAG).is_file():
            return read_bytes(folder / _TAG, 1 << 12) == _TAG_TEXT.encode()
        _read_meta(folder)
    except (DataError, OSError, ValueError):
        return False
    return True


def remove_cache(folder: str | Path) -> None:
    """Remove a cache; raise, and touch nothing, where a cache did not write the folder or it holds anything else."""
    folder = Path(folder)
    if not _is_ours(folder):
        raise DataError(f"{folder} is not removed: matbackprop did not write it.")
    mark = _TAG if (folder / _TAG).is_file() else "meta.json"
    remove_written(folder, mark, ["meta.json", "*.bin"])


def cache_folders(folder: str | Path) -> list[Path]:
    """Return the folders of all caches below a folder; folders that matbackprop did not write are not among them."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is not a folder; name the folder of the caches.")
    parents = (meta.parent for meta in sorted(folder.rglob("meta.json")))
    visible = (p for p in parents if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    return [p for p in visible if _is_ours(p)]


def dataset_folder(name: Literal["coco", "BSDS500"], root: Path | None, made: int, cache: Path | None) -> Path:
    """The folder of a recipe's data set: made on the fly, named by the user, or under ``MATBACKPROP_DATA``.

    Args:
        name: of the folder under ``MATBACKPROP_DATA``, and of the layout.
        root: the folder that the user named, or None.
        made: training images to make on the fly instead, with fewer validation images beside them; 0 for none.
        cache: where generated images are kept; None for the default cache.

    Raises:
        DataError: no data set is named.

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
            f"no data set is named: give --data.root FOLDER (in the layout of {name}), set MATBACKPROP_DATA to the "
            f"folder that holds {name}/, or make images on the fly with --data.made 64."
        )
    return Path(os.environ["MATBACKPROP_DATA"]) / name
