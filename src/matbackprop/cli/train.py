"""``matbackprop train RECIPE``: options override a configuration file, which overrides a preset."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from matbackprop.cli import COMMANDS
from matbackprop.cli import parse as parse_with_tyro
from matbackprop.errors import ConfigurationError
from matbackprop.vision.files import is_number
from matbackprop.vision.training.config import RECIPES, EngineConfig, Recipe, resolve


class _Chosen(NamedTuple):
    recipe: Recipe
    preset: str
    config: Any


def parse(name: str, arguments: Sequence[str], prog: str) -> _Chosen:
    """Parse the preset, configuration file and saved model, which set the defaults, then all options."""
    import tyro

    recipe = RECIPES[name]
    if arguments and arguments[0] in recipe.presets:
        raise ConfigurationError(f"{arguments[0]} is a preset. Use {prog} --preset {arguments[0]}")
    first = argparse.ArgumentParser(prog, add_help=False, allow_abbrev=False)
    first.add_argument("--preset", choices=list(recipe.presets))
    first.add_argument("--config", type=Path)
    first.add_argument("--from", dest="source")
    chosen, _ = first.parse_known_args(list(arguments))
    preset = chosen.preset or ("fine-tune" if chosen.source else "smoke")
    config = resolve(recipe, preset, chosen.config, chosen.source)
    given = {word.split("=")[0].replace("_", "-") for word in arguments}
    if name == "o2p" and "--model.backbone" in given and "--model.taps" not in given:
        config.model.taps = ()  # the last map of the backbone

    def option(kind: Any, **settings: Any) -> Any:
        return Annotated[kind, tyro.conf.arg(**settings)]

    presets: Any = Literal[tuple(recipe.presets)]
    saved = "Saved model to fine-tune: box, a folder, a run folder, or owner/name on the hub."
    file = "TOML or JSON file of fields that override the preset."
    fields = [
        ("preset", option(presets, help="Default values of all options; fine-tune if --from is given."), preset),
        ("source", option(str | None, name="from", help=saved), chosen.source),
        ("config", option(Path | None, help=file), chosen.config),
        ("recipe", option(recipe.config_class, name=""), dataclasses.field(default_factory=lambda: config)),
    ]
    kind = dataclasses.make_dataclass(f"Train{name.title()}", fields)
    description = (
        f"{COMMANDS[f'train {name}'].summary} Set fields here, or in a TOML or JSON file with --config. Engine options "
        "need no prefix: --resume is --engine.resume."
    )
    parsed = parse_with_tyro(kind, [_with_prefix(word) for word in arguments], prog, description)
    return _Chosen(recipe, parsed.preset, parsed.recipe)


def _with_prefix(word: str) -> str:
    """Add the prefix ``engine.`` to engine options.

    Example:
        >>> _with_prefix("--max-epochs=3"), _with_prefix("--no-progress"), _with_prefix("--data.root")
        ('--engine.max-epochs=3', '--engine.no-progress', '--data.root')
    """
    if not word.startswith("--"):
        return word
    name = word[2:].split("=")[0].replace("_", "-")
    fields = {f.name.replace("_", "-") for f in dataclasses.fields(EngineConfig)}
    if name in fields or (name.startswith("no-") and name[3:] in fields):
        return f"--engine.{word[2:]}"
    return word


def main(chosen: _Chosen) -> dict[str, Any]:
    """Train and return the summary."""
    from matbackprop.vision.distributed import is_first_process
    from matbackprop.vision.training.engine import run_recipe

    run = run_recipe(chosen.recipe, chosen.config, preset=chosen.preset)
    if not is_first_process():
        return {}
    results, monitor = run.read_summary(), chosen.config.engine.monitor
    best = ""
    if is_number(results.get("best")):
        best = f"best {results['best_metric']} {results['best']:.5g} at step {results['best_step']}; "
    elif is_number(results.get(monitor)):
        best = f"{monitor} {results[monitor]:.5g} after the last step; "
    return {"summary": f"{best}run folder: {run.path}", "run": run.path, "results": results}
