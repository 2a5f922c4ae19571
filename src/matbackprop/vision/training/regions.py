"""Data of the recipe ``o2p``: batches of images of regions, or of features that training does not change."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from matbackprop.errors import CheckpointError, DataError
from matbackprop.vision.data.cache import cache_key, default_cache_folder
from matbackprop.vision.data.coco import coco_files
from matbackprop.vision.data.coco_regions import (
    Regions,
    RegionSource,
    balancing_weights,
    cache_regions,
    check_same_categories,
    hold_out_images,
)
from matbackprop.vision.devices import choose_device
from matbackprop.vision.models.deep_o2p import RegionClassifier
from matbackprop.vision.training.checkpoint import load_checkpoint, save_checkpoint
from matbackprop.vision.training.config import O2PConfig, RegionDataConfig
from matbackprop.vision.training.loading import EpochLoader
from matbackprop.vision.training.system import Data

Features = dict[str, Tensor]
"""Of all regions: ``vector`` (n, d), or maps (n, c, h, w) by name and ``mask`` (n, canvas, canvas) in 255ths."""


def region_sets(config: RegionDataConfig) -> tuple[Regions, Regions]:
    """Return training and validation regions, cropped and cached on the first call."""
    files = [coco_files(config.folder(), split) for split in ("train", "val")]
    cropped = {name: getattr(config, name) for name in ("side", "margin", "missing_images")}
    train, validation = (cache_regions(*pair, config.cache or default_cache_folder(), **cropped) for pair in files)
    try:
        check_same_categories(train, validation)
    except DataError as error:
        raise DataError(f"{files[0][0]} and {files[1][0]}: {error}") from error
    return train, validation


# ------------------------------------------------------------------------------------------------------------- batches


class ImageBatch(NamedTuple):
    """Normalized images (b, 3, canvas, canvas) of regions with their masks (b, canvas, canvas)."""

    regions: Tensor
    target: Tensor
    mask: Tensor
    image: Tensor

    def maps(self, model: RegionClassifier) -> Features:
        """Return the feature maps that the model uses."""
        return model.maps(self.image, self.mask)


class MapBatch(NamedTuple):
    """Feature maps of regions by layers that are not trained, with the masks."""

    regions: Tensor
    target: Tensor
    mask: Tensor
    fixed: Features

    def maps(self, model: RegionClassifier) -> Features:
        """Return the feature maps that the model uses."""
        return model.maps_from(self.fixed)


class VectorBatch(NamedTuple):
    """Descriptors (b, d) of regions by a network whose features are not trained."""

    regions: Tensor
    target: Tensor
    vector: Tensor


RegionBatch = ImageBatch | MapBatch | VectorBatch


class ImageSource(RegionSource):
    """Batches of images."""

    def on_device(self, batch: dict[str, Tensor], device: torch.device) -> ImageBatch:
        """Return a batch from the result of :meth:`fetch`."""
        parts = self.assemble(batch, device)
        return ImageBatch(parts["index"], parts["target"], parts["mask"], parts["image"])


class FeatureSource:
    """Batches of features that were computed once and stay on the device.

    Args:
        features: of all regions.
        labels: classes (n,) of all regions.
        positions: regions of this source.
    """

    resident = True

    def __init__(self, features: Features, labels: np.ndarray, positions: np.ndarray) -> None:
        self.features, self.labels = features, torch.from_numpy(labels)
        self.positions = torch.from_numpy(np.asarray(positions))

    def __len__(self) -> int:
        return len(self.positions)

    def fetch(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        """Return the regions of the items ``indices``."""
        return {"index": self.positions[indices]}

    def on_device(self, batch: dict[str, Tensor], device: torch.device) -> MapBatch | VectorBatch:
        """Return a batch from the result of :meth:`fetch`."""
        self.features = {name: values.to(device) for name, values in self.features.items()}
        self.labels, index = self.labels.to(device), batch["index"].to(device)
        chosen = {name: values[index].float() for name, values in self.features.items()}
        if "vector" in chosen:
            return VectorBatch(index, self.labels[index], chosen["vector"])
        return MapBatch(index, self.labels[index], chosen.pop("mask") / 255, chosen)


class RegionData(Data):
    """Regions of the configured split.

    Args:
        config: the configuration.
        regions: training and validation regions (:func:`region_sets`).
        features: their features, if these are not trained (:func:`fixed_features`).
    """

    def __init__(
        self, config: O2PConfig, regions: tuple[Regions, Regions], features: tuple[Features, Features] | None = None
    ) -> None:
        self.config, self.seed = config.data, config.engine.seed
        self.dtype = torch.bfloat16 if config.engine.precision == "bf16-mixed" else torch.float32
        self.train_regions, self.validation_regions = regions
        self.features = features
        self.positions = {"train": np.arange(len(regions[0])), "validation": np.arange(len(regions[1]))}
        self.may_choose = self.config.split == "tuning"  # results are reported on the validation regions
        if self.may_choose:
            fit, held_out = hold_out_images(self.train_regions.image_ids, every=self.config.hold_out)
            self.validation_regions = self.train_regions
            self.positions = {"train": fit, "validation": held_out}
            self.features = features and (features[0], features[0])

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return self.train_regions.classes

    @cached_property
    def sources(self) -> dict[str, ImageSource | FeatureSource]:
        """Sources of the batches: ``"train"`` and ``"validation"``."""
        parts = {"train": self.train_regions, "validation": self.validation_regions}
        if self.features is not None:
            return {
                part: FeatureSource(features, regions.labels, self.positions[part])
                for (part, regions), features in zip(parts.items(), self.features, strict=True)
            }
        moved: dict[str, Any] = {"seed": self.seed, "jitter": self.config.jitter, "flip": self.config.flip}
        fixed: dict[str, Any] = {"resident": self._resident(), "dtype": self.dtype}
        return {
            part: _images(regions, self.positions[part], self.config, **fixed, **(moved if part == "train" else {}))
            for part, regions in parts.items()
        }

    def _resident(self) -> bool:
        if self.config.resident != "auto":
            return self.config.resident == "yes"
        if not torch.cuda.is_available():
            return False
        needed = self.train_regions.pixels.nbytes + self.validation_regions.pixels.nbytes
        return needed <= torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 4

    def _loader(self, part: str, batch_size: int, **options: Any) -> EpochLoader:
        source = self.sources[part]
        pin = torch.cuda.is_available() and not source.resident
        threads = 0 if source.resident else self.config.threads
        return EpochLoader(source, batch_size, seed=self.seed, threads=threads, pin_memory=pin, **options)

    def train_loader(self) -> EpochLoader:
        """Return shuffled batches."""
        labels = self.train_regions.labels[self.positions["train"]]
        weights = balancing_weights(labels).tolist() if self.config.sampling == "balanced" else None
        return self._loader("train", self.config.batch_size, weights=weights)

    def validation_loader(self) -> EpochLoader:
        """Return validation batches in order."""
        return self._loader("validation", self.config.validation_batch_size, shuffle=False)

    def on_device(self, batch: dict[str, Tensor], training: bool) -> RegionBatch:
        """Place, flip, mask and normalize images, or gather features, on the device."""
        return self.sources["train" if training else "validation"].on_device(batch, batch["index"].device)

    def first_batches(self, count: int, device: torch.device) -> list[RegionBatch]:
        """Return the first training batches, the same in every process, for calibration."""
        order = self.train_loader().order(0)[: count * self.config.batch_size]
        source = self.sources["train"]
        return [source.on_device(source.fetch(i, 0), device) for i in order.split(self.config.batch_size)]


def _images(regions: Regions, positions: np.ndarray, data: RegionDataConfig, **options: Any) -> ImageSource:
    return ImageSource(regions, positions, canvas=data.canvas, background=data.background, **options)


# ---------------------------------------------------------------------------------------- features that are not trained


def fixed_features(
    network: RegionClassifier, regions: tuple[Regions, Regions], config: O2PConfig
) -> tuple[Features, Features] | None:
    """Return the features of training and validation regions that training does not change, or None.

    These are descriptors if all layers before the classifier are fixed, and maps if the first layers are.
    """
    device = choose_device(config.engine.accelerator)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if not network.trains_features:
        return describe(network, *regions, config.data, device)
    if network.config.train_from is None:
        return None
    fixed = copy.deepcopy(network).to(device).eval()
    train, validation = (compute_maps(fixed, one, config.data, device) for one in regions)
    return train, validation


def _in_order(
    regions: Regions, positions: np.ndarray, data: RegionDataConfig, device: torch.device
) -> Iterator[ImageBatch]:
    source = _images(regions, positions, data)
    for indices in torch.arange(len(positions)).split(64):
        yield source.on_device(source.fetch(indices, 0), device)


@torch.no_grad()
def compute_maps(network: RegionClassifier, regions: Regions, data: RegionDataConfig, device: torch.device) -> Features:
    """Compute the maps of all regions that ``train_from`` fixes, in float16."""
    masks = torch.empty(len(regions), data.canvas, data.canvas, dtype=torch.uint8, device=device)
    features = {"mask": masks}
    for batch in _in_order(regions, np.arange(len(regions)), data, device):
        masks[batch.regions] = (255 * batch.mask).round().byte()
        for tap, values in network.maps(batch.image, batch.mask, network.fixed_maps).items():
            if tap not in features:
                features[tap] = values.new_empty(len(regions), *values.shape[1:], dtype=torch.float16)
            features[tap][batch.regions] = values.half()
    return features


@torch.no_grad()
def describe(
    network: RegionClassifier, train: Regions, validation: Regions, data: RegionDataConfig, device: torch.device
) -> tuple[Features, Features]:
    """Return the float16 descriptors of all regions by a network whose features are not trained, cached on disk.

    Projections are initialized first, on 512 training regions that tuning does not hold out, so that they are the
    same for both splits. They are copied to ``network``.
    """
    key = _described_key(network, train, validation, data)
    path = (data.cache or default_cache_folder()) / f"described-{key}.ckpt"
    try:
        saved = load_checkpoint(path)
    except CheckpointError:  # missing or damaged
        fixed = copy.deepcopy(network).to(device).eval()
        if _projections(fixed):
            fit, _ = hold_out_images(train.image_ids, every=data.hold_out)
            some = fit[np.linspace(0, len(fit) - 1, min(len(fit), 512)).astype(np.int64)]
            fixed.project([batch.maps(fixed) for batch in _in_order(train, some, data, device)])
        saved = {"projections": [weight.cpu() for weight in _projections(fixed)]}
        for part, regions in (("train", train), ("validation", validation)):
            batches = _in_order(regions, np.arange(len(regions)), data, device)
            saved[part] = torch.cat([fixed.describe(batch.image, batch.mask).half().cpu() for batch in batches])
        save_checkpoint(saved, path)
    for mine, weight in zip(_projections(network), saved["projections"], strict=True):
        mine.copy_(weight)
    return {"vector": saved["train"]}, {"vector": saved["validation"]}


def _projections(network: RegionClassifier) -> list[Tensor]:
    return [pooling.reduce.weight for pooling in network.poolings().values() if pooling.reduce is not None]


def _described_key(network: RegionClassifier, train: Regions, validation: Regions, data: RegionDataConfig) -> str:
    weights = hashlib.sha256()
    for name, value in network.backbone.state_dict().items():
        weights.update(f"{name}{tuple(value.shape)}".encode() + value.cpu().numpy().tobytes())
    content: dict[str, Any] = {"regions": [train.path.name, validation.path.name], "hold_out": data.hold_out}
    return cache_key(content | {"network": network.hparams_dict, "weights": weights.hexdigest()})
