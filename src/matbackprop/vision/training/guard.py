"""A guard that stops a training at NaN or Inf before a checkpoint is written.

A single process on the CPU checks every step before the optimizer runs. Otherwise flags stay on the
device and are read every ``guard_every`` batches, so that no step synchronizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from matbackprop.errors import NonFiniteError
from matbackprop.vision.distributed import gather
from matbackprop.vision.training.config import EngineConfig

if TYPE_CHECKING:
    from matbackprop.vision.training.system import System


class Guard:
    """Clips gradients and raises NonFiniteError at the first loss or gradient that is not finite.

    Args:
        engine: ``gradient_clip`` and ``guard_every``.
        system: the system; ``train/gradient_norm`` is recorded in it.
        optimizer: its optimizer.
        checkpoint: the last checkpoint, named in messages.
    """

    def __init__(self, engine: EngineConfig, system: System, optimizer: Optimizer, checkpoint: Path) -> None:
        self.system, self.optimizer, self.checkpoint = system, optimizer, checkpoint
        self.clip = engine.gradient_clip
        self.every = 1 if system.device.type == "cpu" and system.processes == 1 else engine.guard_every
        self._places: list[str] = []  # of the batches since the last check
        self._flags: list[Tensor] = []  # whether their loss and gradient are finite

    def loss(self, loss: Tensor, place: str) -> None:
        """Check the loss of the batch at ``place``."""
        self._places.append(place)
        self._flags.append(torch.isfinite(loss.detach()))

    @torch.no_grad()
    def gradient(self) -> None:
        """Record, check and clip the gradient before an optimizer step."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if parameters:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            self.system.record("train/gradient_norm", norm)
            if self.clip is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, self.clip, norm)
            self._flags[-1] = self._flags[-1] & torch.isfinite(norm)
        if len(self._flags) >= self.every:
            self.check()

    def check(self) -> None:
        """Raise if a loss or gradient since the last check is not finite. All processes call it together."""
        finite = torch.stack(self._flags).tolist() if self._flags else []
        bad = [i for i in gather(finite.index(False) if False in finite else None) if i is not None]
        if bad:
            gather(None)  # a process that ends now would end the others
            raise self.error(f"The loss or its gradient is not finite at {self._places[min(bad)]}")
        self._places.clear()
        self._flags.clear()

    @torch.no_grad()
    def check_all(self) -> None:
        """Raise unless losses, gradients and weights are finite. All processes call it together."""
        self.check()
        weights = [p for p in self.system.parameters() if p.is_floating_point() and p.numel()]
        finite = not weights or bool(torch.isfinite(torch.nn.utils.get_total_norm(weights)))
        if not all(gather(finite)):
            raise self.error(f"A weight is not finite at step {self.system.step}")

    def error(self, problem: str) -> NonFiniteError:
        """Return an error that names the last good checkpoint."""
        last = f"The last good checkpoint is {self.checkpoint}." if self.checkpoint.exists() else "No checkpoint yet."
        return NonFiniteError(f"{problem}. {last} Use a smaller learning rate, --gradient-clip, or a larger eps.")
