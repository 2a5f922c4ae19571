"""``matbackprop demo``: train both systems on generated images and segment sample photographs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import skimage.data
from pydantic import Field

from matbackprop.vision.configuration import Count, Natural, configuration, merge
from matbackprop.vision.inference import segment
from matbackprop.vision.report.figures import segmentation_grid
from matbackprop.vision.report.tables import Table
from matbackprop.vision.training.config import RECIPES
from matbackprop.vision.training.engine import run_recipe
from matbackprop.vision.training.run_folder import RunFolder

_PHOTOGRAPHS = ("astronaut", "coffee", "chelsea")


@configuration
class DemoConfig:
    """Train both systems in their smallest presets on generated images, and segment sample photographs.

    It takes about a minute on two processor cores and needs neither data nor a network connection.
    """

    run: Path = Path("runs/demo")  #: Folder for both runs and the photographs. Earlier runs are replaced.
    seed: Natural = 0  #: Seed of the networks and of the order of the data.
    #: Number of training images of the classifier; the segmenter uses half as many.
    images: Annotated[int, Field(ge=2, le=100_000)] = 96
    epochs: Count = 8  #: Number of epochs.


def main(config: DemoConfig) -> dict[str, Any]:
    """Run the demonstration and print a table of its results."""
    regions = _train(config, "o2p", config.images)
    cuts = _train(config, "ncuts", config.images // 2)
    photographs = config.run / "photographs.png"
    segmented = [segment(getattr(skimage.data, name)(), device="cpu") for name in _PHOTOGRAPHS]
    pictures: list[list[Any]] = [[one.pixels, one.labels(4), one.labels()] for one in segmented]
    segmentation_grid(["Photograph", "four regions", "default number of regions"], pictures, photographs, width=8.5)
    results = {"error": _validated(regions, "val/error"), "objective": _validated(cuts, "val/objective")}
    rows: list[list[Any]] = [
        ["Classification of regions through second-order pooling", "error (%)", *results["error"].values()],
        ["Segmentation by trained normalized cuts", "objective", *results["objective"].values()],
    ]
    Table(["system", "on held-out images", "after one epoch", "at the end"], rows).show()
    reports = [regions.report_path, cuts.report_path]
    return {
        "summary": f"Reports: {reports[0]}, {reports[1]}. Segmented photographs: {photographs}",
        "run": config.run,
        "reports": reports,
        "photographs": photographs,
        "results": results,
    }


def _train(config: DemoConfig, name: str, images: int) -> RunFolder:
    engine = {"run": str(config.run / name), "seed": config.seed, "max_epochs": config.epochs, "overwrite": True}
    engine |= {"accelerator": "cpu", "tensorboard": False}
    fields = {"engine": engine, "data.generate": images, "data.cache": str(config.run / "cache")}
    return run_recipe(RECIPES[name], merge(RECIPES[name].preset("smoke"), fields))


def _validated(run: RunFolder, name: str) -> dict[str, float]:
    values = [row[name] for row in run.read_metrics() if name in row]
    return {"first": values[0], "last": values[-1]}
