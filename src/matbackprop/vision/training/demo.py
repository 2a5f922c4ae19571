"""``matbackprop demo``: train both systems on generated images, segment sample photographs, and write a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from rich.console import Console

from matbackprop.vision.configuration import Count, Natural, configuration, merge
from matbackprop.vision.data.bsds import BSDS
from matbackprop.vision.inference import segment
from matbackprop.vision.metrics.evaluation import evaluate_segmentations
from matbackprop.vision.report.figures import segmentation_grid
from matbackprop.vision.report.html import Page
from matbackprop.vision.report.tables import Table
from matbackprop.vision.training.config import RECIPES
from matbackprop.vision.training.engine import evaluate, fit, load_weights, seed_all
from matbackprop.vision.training.run_folder import RunFolder

_PHOTOGRAPHS = ("astronaut", "coffee", "chelsea")
_SCORED = 12  # held-out images
_NEXT = [
    ["matbackprop segment photo.jpg", "regions of a photograph"],
    ["matbackprop serve", "the same in the browser"],
    ["matbackprop train ncuts --help", "train the segmentation system"],
    ["matbackprop train o2p --help", "train the classification system"],
    ["matbackprop report RUN", "the report of any run folder"],
]


@configuration
class DemoConfig:
    """Train both systems in their smallest presets on generated images, and write a report.

    It takes about a minute on two processor cores and needs neither data nor a network connection.
    """

    run: Path = Path("runs/demo")
    """Folder for both runs and the report. An earlier demonstration is replaced."""
    seed: Natural = 0
    """Seed of the networks and of the order of the data."""
    images: Annotated[int, Field(ge=2, le=100_000)] = 96
    """Number of training images of the classifier; the segmenter uses half as many."""
    epochs: Count = 8
    """Number of epochs."""


def main(config: DemoConfig) -> dict[str, Any]:
    """Run the demonstration."""
    report, results = run_demo(config), RunFolder(config.run).read_summary()
    return {"summary": f"The report with figures: {report}", "run": config.run, "report": report, "results": results}


def run_demo(config: DemoConfig) -> Path:
    """Run the demonstration and return the path of its page."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for reproducible results
    try:
        return _run(config, Console(highlight=False))
    finally:
        torch.set_num_threads(threads)


def _run(config: DemoConfig, console: Console) -> Path:
    page = Page("matbackprop: the demonstration", f"seed {config.seed} · generated images · trained on the CPU")

    def section(title: str, text: str) -> None:
        console.rule(f"[bold]{title}", align="left")
        page.section(title)
        page.text(text)

    section(
        "1 · Regions classified through second-order pooling",
        "The input of an untrained AlexNet is the box of a textured shape. Its features are pooled to log(FᵀF + εI), "
        "and a linear classifier is applied to the upper triangle.",
    )
    pooling, accuracy = _train(config, "o2p", config.images, _accuracy)
    percent = {when: f"{100 * value:.1f} %" for when, value in accuracy.items()}
    console.print(f"accuracy {percent['before']} before, [bold]{percent['after']}[/] after")
    curves = {"cross-entropy": ["train/loss", "val/loss"], "error (%)": ["val/error"], "rank": ["layer/rank"]}
    page.curves(pooling.read_metrics(), curves)
    page.image(pooling.figure_path("confusion"), "Predicted classes of each true class (rows), in percent")

    section(
        "2 · Images segmented by trained normalized cuts",
        "The objective ½‖Π_λ − Π_Ψ‖² (soft projector) rotates the subspace that an AlexNet's features span towards the "
        "regions that annotators drew; K-means in that subspace gives the segmentations.",
    )
    cuts, covering = _train(config, "ncuts", config.images // 2, _covering)
    console.print(f"covering {covering['before']:.3f} before, [bold]{covering['after']:.3f}[/] after")
    curves = {"objective": ["train/objective", "val/objective"], "rank": ["layer/rank", "layer/soft_rank"]}
    page.curves(cuts.read_metrics(), curves)
    page.image(cuts.figure_path("segmentations"), "Held-out images, clusters for three K, an annotator's segmentation")

    section(
        "3 · Photographs segmented by the network in the package",
        "A contour network, trained on human segmentations of photographs: a watershed is merged into a hierarchy "
        "with any number of regions.",
    )
    numbers = _segment_photographs(config.run / "photographs.png")
    console.print(", ".join(f"{name}: {count} regions" for name, count in numbers.items()))
    page.image(config.run / "photographs.png", "Sample photographs of scikit-image")

    page.section("Next steps")
    page.table(Table(["command", "result"], _NEXT))
    tiles = {f"accuracy {when}": text for when, text in percent.items()}
    page.tiles(tiles | {f"covering {when}": f"{value:.3f}" for when, value in covering.items()})
    report = page.write(config.run / "report.html")
    RunFolder(config.run).write_summary({"accuracy": accuracy, "covering": covering})
    return report


def _train(
    config: DemoConfig, recipe: str, images: int, score: Callable[[Any, Any], float]
) -> tuple[RunFolder, dict[str, float]]:
    """Train the smallest preset of a recipe. Return the run, and the score before and after training."""
    engine = {"run": str(config.run / recipe), "seed": config.seed, "max_epochs": config.epochs, "overwrite": True}
    engine |= {"accelerator": "cpu", "tensorboard": False, "report": False}
    fields = {"engine": engine, "data.generate": images, "data.cache": str(config.run / "cache")}
    settings = merge(RECIPES[recipe].preset("smoke"), fields)
    seed_all(config.seed)
    system, data = RECIPES[recipe].module.build(settings)
    system.start(data)  # calibrates the descriptors
    before = score(system, data)
    run = fit(settings, system, data, name=f"demo-{recipe}")
    load_weights(run, system)
    after = score(system, data)
    RECIPES[recipe].module.figures(run, system, data)
    return run, {"before": before, "after": after}


def _accuracy(system: Any, data: Any) -> float:
    return 1 - evaluate(system.config, system, data)["val/error"] / 100


def _covering(system: Any, data: Any) -> float:
    model = system.model.eval().cpu()
    images = data.validation[:_SCORED]
    found = {one.id: list(model.cluster(torch.from_numpy(one.image)[None]).labels[0]) for one in images}
    truth = BSDS(data.config.folder(), "train", ids=list(found))
    scores = evaluate_segmentations(found, {name: truth.segmentations(name) for name in found})
    return float(scores["paper_average"])


def _segment_photographs(path: Path) -> dict[str, int]:
    import skimage.data

    segmented = {name: segment(getattr(skimage.data, name)(), device="cpu") for name in _PHOTOGRAPHS}
    rows: list[list[Any]] = [[one.pixels, one.labels(4), one.labels()] for one in segmented.values()]
    segmentation_grid(["Photograph", "four regions", "default number of regions"], rows, path, width=8.5)
    return {name: one.count() for name, one in segmented.items()}
