"""Data of the recipe ``o2p``: batches of region images or of precomputed descriptors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from matbackprop.vision.data.cache import default_cache_folder
from matbackprop.vision.data.coco import coco_files
from matbackprop.vision.data.coco_regions import (
    ImageBatch,
    Regions,
    RegionSource,
    cache_regions,
    check_same_categories,
    hold_out_images,
)
from matbackprop.vision.devices import choose_device
from matbackprop.vision.models.deep_o2p import RegionClassifier
from matbackprop.vision.training.config import O2PConfig, RegionDataConfig
from matbackprop.vision.training.loading import EpochLoader
from matbackprop.vision.training.system import Data


def region_sets(config: RegionDataConfig) -> tuple[Regions, Regions]:
    """Return the training and validation regions. They are cropped and cached on the first call."""
    files = [coco_files(config.folder(), split) for split in ("train", "val")]
    folder = config.cache or default_cache_folder()
    train, validation = (cache_regions(*pair, folder, side=config.side, margin=config.margin) for pair in files)
    check_same_categories(train, validation)
    return train, validation


class VectorBatch(NamedTuple):
    """Batch of precomputed descriptors (b, d); see :class:`ImageBatch`."""

    regions: Tensor
    target: Tensor
    vector: Tensor


RegionBatch = ImageBatch | VectorBatch


class VectorSource:
    """Batches of precomputed descriptors (n, d), kept on the device; ``positions`` are the regions of this source."""

    resident = True

    def __init__(self, vectors: Tensor, labels: np.ndarray, positions: np.ndarray) -> None:
        self.vectors, self.labels = vectors, torch.from_numpy(labels)
        self.positions = torch.from_numpy(np.asarray(positions))

    def __len__(self) -> int:
        return len(self.positions)

    def fetch(self, indices: Tensor, epoch: int) -> Tensor:
        return self.positions[indices]

    def assemble(self, batch: Tensor, device: torch.device) -> VectorBatch:
        """Gather the descriptors of fetched regions on ``device``."""
        self.vectors, self.labels = self.vectors.to(device), self.labels.to(device)  # once
        index = batch.to(device)
        return VectorBatch(index, self.labels[index], self.vectors[index])


class RegionData(Data):
    """Regions of the configured split. ``vectors`` are precomputed descriptors (:func:`describe`), if any."""

    def __init__(
        self, config: O2PConfig, regions: tuple[Regions, Regions], vectors: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.config, self.seed = config.data, config.engine.seed
        self.train_regions, self.validation_regions = regions
        self.vectors = vectors
        self.positions = {"train": np.arange(len(regions[0])), "validation": np.arange(len(regions[1]))}
        self.may_choose = self.config.split == "tuning"  # results are reported on the validation regions
        if self.may_choose:
            fit, held_out = hold_out_images(self.train_regions.image_ids)
            self.validation_regions = self.train_regions
            self.positions = {"train": fit, "validation": held_out}
            self.vectors = vectors and (vectors[0], vectors[0])

    @property
    def classes(self) -> list[str]:
        """Class names."""
        return self.train_regions.classes

    @cached_property
    def sources(self) -> dict[str, RegionSource | VectorSource]:
        """Sources of the batches: ``"train"`` and ``"validation"``."""
        train, validation = self.train_regions, self.validation_regions
        if self.vectors is not None:
            return {
                "train": VectorSource(self.vectors[0], train.labels, self.positions["train"]),
                "validation": VectorSource(self.vectors[1], validation.labels, self.positions["validation"]),
            }
        resident = fits_device(train, validation)
        moved: dict[str, Any] = {"seed": self.seed, "jitter": self.config.jitter, "flip": self.config.flip}
        return {
            "train": _images(train, self.positions["train"], self.config, resident=resident, **moved),
            "validation": _images(validation, self.positions["validation"], self.config, resident=resident),
        }

    def _loader(self, part: str, batch_size: int, *, shuffle: bool) -> EpochLoader:
        source = self.sources[part]
        threads = 0 if source.resident else self.config.threads
        return EpochLoader(source, batch_size, seed=self.seed, shuffle=shuffle, threads=threads)

    def train_loader(self) -> EpochLoader:
        return self._loader("train", self.config.batch_size, shuffle=True)

    def validation_loader(self) -> EpochLoader:
        return self._loader("validation", self.config.validation_batch_size, shuffle=False)

    def on_device(self, batch: Any, device: torch.device, *, training: bool) -> RegionBatch:
        return self.sources["train" if training else "validation"].assemble(batch, device)

    def first_batches(self, count: int, device: torch.device) -> list[RegionBatch]:
        """Return the first training batches for calibration, the same in every process."""
        order = self.train_loader().order(0)[: count * self.config.batch_size]
        source = self.sources["train"]
        fetched = (source.fetch(indices, 0) for indices in order.split(self.config.batch_size))
        return [source.assemble(batch, device) for batch in fetched]  # type: ignore[arg-type]


def fits_device(*parts: Regions) -> bool:
    """Return whether the pixels of all regions fit into a quarter of the GPU memory."""
    if not torch.cuda.is_available():
        return False
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return sum(regions.pixels.nbytes for regions in parts) <= memory / 4


def _images(regions: Regions, positions: np.ndarray, data: RegionDataConfig, **options: Any) -> RegionSource:
    return RegionSource(regions, positions, canvas=data.canvas, background=data.background, **options)


@torch.no_grad()
def describe(
    network: RegionClassifier, regions: tuple[Regions, Regions], config: O2PConfig
) -> tuple[Tensor, Tensor] | None:
    """Return the descriptors (n, d) of training and validation regions in float16; None if features are trained.

    The network is first calibrated on 512 training regions that are not held out in the split ``tuning``, so that
    descriptors are the same for both splits.
    """
    if network.trains_features:
        return None
    device = choose_device(config.engine.accelerator)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    network.to(device).eval()

    def batches(part: Regions, positions: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
        source = _images(part, positions, config.data)
        for indices in torch.arange(len(positions)).split(64):
            batch = source.assemble(source.fetch(indices, 0), device)
            yield batch.image, batch.mask

    fit, _ = hold_out_images(regions[0].image_ids)
    some = fit[np.linspace(0, len(fit) - 1, min(len(fit), 512)).astype(np.int64)]
    network.calibrate(list(batches(regions[0], some)))
    train, validation = (
        torch.cat([network.describe(*batch).half() for batch in batches(part, np.arange(len(part)))])
        for part in regions
    )
    return train, validation
