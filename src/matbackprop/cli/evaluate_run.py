"""``matbackprop evaluate run RUN``: rebuild the model of a run, load its weights and validate it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from matbackprop.cli import optional
from matbackprop.errors import ConfigurationError
from matbackprop.vision.configuration import from_json, merge, read_config_file
from matbackprop.vision.training.config import RECIPES, Recipe
from matbackprop.vision.training.run_folder import RunFolder


@dataclass
class Config:
    """Validate a trained run on its validation data or on other data."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]  #: Run folder.
    which: Literal["best", "last"] = "best"  #: Weights to load.
    #: TOML or JSON file of fields that override the configuration of the run, for example another data folder.
    config: Annotated[Path | None, optional("FILE")] = None
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"  #: Type of device.


def recipe_of(run: RunFolder) -> Recipe:
    """Return the recipe that matches the configuration in a run folder."""
    data = run.read_config()
    problems = []
    for recipe in RECIPES.values():
        try:
            from_json(recipe.config_class, data)
            return recipe
        except ConfigurationError as error:
            problems.append(f"{recipe.name}: {error}")
    raise ConfigurationError(f"The configuration of {run.path} does not match any recipe. {' '.join(problems)}")


def rebuild(run: RunFolder, file: Path | None = None) -> tuple[Any, Any, Any]:
    """Return the configuration, system and data of a run, with fields overridden by ``file``."""
    from matbackprop.vision.models.backbones import check_published
    from matbackprop.vision.training.checkpoint import seed_all

    recipe = recipe_of(run)
    origin = f"{run.config_path}{'' if file is None else f' and {file}'}"
    overrides = {} if file is None else read_config_file(file)
    try:
        config = merge(from_json(recipe.config_class, run.read_config()), overrides)
        if getattr(getattr(config, "model", None), "backbone", None) is not None:
            check_published(config.model.backbone)
        seed_all(config.engine.seed)
        module, data = recipe.module.build(config)
    except ConfigurationError as error:
        raise ConfigurationError(f"{origin}: {error}") from error
    return config, module, data


def main(config: Config) -> dict[str, Any]:
    """Validate and print the metrics."""
    from matbackprop.vision.training.engine import evaluate, load_weights

    run = RunFolder(config.run)
    resolved, module, data = rebuild(run, config.config)
    weights = load_weights(run, module, config.which)
    engine = replace(resolved.engine, accelerator=config.accelerator, resume=False, overwrite=False)
    metrics = evaluate(engine, module, data)
    for name, value in sorted(metrics.items()):
        print(f"{name:<32}{value:.6g}")
    return {"summary": f"weights: {weights}", "run": run.path, "metrics": metrics}
