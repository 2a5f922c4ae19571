"""Training of all recipes.

:func:`run_recipe` builds a :class:`~matbackprop.vision.training.system.System` and its
:class:`~matbackprop.vision.training.system.Data`, locks the run folder, trains
(:mod:`matbackprop.vision.training.loop`), loads the best weights, exports the model and writes the report. :func:`fit`
only trains. Lightning Fabric selects devices, starts processes and averages gradients.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from matbackprop.errors import ConfigurationError, NonFiniteError
from matbackprop.vision.devices import choose_device
from matbackprop.vision.distributed import is_first_process
from matbackprop.vision.progress import log_on_screen
from matbackprop.vision.signals import RunInterrupted
from matbackprop.vision.training.checkpoint import load_checkpoint, load_state, seed_all
from matbackprop.vision.training.config import EngineConfig, Recipe
from matbackprop.vision.training.loop import Training, validate
from matbackprop.vision.training.run_folder import RunFolder
from matbackprop.vision.training.system import Data, System

log = logging.getLogger("matbackprop")


def run_recipe(recipe: Recipe, config: Any, *, preset: str = "custom") -> RunFolder:
    """Build, train and export a recipe, and write its report.

    The default run folder is ``runs/<recipe>-<preset>-seed<seed>``.
    """
    engine: EngineConfig = config.engine
    run = _run_folder(engine, f"{recipe.name}-{preset}")
    if is_first_process():
        run.check(config, resume=engine.resume, overwrite=engine.overwrite)  # before the data are read
    seed_all(engine.seed)
    with log_on_screen():
        system, data = recipe.module.build(config)
    with _opened(run, config, engine):
        _fit(run, engine, system, data)
        if is_first_process():
            if engine.checkpoints:
                load_weights(run, system)
            recipe.module.export(run, system, data)
            if engine.report:
                from matbackprop.vision.report.html import write_report

                recipe.module.figures(run, system, data)
                write_report(run)
    return run


def fit(config: Any, system: System, data: Data, *, name: str) -> RunFolder:
    """Train ``system`` on ``data`` in a run folder, from the start or from its last checkpoint.

    Args:
        config: an :class:`EngineConfig`, or a configuration with a field ``engine``.
        system: system to train.
        data: training and validation data.
        name: name of the default run folder, ``runs/<name>-seed<seed>``.

    Raises:
        RunInterrupted: a signal was received. The state was saved.
        NonFiniteError: a loss or gradient is not finite, or a layer raised a numerical error.
        ConfigurationError: the folder contains another run, or another process is training in it.
        CheckpointError: the last checkpoint is corrupted.
    """
    engine: EngineConfig = getattr(config, "engine", config)
    run = _run_folder(engine, name)
    with _opened(run, config, engine):
        _fit(run, engine, system, data)
    return run


def evaluate(config: Any, system: System, data: Data) -> dict[str, float]:
    """Compute the validation metrics of a system in this process."""
    engine: EngineConfig = getattr(config, "engine", config)
    device = choose_device(engine.accelerator)
    system.to(device)
    loader = data.validation_loader()
    with _torch_settings(engine, device):
        seed_all(engine.seed)
        return {} if loader is None else validate(system, data, loader, engine)


def load_weights(run: RunFolder, system: System, which: str = "best") -> Path:
    """Load the best or last weights of a run and return their file. If there is no best file, load the last one."""
    path = run.checkpoints / f"{which}.ckpt"
    if which == "best" and not path.exists():
        path = run.checkpoints / "last.ckpt"
    load_state(system, load_checkpoint(path), path)
    return path


def _fit(run: RunFolder, engine: EngineConfig, system: System, data: Data) -> None:
    try:
        fabric = Fabric(accelerator=engine.accelerator, devices=engine.devices, num_nodes=engine.nodes)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"--devices {engine.devices} with --accelerator {engine.accelerator} is not available ({error}). Use auto."
        ) from error
    fabric.launch()
    with _torch_settings(engine, fabric.device):
        Training(run, engine, system, data, fabric).run()
    if torch.distributed.is_initialized():
        fabric.barrier()  # only the first process exports
        torch.distributed.destroy_process_group()


@contextmanager
def _torch_settings(engine: EngineConfig, device: torch.device) -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision(engine.matmul_precision)
    torch.backends.cudnn.benchmark = device.type == "cuda" and not engine.deterministic
    if engine.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.benchmark = before[1]
        torch.use_deterministic_algorithms(deterministic)


def _run_folder(engine: EngineConfig, name: str) -> RunFolder:
    choose_device(engine.accelerator)  # raises before the folder is created
    return RunFolder(engine.run or Path("runs") / f"{name}-seed{engine.seed}")


@contextmanager
def _opened(run: RunFolder, config: Any, engine: EngineConfig) -> Iterator[None]:
    with warnings.catch_warnings():
        for part in ("isinstance\\(treespec, LeafSpec\\)", "srun", "Grad strides do not match", "be using warmup"):
            warnings.filterwarnings("ignore", message=f".*{part}.*")
        if not is_first_process():
            yield
            return
        with run.locked(), log_on_screen():
            run.create(config, resume=engine.resume, overwrite=engine.overwrite)
            file = logging.FileHandler(run.log_path)
            file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            log.addHandler(file)
            try:
                yield
            except (RunInterrupted, NonFiniteError) as error:  # the caller prints it
                file.handle(log.makeRecord(log.name, logging.ERROR, "", 0, str(error), (), None))
                raise
            finally:
                log.removeHandler(file)
                file.close()
