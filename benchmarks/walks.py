"""The files that a region, a photograph and a matrix of features pass, in the order in which they are first entered.

``python benchmarks/walks.py`` fills one row of each table from generated images, pools features, and names every file
of the package in which a function ran, with the first of its functions. Modules are imported before, so that importing
does not count.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import matbackprop
from matbackprop.cli import main
from matbackprop.vision.data.shapes import write_shapes_bsds, write_shapes_coco

PACKAGE = Path(matbackprop.__file__).parent


def files_entered(work: Callable[[], Any]) -> dict[str, str]:
    """File → the first of its functions that ran, in the order of entering."""
    entered: dict[str, str] = {}

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            entered.setdefault(str(Path(code.co_filename).relative_to(PACKAGE)), code.co_name)

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return entered


def walks(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Each walk with its files."""
    write_shapes_coco(folder / "coco", train=12, val=4)
    write_shapes_bsds(folder / "BSDS500", train=10, val=2, size=(64, 80))
    common = f"--accelerator cpu --out {folder}/results --data.cache {folder}/cache"
    table1 = f"table1 --rows o2p-s --trials 1 --scratch-epochs 1 --other-seeds 1 --data.root {folder}/coco {common}"
    table1 += " --data.side 40 --data.canvas 67 --data.batch-size 8 --data.threads 0 --override model.reduce=8"
    table2 = f"table2 --rows deepncuts-alexnet-relu5 --seeds 0 --weights none --epochs 1 --workers 1 {common}"
    table2 += f" --data.root {folder}/BSDS500"

    def fill(table: str, *stages: str) -> None:
        for stage in stages:
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
                main(["reproduce", *table.split(), "--stage", stage])

    def pool(rows: int, channels: int) -> None:
        features = torch.rand(2, rows, channels, requires_grad=True)
        with torch.autograd.set_multithreading_enabled(False):
            matbackprop.second_order_pool(features).sum().backward()

    yield "a region to a row of table 1", files_entered(lambda: fill(table1, "tune", "train", "summary"))
    yield "a photograph to a row of table 2", files_entered(lambda: fill(table2, "train", "summary"))
    yield "F through pooling on the CPU", files_entered(lambda: pool(6, 9))


if __name__ == "__main__":
    for module in pkgutil.walk_packages(matbackprop.__path__, "matbackprop."):
        with contextlib.suppress(Exception):
            importlib.import_module(module.name)
    with tempfile.TemporaryDirectory() as scratch:
        for name, entered in walks(Path(scratch)):
            print(f"\n{name}: {len(entered)} files")
            for file, function in entered.items():
                print(f"  {file:<40}{function}")
