"""``matbackprop data check|download``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from matbackprop.cli import optional
from matbackprop.errors import DataError
from matbackprop.vision.files import counted, printable


@dataclass
class Check:
    """Read every file of a data set in the BSDS or COCO layout and list bad files. Exits with 1 if there are any."""

    root: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]  #: Folder of the data set.


def check(config: Check) -> dict[str, Any]:
    from matbackprop.vision.data.check import check_dataset

    result = check_dataset(config.root)
    print(f"{config.root}: layout of {result.layout.upper()}")
    for name, count in result.counts.items():
        print(f"  {count:>8} {name}")
    for problem in result.problems:
        print(printable(f"  bad: {problem}"))
    return {
        "summary": f"{config.root}: {counted(len(result.problems), 'problem') if result.problems else 'no problems'}",
        "exit_code": int(bool(result.problems)),
        "layout": result.layout,
        "counts": result.counts,
        "problems": [{"path": p.path, "reason": p.reason} for p in result.problems],
    }


_FOLDERS = {"bsds500": "BSDS500", "coco": "coco"}


@dataclass
class Download:
    """Download a data set, or the starting weights of a backbone, and verify its checksum.

    Weights are named after their backbone and converted to a safetensors file. Training downloads missing weights
    automatically.
    """

    #: Data set or weights.
    what: Annotated[
        Literal["bsds500", "coco", "alexnet", "vgg16", "efficientnet-lite2", "tiny-vit"], tyro.conf.Positional
    ]
    #: Target folder. Default: a folder in $MATBACKPROP_DATA for a data set, the cache for weights.
    folder: Annotated[Path | None, optional("FOLDER")] = None


def download(config: Download) -> dict[str, Any]:
    from matbackprop.vision.data.cache import default_cache_folder
    from matbackprop.vision.data.download import download_dataset
    from matbackprop.vision.models.backbones.published import download_weights

    root = os.environ.get("MATBACKPROP_DATA")
    if config.what not in _FOLDERS:
        path = download_weights(config.what, config.folder or default_cache_folder() / "weights")
    elif config.folder is None and not root:
        raise DataError("No folder to download to. Pass --folder, or set MATBACKPROP_DATA.")
    else:
        path = download_dataset(config.what, config.folder or Path(root or "") / _FOLDERS[config.what])
    return {"summary": f"{config.what}: {path}", "what": config.what, "path": path}
