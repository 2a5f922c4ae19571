"""Where a training step's time goes: data, network, structured layer, optimiser."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from matbackprop.files import atomic_write

__all__ = ["StepProfile", "structured_layers"]

PARTS = (
    "data",
    "network forward",
    "layer forward",
    "network backward",
    "layer backward",
    "gradient checks",
    "optimiser",
    "loop",
)


def structured_layers(module: nn.Module) -> list[nn.Module]:
    """Return the outermost submodules that are layers of :mod:`matbackprop.nn`."""
    found: list[nn.Module] = []

    def walk(parent: nn.Module) -> None:
        for child in parent.children():
            if type(child).__module__.startswith("matbackprop.nn"):
                found.append(child)
            else:
                walk(child)

    walk(module)
    return found


class _Mark(torch.autograd.Function):
    """The identity, which says when the backward pass comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.call()
        return gradient, None


class StepProfile(pl.Callback):
    """Times ``steps`` steps after ``skip`` and divides them; the device is waited for at every boundary meanwhile.

    The structured layer's part is that of submodules from :mod:`matbackprop.nn` and of the methods that the Lightning
    module names in ``structured_methods``.

    Args:
        path: the JSON file of the result.
        steps: steps to average.
        skip: steps left out at first.
    """

    def __init__(self, path: Path, steps: int = 20, skip: int = 5) -> None:
        self.path = path
        self.steps = steps
        self.skip = skip
        self.result: dict[str, Any] | None = None
        self._seen = 0
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._layer = {"forward": 0.0, "backward": 0.0}
        self._undo: list[Callable[[], Any]] = []
        self._wait: Any = lambda: None
        self._mark = 0.0
        self._counted = 0

    # The order of hooks in a step: (data) batch_start, forward, before_backward, after_backward,
    # before_optimizer_step, step, before_zero_grad is inside the closure before backward, batch_end.

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if pl_module.device.type == "cuda":
            self._wait = torch.cuda.synchronize
        for layer in structured_layers(pl_module):
            self._watch(layer)
        for name in getattr(pl_module, "structured_methods", ()):
            self._watch_method(pl_module, name)
        self._begin()

    def _clock(self) -> tuple[Callable[[str], None], Callable[[str], None]]:
        """Return functions that start and stop the clock of a direction."""
        starts: dict[str, float] = {}

        def start(direction: str) -> None:
            starts[direction] = self._now()

        def stop(direction: str) -> None:
            if direction in starts:
                self._layer[direction] += self._now() - starts.pop(direction)

        return start, stop

    def _watch(self, layer: nn.Module) -> None:
        start, stop = self._clock()
        self._undo += [
            layer.register_forward_pre_hook(lambda *_: start("forward")).remove,
            layer.register_forward_hook(lambda *_: stop("forward")).remove,
            layer.register_full_backward_pre_hook(lambda *_: start("backward")).remove,
            layer.register_full_backward_hook(lambda *_: stop("backward")).remove,
        ]

    def _watch_method(self, module: nn.Module, name: str) -> None:
        method = getattr(module, name)
        start, stop = self._clock()

        def marked(value: Any, call: Callable[[], None]) -> Any:
            return _Mark.apply(value, call) if isinstance(value, Tensor) and value.requires_grad else value

        def timed(*args: Any, **kwargs: Any) -> Any:
            args = tuple(marked(a, lambda: stop("backward")) for a in args)
            start("forward")
            value = method(*args, **kwargs)
            stop("forward")
            return marked(value, lambda: start("backward"))

        object.__setattr__(module, name, timed)
        self._undo.append(lambda: object.__delattr__(module, name))

    def _now(self) -> float:
        self._wait()
        return time.perf_counter()

    def _begin(self) -> None:
        self._layer = {"forward": 0.0, "backward": 0.0}
        self._step = dict.fromkeys(PARTS, 0.0)
        self._mark = self._now()

    def _until_now(self, part: str) -> None:
        now = self._now()
        self._step[part] += now - self._mark
        self._mark = now

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._counting:
            self._until_now("data")

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        if self._counting:
            self._until_now("network forward")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._counting:
            self._until_now("loop")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._counting:
            self._until_now("network backward")

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._counting:  # this callback comes after the guard
            self._until_now("gradient checks")

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not self._counting:
            return
        self._until_now("optimiser")
        self._seen += 1
        planned = int(trainer.num_training_batches * (trainer.max_epochs or 1))
        if self._seen > (self.skip if planned >= self.skip + self.steps else min(1, planned - 1)):
            self._step["layer forward"] = self._layer["forward"]
            self._step["network forward"] -= self._layer["forward"]
            self._step["layer backward"] = self._layer["backward"]
            self._step["network backward"] -= self._layer["backward"]
            self._counted += 1
            for part, seconds in self._step.items():
                self._seconds[part] += seconds
        if self._counted >= self.steps:
            self._finish(trainer)
        else:
            self._begin()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._counting:
            self._begin()  # validation and checkpoints are no part of a step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._counting:
            self._finish(trainer)

    @property
    def _counting(self) -> bool:
        return self.result is None

    def _finish(self, trainer: pl.Trainer) -> None:
        for undo in self._undo:
            undo()
        self._undo = []
        count = max(self._counted, 1)
        parts = {part: 1e3 * seconds / count for part, seconds in self._seconds.items()}
        total = sum(parts.values())
        self.result = {
            "steps": self._counted,
            "milliseconds": parts,
            "total_milliseconds": total,
            "share": {part: value / total if total else 0.0 for part, value in parts.items()},
            "device": str(trainer.strategy.root_device),
            "note": "the device is waited for at every boundary, so the sum is more than an undisturbed step",
        }
        if trainer.is_global_zero:
            atomic_write(self.path, json.dumps(self.result, indent=2) + "\n")
            for line in self.table():
                print(line)

    def table(self) -> Iterable[str]:
        """Yield the lines of a small table."""
        assert self.result is not None
        yield f"A training step, mean of {self.result['steps']} steps on {self.result['device']}:"
        for part, value in self.result["milliseconds"].items():
            yield f"  {part:<18}{value:>10.3f} ms{self.result['share'][part]:>8.1%}"
        yield f"  {'total':<18}{self.result['total_milliseconds']:>10.3f} ms"
