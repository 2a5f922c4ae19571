"""Base classes of a recipe: the system to train and its data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from matbackprop.solvers import batched_eigh
from matbackprop.vision.training.config import AdamWConfig
from matbackprop.vision.training.loading import EpochLoader


class Means:
    """Weighted means of named numbers. Sums are kept on their device until they are read."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}  # name → sum of weighted values, sum of weights

    def add(self, name: str, value: Tensor | float, weight: float = 1.0) -> None:
        """Add a scalar with a weight, usually the number of averaged items."""
        value = torch.as_tensor(value).detach().double()
        pair = torch.stack([value * weight, torch.full_like(value, weight)])
        self.sums[name] = pair + self.sums[name].to(pair.device) if name in self.sums else pair

    def flush(self, device: torch.device) -> dict[str, float]:
        """Return the means over all processes, computed on ``device``, and reset them."""
        sums, self.sums = self.sums, {}
        if not sums:
            return {}
        names = sorted(sums)  # the same in every process
        table = torch.stack([sums[name].to(device) for name in names])
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(table)
        return {name: s / w if w else float("nan") for name, (s, w) in zip(names, table.tolist(), strict=True)}


class System(nn.Module, ABC):
    """Base class of a network with its loss, metrics and optimizer.

    The engine sets ``step``, the number of completed optimizer steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.means = Means()

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    def record(self, name: str, value: Tensor | float, weight: float = 1.0) -> None:
        """Average a scalar into the next line of metrics, over steps and processes, without synchronizing."""
        self.means.add(name, value, weight)

    def record_layer(self, f: Tensor, output: Tensor, *, rtol: float) -> Tensor:
        """Record rank and spectrum of FᵀF for features (b, m, d), and the gradient norm of a layer's output.

        Eigenvalues below ``rtol`` times the largest do not count for the rank. Returns the eigenvalues, ascending.
        """
        with torch.no_grad():
            f = f.double()
            values = batched_eigh(f @ f.mT if f.shape[-2] < f.shape[-1] else f.mT @ f)[0].clamp(min=0)
        self.record("layer/eigen_max", values[:, -1].mean())
        self.record("layer/eigen_min", values[:, 0].mean())
        self.record("layer/rank", (values > rtol * values[:, -1:]).double().sum(-1).mean())
        if output.requires_grad:
            output.register_hook(lambda g: self.record("layer/gradient_norm", g.detach().float().norm()))
        return values

    def start(self, data: Any) -> None:
        """Prepare for training. Called after moving parameters to the device and loading a checkpoint."""

    @abstractmethod
    def optimizers(self, steps: int) -> tuple[Optimizer, LRScheduler | None]:
        """Return the optimizer and an optional schedule, which is updated after every step."""

    @abstractmethod
    def training_step(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""

    def forward(self, batch: Any) -> Tensor:
        """Call :meth:`training_step`, for the gradient averaging of DDP."""
        return self.training_step(batch)

    def validation_step(self, batch: Any) -> None:
        """Record metrics named ``val/…`` of a batch."""

    def validation_end(self, data: Any) -> Mapping[str, float]:
        """Return metrics of the whole validation, the same in every process."""
        return {}


def adamw(
    model: nn.Module, backbone: nn.Module, config: AdamWConfig, steps: int, *, warmup: float
) -> tuple[Optimizer, LRScheduler]:
    """Return AdamW with a one-cycle schedule, with different learning rates for the backbone and for other layers.

    A rate of 0 freezes the backbone. ``warmup`` is the fraction of the steps in which the learning rates increase.
    """
    if config.backbone_rate == 0:
        backbone.requires_grad_(False)
    known = {id(p) for p in backbone.parameters()}
    new = [p for p in model.parameters() if id(p) not in known]
    body = [p for p in backbone.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": new, "lr": config.rate}]
    groups += [{"params": body, "lr": config.backbone_rate}] if body else []
    optimizer = torch.optim.AdamW(groups, weight_decay=config.decay, fused=new[0].is_cuda)
    rates = [group["lr"] for group in groups]
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=max(2, steps), pct_start=warmup)


class Data(ABC):
    """Base class of training and validation data."""

    may_choose = True  #: Whether the validation selects the best checkpoint. If not, the last weights are the result.

    @abstractmethod
    def train_loader(self) -> EpochLoader:
        """Return the training batches."""

    def validation_loader(self) -> EpochLoader | None:
        """Return the validation batches, or None."""
        return None

    def on_device(self, batch: Any, device: torch.device, *, training: bool) -> Any:
        """Move the tensors of a batch to ``device``. Override to augment on the device."""
        return apply_to_collection(batch, Tensor, lambda tensor: tensor.to(device, non_blocking=True))
