"""Region classification: the recipe from COCO's files to a trained classifier.

Read from top to bottom it follows the data: regions, network, training step, validation, results. The configuration and
its presets are in :mod:`matbackprop.vision.training.config`.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
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
    tuning_split,
)
from matbackprop.vision.devices import choose_device
from matbackprop.vision.distributed import gather
from matbackprop.vision.models.backbones.base import load_backbone_weights
from matbackprop.vision.models.deep_o2p import RegionClassifier, SecondOrderVector
from matbackprop.vision.training.config import O2PConfig, RegionDataConfig
from matbackprop.vision.training.engine import Data, System, evaluate
from matbackprop.vision.training.loading import EpochLoader
from matbackprop.vision.training.run_folder import RunFolder

LARGE = 400
"""Regions of at least this many pixels are also scored on their own."""


# ------------------------------------------------------------------------------------------------------------- regions


def data_folder(config: RegionDataConfig) -> Path:
    """The COCO-format folder to read; shapes are made there first when they are asked for."""
    return dataset_folder("coco", config.root, config.made, config.cache)


def open_regions(config: RegionDataConfig) -> tuple[Regions, Regions]:
    """Training and validation regions, cropped and cached on the first call."""
    root = data_folder(config)
    files = [coco_files(root, split) for split in ("train", "val")]
    cropped = {name: getattr(config, name) for name in ("side", "margin", "minimum_area", "missing_images")}
    train, validation = (cache_regions(*pair, config.cache or default_cache_folder(), **cropped) for pair in files)
    try:
        check_same_categories(train, validation)
    except DataError as error:
        raise DataError(f"{files[0][0]} and {files[1][0]}: {error}") from error
    return train, validation


def _source(regions: Regions, positions: np.ndarray, data: RegionDataConfig, **options: Any) -> RegionSource:
    return RegionSource(regions, positions, canvas=data.canvas, background=data.background, **options)


class KeptSource:
    """Batches of what was computed once for every region and stays on the device: descriptors, or maps and masks.

    Args:
        kept: name in a batch → tensor (n, …) with a row per region; masks in 255ths.
        labels: (n,) classes of all regions.
        positions: which regions are the items.
    """

    resident = True

    def __init__(self, kept: dict[str, Tensor], labels: np.ndarray, positions: np.ndarray) -> None:
        self.kept = {**kept, "target": torch.from_numpy(labels)}
        self.positions = torch.from_numpy(np.asarray(positions))

    def __len__(self) -> int:
        return len(self.positions)

    def fetch(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        """The regions' numbers; nothing about them changes with the epoch."""
        return {"index": self.positions[indices]}

    def assemble(self, batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Gather what is kept on ``device``."""
        self.kept = {name: values.to(device) for name, values in self.kept.items()}
        index = batch["index"].to(device)
        out = {name: values[index] for name, values in self.kept.items()}
        if "mask" in out:
            out["mask"] = out["mask"].float() / 255
        return {name: v.float() if v.is_floating_point() else v for name, v in out.items()} | {"index": index}


class RegionData(Data):
    """Regions of the chosen split, in batches that are assembled on the device."""

    def __init__(self, config: O2PConfig) -> None:
        self.config = config.data
        self.network: RegionClassifier | None = None
        """What is trained: where its features, or its first layers, do not learn, they are computed once."""
        self.seed, self.device = config.engine.seed, choose_device(config.engine.accelerator)
        self.dtype = {"bf16-mixed": torch.bfloat16, "64": torch.float64}.get(config.engine.precision, torch.float32)
        self.train_regions, validation = open_regions(self.config)
        self.final_regions = validation
        if self.config.split == "tuning":
            fit, held_out = tuning_split(self.train_regions.image_ids, every=self.config.hold_out)
            self.validation_regions = self.train_regions
            self.positions = {"train": fit, "validation": held_out}
        else:
            self.validation_regions = validation
            self.positions = {"train": np.arange(len(self.train_regions)), "validation": np.arange(len(validation))}
        self.may_choose = self.config.split == "tuning"  # not on the regions that a result is reported on

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return self.train_regions.classes

    @cached_property
    def sources(self) -> dict[str, Any]:
        """Where the batches of both parts come from; what does not learn is computed on the first use."""
        everything = self.train_regions, self.final_regions, self.config, self.device
        kept: list[dict[str, Tensor]] | None = None  # of training and validation regions
        network, starts = self.network, self.network is not None and self.network.config.train_from is not None
        if network is not None and not network.learns_features:
            described = (keep_descriptors if starts else describe)(network, *everything)
            kept = [{"vector": vectors} for vectors in described]
        elif network is not None and starts:
            stores, taps = keep_maps(network, *everything), network.kept
            kept = [{"mask": store["mask"], **{f"map {tap}": store[tap] for tap in taps}} for store in stores]
        sources: dict[str, Any] = {}
        for part, regions in (("train", self.train_regions), ("validation", self.validation_regions)):
            positions = self.positions[part]
            if kept is not None:
                sources[part] = KeptSource(kept[regions is not self.train_regions], regions.labels, positions)
                continue
            options: dict[str, Any] = {"resident": self._resident(), "dtype": self.dtype}
            if part == "train":
                options |= {"seed": self.seed, "jitter": self.config.jitter, "flip": self.config.flip}
            sources[part] = _source(regions, positions, self.config, **options)
        return sources

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
        """Shuffled batches."""
        labels = self.train_regions.labels[self.positions["train"]]
        weights = balancing_weights(labels).tolist() if self.config.sampling == "balanced" else None
        return self._loader("train", self.config.batch_size, weights=weights)

    def validation_loader(self) -> EpochLoader:
        """Validation batches in order."""
        return self._loader("validation", self.config.validation_batch_size, shuffle=False)

    def on_device(self, batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
        """Place, flip, mask and normalise the whole batch on the device."""
        return self.sources["train" if training else "validation"].assemble(batch, batch["index"].device)

    def first_batches(self, count: int, device: torch.device) -> list[dict[str, Tensor]]:
        """The first training batches of the seeded order, the same on every process, for calibration."""
        order = self.train_loader().order(0)[: count * self.config.batch_size]
        out = []
        for indices in order.split(self.config.batch_size):
            batch = self.sources["train"].fetch(indices, 0)
            out.append(self.on_device({k: v.to(device) for k, v in batch.items()}, training=True))
        return out


_kept: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}


@torch.no_grad()
def keep_maps(
    network: RegionClassifier, train: Regions, validation: Regions, data: RegionDataConfig, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The maps of all regions that a network needs only once, and the masks, in the device's memory.

    They are computed on the first call and stay until those of another backbone are asked for.

    Returns:
        For training and validation: tap → maps (n, c, h, w) in float16, and ``"mask"`` (n, canvas, canvas) in 255ths.
    """
    start = hashlib.sha256(next(network.backbone.parameters()).detach().cpu().numpy().tobytes()).hexdigest()
    key = cache_key(
        {
            "backbone": network.config.backbone,
            "weights": [network.config.weights, start],
            "regions": [str(train.path), str(validation.path), data.canvas, data.background],
            "two_views": network.config.two_views,
            "device": str(device),
        }
    )
    if key not in _kept:
        _kept.clear()
        _kept[key] = {}, {}
    missing = sorted({*network.kept} - {*_kept[key][0]})
    if not missing:
        return _kept[key]
    network = copy.deepcopy(network).to(device).eval()
    for store, regions in zip(_kept[key], (train, validation), strict=True):
        for batch in _in_order(regions, np.arange(len(regions)), data, device):
            maps = network.maps(batch["image"], batch["mask"], missing)
            maps = {"mask": (255 * batch["mask"]).round().byte(), **{tap: m.half() for tap, m in maps.items()}}
            for name, values in maps.items():
                if name not in store:
                    store[name] = values.new_empty(len(regions), *values.shape[1:])
                store[name][batch["index"]] = values
    return _kept[key]


class Described(NamedTuple):
    """Descriptors of regions by a network whose features do not learn, float16."""

    train: Tensor
    validation: Tensor


@torch.no_grad()
def describe(
    network: RegionClassifier, train: Regions, validation: Regions, data: RegionDataConfig, device: torch.device
) -> Described:
    """Descriptors of all regions by a network whose features do not learn: computed once, and cached.

    Projections are started first, on 512 training regions of images that tuning does not hold out, so that they and the
    descriptors are the same for both splits; the network has them afterwards.
    """
    key = cache_key(_described_key(network, train, validation, data))
    path = (data.cache or default_cache_folder()) / f"described-{key}"
    if not path.exists():
        one = copy.deepcopy(network).to(device).eval()

        def look(regions: Regions, positions: np.ndarray) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            for batch in _in_order(regions, positions, data, device):
                yield one.maps(batch["image"], batch["mask"]), batch["mask"]

        if _projections(one):
            one.project([maps for maps, _ in look(train, _first_look(train, data))])
        vectors = {
            part: [one.describe_maps(*seen).half().cpu().numpy() for seen in look(regions, np.arange(len(regions)))]
            for part, regions in (("train", train), ("validation", validation))
        }
        write_cache(path, {**vectors, "projections": _flat_projections(one).numpy()}, {"regions": train.path.name})
    arrays = open_cache(path).arrays
    _set_projections(network, torch.from_numpy(np.array(arrays["projections"])))
    return Described(*(torch.from_numpy(np.array(arrays[part])) for part in Described._fields))


@torch.no_grad()
def keep_descriptors(
    network: RegionClassifier, train: Regions, validation: Regions, data: RegionDataConfig, device: torch.device
) -> Described:
    """The same as :func:`describe`, of maps that :func:`keep_maps` keeps, and kept beside them."""
    stores = keep_maps(network, train, validation, data, device)
    fields = {name: value for name, value in vars(network.config).items() if not name.endswith("dropout")}
    name = f"described {cache_key(fields)}"
    if name not in stores[0]:
        one = copy.deepcopy(network).to(device).eval()

        def look(store: dict[str, Tensor], index: Tensor) -> dict[str, Tensor]:
            return one.maps_behind({tap: store[tap][index].float() for tap in one.kept})

        one.project([look(stores[0], torch.from_numpy(_first_look(train, data)).to(device))])
        stores[0][f"{name} projections"] = _flat_projections(one)
        for store in stores:
            parts = torch.arange(len(store["mask"]), device=device).split(256)
            store[name] = torch.cat(
                [one.describe_maps(look(store, i), store["mask"][i].float() / 255).half() for i in parts]
            )
    _set_projections(network, stores[0][f"{name} projections"])
    return Described(stores[0][name], stores[1][name])


def _first_look(train: Regions, data: RegionDataConfig) -> np.ndarray:
    """The training regions that projections are started on."""
    fit, _ = tuning_split(train.image_ids, every=data.hold_out)
    return fit[np.linspace(0, len(fit) - 1, min(len(fit), 512)).astype(np.int64)]


def _flat_projections(network: RegionClassifier) -> Tensor:
    return torch.cat([p.flatten().cpu() for p in _projections(network)] or [torch.zeros(1)])


def _set_projections(network: RegionClassifier, weights: Tensor) -> None:
    if mine := _projections(network):
        for parameter, part in zip(mine, weights.split([p.numel() for p in mine]), strict=True):
            parameter.copy_(part.view_as(parameter))


def _projections(network: RegionClassifier) -> list[Tensor]:
    return [pooling.reduce.weight for pooling in network.poolings().values() if pooling.reduce is not None]


def _described_key(
    network: RegionClassifier, train: Regions, validation: Regions, data: RegionDataConfig
) -> dict[str, Any]:
    weights = hashlib.sha256()
    for name, value in network.backbone.state_dict().items():
        weights.update(f"{name}{tuple(value.shape)}".encode() + value.cpu().numpy().tobytes())
    return {
        "regions": [train.path.name, validation.path.name],
        "hold_out": data.hold_out,
        "network": network.hparams_dict,
        "weights": weights.hexdigest(),
    }


def _in_order(
    regions: Regions, positions: np.ndarray, data: RegionDataConfig, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Batches of regions as they are validated."""
    source = _source(regions, positions, data)
    for indices in torch.arange(len(positions)).split(64):
        yield source.assemble(source.fetch(indices, 0), device)


# ------------------------------------------------------------------------------------------------------------- network


def build_model(config: O2PConfig, names: list[str]) -> RegionClassifier:
    """Build the network of a configuration, with its starting weights."""
    presented = {name: getattr(config.data, name) for name in ("canvas", "background", "side", "margin")}
    network = RegionClassifier(len(names), config.model, names=names, **presented)
    load_backbone_weights(network.backbone, network.config.backbone, config.model.weights)
    return network


class RegionModule(System):
    """The classifier with cross-entropy, SGD with a cosine schedule, and errors on all and on large regions."""

    def __init__(self, config: O2PConfig, data: RegionData) -> None:
        super().__init__()
        self.config = config
        self.model = build_model(config, data.classes)
        data.network = self.model
        areas = torch.from_numpy(data.validation_regions.areas)
        self.register_buffer("areas", areas, persistent=False)
        self.areas: Tensor
        self._image_ids = data.validation_regions.image_ids
        self.predictions: dict[str, np.ndarray] = {}
        self._collected: list[tuple[Tensor, ...]] = []
        self._calibration_batches = 5

    def scores(self, batch: dict[str, Tensor]) -> Tensor:
        """Scores (b, classes) of an assembled batch."""
        if "vector" in batch:
            return self.model.classify(batch["vector"])
        if "image" not in batch:
            return self.model.classify_maps(self._maps(batch), batch["mask"])
        return self.model(batch["image"], batch["mask"])

    def _maps(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The maps that the descriptors see, from pictures or from those that were kept."""
        if "image" in batch:
            return self.model.maps(batch["image"], batch["mask"])
        return self.model.maps_behind({tap: batch[f"map {tap}"] for tap in self.model.kept})

    def start(self, data: RegionData) -> None:
        """Prepare the device and, in a new run, measure the descriptor's mean and deviation."""
        if self.device.type == "cuda":
            self.model.backbone.to(memory_format=self.model.backbone.memory_format)  # type: ignore[call-overload]
        self.calibrate(data)

    @torch.no_grad()
    def calibrate(self, data: RegionData) -> None:
        """Measure what the descriptors are standardised and projected by on the first training batches, once."""
        if all(bool(one.calibrated) for one in self.model.descriptors()):
            return
        if not self.model.learns_features:
            batches = data.first_batches(50, self.device)
            self.model.calibrate_described(torch.cat([b["vector"] for b in batches]))
            return
        batches = data.first_batches(self._calibration_batches, self.device)
        self.model.calibrate_maps([(self._maps(b), b["mask"]) for b in batches])

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross-entropy of a batch."""
        logged = self.step % self.config.engine.log_every == 0
        watch: contextlib.AbstractContextManager[None] = self._watch() if logged else contextlib.nullcontext()
        with watch:
            scores = self.scores(batch)
        return nnf.cross_entropy(scores.float(), batch["target"], label_smoothing=self.config.optimizer.label_smoothing)

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        """Record rank, spectrum and gradient of the structured layer in the forward pass inside."""
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

    @torch.no_grad()
    def diagnose(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Spectrum and size of what the structured layer sees in a batch."""
        if not self.model.taps or "vector" in batch:
            return {"head": self.config.model.head, "structured_layer": None}
        tap, pooling = next(iter(self.model.poolings().items()))
        features, _ = self.model.cells(self._maps(batch), None, tap)
        finite = torch.isfinite(features.flatten(1)).all(-1)
        spectrum = _spectrum(pooling, features[finite][:32]) if bool(finite.any()) else features.new_zeros(0, 1)
        return {
            "head": self.config.model.head,
            "regions": len(features),
            "regions_with_finite_features": int(finite.sum()),
            "feature_max": float(features[finite].abs().max()) if bool(finite.any()) else None,
            "eps": pooling.eps,
            "power": pooling.power,
            "spectrum": [[float(v) for v in row] for row in spectrum.cpu()],
        }

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """Collect predictions and losses on the device."""
        scores = self.scores(batch).float()
        loss = nnf.cross_entropy(scores, batch["target"], reduction="none")
        self._collected.append((batch["index"], batch["target"], scores.argmax(-1), loss))

    def validation_end(self, data: RegionData) -> dict[str, float]:
        """Errors over all processes, in percent."""
        mine = [torch.cat(part).cpu() for part in zip(*self._collected, strict=True)]
        index, target, predicted, loss = (torch.cat(parts) for parts in zip(*gather(mine), strict=True))
        self._collected.clear()
        wrong = (predicted != target).float()
        large = self.areas.cpu()[index] >= LARGE
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
        """SGD with momentum; linear warm-up, then half a cosine to zero."""
        config = self.config.optimizer
        groups = self.model.parameter_groups(config.rate, config.backbone_factor, config.decay)
        fused = self.device.type == "cuda"
        optimizer = torch.optim.SGD(groups, lr=config.rate, momentum=config.momentum, fused=fused)
        if fused and config.momentum:  # torch leaves them unwritten where a scaler of float16 skips the first step
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
    """Ascending eigenvalues (b, min(m, d)) of what is pooled, before weights are applied and ε is added."""
    f = pooling.features(features).double()
    return batched_eigh(f @ f.mT if f.shape[-2] < f.shape[-1] else f.mT @ f)[0].clamp_min(0)


# ------------------------------------------------------------------------------------------------------------- results


def save_predictions(run: RunFolder, module: RegionModule) -> str:
    """Write the last validation's predictions to the run folder; return their SHA-256."""
    path = run.predictions_path("validation.npz")
    np.savez_compressed(path, **module.predictions)  # type: ignore[arg-type]
    return hashlib.sha256(path.read_bytes()).hexdigest()


def export(run: RunFolder, module: RegionModule, data: RegionData) -> None:
    """Write the trained model, and its predictions."""
    module.model.save_pretrained(run.path / "model")
    evaluate(module.config, module, data)  # with the chosen weights, which need not be the last
    save_predictions(run, module)


def figures(run: RunFolder, module: RegionModule, data: RegionData) -> None:
    """Draw curves and the confusion of the last validation."""
    from matbackprop.vision.report.figures import confusion_matrix, curves

    curves(run.read_metrics(), run.figure_path("curves"))
    table = confusion(module.predictions["target"], module.predictions["predicted"], len(data.classes))
    confusion_matrix(table, data.classes, run.figure_path("confusion"))


def confusion(target: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Counts (classes, classes): row the true class, column the predicted one.

    Example:
        >>> confusion(np.array([0, 1, 1]), np.array([0, 0, 1]), 2).tolist()
        [[1, 0], [1, 1]]
    """
    cells = target.astype(np.int64) * classes + predicted.astype(np.int64)
    return np.bincount(cells, minlength=classes**2).reshape(classes, classes)


def build(config: O2PConfig) -> tuple[RegionModule, RegionData]:
    """Build the system and the data of a configuration."""
    data = RegionData(config)
    return RegionModule(config, data), data
