"""Recipe ``contours``: train a contour network on images with human segmentations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as nnf
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from matbackprop.errors import DataError
from matbackprop.vision.data.bsds import BSDS, find_root, tuning_split
from matbackprop.vision.data.pictures import find_pictures, read_picture
from matbackprop.vision.inference.segmenting import network_contours, shrink
from matbackprop.vision.metrics.boundaries import boundary_map
from matbackprop.vision.metrics.regions import region_scores
from matbackprop.vision.models.contours import ContourNet
from matbackprop.vision.progress import track
from matbackprop.vision.segmentation import merge_contours, watershed_regions
from matbackprop.vision.training.config import ContourDataConfig, ContoursConfig
from matbackprop.vision.training.loading import EpochLoader, ItemSource, generator_for
from matbackprop.vision.training.run_folder import RunFolder
from matbackprop.vision.training.start import load_start
from matbackprop.vision.training.system import Data, System, adamw

THRESHOLDS = np.arange(0.02, 1.0, 0.02)  #: Candidates for the default threshold.
CERTAIN = 0.3  #: Minimum fraction of annotators who drew a border.


class ContourImage(NamedTuple):
    """Photograph with the borders of all annotators, or with the contours that a network predicted."""

    image: Tensor  #: (3, h, w), uint8
    target: Tensor  #: (h, w), uint8: fraction of annotators who drew a border, or contour strength, times 255
    predicted: bool = False  #: whether ``target`` is a prediction


class ContourBatch(NamedTuple):
    """Crops or images, with values in [0, 1]."""

    image: Tensor  #: (b, 3, h, w)
    target: Tensor  #: (b, h, w), fraction of annotators who drew a border, or contour strength
    predicted: Tensor  #: (b,), whether ``target`` is a prediction


def read_images(data: BSDS) -> list[ContourImage]:
    """Read all images of a split with the borders of their annotators."""
    images = []
    for sample in track(data, "Reading images"):
        drawn = np.mean([boundary_map(labels.numpy()) for labels in sample.segmentations], 0)
        images.append(ContourImage(sample.image, torch.from_numpy(np.round(255 * drawn).astype(np.uint8))))
    return images


def read_predicted(photographs: Path, contours: Path) -> list[ContourImage]:
    """Read photographs and their contours, files ``NAME-contours.png`` of ``matbackprop segment --format contours``.

    Photographs without contours are skipped.

    Raises:
        DataError: no photograph has contours, a file cannot be read, or the sizes of a pair do not match.
    """
    pairs = [(path, contours / f"{path.stem}-contours.png") for path in find_pictures([photographs])]
    pairs = [pair for pair in pairs if pair[1].exists()]
    if not pairs:
        raise DataError(
            f"{contours} has no contours of the photographs in {photographs}. Write them with 'matbackprop segment "
            f"{photographs} --format contours --out {contours}'."
        )
    images = []
    for path, file in track(pairs, "Reading predicted contours"):
        target = torch.from_numpy(read_picture(file).pixels[..., 0].copy())
        image = shrink(read_picture(path).pixels, max(target.shape))
        if image.shape[1:] != target.shape:
            raise DataError(f"{file} does not have the shape of {path}. Write the contours again.")
        images.append(ContourImage(image, target, predicted=True))
    return images


def augment(one: ContourImage, config: ContourDataConfig, generator: torch.Generator) -> ContourBatch:
    """Return a random crop of an image, randomly mirrored, transposed, resized and with changed colors, unbatched."""
    draw = torch.rand(6, generator=generator).tolist()
    height, width = one.target.shape
    low, high = config.scale
    # Images smaller than a crop are enlarged.
    side = config.crop / max(low + (high - low) * draw[3], config.crop / min(height, width))
    center = [n / 2 + (r - 0.5) * (n - side) for n, r in zip((width, height), draw[4:], strict=True)]
    turn = torch.diag(torch.tensor([1.0 if r < 0.5 else -1.0 for r in draw[:2]]))
    if draw[2] < 0.3:
        turn = turn.flip(1)
    size = torch.tensor([[width], [height]])
    places = torch.cat([side * turn / size, 2 * torch.tensor(center)[:, None] / size - 1], 1)

    def sample(pixels: Tensor, cells: int, mode: str) -> Tensor:
        grid = nnf.affine_grid(places[None], [1, 1, cells, cells], align_corners=False)
        x = pixels[None].float() / 255
        return nnf.grid_sample(x, grid, mode=mode, padding_mode="reflection", align_corners=False)[0]

    image = sample(one.image, config.crop, "bilinear")
    if one.predicted:
        target = sample(one.target[None], config.crop, "bilinear")
    else:  # borders remain connected lines
        target = nnf.max_pool2d(sample(one.target[None], 2 * config.crop, "nearest"), 2)
    if config.jitter:
        gain = 1 + config.jitter * torch.randn(3, 1, 1, generator=generator)
        image = (image * gain + config.jitter / 4 * torch.randn(3, 1, 1, generator=generator)).clamp(0, 1)
    return ContourBatch(image, target[0], torch.tensor(one.predicted))


class ContoursData(Data):
    """Random crops of the training images, and whole held-out images.

    With predicted contours, half of the crops of an epoch are from their photographs, taken in turn.
    """

    def __init__(self, config: ContoursConfig) -> None:
        self.config, self.seed = config.data, config.engine.seed
        self.folder = self.config.folder()
        ids: Sequence[str] = BSDS(self.folder, "train").ids
        self.held_out: Sequence[str] = []
        if self.config.split == "tuning":
            ids, self.held_out = tuning_split(ids, self.config.fold)
        self.training = self.read("train", ids)
        if self.config.split == "train+val":
            self.training += self.read("val", BSDS(self.folder, "val").ids)
        self.validation = self.read("train", self.held_out)
        self.predicted = read_predicted(*self.config.predicted) if self.config.predicted else []

    def read(self, split: str, ids: Sequence[str]) -> list[ContourImage]:
        """Read images of a split, up to the limit."""
        data = BSDS(self.folder, split, ids=ids[: self.config.limit])
        return read_images(data) if len(data) else []

    def item(self, index: int, epoch: int) -> ContourBatch:
        """Return a crop of a training image, or of a photograph with predicted contours."""
        count = len(self.training)
        if index < count:
            one = self.training[index]
        else:
            one = self.predicted[(epoch * count + index - count) % len(self.predicted)]
        return augment(one, self.config, generator_for(self.seed, epoch, index))

    def train_loader(self) -> EpochLoader:
        source = ItemSource(len(self.training) * (2 if self.predicted else 1), self.item)
        return EpochLoader(source, self.config.batch_size, seed=self.seed, threads=self.config.threads)

    def validation_loader(self) -> EpochLoader | None:
        """Return batches of one image; None in the final split."""
        if not self.validation:
            return None

        def item(index: int, epoch: int) -> ContourBatch:
            one = self.validation[index]
            return ContourBatch(one.image.float() / 255, one.target.float() / 255, torch.tensor(False))

        return EpochLoader(ItemSource(len(self.validation), item), 1, shuffle=False)


def contour_loss(logits: Tensor, target: Tensor, predicted: Tensor) -> Tensor:
    """Compute the cross-entropy of contours.

    It is balanced between borders and interior for annotated images. Pixels marked by some annotators, but by less than
    30 % of them, are ignored. Predicted contours are targets for every pixel, with equal weights.

    Args:
        logits: (b, h, w).
        target: (b, h, w), fraction of the annotators who drew a border, or predicted strength.
        predicted: (b,), whether a target is a prediction.

    Returns:
        The weighted mean over all pixels, times 4.5.
    """
    predicted = predicted[:, None, None]
    border, interior = (target >= CERTAIN) & ~predicted, (target == 0) & ~predicted
    inside = interior.sum() / (border.sum() + interior.sum()).clamp(min=1)
    weight = border * inside + interior * 1.1 * (1 - inside) + predicted / 9
    label = torch.where(predicted, target, border.float())
    entropy = nnf.binary_cross_entropy_with_logits(logits.float(), label, reduction="none")
    return (entropy * weight).mean() * 4.5


class ContoursModule(System):
    """Contour network with its loss over all levels. The result is the moving average of its weights."""

    def __init__(self, config: ContoursConfig, model: ContourNet) -> None:
        super().__init__()
        self.config, self.model = config, model
        if config.train.freeze is not None:
            self.model.backbone.freeze(config.train.freeze)
        decay = config.train.average
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(decay)).requires_grad_(False)

    def losses(self, model: torch.nn.Module, batch: ContourBatch) -> tuple[Tensor, Tensor]:
        """Return the loss of the output, and the sum of the losses of the levels."""
        logits = model(batch.image.to(memory_format=torch.channels_last))
        first, *levels = (contour_loss(one, batch.target, batch.predicted) for one in logits)
        return first, torch.stack(levels).sum()

    def start(self, data: ContoursData) -> None:
        """Use the memory layout that is fastest for convolutions."""
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def training_step(self, batch: ContourBatch) -> Tensor:
        output, sides = self.losses(self.model, batch)
        self.record("train/output", output)
        return output + self.config.train.side_weight * sides

    def validation_step(self, batch: ContourBatch) -> None:
        """Record the loss of the averaged network on a held-out image."""
        self.record("val/loss", self.losses(self.average, batch)[0])

    def optimizers(self, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """Return AdamW with a one-cycle schedule. Each step also updates the average."""
        optimizer, schedule = adamw(self.model, self.model.backbone, self.config.train, steps, warmup=0.05)
        optimizer.register_step_post_hook(lambda *_: self._move_average())
        return optimizer, schedule

    def _move_average(self) -> None:
        if self.step < self.config.train.average_from:
            self.average.n_averaged.zero_()  # the first update copies
        self.average.update_parameters(self.model)


def build(config: ContoursConfig) -> tuple[ContoursModule, ContoursData]:
    """Build the system and the data of a configuration."""
    data = ContoursData(config)
    model = ContourNet(config.model)
    load_start(model, config.model.backbone, config.model.weights)
    return ContoursModule(config, model), data


@torch.no_grad()
def choose_threshold(model: ContourNet, data: BSDS) -> float:
    """Return the threshold with the largest mean covering."""
    model.eval()
    covering = np.zeros(len(THRESHOLDS))
    for sample in track(data, "Choosing the threshold"):
        contours = network_contours(model, sample.image[None])[0]
        regions = watershed_regions(contours)
        tree = merge_contours(regions, contours)
        levels = tree.levels([tree.regions_at(height) for height in THRESHOLDS])
        truth = [labels.numpy() for labels in sample.segmentations]
        covering += region_scores(list(levels[:, regions]), truth).covering.mean(1)
    return round(float(THRESHOLDS[covering.argmax()]), 2)


def export(run: RunFolder, module: ContoursModule, data: ContoursData) -> None:
    """Write the averaged network, quantized to 8 bits, with the best threshold on held-out images, if any."""
    model: ContourNet = module.average.module.to(module.device)  # type: ignore[assignment]
    if (images := threshold_images(data)) is not None:
        threshold = choose_threshold(model, images)
        model.hparams_dict["threshold"] = threshold
        model.config = dataclasses.replace(model.config, threshold=threshold)
    model.save_pretrained(run.path / "model", dtype=torch.int8)


def threshold_images(data: ContoursData) -> BSDS | None:
    """Return the held-out images; in the final split, ``val``. None if no image is held out."""
    split, ids = ("train", data.held_out) if data.held_out else ("val", None)
    if data.config.split == "train+val" or not (find_root(data.folder) / "images" / split).is_dir():
        return None
    return BSDS(data.folder, split, ids=(ids or BSDS(data.folder, split).ids)[: data.config.limit])


def figures(run: RunFolder, module: ContoursModule, data: ContoursData) -> None:
    """Draw a few held-out images with predicted contours and human borders."""
    from matbackprop.vision.report.figures import segmentation_grid

    model: ContourNet = module.average.module.eval()  # type: ignore[assignment]
    rows = []
    for one in (data.validation or data.training)[:6]:
        with torch.no_grad():
            contours = model.contours(one.image[None].to(module.device).float() / 255)[0]
        gray = [np.round(255 * contours.cpu().numpy()).astype(np.uint8), one.target.numpy()]
        rows.append([one.image.permute(1, 2, 0).numpy(), *(np.repeat(g[..., None], 3, -1) for g in gray)])
    segmentation_grid(["Image", "Contours", "People"], rows, run.figure_path("contours.png"))
