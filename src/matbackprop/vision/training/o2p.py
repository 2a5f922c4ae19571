"""Region classification: the recipe from COCO's files to a trained classifier.

The file follows the data: regions, features, network, training step, validation, results. The configuration and its
presets are in :mod:`matbackprop.vision.training.config`.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from matbackprop.errors import DataError
from matbackprop.solvers import batched_eigh
from matbackprop.vision.data.cache import cache_key, dataset_folder, default_cache_folder, open_cache, write_cache
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
from matbackprop.vision.distributed import gather
from matbackprop.vision.models.deep_o2p import RegionClassifier, SecondOrderVector
from matbackprop.vision.training.config import O2PConfig, RegionDataConfig
from matbackprop.vision.training.engine import evaluate
from matbackprop.vision.training.loading import EpochLoader
from matbackprop.vision.training.run_folder import RunFolder
from matbackprop.vision.training.start import load_start
from matbackprop.vision.training.system import Data, System

LARGE = 400
"""Regions of at least this many pixels are also scored separately."""


# ------------------------------------------------------------------------------------- regions and batches


def coco_folder(config: RegionDataConfig) -> Path:
    """Return the COCO folder to read. Generated images are written first."""
    return dataset_folder("coco", config.root, config.made, config.cache)


def region_sets(config: RegionDataConfig) -> tuple[Regions, Regions]:
    """Return training and validation regions, cropped and cached on the first call."""
    root = coco_folder(config)
    files = [coco_files(root, split) for split in ("train", "val")]
    cropped = {name: getattr(config, name) for name in ("side", "margin", "minimum_area", "missing_images")}
    train, validation = (cache_regions(*pair, config.cache or default_cache_folder(), **cropped) for pair in files)
    try:
        check_same_categories(train, validation)
    except DataError as error:
        raise DataError(f"{files[0][0]} and {files[1][0]}: {error}") from error
    return train, validation


class ImageBatch(NamedTuple):
    """Normalized images (b, 3, canvas, canvas) of regions with their masks (b, canvas, canvas)."""

    regions: Tensor
    target: Tensor
    image: Tensor
    mask: Tensor


class MapBatch(NamedTuple):
    """Feature maps of regions by layers that are not trained, with the masks."""

    regions: Tensor
    target: Tensor
    mask: Tensor
    maps: dict[str, Tensor]


class VectorBatch(NamedTuple):
    """Descriptors (b, d) of regions by a network whose features are not trained."""

    regions: Tensor
    target: Tensor
    vector: Tensor


RegionBatch = ImageBatch | MapBatch | VectorBatch


class MapFeatures(NamedTuple):
    """Maps (n, c, h, w) of all regions in float16, and masks (n, canvas, canvas) in 255ths."""

    maps: dict[str, Tensor]
    masks: Tensor

    def to(self, device: torch.device) -> MapFeatures:
        """Move to a device."""
        return MapFeatures({tap: maps.to(device) for tap, maps in self.maps.items()}, self.masks.to(device))

    def batch(self, index: Tensor, target: Tensor) -> MapBatch:
        """Return the batch of the regions ``index``."""
        maps = {tap: maps[index].float() for tap, maps in self.maps.items()}
        return MapBatch(index, target, self.masks[index].float() / 255, maps)


class VectorFeatures(NamedTuple):
    """Descriptors (n, d) of all regions in float16."""

    vectors: Tensor

    def to(self, device: torch.device) -> VectorFeatures:
        """Move to a device."""
        return VectorFeatures(self.vectors.to(device))

    def batch(self, index: Tensor, target: Tensor) -> VectorBatch:
        """Return the batch of the regions ``index``."""
        return VectorBatch(index, target, self.vectors[index].float())


Features = MapFeatures | VectorFeatures


class ImageSource(RegionSource):
    """Batches of images."""

    def on_device(self, batch: dict[str, Tensor], device: torch.device) -> ImageBatch:
        """Return a batch from the result of :meth:`fetch`."""
        parts = self.assemble(batch, device)
        return ImageBatch(parts["index"], parts["target"], parts["image"], parts["mask"])


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

    def on_device(self, batch: dict[str, Tensor], device: torch.device) -> RegionBatch:
        """Return a batch from the result of :meth:`fetch`."""
        self.features, self.labels = self.features.to(device), self.labels.to(device)
        index = batch["index"].to(device)
        return self.features.batch(index, self.labels[index])


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
        self.dtype = {"bf16-mixed": torch.bfloat16, "64": torch.float64}.get(config.engine.precision, torch.float32)
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


# ------------------------------------------------------------------------------ features that are not trained


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
    if network.config.train_from is not None:
        fixed = copy.deepcopy(network).to(device).eval()
        train, validation = (compute_maps(fixed, one, config.data, device) for one in regions)
        return train, validation
    return None


@torch.no_grad()
def compute_maps(
    network: RegionClassifier, regions: Regions, data: RegionDataConfig, device: torch.device
) -> MapFeatures:
    """Compute the maps of all regions that ``train_from`` fixes."""
    maps: dict[str, Tensor] = {}
    masks = torch.empty(len(regions), data.canvas, data.canvas, dtype=torch.uint8, device=device)
    for batch in _in_order(regions, np.arange(len(regions)), data, device):
        masks[batch.regions] = (255 * batch.mask).round().byte()
        for tap, values in network.maps(batch.image, batch.mask, network.fixed_maps).items():
            if tap not in maps:
                maps[tap] = values.new_empty(len(regions), *values.shape[1:], dtype=torch.float16)
            maps[tap][batch.regions] = values.half()
    return MapFeatures(maps, masks)


@torch.no_grad()
def describe(
    network: RegionClassifier, train: Regions, validation: Regions, data: RegionDataConfig, device: torch.device
) -> tuple[VectorFeatures, VectorFeatures]:
    """Return the descriptors of all regions by a network whose features are not trained, cached on disk.

    Projections are initialized first, on 512 training regions that tuning does not hold out, so that they are the
    same for both splits. They are copied to ``network``.
    """
    path = (data.cache or default_cache_folder()) / f"described-{_described_key(network, train, validation, data)}"
    if not path.exists():
        one = copy.deepcopy(network).to(device).eval()

        def maps(regions: Regions, positions: np.ndarray) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            for batch in _in_order(regions, positions, data, device):
                yield one.maps(batch.image, batch.mask), batch.mask

        if _projections(one):
            fit, _ = hold_out_images(train.image_ids, every=data.hold_out)
            some = fit[np.linspace(0, len(fit) - 1, min(len(fit), 512)).astype(np.int64)]
            one.project([found for found, _ in maps(train, some)])
        arrays = {
            part: [one.describe_maps(*seen).half().cpu().numpy() for seen in maps(regions, np.arange(len(regions)))]
            for part, regions in (("train", train), ("validation", validation))
        }
        weights = torch.cat([p.flatten().cpu() for p in _projections(one)] or [torch.zeros(1)]).numpy()
        write_cache(path, {**arrays, "projections": weights}, {"regions": train.path.name})
    cached = open_cache(path).arrays
    if mine := _projections(network):
        parts = torch.from_numpy(np.array(cached["projections"])).split([p.numel() for p in mine])
        for parameter, part in zip(mine, parts, strict=True):
            parameter.copy_(part.view_as(parameter))
    found = [VectorFeatures(torch.from_numpy(np.array(cached[part]))) for part in ("train", "validation")]
    return found[0], found[1]


def _projections(network: RegionClassifier) -> list[Tensor]:
    return [pooling.reduce.weight for pooling in network.poolings().values() if pooling.reduce is not None]


def _described_key(network: RegionClassifier, train: Regions, validation: Regions, data: RegionDataConfig) -> str:
    weights = hashlib.sha256()
    for name, value in network.backbone.state_dict().items():
        weights.update(f"{name}{tuple(value.shape)}".encode() + value.cpu().numpy().tobytes())
    return cache_key(
        {
            "regions": [train.path.name, validation.path.name],
            "hold_out": data.hold_out,
            "network": network.hparams_dict,
            "weights": weights.hexdigest(),
        }
    )


def _in_order(
    regions: Regions, positions: np.ndarray, data: RegionDataConfig, device: torch.device
) -> Iterator[ImageBatch]:
    source = _images(regions, positions, data)
    for indices in torch.arange(len(positions)).split(64):
        yield source.on_device(source.fetch(indices, 0), device)


# --------------------------------------------------------------------------------------------------- network


def build_model(config: O2PConfig, names: list[str]) -> RegionClassifier:
    """Build the network of a configuration, with its starting weights."""
    presented = {name: getattr(config.data, name) for name in ("canvas", "background", "side", "margin")}
    network = RegionClassifier(len(names), config.model, names=names, **presented)
    load_start(network, network.config.backbone, config.model.weights)
    return network


class RegionModule(System):
    """The classifier with cross-entropy, SGD with a cosine schedule, and errors on all and on large regions."""

    def __init__(self, config: O2PConfig, model: RegionClassifier, validation: Regions) -> None:
        super().__init__()
        self.config, self.model = config, model
        self._areas, self._image_ids = torch.from_numpy(validation.areas), validation.image_ids
        self.predictions: dict[str, np.ndarray] = {}
        self._collected: list[tuple[Tensor, ...]] = []

    def scores(self, batch: RegionBatch) -> Tensor:
        """Return scores (b, classes)."""
        if isinstance(batch, VectorBatch):
            return self.model.classify(batch.vector)
        return self.model.classify_maps(self._maps(batch), batch.mask)

    def _maps(self, batch: ImageBatch | MapBatch) -> dict[str, Tensor]:
        if isinstance(batch, ImageBatch):
            return self.model.maps(batch.image, batch.mask)
        return self.model.maps_from(batch.maps)

    def start(self, data: RegionData) -> None:
        """Prepare the device and, in a new run, calibrate the descriptors."""
        if self.device.type == "cuda":
            self.model.backbone.to(memory_format=self.model.backbone.memory_format)  # type: ignore[call-overload]
        self.calibrate(data)

    @torch.no_grad()
    def calibrate(self, data: RegionData) -> None:
        """Measure the descriptors' means, deviations and projections on the first training batches, once."""
        if all(bool(one.calibrated) for one in self.model.descriptors()):
            return
        if isinstance(data.sources["train"], FeatureSource) and not self.model.trains_features:
            batches = data.first_batches(50, self.device)
            self.model.calibrate_described(torch.cat([b.vector for b in batches if isinstance(b, VectorBatch)]))
            return
        batches = data.first_batches(5, self.device)
        self.model.calibrate_maps([(self._maps(b), b.mask) for b in batches if not isinstance(b, VectorBatch)])

    def training_step(self, batch: RegionBatch) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        logged = self.step % self.config.engine.log_every == 0
        watch: contextlib.AbstractContextManager[None] = self._watch() if logged else contextlib.nullcontext()
        with watch:
            scores = self.scores(batch)
        return nnf.cross_entropy(scores.float(), batch.target, label_smoothing=self.config.optimizer.label_smoothing)

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        """Record rank, spectrum and gradient of the structured layer."""
        pooling = next(iter(self.model.poolings().values()), None)
        if pooling is None:
            yield
            return

        def look(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            spectrum = _spectrum(pooling, inputs[0].detach()[:8])
            largest = spectrum[:, -1:]
            self.record("layer/eigen_max", largest.mean())
            self.record("layer/eigen_min", spectrum[:, 0].mean())
            self.record("layer/rank", (spectrum > 1e-6 * largest).sum(-1).double().mean())
            self.record("layer/eps", pooling.eps)
            if pooling.power is not None:
                self.record("layer/power", pooling.power)
            if output.requires_grad:
                output.register_hook(lambda g: self.record("layer/gradient_norm", g.detach().float().norm()))

        handle = pooling.register_forward_hook(look)
        try:
            yield
        finally:
            handle.remove()

    def validation_step(self, batch: RegionBatch) -> None:
        """Collect predictions and losses on the device."""
        scores = self.scores(batch).float()
        loss = nnf.cross_entropy(scores, batch.target, reduction="none")
        self._collected.append((batch.regions, batch.target, scores.argmax(-1), loss))

    def validation_end(self, data: RegionData) -> dict[str, float]:
        """Return the errors over all processes, in percent."""
        mine = [torch.cat(part).cpu() for part in zip(*self._collected, strict=True)]
        index, target, predicted, loss = (torch.cat(parts) for parts in zip(*gather(mine), strict=True))
        self._collected.clear()
        wrong = (predicted != target).float()
        large = self._areas[index] >= LARGE
        order = index.argsort()
        self.predictions = {
            "index": index[order].numpy(),
            "target": target[order].numpy().astype(np.int16),
            "predicted": predicted[order].numpy().astype(np.int16),
            "loss": loss[order].half().numpy(),
            "large": large[order].numpy(),
            "image": self._image_ids[index[order].numpy()],
        }
        return {
            "val/loss": float(loss.mean()),
            "val/error": float(100 * wrong.mean()),
            "val/error_large": float(100 * wrong[large].mean()) if bool(large.any()) else math.nan,
        }

    def optimizers(self, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """Return SGD with momentum; linear warm-up, then half a cosine to zero."""
        config = self.config.optimizer
        groups = self.model.parameter_groups(config.rate, config.backbone_factor, config.decay)
        fused = self.device.type == "cuda"
        optimizer = torch.optim.SGD(groups, lr=config.rate, momentum=config.momentum, fused=fused)
        if fused and config.momentum:  # not initialized if the float16 scaler skips the first step
            for p in (p for group in groups for p in group["params"]):
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        warmup = config.warmup * steps / max(self.config.engine.max_epochs, 1)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            return 0.5 * (1 + math.cos(math.pi * min((step - warmup) / max(steps - warmup, 1), 1.0)))

        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def _spectrum(pooling: SecondOrderVector, features: Tensor) -> Tensor:
    """Return ascending eigenvalues (b, min(m, d)) of FᵀF, without weights and ε."""
    f = pooling.features(features).double()
    return batched_eigh(f @ f.mT if f.shape[-2] < f.shape[-1] else f.mT @ f)[0].clamp_min(0)


# ------------------------------------------------------------------------------------------------------------- results


def save_predictions(run: RunFolder, module: RegionModule) -> str:
    """Write the predictions of the last validation; return their SHA-256."""
    path = run.predictions / "validation.npz"
    np.savez_compressed(path, **module.predictions)  # type: ignore[arg-type]
    return hashlib.sha256(path.read_bytes()).hexdigest()


def export(run: RunFolder, module: RegionModule, data: RegionData) -> None:
    """Write the trained model and its predictions."""
    module.model.save_pretrained(run.path / "model")
    evaluate(module.config, module, data)  # the best weights, which need not be the last
    save_predictions(run, module)


def figures(run: RunFolder, module: RegionModule, data: RegionData) -> None:
    """Draw curves and the confusion matrix of the last validation."""
    from matbackprop.vision.report.figures import confusion_matrix, curves

    curves(run.read_metrics(), run.figure_path("curves"))
    table = confusion(module.predictions["target"], module.predictions["predicted"], len(data.classes))
    confusion_matrix(table, data.classes, run.figure_path("confusion"))


def confusion(target: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Return counts (classes, classes): rows are true classes, columns predicted ones.

    Example:
        >>> confusion(np.array([0, 1, 1]), np.array([0, 0, 1]), 2).tolist()
        [[1, 0], [1, 1]]
    """
    cells = target.astype(np.int64) * classes + predicted.astype(np.int64)
    return np.bincount(cells, minlength=classes**2).reshape(classes, classes)


def build(config: O2PConfig) -> tuple[RegionModule, RegionData]:
    """Build the system and the data of a configuration."""
    regions = region_sets(config.data)
    model = build_model(config, regions[0].classes)
    data = RegionData(config, regions, fixed_features(model, regions, config))
    return RegionModule(config, model, data.validation_regions), data
