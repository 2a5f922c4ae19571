"""Times of the parts of a training step."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from matbackprop.vision.files import atomic_write

PARTS = ("data", "network forward", "layer forward", "network backward", "layer backward", "gradient checks",
         "optimizer", "loop")  # fmt: skip
SKIPPED = 5
"""Warm-up steps."""


def structured_layers(module: nn.Module) -> list[nn.Module]:
    """Return the outermost layers of :mod:`matbackprop.nn`, or with an attribute ``structured = True``."""
    layers: list[nn.Module] = []
    for child in module.children():
        ours = type(child).__module__.startswith("matbackprop.nn") or getattr(child, "structured", False)
        layers += [child] if ours else structured_layers(child)
    return layers


class StepProfile:
    """Times the parts of training steps. The device is synchronized at every boundary.

    The loop calls :meth:`begin` before a step, :meth:`mark` with the name of the part that has just
    ended, and :meth:`end` after the step.

    Args:
        system: the system.
        path: JSON file of the result.
        planned: number of steps of the training.
        steps: number of steps to average. With 0 nothing is measured.
    """

    def __init__(self, system: nn.Module, path: Path, planned: int, steps: int = 20) -> None:
        self.path, self.steps, self.active = path, steps, steps > 0
        self.skip = SKIPPED if planned >= SKIPPED + steps else min(1, planned - 1)
        self.result: dict[str, Any] | None = None
        self._device = next(system.parameters()).device
        self._seen = self._counted = 0
        self._seconds = dict.fromkeys(PARTS, 0.0)
        layers = structured_layers(system) if self.active else []
        self._hooks = [hook for layer in layers for hook in self._watch(layer)]

    def _watch(self, layer: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        started: dict[str, float] = {}

        def start(direction: str, *_: Any) -> None:
            started[direction] = self._now()

        def stop(direction: str, *_: Any) -> None:
            seconds = self._now() - started[direction]
            self._step[f"layer {direction}"] += seconds
            self._step[f"network {direction}"] -= seconds

        yield layer.register_forward_pre_hook(partial(start, "forward"))
        yield layer.register_forward_hook(partial(stop, "forward"))
        yield layer.register_full_backward_pre_hook(partial(start, "backward"))
        yield layer.register_full_backward_hook(partial(stop, "backward"))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def begin(self) -> None:
        """Start a step."""
        if self.active:
            self._step = dict.fromkeys(PARTS, 0.0)
            self._last = self._now()

    def mark(self, part: str) -> None:
        """Add the time since the last mark to a part."""
        if self.active:
            now = self._now()
            self._step[part] += now - self._last
            self._last = now

    def end(self) -> None:
        """End a step."""
        if not self.active:
            return
        self.mark("loop")
        self._seen += 1
        if self._seen > self.skip:
            self._counted += 1
            for part, seconds in self._step.items():
                self._seconds[part] += seconds
        if self._counted >= self.steps:
            self.finish()

    def finish(self) -> None:
        """Write and print the result once."""
        if not self.active:
            return
        self.active = False
        for hook in self._hooks:
            hook.remove()
        parts = {part: 1e3 * seconds / max(self._counted, 1) for part, seconds in self._seconds.items()}
        total = sum(parts.values())
        fractions = {part: value / total if total else 0.0 for part, value in parts.items()}
        self.result = {
            "steps": self._counted,
            "milliseconds": parts,
            "total_milliseconds": total,
            "share": fractions,
            "device": str(self._device),
            "note": "The device is synchronized at every boundary, so the total exceeds that of an undisturbed step.",
        }
        atomic_write(self.path, json.dumps(self.result, indent=2) + "\n")
        print(f"A training step, mean of {self._counted} steps on {self._device}:")
        for part, value in parts.items():
            print(f"  {part:<18}{value:>10.3f} ms{fractions[part]:>8.1%}")
        print(f"  {'total':<18}{total:>10.3f} ms")
