"""``matbackprop train RECIPE``: options override a file, which overrides a preset.

Engine options need no prefix: ``--resume`` is ``--engine.resume``.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from matbackprop.cli import parse as parse_with_tyro
from matbackprop.errors import ConfigurationError
from matbackprop.vision.training.config import EngineConfig, Recipe, get_recipe, resolve


@dataclasses.dataclass
class _Chosen:
    recipe: Recipe
    preset: str
    config: Any


def options(
    name: str,
    preset: str | None = None,
    file: Path | None = None,
    *,
    source: str | None = None,
    last_map: bool = False,
) -> type:
    """Return a dataclass of all options of a recipe, with defaults from a preset, a saved model and a file.

    With ``last_map``, the default of ``model.taps`` is the last map of the backbone.
    """
    import tyro

    recipe = get_recipe(name)
    preset = preset or next(iter(recipe.presets))
    config = resolve(recipe, preset, file, source)
    if last_map:
        config.model.taps = ()
    presets: Any = Literal[tuple(recipe.presets)]
    chosen: Any = Annotated[presets, tyro.conf.arg(help="Source of the defaults.")]
    path: Any = Annotated[Path | None, tyro.conf.arg(help="TOML or JSON file of fields that override the preset.")]
    whole: Any = Annotated[recipe.config_class, tyro.conf.arg(name="")]
    default = dataclasses.field(default_factory=lambda: config)
    text = "Saved model to fine-tune: box, a folder, a run folder, or owner/name on the hub."
    saved: Any = Annotated[str | None, tyro.conf.arg(name="from", help=text)]
    fields = [("preset", chosen, preset), ("source", saved, source), ("config", path, file), ("recipe", whole, default)]
    return dataclasses.make_dataclass(f"Train{name.title()}", fields)


def parse(name: str, arguments: Sequence[str], prog: str) -> _Chosen:
    """Parse the preset and the file, which set the defaults, then all options."""
    recipe = get_recipe(name)
    if arguments and arguments[0] in recipe.presets:
        raise ConfigurationError(f"{arguments[0]} is a preset. Use {prog} --preset {arguments[0]}")
    first = argparse.ArgumentParser(prog, add_help=False, allow_abbrev=False)
    first.add_argument("--preset", choices=list(recipe.presets), default=next(iter(recipe.presets)))
    first.add_argument("--config", type=Path)
    first.add_argument("--from", dest="source")
    chosen, _ = first.parse_known_args(list(arguments))
    given = {word.split("=")[0].replace("_", "-") for word in arguments}
    last_map = name == "o2p" and "--model.backbone" in given and "--model.taps" not in given
    kind = options(name, chosen.preset, chosen.config, source=chosen.source, last_map=last_map)
    summary = (recipe.summary or f"Train the recipe {name}").rstrip(".")
    description = (
        f"{summary[0].upper()}{summary[1:]}. Set fields here, or in a TOML or JSON file with --config. Engine options "
        "need no prefix: --resume is --engine.resume."
    )
    parsed = parse_with_tyro(kind, [_with_prefix(word) for word in arguments], prog, description)
    return _Chosen(recipe, parsed.preset, parsed.recipe)


def _with_prefix(word: str) -> str:
    """Add the prefix of engine options.

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
    """Train."""
    from matbackprop.vision.training.engine import is_first_process, run_recipe

    run = run_recipe(chosen.recipe, chosen.config, preset=chosen.preset)
    if not is_first_process():
        return {}
    results, monitor = run.read_summary(), chosen.config.engine.monitor
    said = ""
    if "best" in results:
        said = f"best {results['best_metric']} {results['best']:.5g} at step {results['best_step']}; "
    elif results.get(monitor) is not None:
        said = f"{monitor} {results[monitor]:.5g} after the last step; "
    return {"summary": f"{said}run folder: {run.path}", "run": run.path, "results": results}
