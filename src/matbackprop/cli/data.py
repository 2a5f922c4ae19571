"""``matbackprop data check|download|cache``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from matbackprop.errors import ConfigurationError, DataError
from matbackprop.vision.files import printable

# ---------------------------------------------------------------------------------------------------------------- check


@dataclass
class Check:
    """Read every file of a data set in the layout of BSDS or COCO and name each bad one. Exits with 1 if any is bad."""

    root: Annotated[Path, tyro.conf.Positional]
    """Folder of the data set."""
    threads: int = 4
    """Files read at once."""


def check(config: Check) -> dict[str, Any]:
    from matbackprop.vision.data.check import check_dataset

    result = check_dataset(config.root, threads=config.threads)
    print(f"{config.root}: {result.layout.upper()}'s layout")
    for name, count in result.counts.items():
        print(f"  {count:>8} {name}")
    for note in result.notes:
        print(f"  note: {note}")
    for problem in result.problems:
        print(printable(f"  bad: {problem}"))
    return {
        "summary": f"{config.root}: "
        + ("everything is in order" if result.good else f"{len(result.problems)} problems"),
        "exit_code": 0 if result.good else 1,
        "layout": result.layout,
        "counts": result.counts,
        "problems": [{"path": p.path, "reason": p.reason} for p in result.problems],
        "notes": result.notes,
    }


# ------------------------------------------------------------------------------------------------------------- download


@dataclass
class Download:
    """Download a data set, or the weights of a backbone, from its official address."""

    what: Annotated[Literal["bsds500", "bsds300", "coco", "alexnet", "vgg16"], tyro.conf.Positional]
    """Data set or weights."""
    folder: Path | None = None
    """Target folder. By default below $MATBACKPROP_DATA; for weights the cache."""
    keep_archives: bool = False
    """Keep the downloaded archives."""


_FOLDERS = {"bsds500": "BSDS500", "bsds300": "BSDS300", "coco": "coco"}


def download(config: Download) -> dict[str, Any]:
    from matbackprop.vision.data.cache import default_cache_folder
    from matbackprop.vision.data.download import download_dataset
    from matbackprop.vision.models.backbones import BACKBONES
    from matbackprop.vision.models.backbones.base import download_weights

    if config.what in BACKBONES:
        folder = config.folder or default_cache_folder() / "weights"
        path = download_weights(config.what, folder / f"{config.what}.safetensors")
        return {"summary": f"{config.what}: {path}", "what": config.what, "path": path}
    target = config.folder
    if target is None:
        root = os.environ.get("MATBACKPROP_DATA")
        if not root:
            raise DataError("No folder to download to. Pass --folder, or set MATBACKPROP_DATA.")
        target = Path(root) / _FOLDERS[config.what]
    path = download_dataset(config.what, target, keep_archives=config.keep_archives)
    return {"summary": f"{config.what}: {path}", "what": config.what, "path": path}


# ---------------------------------------------------------------------------------------------------------------- cache


@dataclass
class CacheConfig:
    """List caches; --make prepares the data of a recipe, --verify compares checksums, --remove deletes."""

    folder: Annotated[Path | None, tyro.conf.Positional] = None
    """Folder of caches. By default $MATBACKPROP_CACHE, or matbackprop in the user's cache folder."""
    make: Literal["none", "o2p", "ncuts"] = "none"
    """Decode and cache the data of a recipe now instead of at its first run."""
    preset: str = "paper"
    """Preset of that recipe."""
    config: Path | None = None
    """TOML or JSON file of fields that override the preset, for example data.root."""
    verify: bool = False
    """Compare the checksums. Exits with 1 if a cache is damaged."""
    remove: Literal["none", "damaged", "all"] = "none"
    """Delete caches; they are rebuilt when needed."""


def cache(config: CacheConfig) -> dict[str, Any]:
    from matbackprop.vision.data.cache import cache_folders, default_cache_folder, open_cache, remove_cache

    if config.make != "none":
        _make(config)
    folder = config.folder or default_cache_folder()
    total = damaged = kept = 0
    caches: list[dict[str, Any]] = []
    for path in cache_folders(folder):
        state = ""
        try:
            opened = open_cache(path, verify=config.verify or config.remove == "damaged")
            size = opened.nbytes
            arrays = ", ".join(f"{n} {tuple(a.shape)} {a.dtype}" for n, a in opened.arrays.items())
        except DataError as error:
            damaged += 1
            size = sum(f.stat().st_size for f in path.iterdir() if f.is_file())
            state, arrays = "DAMAGED ", str(error)
        removed = config.remove == "all" or (config.remove == "damaged" and bool(state))
        if removed:
            try:
                remove_cache(path)
            except ConfigurationError as error:  # it holds other files
                removed, kept, state = False, kept + 1, f"{state}KEPT "
                arrays = str(error)
        print(f"{state}{'removed ' if removed else ''}{path} ({size / 1e6:.1f} MB): {arrays}")
        caches.append({"path": path, "bytes": size, "damaged": "DAMAGED" in state, "removed": removed, "holds": arrays})
        total += 0 if removed else size
    verified = ", all checksums agree" if config.verify and not damaged else ""
    return {
        "summary": f"{folder}: {total / 1e6:.1f} MB{verified}",
        "exit_code": 1 if kept or (damaged and config.remove == "none") else 0,
        "folder": folder,
        "bytes": total,
        "caches": caches,
    }


def _make(config: CacheConfig) -> None:
    """Prepare the data of a recipe."""
    from matbackprop.vision.configuration import merge
    from matbackprop.vision.training.config import get_recipe, resolve

    recipe = get_recipe(config.make)
    resolved = resolve(recipe, config.preset, config.config)
    if config.folder is not None:
        resolved = merge(resolved, {"data.cache": str(config.folder)})
    _, data = recipe.build(resolved)
    data.train_loader()
    data.validation_loader()
