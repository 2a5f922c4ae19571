"""Data of the recipe ``o2p``: batches of region images or of precomputed descriptors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from matbackprop.errors import DataError
from matbackprop.vision.data.cache import default_cache_folder
from matbackprop.vision.data.coco import coco_files
from matbackprop.vision.data.coco_regions import (
    FetchedRegions,
    ImageBatch,
    Regions,
    RegionSource,
    cache_regions,
    hold_out_images,
    place_batch,
)
from matbackprop.vision.devices import choose_device
from matbackprop.vision.files import show
from matbackprop.vision.models.deep_o2p import RegionClassifier
from matbackprop.vision.training.config import O2PConfig, RegionDataConfig
from matbackprop.vision.training.loading import EpochLoader
from matbackprop.vision.training.system import Data


def region_sets(config: RegionDataConfig) -> tuple[Regions, Regions]:
    """Return the training and validation regions, which are cropped and cached on the first call.

    Raises:
        DataError: the files have different categories, or :func:`cache_regions` raises it.
    """
    files = [coco_files(config.folder(), split) for split in ("train", "val")]
    folder = config.cache or default_cache_folder()
    train, validation = (cache_regions(*pair, folder, side=config.side, margin=config.margin) for pair in files)
    first, second = ({(c["id"], c["name"]) for c in regions.categories} for regions in (train, validation))
    if first != second:
        raise DataError(
            f"{files[0][0]} and {files[1][0]} have different categories, for example {show(min(first ^ second))}. "
            "Use one list of categories."
        )
    return train, validation


class VectorBatch(NamedTuple):
    """Batch of precomputed descriptors (b, d); see :class:`ImageBatch`."""

    regions: Tensor
    target: Tensor
    vector: Tensor


RegionBatch = ImageBatch | VectorBatch


class VectorSource:
    """Batches of precomputed descriptors (n, d); ``positions`` are the regions of this source."""

    def __init__(self, vectors: Tensor, labels: np.ndarray, positions: np.ndarray) -> None:
        self.vectors, self.labels, self.positions = vectors, torch.from_numpy(labels), torch.from_numpy(positions)

    def __len__(self) -> int:
        return len(self.positions)

    def fetch(self, indices: Tensor, epoch: int) -> VectorBatch:
        index = self.positions[indices]
        return VectorBatch(index, self.labels[index], self.vectors[index])


class RegionData(Data):
    """Regions of the configured split. ``vectors`` are precomputed descriptors (:func:`describe`), if any."""

    def __init__(
        self, config: O2PConfig, regions: tuple[Regions, Regions], vectors: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.config, self.seed = config.data, config.engine.seed
        self.train_regions, self.validation_regions = regions
        self.may_choose = self.config.split == "tuning"  # results are reported on the validation regions
        fit, held_out = np.arange(len(regions[0])), np.arange(len(regions[1]))
        if self.may_choose:
            fit, held_out = hold_out_images(self.train_regions.image_ids)
            self.validation_regions = self.train_regions
            vectors = vectors and (vectors[0], vectors[0])
        self.train: RegionSource | VectorSource
        self.validation: RegionSource | VectorSource
        if vectors is None:
            moved: dict[str, Any] = {"seed": self.seed, "jitter": self.config.jitter, "flip": self.config.flip}
            self.train = RegionSource(self.train_regions, fit, **moved)
            self.validation = RegionSource(self.validation_regions, held_out)
        else:
            self.train = VectorSource(vectors[0], self.train_regions.labels, fit)
            self.validation = VectorSource(vectors[1], self.validation_regions.labels, held_out)

    @property
    def classes(self) -> list[str]:
        """Class names."""
        return self.train_regions.classes

    def train_loader(self) -> EpochLoader:
        return EpochLoader(self.train, self.config.batch_size, seed=self.seed, threads=self.config.threads)

    def validation_loader(self) -> EpochLoader:
        size, threads = self.config.validation_batch_size, self.config.threads
        return EpochLoader(self.validation, size, shuffle=False, threads=threads)

    def on_device(self, batch: Any, device: torch.device, *, training: bool) -> RegionBatch:
        batch = super().on_device(batch, device, training=training)
        if isinstance(batch, VectorBatch):
            return batch
        return place_batch(batch, self.config.canvas, self.config.background)

    def first_batches(self, count: int, device: torch.device) -> list[RegionBatch]:
        """Return the first training batches for calibration, the same in every process."""
        order = self.train_loader().order(0)[: count * self.config.batch_size]
        fetched = (self.train.fetch(indices, 0) for indices in order.split(self.config.batch_size))
        return [self.on_device(batch, device, training=True) for batch in fetched]


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
        source = RegionSource(part, positions)
        for indices in torch.arange(len(positions)).split(64):
            fetched = FetchedRegions(*(tensor.to(device) for tensor in source.fetch(indices, 0)))
            batch = place_batch(fetched, config.data.canvas, config.data.background)
            yield batch.image, batch.mask

    fit, _ = hold_out_images(regions[0].image_ids)
    some = fit[np.linspace(0, len(fit) - 1, min(len(fit), 512)).astype(np.int64)]
    network.calibrate(list(batches(regions[0], some)))
    train, validation = (
        torch.cat([network.describe(*batch).half().cpu() for batch in batches(part, np.arange(len(part)))])
        for part in regions
    )
    return train, validation
