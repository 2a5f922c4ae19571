"""Stops a run that meets NaN or Inf, before it can spoil a checkpoint, and says what it met.

On the CPU every step is checked before the optimiser sees the gradient. On a GPU a flag is kept on the device and read
every ``guard_every`` steps, so that no step waits; fused optimisers skip their update on the device from the first bad
gradient on, so that the weights are still those of that step when the flag is read. No checkpoint is written without
reading the flag.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from matbackprop.errors import CheckpointError, NonFiniteError, NumericalError, SolverError
from matbackprop.files import atomic_write
from matbackprop.training.checkpoint import latest_checkpoint, load_checkpoint
from matbackprop.training.run_folder import _number

if TYPE_CHECKING:
    from matbackprop.training.config import EngineConfig
    from matbackprop.training.recording import Means
    from matbackprop.training.run_folder import RunFolder

__all__ = ["GradientGuard", "flatten_tensors"]


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


class GradientGuard(pl.Callback):
    """Measures and clips the gradient's norm and stops at the first loss or gradient that is not finite.

    Args:
        run: where the report goes.
        config: ``gradient_clip`` and ``guard_every``.
        means: receives ``train/gradient_norm``.
    """

    def __init__(self, run: RunFolder, config: EngineConfig, means: Means) -> None:
        self.run = run
        self.config = config
        self.means = means
        self.message: str | None = None
        self._losses: Tensor | None = None
        self._norms: Tensor | None = None
        self._good_steps: Tensor | None = None
        self._recent: deque[tuple[int, int, int, Any]] = deque()
        self._fused = False
        self._sharded = False
        self._scaler: Any = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._sharded = isinstance(trainer.strategy, pl.strategies.FSDPStrategy)
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)
        # Sums of all losses and of all gradient norms: once they are not finite they stay so.
        self._losses = torch.zeros((), dtype=torch.float64, device=pl_module.device)
        self._norms = torch.zeros((), dtype=torch.float64, device=pl_module.device)
        self._good_steps = torch.zeros((), dtype=torch.int64, device=pl_module.device)
        self._waits = pl_module.device.type == "cpu" and trainer.world_size == 1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Here the optimisers have their states, also those of a checkpoint.
        for optimizer in trainer.optimizers:
            if self._scaler is not None:
                # Let Lightning unscale the gradients before they come here, not the optimiser after.
                optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
            elif pl_module.device.type == "cuda":
                _prefer_fused(optimizer)
        self._fused = all(getattr(o, "_step_supports_amp_scaling", False) for o in trainer.optimizers)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._recent.append((trainer.global_step, trainer.current_epoch, batch_idx, batch))

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        assert self._losses is not None
        self._losses += loss.detach().sum()

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        assert self._norms is not None and self._good_steps is not None
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        if not gradients and not self._sharded:
            return
        norm = torch.nn.utils.get_total_norm(gradients).to(pl_module.device)
        if self._sharded:  # a process may hold no part of what has a gradient
            square = norm.double().square()
            torch.distributed.all_reduce(square)
            norm = square.sqrt().to(norm.dtype)
        self.means.add("train/gradient_norm", norm)
        if self.config.gradient_clip is not None and gradients:
            scale = (self.config.gradient_clip / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, scale)
        if self._scaler is None:  # a scaler of float16 gradients meets Inf on purpose and handles it
            self._norms += norm
        bad = self._is_bad()
        if self._scaler is None and self._fused:
            optimizer.found_inf = bad.to(torch.float32)  # type: ignore[attr-defined]
        self._good_steps += ~bad
        if self._waits and bad.item():
            self._stop(trainer, pl_module, optimizer)

    def _is_bad(self) -> Tensor:
        assert self._losses is not None and self._norms is not None
        return ((self._losses + self._norms) * 0.0) != 0.0  # Inf · 0 and NaN · 0 are NaN

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._waits:
            if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                self._forget()
        elif len(self._recent) >= self.config.guard_every:
            self.check(trainer, pl_module)

    def check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the flag and stop if it is set; all processes call it together."""
        assert self._good_steps is not None
        bad = self._is_bad().to(torch.int32)
        if trainer.world_size > 1:
            torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX)
        if bad.item():
            self._stop(trainer, pl_module, None)
        self._forget()

    def _forget(self) -> None:
        assert self._good_steps is not None
        self._recent.clear()
        self._good_steps.zero_()

    def is_good(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        """Return whether the state may be saved: no bad gradient so far (raises otherwise) and finite weights."""
        self.check(trainer, pl_module)
        with torch.no_grad():
            weights = [p for p in pl_module.parameters() if p.is_floating_point() and p.numel()]
            finite = not weights or bool(torch.isfinite(torch.nn.utils.get_total_norm(weights)))
        if trainer.world_size > 1:
            finite = trainer.strategy.reduce_boolean_decision(finite, all=True)
        if not finite:
            self._stop(trainer, pl_module, None)
        return True

    # ---------------------------------------------------------------------------------------------------------- report

    def _stop(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer | None) -> None:
        assert self._good_steps is not None
        index = int(self._good_steps) * trainer.accumulate_grad_batches
        raise NonFiniteError(self._describe(trainer, module, index, unchanged=optimizer is not None or self._fused))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # A layer that looks at its input refuses a bad batch before there is a loss; that is reported the same way.
        numerical = isinstance(exception, (NumericalError, SolverError, torch.linalg.LinAlgError))
        if numerical and self.message is None and self._recent:
            reason = f" ({str(exception).rstrip('.')})"
            self._describe(trainer, pl_module, len(self._recent) - 1, unchanged=True, reason=reason)

    def _describe(
        self, trainer: pl.Trainer, module: pl.LightningModule, index: int, *, unchanged: bool, reason: str = ""
    ) -> str:
        """Write the report on the ``index``-th of the recent batches and return the message to stop with.

        Args:
            trainer: the trainer.
            module: the module.
            index: which of the recent batches.
            unchanged: whether the weights are still those that the batch met.
            reason: what a layer said of the batch.
        """
        what = "a batch cannot be computed" if reason else "the loss or its gradient is not finite"
        steps = list(self._recent)
        step, epoch, batch_idx, batch = (
            steps[max(0, min(index, len(steps) - 1))]
            if steps
            else (trainer.global_step, trainer.current_epoch, -1, None)
        )
        folder = self.run.nonfinite / f"step-{step}"
        if trainer.global_rank:
            folder = folder.with_name(f"{folder.name}-rank-{trainer.global_rank}")
        if trainer.is_global_zero or self._own_fault():
            report: dict[str, Any] = {"what": what + reason, "step": step, "epoch": epoch, "batch": batch_idx}
            report["nonfinite_gradients"] = [
                {"parameter": name, "entries": int((~torch.isfinite(p.grad)).sum()), "of": p.grad.numel()}
                for name, p in module.named_parameters()
                if p.grad is not None and not bool(torch.isfinite(p.grad).all())
            ]
            report["weights"] = self._usable_weights(module, unchanged)
            folder.mkdir(parents=True, exist_ok=True)
            if batch is not None:
                self._write_batch(folder / "batch.safetensors", batch)
                report["layer"] = self._diagnose(module, batch)
            atomic_write(folder / "report.json", json.dumps(_number(report), indent=2) + "\n")
        try:
            last = latest_checkpoint(self.run.checkpoints)
        except CheckpointError:
            last = None
        kept = f"The last good checkpoint is {last}." if last else "There is no checkpoint yet."
        self.message = (
            f"{what} at step {step}, epoch {epoch}, batch {batch_idx}{reason}. {kept} The batch, its spectrum and the "
            f"layer's report are in {folder}. Try a smaller learning rate, --gradient-clip, or a larger eps of the "
            "layer."
        )
        return self.message

    def _own_fault(self) -> bool:
        """Return whether a loss of this very process was not finite."""
        return self._losses is not None and not bool(torch.isfinite(self._losses))

    def _usable_weights(self, module: pl.LightningModule, unchanged: bool) -> str:
        """Make sure that the layer can be examined: take the last good weights where the present ones are spoiled."""
        finite = all(bool(torch.isfinite(p).all()) for p in module.parameters() if p.is_floating_point())
        if finite:
            return "those of this step" if unchanged else "those after this step"
        try:
            path = latest_checkpoint(self.run.checkpoints)
            if path is None:
                return "not finite"
            module.load_state_dict(load_checkpoint(path)["state_dict"])
        except (CheckpointError, RuntimeError) as error:
            return f"not finite, and the last checkpoint cannot be used: {error}"
        return f"those of {path.name}; the present ones are not finite"

    @staticmethod
    def _write_batch(path: Any, batch: Any) -> None:
        from safetensors.torch import save_file

        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in flatten_tensors(batch)}
        if tensors:
            save_file(tensors, str(path))

    @staticmethod
    def _diagnose(module: pl.LightningModule, batch: Any) -> Any:
        diagnose: Callable[[Any], Any] | None = getattr(module, "diagnose", None)
        if diagnose is None:
            return None
        training = module.training
        try:
            with torch.no_grad():
                return diagnose(batch)
        except Exception as error:  # the report must not hide the reason of the stop
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            module.train(training)


def _prefer_fused(optimizer: Optimizer) -> None:
    """Let SGD and Adam run as one kernel a step on CUDA where the user did not choose otherwise."""
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return
    groups = optimizer.param_groups
    if all(group.get("fused") for group in groups):  # by the user, or by a checkpoint, which does not set the mark
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        return
    parameters = [p for group in groups for p in group["params"]]
    if not all(p.is_cuda and p.is_floating_point() for p in parameters):
        return
    if any(group.get("fused") is not None or group.get("foreach") or group.get("differentiable") for group in groups):
        return
    for group in groups:
        group["fused"], group["foreach"] = True, False
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:  # Adam's; a checkpoint of another device may have left it there
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
