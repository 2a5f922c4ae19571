"""Where a recipe's data set lies: named by the user, under ``MATBACKPROP_DATA``, or made on the fly."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matbackprop.errors import DataError

__all__ = ["dataset_folder"]


def dataset_folder(
    name: str, root: Path | None, *, made: int, val: int, write: Callable[..., Any], cache: Path
) -> Path:
    """The folder of a data set; shapes are made there first when they are asked for.

    Args:
        name: of the folder under ``MATBACKPROP_DATA``, and of the layout in messages.
        root: the folder that the user named, or None.
        made: training images to make on the fly instead, or 0.
        val: validation images to make beside them.
        write: ``write(folder, train=, val=, seed=)`` makes them in the data set's layout.
        cache: where made images are kept.

    Raises:
        DataError: no data set is named.

    Example:
        >>> dataset_folder("coco", Path("somewhere"), made=0, val=0, write=print, cache=Path("cache")).name
        'somewhere'
    """
    if made:
        folder = cache / f"shapes-{name.lower()}-{made}"
        if not folder.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                write(Path(scratch) / name, train=made, val=val, seed=0)
                with contextlib.suppress(OSError):  # another process was first
                    (Path(scratch) / name).rename(folder)
        return folder
    if root is not None:
        return root
    if "MATBACKPROP_DATA" not in os.environ:
        raise DataError(
            f"no data set is named: give --data.root FOLDER (in the layout of {name}), set MATBACKPROP_DATA to the "
            f"folder that holds {name}/, or make images on the fly with --data.made 64."
        )
    return Path(os.environ["MATBACKPROP_DATA"]) / name
