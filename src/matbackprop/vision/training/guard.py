"""What watches a training: a guard that stops it at NaN or Inf, and a profile of where a step's time goes.

The guard stops before a checkpoint can be spoiled, and says what it met.

On the CPU every step is checked before the optimiser sees the gradient. On a GPU a flag is kept on the device and read
every ``guard_every`` batches, so that no step waits; fused optimisers skip their update on the device from the first
bad gradient on, so that the weights are still those of that step when the flag is read. No checkpoint is written
without reading the flag.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from matbackprop.errors import CheckpointError, NonFiniteError
from matbackprop.vision.files import atomic_write, plain_numbers
from matbackprop.vision.processes import any_process
from matbackprop.vision.training.config import EngineConfig
from matbackprop.vision.training.run_folder import RunFolder, latest_checkpoint, load_checkpoint

if TYPE_CHECKING:
    from matbackprop.vision.training.engine import System


def flatten_tensors(value: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (dotted name, tensor) for all tensors in nested dicts, lists, tuples and dataclasses."""
    if isinstance(value, Tensor):
        yield prefix or "batch", value
        return
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", range(len(value)))
        items = zip(names, value, strict=True)
    elif hasattr(value, "__dict__"):
        items = vars(value).items()
    else:
        return
    for key, item in items:
        yield from flatten_tensors(item, f"{prefix}.{key}" if prefix else str(key))


class Guard:
    """Measures and clips the gradient's norm and stops at the first loss or gradient that is not finite.

    The loop calls :meth:`batch`, :meth:`loss` and :meth:`gradient` in every step, then :meth:`after_batch`, and
    :meth:`check_weights` before it saves.

    Args:
        run: where the report goes.
        config: ``gradient_clip``, ``guard_every`` and ``accumulate``.
        system: what is trained; it records ``train/gradient_norm``.
        optimizer: the system's.
        rank: number of this process.
        scaled: whether gradients are scaled for float16, where Inf is met on purpose and handled by the scaler.
    """

    def __init__(
        self, run: RunFolder, config: EngineConfig, system: System, optimizer: Optimizer, rank: int, scaled: bool
    ) -> None:
        self.run, self.config, self.system, self.optimizer = run, config, system, optimizer
        self.rank, self.scaled = rank, scaled
        self.waits = system.device.type == "cpu" and system.processes == 1
        self.fused = all(group.get("fused") for group in optimizer.param_groups)
        # Sums of all losses and of all gradient norms: once they are not finite they stay so.
        self._losses = torch.zeros((), dtype=torch.float64, device=system.device)
        self._norms = torch.zeros_like(self._losses)
        self._good_steps = torch.zeros((), dtype=torch.int64, device=system.device)
        self._recent: list[tuple[int, int, int, Any]] = []

    def batch(self, epoch: int, index: int, batch: Any) -> None:
        """Remember a batch until it is known to be good."""
        self._recent.append((self.system.step, epoch, index, batch))

    def loss(self, loss: Tensor) -> None:
        """Look at a loss."""
        self._losses += loss.detach()

    @torch.no_grad()
    def gradient(self) -> None:
        """Look at the gradient before the optimiser does, and clip it."""
        learning = [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        if not learning:
            return
        norm = torch.nn.utils.get_total_norm([p.grad for p in learning if p.grad is not None])
        self.system.record("train/gradient_norm", norm)
        if self.config.gradient_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(learning, self.config.gradient_clip, norm)
        if not self.scaled:
            self._norms += norm
        bad = self._is_bad()
        if self.fused and not self.scaled:
            self.optimizer.found_inf = bad.to(torch.float32)  # type: ignore[attr-defined]
        self._good_steps += ~bad
        if self.waits and bad.item():
            self._stop(unchanged=True)

    def _is_bad(self) -> Tensor:
        return ((self._losses + self._norms) * 0.0) != 0.0  # Inf · 0 and NaN · 0 are NaN

    def after_batch(self, whole: bool) -> None:
        """Forget what is known to be good; ``whole`` says whether an optimiser step is complete."""
        if self.waits:
            if whole:
                self._forget()
        elif len(self._recent) >= self.config.guard_every:
            self.check()

    def check(self) -> None:
        """Read the flag and stop if it is set; all processes call it together."""
        if any_process(bool(self._is_bad()), self.system.device):
            self._stop(unchanged=self.fused)
        self._forget()

    def check_weights(self) -> None:
        """Stop unless the state may be saved: no bad gradient so far, and finite weights."""
        self.check()
        with torch.no_grad():
            weights = [p for p in self.system.parameters() if p.is_floating_point() and p.numel()]
            finite = not weights or bool(torch.isfinite(torch.nn.utils.get_total_norm(weights)))
        if any_process(not finite, self.system.device):
            self._stop(unchanged=self.fused)

    def _forget(self) -> None:
        self._recent.clear()
        self._good_steps.zero_()

    # ---------------------------------------------------------------------------------------------------------- report

    def _stop(self, unchanged: bool) -> None:
        error = self._report(int(self._good_steps) * self.config.accumulate, unchanged)
        if self.system.processes > 1:  # a process that ends now would take the others with it
            torch.distributed.barrier()
        raise error

    def refused(self, error: Exception) -> NonFiniteError:
        """Return what to stop with where a layer that looks at its input refused the last batch."""
        return self._report(len(self._recent) - 1, unchanged=True, reason=f" ({str(error).rstrip('.')})")

    def _report(self, number: int, unchanged: bool, reason: str = "") -> NonFiniteError:
        """Report on the ``number``-th of the recent batches and return what to stop with; ``unchanged`` says whether
        the weights are still those that the batch met, ``reason`` what a layer said of it."""
        what = "a batch cannot be computed" if reason else "the loss or its gradient is not finite"
        step, epoch, index, batch = self.system.step, -1, -1, None
        if self._recent:
            step, epoch, index, batch = self._recent[max(0, min(number, len(self._recent) - 1))]
        folder = self.run.nonfinite / (f"step-{step}-rank-{self.rank}" if self.rank else f"step-{step}")
        if self.rank == 0 or not bool(torch.isfinite(self._losses)):
            report: dict[str, Any] = {"what": what + reason, "step": step, "epoch": epoch, "batch": index}
            report["nonfinite_gradients"] = [
                {"parameter": name, "entries": int((~torch.isfinite(p.grad)).sum()), "of": p.grad.numel()}
                for name, p in self.system.named_parameters()
                if p.grad is not None and not bool(torch.isfinite(p.grad).all())
            ]
            report["weights"] = self._usable_weights(unchanged)
            folder.mkdir(parents=True, exist_ok=True)
            if batch is not None:
                if tensors := dict(flatten_tensors(batch)):
                    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
                    save_file(copies, str(folder / "batch.safetensors"))
                report["layer"] = self._diagnose(batch)
            atomic_write(folder / "report.json", json.dumps(plain_numbers(report), indent=2) + "\n")
        try:
            last = latest_checkpoint(self.run.checkpoints)
        except CheckpointError:
            last = None
        kept = f"The last good checkpoint is {last}." if last else "There is no checkpoint yet."
        return NonFiniteError(
            f"{what} at step {step}, epoch {epoch}, batch {index}{reason}. {kept} The batch, its spectrum and the "
            f"layer's report are in {folder}. Try a smaller learning rate, --gradient-clip, or a larger eps of the "
            "layer."
        )

    def _usable_weights(self, unchanged: bool) -> str:
        """Make sure that the layer can be examined: take the last good weights where the present ones are spoiled."""
        if all(bool(torch.isfinite(p).all()) for p in self.system.parameters() if p.is_floating_point()):
            return "those of this step" if unchanged else "those after this step"
        try:
            path = latest_checkpoint(self.run.checkpoints)
            if path is None:
                return "not finite"
            self.system.load_state_dict(load_checkpoint(path)["state_dict"])
        except (CheckpointError, RuntimeError) as error:
            return f"not finite, and the last checkpoint cannot be used: {error}"
        return f"those of {path.name}; the present ones are not finite"

    def _diagnose(self, batch: Any) -> Any:
        training = self.system.training
        try:
            with torch.no_grad():
                return self.system.diagnose(batch)
        except Exception as error:  # the report must not hide the reason of the stop
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            self.system.train(training)


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
        started: dict[str, float] = {}

        def start(direction: str, *_: Any) -> None:
            started[direction] = self._now()

        def stop(direction: str, *_: Any) -> None:
            self._layer[direction] += self._now() - started[direction]

        yield layer.register_forward_pre_hook(partial(start, "forward"))
        yield layer.register_forward_hook(partial(stop, "forward"))
        yield layer.register_full_backward_pre_hook(partial(start, "backward"))
        yield layer.register_full_backward_hook(partial(stop, "backward"))

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
