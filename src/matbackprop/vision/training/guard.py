"""A guard that stops a training at NaN or Inf before a checkpoint is written.

On the CPU every step is checked before the optimizer runs. On a GPU, flags stay on the device and are
read every ``guard_every`` batches, so that no step synchronizes. Fused optimizers skip all updates from
the first bad gradient on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from matbackprop.errors import NonFiniteError
from matbackprop.vision.distributed import gather
from matbackprop.vision.files import atomic_write, plain_numbers
from matbackprop.vision.training.config import EngineConfig
from matbackprop.vision.training.run_folder import RunFolder

if TYPE_CHECKING:
    from matbackprop.vision.training.system import System


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (dotted name, tensor) for all tensors in nested dicts, lists, tuples and named tuples."""
    if isinstance(value, Tensor):
        yield name or "batch", value
    elif isinstance(value, (Mapping, list, tuple)):
        if hasattr(value, "_asdict"):
            value = value._asdict()
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from named_tensors(item, f"{name}.{key}" if name else str(key))


class _Batch(NamedTuple):
    step: int
    epoch: int
    number: int
    content: Any


class Guard:
    """Clips gradients and raises NonFiniteError at the first loss or gradient that is not finite.

    The loop calls :meth:`batch` and :meth:`loss` for every batch, :meth:`gradient` before every
    optimizer step, and :meth:`check_weights` before it saves.

    Args:
        run: folder for the report.
        config: ``gradient_clip`` and ``guard_every``.
        system: the system; ``train/gradient_norm`` is recorded in it.
        optimizer: its optimizer.
        rank: rank of this process.
        scaled: whether gradients are scaled for float16, where Inf is expected and handled by the scaler.
    """

    def __init__(
        self, run: RunFolder, config: EngineConfig, system: System, optimizer: Optimizer, rank: int, scaled: bool
    ) -> None:
        self.run, self.system, self.optimizer, self.rank, self.scaled = run, system, optimizer, rank, scaled
        self.clip = config.gradient_clip
        self.every = 1 if system.device.type == "cpu" and system.processes == 1 else config.guard_every
        self.fused = not scaled and all(group.get("fused") for group in optimizer.param_groups)
        self._finite = torch.ones((), dtype=torch.bool, device=system.device)  # so far
        self._recent: list[_Batch] = []
        self._flags: list[Tensor] = []  # whether loss and gradient of each recent batch are finite

    def batch(self, epoch: int, index: int, batch: Any) -> None:
        """Keep a batch until it is known to be finite."""
        self._recent.append(_Batch(self.system.step, epoch, index, batch))

    def loss(self, loss: Tensor) -> None:
        """Check a loss."""
        self._flags.append(torch.isfinite(loss.detach()))

    @torch.no_grad()
    def gradient(self) -> None:
        """Record, check and clip the gradient."""
        learning = [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        if learning:
            norm = torch.nn.utils.get_total_norm([p.grad for p in learning if p.grad is not None])
            self.system.record("train/gradient_norm", norm)
            if self.clip is not None:
                torch.nn.utils.clip_grads_with_norm_(learning, self.clip, norm)
            if not self.scaled:
                self._flags[-1] = self._flags[-1] & torch.isfinite(norm)
        if self.fused:
            self._finite = self._finite & torch.stack(self._flags).all()
            self.optimizer.found_inf = (~self._finite).float()  # type: ignore[attr-defined]
        if len(self._recent) >= self.every:
            self.check()

    def check(self) -> None:
        """Read the flags and raise if one is not finite. All processes call it together."""
        finite = torch.stack(self._flags).tolist() if self._flags else []
        if not all(gather(all(finite))):
            bad = finite.index(False) if False in finite else -1
            error = self._error(self._recent[bad], write=self.rank == 0 or False in finite)
            gather(None)  # a process that ends now would end the others
            raise error
        self._recent.clear()
        self._flags.clear()

    @torch.no_grad()
    def check_weights(self) -> None:
        """Raise unless all losses, gradients and weights so far are finite. All processes call it together."""
        self.check()
        weights = [p for p in self.system.parameters() if p.is_floating_point() and p.numel()]
        finite = not weights or bool(torch.isfinite(torch.nn.utils.get_total_norm(weights)))
        if not all(gather(finite)):
            raise NonFiniteError(f"A weight is not finite at step {self.system.step}. {self._advice()}")

    def refused(self, error: Exception) -> NonFiniteError:
        """Return the error for a batch that a layer refused."""
        return self._error(self._recent[-1], reason=f" ({str(error).rstrip('.')})")

    def _error(self, batch: _Batch, *, write: bool = True, reason: str = "") -> NonFiniteError:
        what = "A batch cannot be computed" if reason else "The loss or its gradient is not finite"
        where = f"at step {batch.step}, epoch {batch.epoch}, batch {batch.number}"
        folder = self.run.nonfinite / (f"step-{batch.step}" + (f"-rank-{self.rank}" if self.rank else ""))
        if write:
            folder.mkdir(parents=True, exist_ok=True)
            copies = {name: t.detach().cpu().contiguous().clone() for name, t in named_tensors(batch.content)}
            save_file(copies, str(folder / "batch.safetensors"))
            report = {
                "what": what + reason,
                "step": batch.step,
                "epoch": batch.epoch,
                "batch": batch.number,
                "nonfinite_weights": [n for n, p in self.system.named_parameters() if not _is_finite(p)],
                "nonfinite_gradients": [
                    n for n, p in self.system.named_parameters() if p.grad is not None and not _is_finite(p.grad)
                ],
                "layer": self._diagnose(batch.content),
            }
            atomic_write(folder / "report.json", json.dumps(plain_numbers(report), indent=2) + "\n")
        return NonFiniteError(f"{what} {where}{reason}. The batch and a report are in {folder}. {self._advice()}")

    def _advice(self) -> str:
        last = self.run.checkpoints / "last.ckpt"
        kept = f"The last good checkpoint is {last}." if last.exists() else "There is no checkpoint yet."
        return f"{kept} Try a smaller learning rate, --gradient-clip, or a larger eps of the layer."

    def _diagnose(self, batch: Any) -> Any:
        try:
            with torch.no_grad():
                return self.system.diagnose(batch)
        except Exception as error:  # must not hide the reason of the stop
            return {"error": f"{type(error).__name__}: {error}"}


def _is_finite(x: Tensor) -> bool:
    return not x.is_floating_point() or bool(torch.isfinite(x).all())
