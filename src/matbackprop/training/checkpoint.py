"""Checkpoints that are never half-written, that say when they are damaged, and that execute nothing.

A checkpoint is an ordinary ``torch.save`` file whose archive comment carries its own SHA-256: plain
``torch.load(path, weights_only=True)`` reads it, :func:`load_checkpoint` verifies it first. Writing goes to a temporary
file, which is flushed to the disk and then renamed over the target, so that a crash at any moment leaves either the
old or the new file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import CheckpointIO
from torch import Tensor

from matbackprop.errors import CheckpointError, ConfigurationError
from matbackprop.files import fsync_folder
from matbackprop.training.loading import EpochLoader

if TYPE_CHECKING:
    from matbackprop.training.config import EngineConfig
    from matbackprop.training.recording import Means
    from matbackprop.training.run_folder import RunFolder

__all__ = ["CheckedCheckpointIO", "Checkpointer", "latest_checkpoint", "load_checkpoint", "save_checkpoint"]

log = logging.getLogger("matbackprop")

_PREFIX = b"matbackprop-sha256:"
_COMMENT = len(_PREFIX) + 64
_CHUNK = 1 << 24


class _HashingFile:
    """A file that hashes what is written to it, holding back the last bytes: the archive's empty comment."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.hash = hashlib.sha256()
        self.held = b""

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        if len(data) >= 2:
            self._emit(self.held)
            self._emit(data[:-2])
            self.held = bytes(data[-2:])
        else:
            joined = self.held + bytes(data)
            self._emit(joined[:-2])
            self.held = joined[-2:]
        return len(data)

    def _emit(self, data: Any) -> None:
        self.hash.update(data)
        self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def finish(self) -> None:
        if self.held != b"\0\0":
            raise CheckpointError("torch.save wrote an archive that does not end as expected; nothing was replaced.")
        self.file.write(_COMMENT.to_bytes(2, "little") + _PREFIX + self.hash.hexdigest().encode())


def save_checkpoint(content: Mapping[str, Any], path: str | Path, *, keep: str | Path | None = None) -> None:
    """Write a checkpoint: temporary file, flush to disk, rename.

    Args:
        content: nested dicts, lists and tuples of tensors, numbers, strings and None.
        path: the target.
        keep: where the file that is now at ``path`` is kept as the one before.

    Raises:
        CheckpointError: ``content`` holds an object that a safe reader would refuse.
    """
    path = Path(path)
    plain = _plain(content, "checkpoint")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            hashing = _HashingFile(file)
            torch.save(plain, hashing)  # type: ignore[arg-type]
            hashing.finish()
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            _link(path, Path(keep))
        temporary.replace(path)
        fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Verify a checkpoint's checksum and read it with ``torch.load(weights_only=True)``.

    Raises:
        CheckpointError: the file is missing, cut short or changed, or was not written by :func:`save_checkpoint`.
    """
    path = Path(path)
    verify_checkpoint(path)
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def verify_checkpoint(path: Path) -> None:
    """Raise :class:`CheckpointError` unless the file is complete and unchanged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if size < _COMMENT + 22:
                raise CheckpointError(f"{path} is damaged: it has only {size} bytes.")
            digest = hashlib.sha256()
            left = size - _COMMENT - 2
            while left:
                chunk = file.read(min(_CHUNK, left))
                if not chunk:
                    raise CheckpointError(f"{path} is damaged: it became shorter while it was read.")
                digest.update(chunk)
                left -= len(chunk)
            tail = file.read()
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror}.") from error
    if tail[2 : 2 + len(_PREFIX)] != _PREFIX:
        raise CheckpointError(f"{path} is damaged (cut short?) or was not written by this library: it has no checksum.")
    if tail != _COMMENT.to_bytes(2, "little") + _PREFIX + digest.hexdigest().encode():
        raise CheckpointError(f"{path} is damaged: its content does not fit its checksum.")


def latest_checkpoint(folder: str | Path, say: Callable[[str], None] = log.warning) -> Path | None:
    """Return the newest undamaged checkpoint of a folder, or None where there is none at all.

    A damaged ``last.ckpt`` is announced and ``previous.ckpt`` used instead.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    folder = Path(folder)
    damaged = []
    for name in ("last.ckpt", "previous.ckpt"):
        path = folder / name
        if not path.exists():
            continue
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            damaged.append(path)
            say(f"{error} Looking for the checkpoint before it.")
            continue
        if damaged:
            say(f"Going on from {path}; the steps after it are done again.")
        return path
    if damaged:
        raise CheckpointError(
            f"all checkpoints in {folder} are damaged ({', '.join(p.name for p in damaged)}). "
            "Start again with --overwrite."
        )
    return None


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, replacing what had it, so that the name is never without a file."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # file systems without hard links
        shutil.copyfile(source, temporary)
    temporary.replace(target)


def _plain(value: Any, where: str) -> Any:
    """Return ``value`` with only what ``torch.load(weights_only=True)`` accepts."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {k if type(k) in (str, int) else str(k): _plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
        return tuple(items) if type(value) is tuple else items
    if isinstance(value, (bool, int, float, str)):  # subclasses, for example enumerations of strings
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    if isinstance(value, (torch.Size, torch.dtype, torch.device)):
        return value
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__name__}, which a checkpoint cannot hold because reading "
        "it would execute code. Keep numbers, strings, tensors, lists and dicts in hyperparameters and callback states."
    )


class CheckedCheckpointIO(CheckpointIO):
    """Lets Lightning's own saving and loading go through :func:`save_checkpoint` and :func:`load_checkpoint`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        path = Path(path)
        save_checkpoint(checkpoint, path, keep=path.with_name("previous.ckpt") if path.name == "last.ckpt" else None)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return load_checkpoint(path, map_location if map_location is not None else "cpu")

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------- random states


def random_state() -> dict[str, Any]:
    """Return the states of all random generators of this process, in plain values and tensors."""
    version, words, gauss = random.getstate()
    name, key, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(key).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set what :func:`random_state` gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, key, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, key.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])


# ------------------------------------------------------------------------------------------------------------ callback


def whole_step(trainer: pl.Trainer) -> bool:
    """Return whether no accumulated gradient is pending: a checkpoint does not hold gradients."""
    return (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0


class Checkpointer(pl.callbacks.Checkpoint):
    """Saves the last and the best state, and brings a resumed run to exactly where it was.

    The best weights are kept in memory and written together with the last checkpoint, best first: a run that is killed
    in between finds a best state that it is going to reach again.

    Args:
        run: the run folder.
        config: when to save and what to monitor.
        means: what the engine averages between two lines of metrics.
        is_good: called before saving; False leaves the last good checkpoint as it is.
    """

    def __init__(
        self, run: RunFolder, config: EngineConfig, means: Means, is_good: Callable[[], bool] = lambda: True
    ) -> None:
        self.run = run
        self.means = means
        self.config = config
        self.is_good = is_good
        self.best_score: float | None = None
        self.best_step = 0
        self.partial_validation = False
        self.can_resume_inside = True
        self._warned = False
        self._best: dict[str, Any] | None = None
        self._saved_step = -1
        self._saved_time = time.monotonic()
        self._saved_epoch = 0
        self._resumed: dict[str, Any] | None = None
        self._before_validation: dict[str, Any] | None = None

    # ------------------------------------------------------------------------------------------------------- saving

    @property
    def last_path(self) -> Path:
        return self.run.checkpoints / "last.ckpt"

    @property
    def best_path(self) -> Path:
        return self.run.checkpoints / "best.ckpt"

    def save(self, trainer: pl.Trainer) -> bool:
        """Save the last state, and the best weights where they changed; all processes call it together."""
        if not self.is_good() or not self.config.checkpoints:
            return False
        self._write_best(trainer)
        trainer.save_checkpoint(self.last_path)
        self._saved_step = trainer.global_step
        self._saved_epoch = trainer.current_epoch
        self._saved_time = time.monotonic()
        return True

    def _write_best(self, trainer: pl.Trainer) -> None:
        if self._best is None:
            return
        if trainer.is_global_zero:
            save_checkpoint(self._best, self.best_path)
        self._best = None

    def note_best(self, trainer: pl.Trainer) -> None:
        """Keep the weights in memory if the monitored metric is the best so far."""
        if not getattr(trainer.datamodule, "may_choose", True):  # type: ignore[attr-defined]
            return
        value = trainer.callback_metrics.get(self.config.monitor)
        if value is None or self.partial_validation:
            validated = sorted(name for name in trainer.callback_metrics if name.startswith("val/"))
            if value is None and validated and not self._warned:
                self._warned = True
                log.warning(
                    "There is no metric %s to choose the best checkpoint by; there are %s. Set --monitor.",
                    self.config.monitor,
                    ", ".join(validated),
                )
            return
        score = float(value)
        sign = 1.0 if self.config.monitor_mode == "min" else -1.0
        if score != score or (self.best_score is not None and sign * score >= sign * self.best_score):
            return
        self.best_score, self.best_step = score, trainer.global_step
        if not self.config.checkpoints:
            return
        self._best = {
            "state_dict": {
                key: tensor.detach().clone() for key, tensor in trainer.strategy.lightning_module_state_dict().items()
            },
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "monitor": self.config.monitor,
            "score": score,
        }

    def _may_save(self, trainer: pl.Trainer) -> bool:
        waited = time.monotonic() - self._saved_time >= self.config.checkpoint_min_seconds
        if self.config.checkpoint_min_seconds and trainer.world_size > 1:  # clocks differ between processes
            waited = trainer.strategy.reduce_boolean_decision(waited, all=False)
        return waited

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = self.config.checkpoint_every_steps
        step = trainer.global_step
        inside = batch_idx + 1 < trainer.num_training_batches
        due = every and step and step % every == 0 and step != self._saved_step
        if due and inside and self.can_resume_inside and whole_step(trainer) and self._may_save(trainer):
            self.save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.note_best(trainer)
        done = trainer.current_epoch + 1
        if done >= (trainer.max_epochs or 0) or (
            done - self._saved_epoch >= self.config.checkpoint_every_epochs and self._may_save(trainer)
        ):
            self.save(trainer)

    # Validation may draw random numbers as it likes: training does not see it.

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._before_validation = random_state()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._before_validation is not None:
            set_random_state(self._before_validation)
            self._before_validation = None

    # ------------------------------------------------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score, self.best_step = state_dict["best_score"], state_dict["best_step"]

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        own = {"random": random_state(), "means": [means.state_dict() for means in self._means(pl_module)]}
        states: list[Any] = [own]
        if trainer.world_size > 1:
            states = [None] * trainer.world_size
            torch.distributed.all_gather_object(states, own)
        progress: Any = trainer.fit_loop.epoch_progress.current
        finished = progress.processed
        at_end = finished > progress.completed
        checkpoint["matbackprop"] = {
            "epoch": finished,
            "batch": 0 if at_end else trainer.fit_loop.batch_idx + 1,
            "world_size": trainer.world_size,
            "processes": states,
        }

    def _means(self, module: pl.LightningModule) -> list[Means]:
        """Return the means that the next line of metrics is made of: a resumed run completes them."""
        own = getattr(module, "means", None)
        return [self.means, *([own] if own is not None else [])]

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._resumed = checkpoint.get("matbackprop")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
            raise ConfigurationError(
                "ReduceLROnPlateau steps after the checkpoint of an epoch is written, so that a resumed run would "
                "differ; use a schedule of steps or epochs."
            )
        self._saved_time = time.monotonic()
        self._saved_step = trainer.global_step if self._resumed else -1
        self._saved_epoch = trainer.current_epoch
        loader = trainer.train_dataloader
        self.can_resume_inside = isinstance(loader, EpochLoader)
        if not self.can_resume_inside:
            log.warning(
                "The training loader is a %s, not an EpochLoader: checkpoints are written at ends of epochs, and a "
                "run stopped within an epoch does that epoch again.",
                type(loader).__name__,
            )
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            return
        restore: Callable[[], None] | None = None
        if resumed["world_size"] == trainer.world_size:
            state = resumed["processes"][trainer.global_rank]
            for means, sums in zip(self._means(pl_module), state["means"], strict=True):
                means.load_state_dict(sums)

            def restore() -> None:
                set_random_state(state["random"])
        elif resumed["batch"]:
            raise ConfigurationError(
                f"the checkpoint is from within an epoch of {resumed['world_size']} processes, whose batches "
                f"{trainer.world_size} processes cannot go on with. Finish the epoch with as many processes as before."
            )
        else:
            log.warning(
                "The run goes on with %d processes instead of %d: random numbers start anew, the data go on in order.",
                trainer.world_size,
                resumed["world_size"],
            )
        if isinstance(loader, EpochLoader):
            loader.seek(resumed["epoch"], resumed["batch"], then=restore)
        elif restore is not None:
            restore()
