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
WARM_UP = 5  # steps


def structured_layers(module: nn.Module) -> list[nn.Module]:
    """Return the outermost layers of :mod:`matbackprop.nn`, or with an attribute ``structured = True``."""
    layers: list[nn.Module] = []
    for child in module.children():
        ours = type(child).__module__.startswith("matbackprop.nn") or getattr(child, "structured", False)
        layers += [child] if ours else structured_layers(child)
    return layers


class StepProfile:
    """Times the parts of ``steps`` training steps; with 0 steps, nothing. Synchronizes at every boundary.

    The loop calls :meth:`begin` before the first step, :meth:`mark` with the name of the part that has
    just ended, and :meth:`end` after a step.
    """

    def __init__(self, system: nn.Module, planned: int, steps: int) -> None:
        self.steps, self.active = steps, steps > 0
        self._skipped = WARM_UP if planned >= WARM_UP + steps else min(1, planned - 1)
        self._device = next(system.parameters()).device
        self._history: list[dict[str, float]] = []
        layers = structured_layers(system) if self.active else []
        self._hooks = [hook for layer in layers for hook in self._time(layer)]

    def _time(self, layer: nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
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
        """Start the clock."""
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
        """End a step and begin the next."""
        if not self.active:
            return
        self.mark("loop")
        self._history.append(self._step)
        self.begin()
        if len(self._history) == self._skipped + self.steps:
            self.active = False
            for hook in self._hooks:
                hook.remove()

    def write(self, path: Path) -> float:
        """Write and print the means; return the milliseconds of a step."""
        steps = self._history[self._skipped :]
        parts = {part: 1e3 * sum(step[part] for step in steps) / max(len(steps), 1) for part in PARTS}
        total = sum(parts.values())
        fractions = {part: value / total if total else 0.0 for part, value in parts.items()}
        result = {"steps": len(steps), "device": str(self._device), "milliseconds": parts,
                  "total_milliseconds": total, "share": fractions}  # fmt: skip
        atomic_write(path, json.dumps(result, indent=2) + "\n")
        print(f"A training step, mean of {len(steps)} steps on {self._device}:")
        for part, value in parts.items():
            print(f"  {part:<18}{value:>10.3f} ms{fractions[part]:>8.1%}")
        print(f"  {'total':<18}{total:>10.3f} ms")
        return total
