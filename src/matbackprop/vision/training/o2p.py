"""Recipe ``o2p``: train a region classifier on COCO-format data."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as nnf

from matbackprop.vision.data.coco_regions import ImageBatch, Regions
from matbackprop.vision.distributed import gather
from matbackprop.vision.models.deep_o2p import RegionClassifier, SecondOrderVector
from matbackprop.vision.training.config import O2PConfig
from matbackprop.vision.training.engine import evaluate
from matbackprop.vision.training.regions import RegionBatch, RegionData, VectorBatch, describe, region_sets
from matbackprop.vision.training.run_folder import RunFolder
from matbackprop.vision.training.start import load_start
from matbackprop.vision.training.system import System

LARGE = 400  #: The error on regions with at least this many pixels is reported separately.


def build_model(config: O2PConfig, names: list[str]) -> RegionClassifier:
    """Build the network of a configuration, with its starting weights."""
    presented = {name: getattr(config.data, name) for name in ("canvas", "background", "side", "margin")}
    network = RegionClassifier(len(names), config.model, names=names, **presented)
    load_start(network, network.config.backbone, config.model.weights)
    return network


class RegionModule(System):
    """Region classifier with cross-entropy, trained by SGD with a cosine schedule."""

    def __init__(self, config: O2PConfig, model: RegionClassifier, validation: Regions) -> None:
        super().__init__()
        self.config, self.model = config, model
        self._areas, self._image_ids = torch.from_numpy(validation.areas), validation.image_ids
        self.predictions: dict[str, np.ndarray] = {}
        self._collected: list[tuple[Tensor, ...]] = []
        for pooling in [*model.poolings().values()][:1]:
            pooling.register_forward_hook(self._record_spectrum)  # type: ignore[arg-type]

    def scores(self, batch: RegionBatch) -> Tensor:
        """Return scores (b, classes)."""
        if isinstance(batch, VectorBatch):
            return self.model.classify(batch.vector)
        return self.model(batch.image, batch.mask)

    def start(self, data: RegionData) -> None:
        """Choose the memory layout and, in a new run, calibrate the descriptors on the first training batches."""
        if self.device.type == "cuda":
            self.model.backbone.to(memory_format=self.model.backbone.memory_format)  # type: ignore[call-overload]
        if self.model.trains_features:
            batches = data.first_batches(5, self.device)
            self.model.calibrate([(b.image, b.mask) for b in batches if isinstance(b, ImageBatch)])

    def training_step(self, batch: RegionBatch) -> Tensor:
        scores = self.scores(batch).float()
        return nnf.cross_entropy(scores, batch.target, label_smoothing=self.config.optimizer.label_smoothing)

    def _record_spectrum(self, pooling: SecondOrderVector, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Record rank, spectrum and gradient of the structured layer every ``log_every`` steps."""
        if not self.training or self.step % self.config.engine.log_every:
            return
        self.record_layer(pooling.features(inputs[0][:8]), output, rtol=1e-6)
        self.record("layer/eps", pooling.config.eps)
        if pooling.power is not None:
            self.record("layer/power", pooling.power)

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
        """Return SGD with momentum, linear warm-up and a cosine schedule to zero."""
        config = self.config.optimizer
        groups = self.model.parameter_groups(config.rate, config.backbone_factor, config.decay)
        fused = self.device.type == "cuda"
        optimizer = torch.optim.SGD(groups, lr=config.rate, momentum=config.momentum, fused=fused)
        warmup = config.warmup * steps / max(self.config.engine.max_epochs, 1)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            return 0.5 * (1 + math.cos(math.pi * min((step - warmup) / max(steps - warmup, 1), 1.0)))

        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def save_predictions(run: RunFolder, module: RegionModule) -> str:
    """Write the predictions of the last validation and return their SHA-256."""
    path = run.predictions / "validation.npz"
    np.savez_compressed(path, **module.predictions)  # type: ignore[arg-type]
    return hashlib.sha256(path.read_bytes()).hexdigest()


def export(run: RunFolder, module: RegionModule, data: RegionData) -> None:
    """Write the trained model and its predictions."""
    module.model.save_pretrained(run.path / "model")
    evaluate(module.config, module, data)  # the best weights may differ from the last
    save_predictions(run, module)


def figures(run: RunFolder, module: RegionModule, data: RegionData) -> None:
    """Draw the confusion matrix of the last validation."""
    from matbackprop.vision.report.figures import confusion_matrix

    count = len(data.classes)
    cells = module.predictions["target"].astype(np.int64) * count + module.predictions["predicted"]
    table = np.bincount(cells, minlength=count**2).reshape(count, count)
    confusion_matrix(table, data.classes, run.figure_path("confusion"))


def build(config: O2PConfig) -> tuple[RegionModule, RegionData]:
    """Build the system and the data of a configuration."""
    regions = region_sets(config.data)
    model = build_model(config, regions[0].classes)
    data = RegionData(config, regions, describe(model, regions, config))
    return RegionModule(config, model, data.validation_regions), data
