"""Shell completion of all commands, made by tyro and shtab from the same dataclasses that parse them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

import tyro

from matbackprop.cli import COMMANDS, GROUPS
from matbackprop.errors import ConfigurationError

SHELLS = ("bash", "zsh", "tcsh")


@dataclass
class Config:
    """Print the script that completes commands and options in a shell: eval "$(matbackprop completion bash)"."""

    shell: Annotated[Literal["bash", "zsh", "tcsh"], tyro.conf.Positional] = "bash"
    """The shell."""


def main(config: Config) -> dict[str, Any]:
    """Print the script."""
    script = completion(config.shell)
    print(script)
    return {"shell": config.shell, "script": script}


def completion(shell: str) -> str:
    """Return the script that completes ``matbackprop`` in a shell.

    Commands whose extras are not installed are left out.
    """
    if shell not in SHELLS:
        raise ConfigurationError(f"there is no completion for {shell!r}; choose one of {', '.join(SHELLS)}.")
    groups: dict[str, list[Any]] = {}
    top: list[Any] = []
    for name, command in COMMANDS.items():
        try:
            module = importlib.import_module(command.module)
            kind = module.options(*command.arguments) if command.parse is not None else getattr(module, command.config)
        except ImportError:
            continue
        *group, last = name.split()
        marker = tyro.conf.subcommand(last, description=command.summary, prefix_name=False)
        marked = Annotated[kind, marker]  # type: ignore[valid-type]
        (groups.setdefault(group[0], []) if group else top).append(marked)
    for name, members in groups.items():
        choice = Union[tuple(members)]  # type: ignore[valid-type]  # noqa: UP007
        fields: list[Any] = [("command", Annotated[choice, tyro.conf.arg(name="")])]  # type: ignore[valid-type]
        kind = dataclasses.make_dataclass(f"{name.title()}Commands", fields)
        top.append(Annotated[kind, tyro.conf.subcommand(name, description=GROUPS[name], prefix_name=False)])
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        everything: Any = Union[tuple(top)]  # noqa: UP007
        tyro.cli(everything, prog="matbackprop", args=["--tyro-print-completion", shell])
    # Options of the engine may be written without their prefix; see cli.train.
    return re.sub(r"'--engine\.([\w-]+)'", r"'--\1', '--engine.\1'", text.getvalue())
