"""Recipe ``ncuts``: train deep normalized cuts on images with human segmentations.

Images and labels are kept in memory. Augmentation runs on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as nnf

from matbackprop.functional._normalized_cut import normalized_cut_j1, normalized_cut_j2
from matbackprop.functional._normalized_cut_soft import normalized_cut_soft
from matbackprop.vision.data.bsds import BSDS, PreparedImage, pad_stack, prepare_images, tuning_split
from matbackprop.vision.models.deep_ncuts import DeepNCuts
from matbackprop.vision.training.config import NCutsConfig, NCutsDataConfig
from matbackprop.vision.training.loading import EpochLoader, generator_for
from matbackprop.vision.training.run_folder import RunFolder
from matbackprop.vision.training.start import load_start
from matbackprop.vision.training.system import Data, System, adamw


def split_images(
    images: Sequence[PreparedImage], config: NCutsDataConfig
) -> tuple[list[PreparedImage], list[PreparedImage]]:
    """Return the training and validation images of the configured split."""
    held_out = tuning_split([image.id for image in images], config.fold)[1] if config.split == "tuning" else []
    training = [image for image in images if image.id not in held_out]
    validation = [image for image in images if image.id in held_out]
    return training[: config.limit], validation[: config.limit]


class NCutsBatch(NamedTuple):
    """Batch of images with label maps, padded to one size."""

    image: Tensor  #: (b, 3, h, w), uint8; floating point in [0, 1] after :func:`augment`
    grid: Tensor  #: int64 (b, a, h', w'), cell labels of each annotator, −1 outside the image
    num_labels: int  #: number of labels, the same for all batches
    flip: Tensor | None = None  #: bool (b,), images to mirror; None in evaluation
    factors: Tensor | None = None  #: (b, 3), factors of brightness, contrast and saturation; None for no change


class PreparedSource:
    """Batches of prepared images with the random numbers of their augmentation; ``config`` is None for evaluation."""

    def __init__(self, images: Sequence[PreparedImage], config: NCutsDataConfig | None, seed: int) -> None:
        self.images, self.config, self.seed = images, config, seed
        self.num_labels = 1 + max((int(image.grid.max()) for image in images), default=0)

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, indices: Tensor, epoch: int) -> NCutsBatch:
        items = [self.images[int(i)] for i in indices]
        multiple = 1 if len({i.image.shape for i in items}) == 1 else 16
        image, grid = pad_stack([i.image for i in items], 0, multiple), pad_stack([i.grid for i in items], -1).long()
        if self.config is None:
            return NCutsBatch(image, grid, self.num_labels)
        draws = torch.stack([torch.rand(4, generator=generator_for(self.seed, epoch, int(i))) for i in indices])
        flip = draws[:, 0] < (0.5 if self.config.flip else 0.0)
        factors = 1 + self.config.jitter * (2 * draws[:, 1:] - 1) if self.config.jitter else None
        return NCutsBatch(image, grid, self.num_labels, flip, factors)


def augment(batch: NCutsBatch) -> NCutsBatch:
    """Flip images and labels, change colors and convert to floating point, on the device of the batch."""
    image, grid = batch.image.float() / 255, batch.grid
    if batch.flip is not None:
        flip = batch.flip.view(-1, 1, 1, 1)
        image, grid = torch.where(flip, image.flip(-1), image), torch.where(flip, grid.flip(-1), grid)
    if batch.factors is not None:
        brightness, contrast, saturation = (f.view(-1, 1, 1, 1).to(image) for f in batch.factors.unbind(-1))
        mean = image.mean((1, 2, 3), keepdim=True)
        image = ((image - mean) * contrast + mean) * brightness
        gray = image.mean(1, keepdim=True)
        image = ((image - gray) * saturation + gray).clamp(0, 1)
    return NCutsBatch(image, grid, batch.num_labels)


class NCutsData(Data):
    """Images of the chosen split, with labels on cells of ``stride`` pixels."""

    def __init__(self, config: NCutsConfig, stride: int) -> None:
        self.config, self.seed = config.data, config.engine.seed
        images = prepare_images(BSDS(self.config.folder(), "train"), stride)
        self.training, self.validation = split_images(images, self.config)

    def train_loader(self) -> EpochLoader:
        source = PreparedSource(self.training, self.config, self.seed)
        return EpochLoader(source, self.config.batch_size, seed=self.seed, threads=self.config.threads)

    def validation_loader(self) -> EpochLoader | None:
        """Return batches of one validation image without augmentation; None in the final split."""
        if len(self.validation) == 0:
            return None
        return EpochLoader(PreparedSource(self.validation, None, 0), 1, shuffle=False)

    def on_device(self, batch: Any, device: torch.device, *, training: bool) -> NCutsBatch:
        return augment(super().on_device(batch, device, training=training))


class NCutsModule(System):
    """DeepNCuts with its objective, averaged over annotators and images. Rank and spectrum of F are recorded."""

    def __init__(self, config: NCutsConfig, model: DeepNCuts) -> None:
        super().__init__()
        self.config, self.model = config, model

    def start(self, data: NCutsData) -> None:
        """Choose the memory layout for tensor cores."""
        if self.device.type == "cuda":
            self.model.to(memory_format=self.model.backbone.memory_format)  # type: ignore[call-overload]

    def loss(self, batch: NCutsBatch) -> tuple[Tensor, Tensor]:
        """Return the mean objective of a batch, and the rows of F (b, m, d)."""
        features = self.model(batch.image).float()
        height, width = features.shape[1:3]
        grid = batch.grid[..., :height, :width]
        grid = nnf.pad(grid, (0, width - grid.shape[-1], 0, height - grid.shape[-2]), value=-1)
        f, labels = features.flatten(1, 2), grid.flatten(-2)
        objective, number = self.config.train.objective, batch.num_labels
        if objective == "soft":
            value = normalized_cut_soft(f, labels, ridge=self.config.model.ridge, num_labels=number)
        elif objective == "j1":
            value = normalized_cut_j1(f, labels, lam=self.model.lam, num_labels=number)
        else:
            value = normalized_cut_j2(f, labels, num_labels=number)
        return value.mean(), f

    def training_step(self, batch: NCutsBatch) -> Tensor:
        """Return the mean objective, and record rank, spectrum and gradient every ``log_every`` steps."""
        total, f = self.loss(batch)
        self.record("train/objective", total)
        if self.step % self.config.engine.log_every == 0:
            unit = f.detach().double()
            unit = unit / unit.flatten(1).norm(dim=1).clamp(min=1e-150)[:, None, None]  # unit trace of FᵀF
            values = self.record_layer(unit, f, rtol=1e-10)
            self.record("layer/soft_rank", (values / (values + self.config.model.ridge / f.shape[-1])).sum(-1).mean())
        return total

    def validation_step(self, batch: NCutsBatch) -> None:
        total, _ = self.loss(batch)
        for name in ("loss", "objective"):
            self.record(f"val/{name}", total, len(batch.image))

    def optimizers(self, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """Return AdamW with a one-cycle schedule."""
        return adamw(self.model, self.model.backbone, self.config.train, steps, warmup=0.3)


def build(config: NCutsConfig) -> tuple[NCutsModule, NCutsData]:
    """Build the system and the data of a configuration."""
    model = DeepNCuts(config.model)
    data = NCutsData(config, model.stride)  # fails before weights are downloaded
    load_start(model, config.model.resolved()["backbone"], config.model.weights)
    return NCutsModule(config, model), data


def export(run: RunFolder, module: NCutsModule, data: NCutsData) -> None:
    """Write the trained model."""
    module.model.save_pretrained(run.path / "model")


def figures(run: RunFolder, module: NCutsModule, data: NCutsData) -> None:
    """Draw a few held-out images with their segmentations."""
    from matbackprop.vision.report.figures import segmentation_grid

    images = data.validation if len(data.validation) else data.training
    module.model.eval()
    rows = []
    for image in [images[i] for i in range(min(6, len(images)))]:
        pixels = torch.from_numpy(np.array(image.image))
        labels = module.model.cluster(pixels.unsqueeze(0).to(module.device), (4, 8, 16)).labels[0].cpu().numpy()
        truth = BSDS(data.config.folder(), "train", ids=[image.id]).segmentations(image.id)[0].numpy()
        rows.append([pixels.permute(1, 2, 0).numpy(), *labels, truth])
    segmentation_grid(["Image", "K = 4", "K = 8", "K = 16", "Human"], rows, run.figure_path("segmentations.png"))
