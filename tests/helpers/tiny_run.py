"""A tiny system for the engine's tests: regression with dropout, keyed augmentation, momentum and a schedule."""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from matbackprop.vision.training.checkpoint import load_checkpoint
from matbackprop.vision.training.config import EngineConfig
from matbackprop.vision.training.engine import fit, seed_all
from matbackprop.vision.training.loading import EpochLoader, ItemSource, generator_for
from matbackprop.vision.training.system import Data, System


@dataclass
class TinyConfig:
    engine: EngineConfig = field(default_factory=EngineConfig)
    batch: int = 4
    items: int = 24
    dropout: float = 0.3
    poison: int = -1
    pause: float = 0.0
    held_out: int = 7


class TinyData(Data):
    def __init__(self, config: TinyConfig):
        self.config = config

    def item(self, index, epoch):
        x = torch.linspace(-1, 1, 6, dtype=torch.float64) * (index + 1) / self.config.items
        noise = torch.randn(6, generator=generator_for(self.config.engine.seed, epoch, index), dtype=torch.float64)
        x = x + 0.1 * noise
        if index == self.config.poison and epoch == 1:
            x = x * float("inf")
        return x, torch.tensor(float(index % 3), dtype=torch.float64)

    def train_loader(self):
        c = self.config
        return EpochLoader(ItemSource(c.items, self.item), c.batch, seed=c.engine.seed)

    def validation_loader(self):
        c = self.config
        return EpochLoader(ItemSource(c.held_out, lambda i, e: self.item(i, 0)), c.batch, shuffle=False)


class TinyModule(System):
    def __init__(self, config: TinyConfig):
        super().__init__()
        self.config = config
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(config.dropout), nn.Linear(8, 1)).double()

    def loss(self, batch):
        x, y = batch
        return (self.net(x).squeeze(-1) - y).square().mean()

    def training_step(self, batch):
        if self.config.pause:
            time.sleep(self.config.pause)
        loss = self.loss(batch)
        self.record("train/twice", 2 * loss, weight=len(batch[1]))
        return loss

    def validation_step(self, batch):
        torch.rand(1)  # validation may draw without changing the training
        self.record("val/loss", self.loss(batch), len(batch[1]))

    def optimizers(self, steps):
        fused = self.device.type == "cuda"
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, fused=fused)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)


class GroupedModule(TinyModule):
    """Groups by shape, in another order than the parameters; a frozen layer; a start that uses the network."""

    def __init__(self, config):
        super().__init__(config)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.net[2].requires_grad_(False)
        self.register_buffer("first_output", torch.tensor(torch.nan, dtype=torch.float64))

    def start(self, data):
        if self.first_output.isnan():
            self.first_output.fill_(self.net(torch.ones(1, 6, dtype=torch.float64, device=self.device)).item())

    def optimizers(self, steps):
        learning = [p for p in self.parameters() if p.requires_grad]
        vectors = [p for p in reversed(learning) if p.ndim == 1]
        matrices = [p for p in learning if p.ndim == 2]
        assert len(vectors) == len(matrices) == 2
        groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.3, "lr": 0.01}]
        return torch.optim.AdamW(groups, lr=0.02, fused=self.device.type == "cuda"), None


def tiny_config(run, *, seed=3, max_epochs=3, **options) -> TinyConfig:
    """Return a configuration; options name fields of the engine or of TinyConfig."""
    base = {
        "accelerator": "cpu",
        "log_every": 1,
        "checkpoint_min_seconds": 0.0,
        "progress": False,
        "tensorboard": False,
        "report": False,
    }
    own = {k: options.pop(k) for k in list(options) if k in TinyConfig.__dataclass_fields__ and k != "engine"}
    engine = EngineConfig(run=Path(run), seed=seed, max_epochs=max_epochs, **(base | options))
    return replace(TinyConfig(engine=engine), **own)


def train(config: TinyConfig, kind=TinyModule):
    """Train and return (run folder, module)."""
    seed_all(config.engine.seed)
    module = kind(config)
    return fit(config, module, TinyData(config), name="tiny"), module


def last_checkpoint(run):
    return load_checkpoint(run.checkpoints / "last.ckpt")


def lines(run):
    """The lines of metrics without times."""
    drop = {"time", "train/steps_per_second"}
    return [{k: v for k, v in m.items() if k not in drop} for m in run.read_metrics()]


def assert_equal_tensors(one, two):
    assert one.keys() == two.keys()
    for key in one:
        assert torch.equal(one[key], two[key]), key


def at_step(step, act, hook="training_step"):
    """Call ``act()`` before a step, in this process only."""
    original = getattr(TinyModule, hook)

    def patched(self, batch):
        if self.step == step:
            act()
        return original(self, batch)

    setattr(TinyModule, hook, patched)
