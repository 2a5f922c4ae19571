"""Folders of cached data and of data sets."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from matbackprop.errors import DataError
from matbackprop.vision.files import atomic_folder


def default_cache_folder() -> Path:
    """Return ``$MATBACKPROP_CACHE``, or ``matbackprop`` in the user's cache folder."""
    chosen = os.environ.get("MATBACKPROP_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "matbackprop"


def cache_key(config: Mapping[str, Any]) -> str:
    """Return a hash of a JSON object, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def dataset_folder(name: Literal["coco", "BSDS500"], root: Path | None, generate: int, cache: Path | None) -> Path:
    """Return the folder of a data set: generated, given by the user, or under ``MATBACKPROP_DATA``.

    If ``generate`` is positive, this many training images and fewer validation images are written to ``cache``.
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
            f"folder that contains {name}/, or generate images with --data.generate 64."
        )
    return Path(os.environ["MATBACKPROP_DATA"]) / name
