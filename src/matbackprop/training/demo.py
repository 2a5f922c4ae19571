"""The demonstration: two small networks trained through the structured layers on images made on the fly.

1. The gradient at a spectrum with ties: autograd through ``eigh`` and the fused layer, against finite differences.
2. Regions classified through :func:`matbackprop.second_order_pool`.
3. Images segmented by features trained through :func:`matbackprop.normalized_cut_soft` (or
   :func:`matbackprop.normalized_cut_j2`, which is watched in either case).

Both trainings run in the common engine and leave a run folder each; one page shows everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as nnf

import matbackprop
from matbackprop.data.bsds import labels_to_grid
from matbackprop.data.shapes import CLASSES, ShapesRegions, ShapesSegmentation
from matbackprop.inference import segment
from matbackprop.metrics.evaluation import score_image
from matbackprop.report.figures import confusion_matrix, image_grid, segmentation_grid, spectrum
from matbackprop.report.html import Page
from matbackprop.report.tables import Table
from matbackprop.spectral import NCutSpace, SoftSpace, segment_features
from matbackprop.training.config import EngineConfig
from matbackprop.training.engine import Data, System, evaluate, fit, seed_all
from matbackprop.training.loading import EpochLoader, ItemSource
from matbackprop.training.run_folder import RunFolder

_PHOTOGRAPHS = ("astronaut", "coffee", "chelsea")
_KS = (2, 3, 4, 5, 6, 8)
_PANELS = {
    "pooling": {"cross-entropy": ["train/loss", "val/loss"], "accuracy": ["train/accuracy", "val/accuracy"]},
    "cuts": {
        "objective": ["train/loss", "val/loss"],
        "J₂": ["val/j2"],
        "alignment of the two spans (0 is perfect)": ["val/alignment"],
    },
}


@dataclass
class PoolingConfig:
    """The classification of textured shapes."""

    train_images: int = 320
    """Training images; each holds one to four regions."""
    val_images: int = 120
    """Validation images."""
    epochs: int = 10
    """Passes over the training regions."""
    channels: int = 24
    """Channels d of the features that are pooled."""
    function: Literal["log", "sqrt"] = "log"
    """The matrix function of the pooling."""


@dataclass
class CutsConfig:
    """The segmentation of made-up scenes."""

    train_images: int = 96
    """Training images."""
    val_images: int = 24
    """Validation images."""
    epochs: int = 12
    """Passes over the training images."""
    channels: int = 16
    """Channels d of the features that are clustered."""
    objective: Literal["j2", "soft"] = "soft"
    """The objective: the paper's J₂, or the soft projector."""


@dataclass
class DemoConfig:
    """Where the demonstration goes and how large it is."""

    run: Path = Path("runs/demo")
    """Folder for both runs and the report; what an earlier demonstration left there is replaced."""
    seed: int = 0
    """Seed of images and networks."""
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    cuts: CutsConfig = field(default_factory=CutsConfig)

    def engine(self, part: str, epochs: int, monitor: str, mode: Literal["min", "max"]) -> EngineConfig:
        """The engine's configuration of one part."""
        return EngineConfig(
            run=self.run / part,
            seed=self.seed,
            max_epochs=epochs,
            overwrite=True,
            accelerator="cpu",
            log_every=5,
            monitor=monitor,
            monitor_mode=mode,
            tensorboard=False,
            progress=False,
            report=False,
        )


# ------------------------------------------------------------------------------------------------- gradients at ties


def _through_eigh(f: Tensor, eps: float = 1e-3) -> Tensor:
    lam, u = torch.linalg.eigh(f.mT @ f + eps * torch.eye(f.shape[-1], dtype=f.dtype))
    return (u * lam.log().unsqueeze(-2)) @ u.mT


def _finite_differences(function: Callable[[Tensor], Tensor], f: Tensor, direction: Tensor) -> Tensor:
    """d⟨direction, function(F)⟩/dF by central differences of the fourth order, all entries as one batch."""
    step = 1e-3
    units = torch.eye(f.numel(), dtype=f.dtype).view(-1, *f.shape)

    def along(shift: float) -> Tensor:
        return (function(f + shift * step * units) * direction).sum((-2, -1))

    return ((8 * (along(1) - along(-1)) - along(2) + along(-2)) / (12 * step)).view_as(f)


def gradient_check(seed: int = 0) -> Table:
    """Compare gradients of log pooling with finite differences, at spectra with and without ties.

    The table has the relative error of autograd through ``torch.linalg.eigh`` and of ``second_order_pool``, in float64.

    Example:
        >>> table = gradient_check()
        >>> [row[0] for row in table.rows]
        ['all different', 'three dead channels', 'pixels of six pure kinds', 'no signal, F = 0']
        >>> [bool(row[1] < 1e-8) for row in table.rows], [bool(row[2] < 1e-8) for row in table.rows]
        ([True, False, False, False], [True, True, True, True])
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(m: int, d: int) -> Tensor:
        return torch.randn(m, d, generator=generator, dtype=torch.float64)

    dead = draw(10, 6).relu()
    dead[:, 2:5] = 0
    cases = {
        "all different": draw(10, 6).relu(),
        "three dead channels": dead,
        "pixels of six pure kinds": torch.eye(6, dtype=torch.float64).repeat(2, 1),
        "no signal, F = 0": torch.zeros(10, 6, dtype=torch.float64),
    }
    rows: list[list[Any]] = []
    for name, f in cases.items():
        direction = draw(f.shape[1], f.shape[1])
        truth = _finite_differences(lambda x: matbackprop.second_order_pool(x, eps=0.1), f, direction)
        row: list[Any] = [name]
        for function in (lambda x: _through_eigh(x, eps=0.1), lambda x: matbackprop.second_order_pool(x, eps=0.1)):
            leaf = f.clone().requires_grad_()
            (got,) = torch.autograd.grad(function(leaf), leaf, direction)
            row.append(float((got - truth).norm() / truth.norm().clamp_min(1)))
        rows.append(row)
    columns = ["spectrum", "eigh + autograd", "second_order_pool"]
    note = "Error of the gradient of log(FᵀF + εI) against central differences, float64."
    return Table(columns, rows, note=note, formats=dict.fromkeys(columns[1:], ".1e"))


def _one_cycle(
    module: nn.Module, rate: float, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW whose rate rises to ``rate`` and falls to nothing by the end of the training."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=1e-2)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)


# ------------------------------------------------------------------------------------------- second-order pooling


class _Items(Data):
    """Batches of items that are kept in memory."""

    def __init__(self, train: list[Any], val: list[Any], seed: int, sizes: tuple[int, int]) -> None:
        self.train, self.val, self.seed, self.sizes = train, val, seed, sizes

    def _loader(self, items: list[Any], size: int, shuffle: bool) -> EpochLoader:
        source = ItemSource(len(items), lambda index, epoch: items[index])
        return EpochLoader(source, size, seed=self.seed, shuffle=shuffle)

    def train_loader(self) -> EpochLoader:
        return self._loader(self.train, self.sizes[0], shuffle=True)

    def validation_loader(self) -> EpochLoader:
        return self._loader(self.val, self.sizes[1], shuffle=False)


_CROP, _STRIDE = 48, 4


def _crops(data: ShapesRegions) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Every region of every image, its box resized to a square, its mask brought to the grid of the features."""
    items = []
    for sample in (data[i] for i in range(len(data))):
        for mask, box, label in zip(sample.masks, sample.boxes.long().tolist(), sample.labels, strict=True):
            x, y, w, h = box
            window = (slice(y, y + h), slice(x, x + w))
            picture = sample.image[:, *window].float().unsqueeze(0) / 255
            cover = mask[window].float()[None, None]
            image = nnf.interpolate(picture, (_CROP, _CROP), mode="bilinear", align_corners=False)[0]
            items.append((image, nnf.adaptive_avg_pool2d(cover, _CROP // _STRIDE).flatten(), label))
    return items


class _Narrated(System):
    """Says after each epoch of a training how far it is."""

    console: Console | None = None
    epochs = 0
    measures: tuple[str, ...] = ("val/loss",)

    def validated(self, epoch: int, metrics: Mapping[str, float]) -> None:
        said = " · ".join(f"{name.removeprefix('val/')} {metrics[name]:.3f}" for name in self.measures)
        if self.console is not None:
            self.console.print(f"  epoch {epoch + 1:>2} of {self.epochs} · {said}")


class _PoolingModule(_Narrated):
    """Convolutions → features inside the mask → g(FᵀF + εI) → upper triangle → linear classifier."""

    measures = ("val/loss", "val/accuracy")

    def __init__(self, config: PoolingConfig) -> None:
        super().__init__()
        d = config.channels
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, d, 5, stride=2, padding=2), nn.ReLU()
        )
        self.pool = matbackprop.nn.SecondOrderPool(eps=1e-3, function=config.function)
        self.norm = nn.BatchNorm1d(d * (d + 1) // 2, affine=False)
        self.head = nn.Linear(d * (d + 1) // 2, len(CLASSES))

    def rows(self, images: Tensor) -> Tensor:
        """Features (b, m, d), one row per cell of the grid."""
        return self.features(images - 0.5).flatten(2).mT

    def scores(self, images: Tensor, weights: Tensor) -> Tensor:
        share = weights / weights.sum(-1, keepdim=True)
        pooled = self.pool(self.rows(images), weight=share)
        return self.head(self.norm(matbackprop.vectorize_symmetric(pooled)))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, weights, labels = batch
        scores = self.scores(images, weights)
        self.record("train/accuracy", (scores.argmax(1) == labels).float().mean(), len(labels))
        return nnf.cross_entropy(scores, labels)

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        images, weights, labels = batch
        scores = self.scores(images, weights)
        self.record("val/loss", nnf.cross_entropy(scores, labels), len(labels))
        self.record("val/accuracy", (scores.argmax(1) == labels).float().mean(), len(labels))

    def diagnose(self, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
        """The spectra of the pooled matrices, for the engine's report on a batch that is not finite."""
        return {"eigenvalues": self.spectra(batch[0], batch[1]).tolist()}

    @torch.no_grad()
    def spectra(self, images: Tensor, weights: Tensor) -> Tensor:
        """Eigenvalues (b, d) of FᵀF + εI, ascending."""
        f = self.rows(images).double() * (weights / weights.sum(-1, keepdim=True)).double().sqrt().unsqueeze(-1)
        return torch.linalg.eigvalsh(f.mT @ f) + 1e-3

    def optimizers(self, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        return _one_cycle(self, 4e-3, steps)


def _train_pooling(config: DemoConfig, console: Console) -> tuple[RunFolder, dict[str, float]]:
    seed_all(config.seed)
    sizes, seed = (config.pooling.train_images, config.pooling.val_images), 2 * config.seed
    train, val = (_crops(ShapesRegions(size, seed=seed + i)) for i, size in enumerate(sizes))
    data = _Items(train, val, config.seed, (32, 128))
    images, weights, labels = torch.utils.data.default_collate(val)
    module = _PoolingModule(config.pooling)
    module.console, module.epochs = console, config.pooling.epochs
    engine = config.engine("pooling", config.pooling.epochs, "val/accuracy", "max")
    console.print(f"{len(train)} training and {len(val)} validation regions")
    spectra = {"before training": module.spectra(images[:64], weights[:64]).mean(0)}
    module.train()  # calibrate the normalisation: an untrained network deserves its best
    with torch.no_grad():
        module.scores(*torch.utils.data.default_collate(train[:256])[:2])
    before = evaluate(engine, module, data)["val/accuracy"]
    run = fit(engine, module, data, name="demo-pooling")
    module.eval()
    with torch.no_grad():
        guess = module.scores(images, weights).argmax(1)
    spectra["after training"] = module.spectra(images[:64], weights[:64]).mean(0)
    counts = np.zeros((len(CLASSES), len(CLASSES)))
    np.add.at(counts, (labels.numpy(), guess.numpy()), 1)
    confusion_matrix(counts, CLASSES, run.figure_path("confusion"), title="Validation regions")
    spectrum({k: v.numpy() for k, v in spectra.items()}, run.figure_path("spectrum"), eps=1e-3, title="Mean spectrum")
    right = guess == labels
    captions = [CLASSES[i] for i in guess[:24].tolist()]
    image_grid(list(images[:24].numpy()), captions, run.figure_path("examples"), marks=right[:24].tolist())
    return run, {"before": before, "after": float(right.float().mean())}


# ------------------------------------------------------------------------------------------------ normalized cuts


_SIZE, _GRID = (64, 96), (32, 48)


def _scenes(data: ShapesSegmentation) -> list[tuple[Tensor, Tensor]]:
    """Images (3, h, w) and their annotators' maps on the grid of the features (a, m)."""
    items = []
    for sample in (data[i] for i in range(len(data))):
        maps = [labels_to_grid(labels, _GRID).flatten() for labels in sample.segmentations]
        items.append((sample.image.float() / 255, torch.stack(maps)))
    return items


class _CutsModule(_Narrated):
    """Convolutions with place → non-negative features → a normalized-cut objective, averaged over annotators."""

    measures = ("val/loss", "val/alignment")

    def __init__(self, config: CutsConfig) -> None:
        super().__init__()
        self.objective = config.objective
        self.features = nn.Sequential(
            nn.Conv2d(5, 32, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(32, 32, 5, padding=2),
            nn.ReLU(),
            nn.Conv2d(32, 32, 5, padding=4, dilation=2),
            nn.ReLU(),
            nn.Conv2d(32, config.channels, 1),
            nn.ReLU(),
        )

    def maps(self, images: Tensor) -> Tensor:
        """Features (b, h, w, d) of images (b, 3, 2h, 2w)."""
        axes = [torch.linspace(-1, 1, n, device=images.device) for n in images.shape[-2:]]
        place = torch.stack(torch.meshgrid(*axes, indexing="ij")).expand(len(images), 2, *images.shape[-2:])
        return self.features(torch.cat([2 * images - 1, place], 1)).movedim(1, -1)

    def loss(self, f: Tensor, labels: Tensor) -> Tensor:
        cut = matbackprop.normalized_cut_j2 if self.objective == "j2" else matbackprop.normalized_cut_soft
        return cut(f.flatten(1, 2), labels).mean()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return self.loss(self.maps(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        f = self.maps(images)
        self.record("val/loss", self.loss(f, labels), len(images))
        report = matbackprop.rank_report(f.flatten(1, 2), labels)
        for name, value in (("j2", report.j2), ("rank", report.rank), ("alignment", report.alignment)):
            self.record(f"val/{name}", value.double().mean(), len(images))

    def diagnose(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        """Singular values of the features, for the engine's report on a batch that is not finite."""
        with torch.no_grad():
            return {"singular_values": torch.linalg.svdvals(self.maps(batch[0]).flatten(1, 2).double()).tolist()}

    def optimizers(self, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        return _one_cycle(self, 6e-3, steps)

    @torch.no_grad()
    def segment(self, image: Tensor) -> list[np.ndarray]:
        """Label maps of one image (3, h, w), one for each K."""
        space = NCutSpace() if self.objective == "j2" else SoftSpace()
        size = (image.shape[-2], image.shape[-1])
        segmented = segment_features(self.maps(image.unsqueeze(0))[0], _KS, size=size, space=space)
        return list(segmented.labels.numpy())


def _segment_all(module: _CutsModule, images: ShapesSegmentation) -> tuple[list[list[np.ndarray]], list[float]]:
    """Segment images; return the maps and the paper's average covering of each image."""
    maps, scores = [], []
    for index in range(len(images)):
        sample = images[index]
        maps.append(module.segment(sample.image.float() / 255))
        scores.append(score_image(str(index), maps[-1], sample.segmentations).paper_average)
    return maps, scores


def _best_map(maps: list[np.ndarray], truths: list[Tensor]) -> np.ndarray:
    covering = score_image("", maps, truths).covering.mean(1)
    return maps[int(np.argmax(covering))]


def _train_cuts(config: DemoConfig, console: Console) -> tuple[RunFolder, dict[str, float]]:
    seed_all(config.seed)
    sizes, seed = (config.cuts.train_images, config.cuts.val_images), 2 * config.seed
    train, val = (ShapesSegmentation(size, size=_SIZE, seed=seed + i) for i, size in enumerate(sizes))
    data = _Items(_scenes(train), _scenes(val), config.seed, (8, 8))
    module = _CutsModule(config.cuts)
    module.console, module.epochs = console, config.cuts.epochs
    engine = config.engine("cuts", config.cuts.epochs, "val/loss", "min")
    console.print(f"{len(train)} training and {len(val)} validation images")
    before_maps, before = _segment_all(module, val)
    run = fit(engine, module, data, name="demo-cuts")
    after_maps, after = _segment_all(module.eval(), val)
    rows: list[list[Any]] = []
    for index in range(min(6, len(val))):
        sample = val[index]
        truths = sample.segmentations
        maps = (before_maps[index], after_maps[index])
        rows.append([sample.image.numpy(), *(_best_map(m, truths) for m in maps), truths[0].numpy()])
    columns = ["Image", ("clustered features", "before"), ("clustered features", "after"), "Ground truth"]
    segmentation_grid(columns, rows, run.figure_path("segmentations"), width=8.5)
    return run, {"before": float(np.mean(before)), "after": float(np.mean(after))}


# -------------------------------------------------------------------------------------------------- photographs


def _segment_photographs(path: Path) -> dict[str, int]:
    """Draw sample photographs with their regions; return how many regions each has."""
    import skimage.data

    rows: list[list[Any]] = []
    numbers = {}
    for name in _PHOTOGRAPHS:
        segments = segment(getattr(skimage.data, name)(), device="cpu")
        rows.append([segments.pixels, segments.labels(4), segments.labels()])
        numbers[name] = segments.count()
    segmentation_grid(["Photograph", "four regions", "as many as people would draw"], rows, path, width=8.5)
    return numbers


# ------------------------------------------------------------------------------------------------------- the whole


def run_demo(config: DemoConfig | None = None) -> Path:
    """Run the demonstration, about a minute's work on two processor cores, and return the path of its page."""
    config = config or DemoConfig()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # networks this small gain nothing from more, and one gives the same numbers everywhere
    try:
        return _run(config, Console(highlight=False))
    finally:
        torch.set_num_threads(threads)


def _run(config: DemoConfig, console: Console) -> Path:
    console.rule("[bold]1 · Gradients where eigenvalues meet", align="left")
    gradients = gradient_check(config.seed)
    console.print(gradients.rich())
    console.rule("[bold]2 · Regions classified through second-order pooling", align="left")
    pooling, accuracy = _train_pooling(config, console)
    console.print(f"accuracy {100 * accuracy['before']:.1f} % before, [bold]{100 * accuracy['after']:.1f} %[/] after")
    console.rule("[bold]3 · Images segmented by learned normalized cuts", align="left")
    cuts, covering = _train_cuts(config, console)
    console.print(f"covering {covering['before']:.3f} before, [bold]{covering['after']:.3f}[/] after")
    console.rule("[bold]4 · Photographs segmented by the network in the package", align="left")
    photographs = config.run / "photographs.png"
    numbers = _segment_photographs(photographs)
    console.print(", ".join(f"{name}: {count} regions" for name, count in numbers.items()))
    errors = {str(name): {"eigh": eigh, "second_order_pool": ours} for name, eigh, ours in gradients.rows}
    summary: dict[str, dict[str, Any]] = {"accuracy": accuracy, "covering": covering, "gradient error": errors}
    report = _write_page(config, gradients, pooling, cuts, photographs, summary)
    RunFolder(config.run).write_summary(summary)
    return report


def _write_page(
    config: DemoConfig,
    gradients: Table,
    pooling: RunFolder,
    cuts: RunFolder,
    photographs: Path,
    summary: dict[str, dict[str, Any]],
) -> Path:
    page = Page("matbackprop: the demonstration", f"seed {config.seed} · images made on the fly · trained on the CPU")
    accuracy, covering = summary["accuracy"], summary["covering"]
    page.tiles(
        {
            "accuracy before": f"{100 * accuracy['before']:.1f} %",
            "accuracy after": f"{100 * accuracy['after']:.1f} %",
            "covering before": f"{covering['before']:.3f}",
            "covering after": f"{covering['after']:.3f}",
        }
    )
    page.section("1 · Gradients where eigenvalues meet")
    page.text(
        "Dead channels, or more channels than pixels, give the matrix FᵀF + εI repeated eigenvalues. Autograd through "
        "the eigendecomposition divides by their gap; the fused layer uses divided differences, which have a limit."
    )
    page.table(gradients)
    page.section("2 · Regions classified through second-order pooling")
    page.text(
        "Two convolutions see the box of a textured shape. The features inside its mask are pooled to "
        f"{config.pooling.function}(FᵀF + εI), and a linear classifier reads the upper triangle."
    )
    page.curves(pooling.read_metrics(), _PANELS["pooling"])
    page.picture(pooling.figure_path("examples"), "Validation regions with the predicted class; mistakes in red")
    page.picture(pooling.figure_path("confusion"), "Each row shows where a true class went, in percent")
    page.picture(pooling.figure_path("spectrum"), "Eigenvalues of FᵀF + εI, mean over 64 validation regions")
    page.section("3 · Images segmented by learned normalized cuts")
    named = "½‖Π_F − Π_Ψ‖² (J₂)" if config.cuts.objective == "j2" else "½‖Π_λ − Π_Ψ‖² (soft projector)"
    page.text(
        f"Four convolutions give {config.cuts.channels} features per cell. The objective {named} turns the subspace "
        "that they span towards the regions that annotators drew; K-means in that subspace gives the segmentations."
    )
    page.curves(cuts.read_metrics(), _PANELS["cuts"])
    page.picture(
        cuts.figure_path("segmentations"),
        f"Validation images, the best of K = {', '.join(map(str, _KS))}, with random and with trained features",
    )
    page.section("4 · Photographs segmented by the network in the package")
    page.text(
        "The same objective, trained on people's segmentations of photographs: superpixels are merged into a hierarchy "
        "of regions, from which any number can be read off."
    )
    page.picture(photographs, "Sample photographs of scikit-image")
    page.section("What to try next")
    page.table(
        Table(
            ["command", "what it does"],
            [
                ["matbackprop segment photo.jpg", "regions of a photograph"],
                ["matbackprop serve", "the same in the browser"],
                ["matbackprop train ncuts --help", "train the segmentation system"],
                ["matbackprop train o2p --help", "train the classification system"],
                ["matbackprop report RUN", "the report of any run folder"],
            ],
        )
    )
    return page.write(config.run / "report.html")
