"""The one engine that both systems train in.

Lightning drives the loop; this module wires our parts to it: the run folder, checkpoints that survive, exact resuming,
signals, the guard against NaN and Inf, metrics that do not make the device wait, and the profile of a step.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy

from matbackprop.errors import ConfigurationError, NonFiniteError
from matbackprop.training.checkpoint import CheckedCheckpointIO, Checkpointer, latest_checkpoint, load_checkpoint
from matbackprop.training.config import EngineConfig, Recipe
from matbackprop.training.guard import GradientGuard
from matbackprop.training.loading import EpochLoader, generator_for
from matbackprop.training.profiling import StepProfile
from matbackprop.training.recording import Means, MetricsCallback, MetricsLogger, ReduceLogs
from matbackprop.training.run_folder import RunFolder
from matbackprop.training.signals import RunInterrupted, StopOnSignal

__all__ = ["RunInterrupted", "evaluate", "fit", "is_first_process", "load_weights", "run_recipe", "seed_all"]

log = logging.getLogger("matbackprop")
_file_log = logging.getLogger("matbackprop.training.file")  # what is said elsewhere too, by who catches it
_file_log.propagate = False
_file_log.addHandler(logging.NullHandler())

T = TypeVar("T")

_PRECISION = {"32": "32-true", "64": "64-true", "bf16-mixed": "bf16-mixed", "16-mixed": "16-mixed"}


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def is_first_process() -> bool:
    """Return whether this is the first process of a run, also before the processes know each other."""
    found = os.environ
    if "RANK" in found:
        return int(found["RANK"]) == 0
    if "SLURM_PROCID" in found and found.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return int(found["SLURM_PROCID"]) == 0
    return int(found.get("NODE_RANK", found.get("GROUP_RANK", 0))) == int(found.get("LOCAL_RANK", 0)) == 0


def run_recipe(recipe: Recipe[T], config: T, *, preset: str = "custom") -> RunFolder:
    """Train a recipe: seed, build, fit, export, figures, report.

    Args:
        recipe: what to train.
        config: its resolved configuration.
        preset: the preset that the configuration came from; part of the default name of the run folder.

    Returns:
        The run folder.
    """
    engine: EngineConfig = config.engine  # type: ignore[attr-defined]
    seed_all(engine.seed)
    module, data = recipe.build(config)
    run = fit(config, module, data, name=f"{recipe.name}-{preset}")
    if not is_first_process():
        return run
    sharded = engine.strategy == "fsdp"
    if engine.checkpoints or not sharded:
        if sharded:
            module, data = recipe.build(config)  # the one that was trained is left in pieces
        if engine.checkpoints:
            load_weights(run, module)
        if recipe.export is not None:
            recipe.export(run, module, data)
        if recipe.figures is not None and engine.report:
            recipe.figures(run, module, data)
    if engine.report:
        from matbackprop.report.html import write_report

        write_report(run)
    return run


def fit(config: Any, module: pl.LightningModule, data: pl.LightningDataModule, *, name: str) -> RunFolder:
    """Train ``module`` on ``data`` in a run folder, from the start or from its last checkpoint.

    Args:
        config: an :class:`EngineConfig`, or a configuration with a field ``engine``; saved as it is.
        module: the Lightning module. ``diagnose(batch)`` is asked for a report where a batch is not finite.
        data: the Lightning data module. Its training loader should be an :class:`EpochLoader`. Where its attribute
            ``may_choose`` is False, validation only reports, and the last weights are the result.
        name: the folder is ``runs/<name>-seed<seed>`` unless ``engine.run`` says otherwise.

    Returns:
        The run folder.

    Raises:
        RunInterrupted: SIGINT or SIGTERM came; the state is saved.
        NonFiniteError: a loss or a gradient was not finite, or a layer could not compute a batch; the last good
            checkpoint is kept.
        ConfigurationError: the folder holds another run.
        CheckpointError: all checkpoints are damaged.
    """
    engine: EngineConfig = getattr(config, "engine", config)
    run = RunFolder(engine.run or Path("runs") / f"{name}-seed{engine.seed}")
    with run.locked() if is_first_process() else nullcontext(), _quiet_lightning(), ExitStack() as logging_here:
        if is_first_process():
            run.create(config, resume=engine.resume, overwrite=engine.overwrite, seed=engine.seed)
        logging_here.enter_context(_logging_to(run))
        checkpoint = latest_checkpoint(run.checkpoints) if engine.resume else None
        if checkpoint is not None:
            log.info("Going on from %s.", checkpoint)
        elif engine.resume:
            log.info("There is no checkpoint in %s yet: starting at the beginning.", run.checkpoints)
        _fit(run, engine, module, data, checkpoint)
    return run


def _fit(
    run: RunFolder,
    engine: EngineConfig,
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    checkpoint: Path | None,
) -> None:
    means = Means()
    logger = MetricsLogger(run, engine.tensorboard)
    guard = GradientGuard(run, engine, means)
    checkpointer = Checkpointer(run, engine, means)
    signals = StopOnSignal(checkpointer, logger, engine.guard_every)
    profile = StepProfile(run.profile_path, engine.profile_steps) if engine.profile else None
    callbacks: list[pl.Callback] = [_Sharing(), ReduceLogs(), guard, MetricsCallback(logger, means, engine.log_every)]
    if profile is not None:
        callbacks.insert(callbacks.index(guard) + 1, profile)
    if engine.progress and sys.stderr.isatty():
        callbacks.append(TQDMProgressBar(refresh_rate=max(1, engine.log_every // 5)))
    trainer = _trainer(engine, run, [*callbacks, checkpointer, signals], logger)
    checkpointer.is_good = lambda: guard.is_good(trainer, module)
    started = time.perf_counter()
    torch.set_float32_matmul_precision(engine.matmul_precision)
    seed_all(engine.seed)
    try:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    except RunInterrupted as stop:
        _file_log.warning("%s", stop)
        raise
    except SystemExit as end:  # what Lightning makes of it
        raise KeyboardInterrupt from end
    except Exception as error:
        if guard.message is None:
            raise
        _file_log.error("%s", guard.message)
        raise NonFiniteError(guard.message) from error
    finally:
        signals.restore()
        logger.finalize("finished")
    if isinstance(trainer.strategy, (DDPStrategy, FSDPStrategy)) and torch.distributed.is_initialized():
        # What follows, figures and the report, is the first process's alone: nothing may wait for the others.
        trainer.strategy.barrier()
        torch.distributed.destroy_process_group()
    if trainer.is_global_zero:
        run.write_summary(_summary(trainer, checkpointer, profile, time.perf_counter() - started, run.read_summary()))
        log.info("Done after %d steps: %s", trainer.global_step, run.path)
    if signals.signum is not None:  # too late to end the run earlier, but not to be forgotten
        raise signals.interrupted(trainer)


def _summary(
    trainer: pl.Trainer, checkpointer: Checkpointer, profile: StepProfile | None, seconds: float, before: dict[str, Any]
) -> dict[str, Any]:
    """Return the final numbers; a run that was complete already keeps those it had."""
    final = {name: float(value) for name, value in trainer.callback_metrics.items()}
    summary: dict[str, Any] = {
        **before,
        **final,
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "seconds": before.get("seconds", 0.0) + seconds,
        "processes": trainer.world_size,
    }
    if checkpointer.best_score is not None:
        summary |= {
            "best": checkpointer.best_score,
            "best_metric": checkpointer.config.monitor,
            "best_step": checkpointer.best_step,
        }
    if profile is not None and profile.result is not None:
        summary["step_milliseconds"] = profile.result["total_milliseconds"]
    return summary


def _trainer(engine: EngineConfig, run: RunFolder, callbacks: list[pl.Callback], logger: MetricsLogger) -> pl.Trainer:
    plugins: list[Any] = [CheckedCheckpointIO()]
    if SLURMEnvironment.detect():
        plugins.append(SLURMEnvironment(auto_requeue=False))  # --resume and our own signals do it
    cuda = torch.cuda.is_available() and engine.accelerator != "cpu"
    precision: Any = _PRECISION[engine.precision]
    strategy: Any = engine.strategy
    if engine.strategy == "fsdp":
        if engine.precision == "64":
            raise ConfigurationError("--strategy fsdp does not go with --precision 64; use --strategy ddp.")
        from matbackprop.training.sharding import ShardedStrategy

        strategy = ShardedStrategy(precision, "cuda" if cuda else "cpu")
        precision = None  # the strategy has it
    elif engine.strategy == "ddp":
        strategy = DDPStrategy(gradient_as_bucket_view=True)
    return pl.Trainer(
        default_root_dir=run.path,
        accelerator=engine.accelerator,
        devices=_devices(engine.devices, cuda),
        num_nodes=engine.nodes,
        strategy=strategy,
        precision=precision,
        max_epochs=engine.max_epochs,
        accumulate_grad_batches=engine.accumulate,
        check_val_every_n_epoch=engine.validate_every,
        num_sanity_val_steps=0,
        log_every_n_steps=engine.log_every,
        logger=logger,
        callbacks=callbacks,
        plugins=plugins,
        enable_checkpointing=True,
        enable_progress_bar=any(isinstance(c, TQDMProgressBar) for c in callbacks),
        enable_model_summary=False,
        use_distributed_sampler=False,
        deterministic=engine.deterministic or None,
        benchmark=cuda and not engine.deterministic,
    )


def _devices(text: str, cuda: bool) -> Any:
    """Return Lightning's ``devices``: auto, a number, or a list. On the CPU auto is one process."""
    if text == "auto":
        return "auto" if cuda else 1
    try:
        return [int(part) for part in text.split(",") if part] if "," in text else int(text)
    except ValueError:
        raise ConfigurationError(f"--devices is {text!r}; it must be auto, a number, or a list such as 0,2.") from None


class _Sharing(pl.Callback):
    """Tells every :class:`EpochLoader` which part of each batch is this process's, and lets processes draw apart."""

    def __init__(self) -> None:
        self._replaced: list[str] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        data = getattr(trainer, "datamodule", None)
        for name in ("train_dataloader", "val_dataloader"):
            if data is not None and getattr(type(data), name) is not getattr(pl.LightningDataModule, name):
                setattr(data, name, _sharing(getattr(data, name), trainer))
                self._replaced.append(name)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for name in self._replaced:
            delattr(trainer.datamodule, name)  # type: ignore[attr-defined]
        self._replaced = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size > 1:
            torch.manual_seed(generator_for(torch.initial_seed(), trainer.global_rank).initial_seed())


def _sharing(make: Any, trainer: pl.Trainer) -> Any:
    def made() -> Any:
        loaders = make()
        for loader in loaders if isinstance(loaders, (list, tuple)) else [loaders]:
            if isinstance(loader, EpochLoader):
                loader.share(trainer.global_rank, trainer.world_size)
                uneven = not loader.shuffle and loader.batch_size == 1 and len(loader.source) % trainer.world_size
                if uneven and isinstance(trainer.strategy, FSDPStrategy):
                    raise ConfigurationError(
                        f"fsdp needs equally many batches on every process, and {len(loader.source)} items one by "
                        f"one do not divide by {trainer.world_size}; use batches of at least 2, or --strategy ddp."
                    )
        return loaders

    return made


# ------------------------------------------------------------------------------------------------- using finished runs


def load_weights(run: RunFolder, module: pl.LightningModule, which: str = "best") -> Path:
    """Load the best (or ``"last"``) weights of a run into a module; last where there is no best.

    Returns:
        The file that was read.
    """
    path = run.checkpoints / f"{which}.ckpt"
    if which == "best" and not path.exists():
        path = latest_checkpoint(run.checkpoints) or path
    state = load_checkpoint(path)["state_dict"]
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigurationError(f"{path} does not fit the model of {run.path / 'config.json'}: {error}") from error
    return path


def evaluate(config: Any, module: pl.LightningModule, data: pl.LightningDataModule, run: RunFolder) -> dict[str, float]:
    """Validate a module on one device, with the precision of ``config``, and return its metrics.

    After a distributed run the first process calls it alone.
    """
    engine: EngineConfig = getattr(config, "engine", config)
    first = engine.devices.split(",")[0] + "," if "," in engine.devices else "1"
    engine = replace(engine, devices=first, nodes=1, strategy="auto")
    with _quiet_lightning():
        logger = MetricsLogger(run, tensorboard=False)
        logger.muted = True
        trainer = _trainer(engine, run, [_Sharing(), ReduceLogs()], logger)
        torch.set_float32_matmul_precision(engine.matmul_precision)
        seed_all(engine.seed)
        (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
    return {name: float(value) for name, value in metrics.items()}


# ------------------------------------------------------------------------------------------------------------------ log


@contextmanager
def _logging_to(run: RunFolder) -> Iterator[None]:
    """Let what is said also go to ``log.txt``, and to the screen where nobody else listens."""
    added: list[tuple[logging.Logger, logging.Handler]] = []
    if is_first_process():
        run.path.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(run.log_path)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        screen = logging.StreamHandler()
        screen.setFormatter(logging.Formatter("%(message)s"))
        added = [(log, file), (_file_log, file), *([] if log.hasHandlers() else [(log, screen)])]
    level = log.level
    log.setLevel(min(level or logging.INFO, logging.INFO))
    for logger, handler in added:
        logger.addHandler(handler)
    try:
        yield
    finally:
        log.setLevel(level)
        for logger, handler in added:
            logger.removeHandler(handler)
            handler.close()


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Leave out Lightning's banners and hints that do not apply to us."""
    loggers = [logging.getLogger(n) for n in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in (
                ".*does not have many workers.*",
                ".*smaller than the logging interval.*",
                ".*module.*in eval mode at the start of training.*",
                ".*Checkpoint directory.*exists and is not empty.*",
                ".*isinstance\\(treespec, LeafSpec\\).*",
                ".*srun.*",
                ".*Total length of `list` across ranks is zero.*",
                ".*It is recommended to use `self.log.*sync_dist=True.*",  # they are reduced, see ReduceLogs
                ".*NO_SHARD.*",  # what one process does
                ".*FSDP.state_dict_type.*being deprecated.*",
            ):
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
