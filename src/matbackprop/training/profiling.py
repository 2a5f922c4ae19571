"""Where a training step's time goes: data, network, structured layer, optimiser."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from matbackprop.files import atomic_write

PARTS = ("data", "network forward", "layer forward", "network backward", "layer backward", "gradient checks",
         "optimiser", "loop")  # fmt: skip
SKIPPED = 5
"""Steps that are left out at first, or fewer where the training is short."""


def structured_layers(module: nn.Module) -> list[nn.Module]:
    """Return the outermost submodules that are layers of :mod:`matbackprop.nn`, or say so by ``structured = True``."""
    layers: list[nn.Module] = []
    for child in module.children():
        ours = type(child).__module__.startswith("matbackprop.nn") or getattr(child, "structured", False)
        layers += [child] if ours else structured_layers(child)
    return layers


class StepProfile:
    """Times steps after the first few and divides them; the device is waited for at every boundary meanwhile.

    The loop calls :meth:`begin` before a step, :meth:`mark` with the name of the part that has just ended, and
    :meth:`end` after the step. The structured layer's part is that of :func:`structured_layers`.

    Args:
        system: what is trained.
        path: the JSON file of the result.
        planned: steps that the training will have.
        steps: steps to average; with 0 nothing is measured.
    """

    def __init__(self, system: nn.Module, path: Path, planned: int, steps: int = 20) -> None:
        self.path = path
        self.steps = steps
        self.active = steps > 0
        self.skip = SKIPPED if planned >= SKIPPED + steps else min(1, planned - 1)
        self.result: dict[str, Any] | None = None
        self._device = next(system.parameters()).device
        self._seen = self._counted = 0
        self._seconds = dict.fromkeys(PARTS, 0.0)
        layers = structured_layers(system) if self.active else []
        self._hooks = [hook for layer in layers for hook in self._watch(layer)]

    def _watch(self, layer: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        started = {"forward": 0.0, "backward": 0.0}

        def start(direction: str) -> Callable[..., None]:
            return lambda *_: started.update({direction: self._now()})

        def stop(direction: str) -> Callable[..., None]:
            def add(*_: Any) -> None:
                self._layer[direction] += self._now() - started[direction]

            return add

        yield layer.register_forward_pre_hook(start("forward"))
        yield layer.register_forward_hook(stop("forward"))
        yield layer.register_full_backward_pre_hook(start("backward"))
        yield layer.register_full_backward_hook(stop("backward"))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def begin(self) -> None:
        """Start a step, whose first part is reading the data; validation and checkpoints are no part of a step."""
        if self.active:
            self._layer = {"forward": 0.0, "backward": 0.0}
            self._step = dict.fromkeys(PARTS, 0.0)
            self._last = self._now()

    def mark(self, part: str) -> None:
        """Count the time since the last mark as a part's."""
        if self.active:
            now = self._now()
            self._step[part] += now - self._last
            self._last = now

    def end(self) -> None:
        """Count the step."""
        if not self.active:
            return
        self.mark("loop")
        self._seen += 1
        if self._seen > self.skip:
            for direction, seconds in self._layer.items():
                self._step[f"layer {direction}"] = seconds
                self._step[f"network {direction}"] -= seconds
            self._counted += 1
            for part, seconds in self._step.items():
                self._seconds[part] += seconds
        if self._counted >= self.steps:
            self.finish()

    def finish(self) -> None:
        """Write and print the result, if that has not been done."""
        if not self.active:
            return
        self.active = False
        for hook in self._hooks:
            hook.remove()
        parts = {part: 1e3 * seconds / max(self._counted, 1) for part, seconds in self._seconds.items()}
        total = sum(parts.values())
        self.result = {
            "steps": self._counted,
            "milliseconds": parts,
            "total_milliseconds": total,
            "share": {part: value / total if total else 0.0 for part, value in parts.items()},
            "device": str(self._device),
            "note": "the device is waited for at every boundary, so the sum is more than an undisturbed step",
        }
        atomic_write(self.path, json.dumps(self.result, indent=2) + "\n")
        print(f"A training step, mean of {self._counted} steps on {self._device}:")
        for part, value in parts.items():
            print(f"  {part:<18}{value:>10.3f} ms{self.result['share'][part]:>8.1%}")
        print(f"  {'total':<18}{total:>10.3f} ms")
