"""Command-line interface. The module of a command is imported when the command is called.

Each module defines a dataclass ``Config``, from which tyro builds the options, and ``main(config)``, which prints
results and returns a JSON document. Reserved keys are ``summary`` (the last line to print), ``exit_code``, and ``then``
(a function to call after printing). Library errors print one message and exit with code 2. SIGINT, SIGTERM and SIGHUP
exit with 130, 143 and 129.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import inspect
import json
import os
import re
import shutil
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from typing import Any

from matbackprop.vision.files import plain_numbers, printable
from matbackprop.vision.signals import interrupt_on_signal

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True)
class Command:
    """Entry in the table of commands."""

    module: str  #: module that implements the command
    summary: str  #: one line for the overview
    config: str = "Config"  #: name of the options dataclass in the module
    main: str = "main"  #: name of the function in the module
    #: name of a function ``parse(word, arguments, prog) → config`` that replaces the tyro parser; ``word`` is the last
    #: word of the command
    parse: str | None = None
    stopped: str | None = None  #: message after a signal
    extra: str = "train"  #: extra that installs the dependencies of the command


_TRAIN, _EVALUATE, _DATA = (f"matbackprop.cli.{name}" for name in ("train", "evaluate", "data"))
_KEPT = "stopped. The results so far are kept; rerun the command for the rest."

#: Command name, one or two words → implementation.
COMMANDS: dict[str, Command] = {
    "segment": Command("matbackprop.cli.segment", "Segment photographs.", stopped=_KEPT),
    "classify": Command("matbackprop.cli.classify", "Classify images or their regions."),
    "serve": Command("matbackprop.cli.serve", "Serve a local web page to segment photographs.", extra="serve"),
    "train contours": Command(_TRAIN, "Train a contour network (ContourNet).", parse="parse"),
    "train ncuts": Command(_TRAIN, "Train a network for normalized cuts (DeepNCuts).", parse="parse"),
    "train o2p": Command(_TRAIN, "Train a region classifier (DeepO2P).", parse="parse"),
    "evaluate segmentations": Command(_EVALUATE, "Score segmentations against human maps.", extra="metrics"),
    "evaluate contours": Command(
        _EVALUATE, "Score contour maps against human maps.", "ContourMapsConfig", "contours", extra="metrics"
    ),
    "evaluate run": Command("matbackprop.cli.evaluate_run", "Compute the validation metrics of a trained run."),
    "report": Command("matbackprop.cli.report", "Write the report of a run, or compare several runs."),
    "export": Command("matbackprop.cli.export", "Write a trained network as an ONNX file.", extra="onnx"),
    "data check": Command(_DATA, "Verify a data set and list bad files.", "Check", "check"),
    "data download": Command(_DATA, "Download a data set or weights.", "Download", "download"),
    "doctor": Command("matbackprop.cli.doctor", "Report the installation and check the gradients.", parse="parse"),
    "demo": Command("matbackprop.vision.training.demo", "Train both systems on synthetic images.", "DemoConfig"),
}

_MEMORY = re.compile("can't allocate memory|not enough memory|out of memory")  # torch errors


def main(
    arguments: Sequence[str] | None = None, commands: Mapping[str, Command] = COMMANDS, prog: str = "matbackprop"
) -> None:
    """Run a command and exit.

    Args:
        arguments: command-line arguments; ``sys.argv[1:]`` by default.
        commands: table of commands.
        prog: program name in messages.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # file names may not be encodable
    flags = {flag: f"--{flag}" in words for flag in ("debug", "quiet", "json")}
    debug = flags["debug"] or os.environ.get("MATBACKPROP_DEBUG", "") not in ("", "0")
    words = [word for word in words if word not in ("--debug", "--quiet", "--json")]
    command = commands.get(_name(words, commands) or "")
    with interrupt_on_signal() as signals, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")  # corrupted images are reported separately
        warnings.filterwarnings("ignore", "Detected pickle protocol")  # the file is rejected
        try:
            code = _dispatch(words, commands, prog, quiet=flags["quiet"], as_json=flags["json"])
        except BaseException as error:
            if debug and not isinstance(error, SystemExit):
                traceback.print_exc()
            code = _exit_code(error, signals.signum, command)
    sys.exit(code)


def _exit_code(error: BaseException, signum: int | None, command: Command | None) -> int:
    """Print the error message and return the exit code; reraise unexpected errors."""
    signum = getattr(error, "signum", signum)  # RunInterrupted has one
    if isinstance(error, KeyboardInterrupt) and signum is None:
        signum = signal.SIGINT
    if signum is not None:  # also if another error followed
        stopped = (command and command.stopped) or (str(error) if hasattr(error, "signum") else "stopped.")
        print(f"matbackprop: {stopped}", file=sys.stderr)
        return 128 + int(signum)
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        return 141
    message = _message(error, command)
    if message is None:
        raise error
    print(f"matbackprop: error: {printable(message)}", file=sys.stderr)
    return 2


def _message(error: BaseException, command: Command | None) -> str | None:
    """Return the message for a library or system error; None for unexpected errors."""
    from matbackprop import errors

    if isinstance(error, ModuleNotFoundError) and not (error.name or "matbackprop").startswith("matbackprop"):
        module, extra = (error.name or "").split(".")[0], command.extra if command else "train"
        return f"{module} is not installed. Install it with: pip install 'matbackprop[{extra}]'"
    if isinstance(error, tuple(getattr(errors, name) for name in errors.__all__ if not name.endswith("Warning"))):
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _MEMORY.search(str(error))):
        return "Not enough memory. Use smaller files, or a machine with more memory."
    if isinstance(error, RecursionError):
        return "A path or a file is nested too deeply. Use fewer levels."
    if isinstance(error, OSError) and error.strerror:
        place = "" if error.filename is None else f"{error.filename}: "
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return f"{place}{error.strerror}. {'Free disk space' if full else 'Check the path and its permissions'}."
    return None


def _dispatch(words: list[str], commands: Mapping[str, Command], prog: str, *, quiet: bool, as_json: bool) -> int:
    if words and words[0] in ("-V", "--version"):
        from matbackprop import __version__

        print(f"matbackprop {__version__}")
        return 0
    name = _name(words, commands)
    if name is not None:
        return run(name, words[len(name.split()) :], commands, prog, quiet=quiet, as_json=as_json)
    group = {name: command for name, command in commands.items() if name.split()[0] in words[:1]}
    rest, known = words[len(group) > 0 :], group or commands
    if not rest or rest[0] in ("-h", "--help", "help"):
        print(overview(known, prog))
        return 0
    unknown = " ".join(words[: 2 if group else 1])
    near = difflib.get_close_matches(unknown, [*known, *(name.split()[0] for name in known)], n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Commands: {', '.join(known)}."
    print(f"{prog}: error: Unknown command {unknown!r}. {hint}", file=sys.stderr)
    return 2


def _name(words: Sequence[str], commands: Mapping[str, Command]) -> str | None:
    return next((name for length in (2, 1) if (name := " ".join(words[:length])) in commands), None)


def run(
    name: str,
    arguments: list[str],
    commands: Mapping[str, Command] = COMMANDS,
    prog: str = "matbackprop",
    *,
    quiet: bool = False,
    as_json: bool = False,
) -> int:
    """Parse the options of a command, run it, print its summary or JSON document, and return the exit code."""
    from matbackprop import __version__
    from matbackprop.vision.progress import silence

    command = commands[name]
    module = importlib.import_module(command.module)
    prog = f"{prog} {name}"
    if command.parse is not None:
        config = getattr(module, command.parse)(name.split()[-1], arguments, prog)
    else:
        config = parse(getattr(module, command.config), arguments, prog)
    with ExitStack() as stack:
        if quiet or as_json:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        if quiet:
            stack.enter_context(silence())
        document = getattr(module, command.main)(config) or {}
    then = document.pop("then", None)
    if as_json:
        whole = {"command": name, "version": __version__, "exit_code": 0, **document}
        print(json.dumps(plain_numbers(whole), indent=2), flush=True)
    elif not quiet and "summary" in document:
        print(printable(document["summary"]), flush=True)
    if then is not None:
        then()
    return int(document.get("exit_code", 0))


def parse(kind: Any, arguments: Sequence[str], prog: str, description: str | None = None) -> Any:
    """Parse options into a dataclass."""
    import tyro

    if shutil.get_terminal_size().columns < 40:
        os.environ["COLUMNS"] = "40"  # the help of tyro hangs in very narrow terminals
    paragraphs = inspect.cleandoc(description or kind.__doc__ or "").split("\n\n")
    paragraphs.append("Options of every command: --quiet (errors only), --json (print one JSON document) and --debug.")
    # The indent also prevents tyro from joining the lines.
    wrap = textwrap.TextWrapper(shutil.get_terminal_size().columns, initial_indent=" ", subsequent_indent=" ").fill
    text = "\n".join(map(wrap, paragraphs))
    return tyro.cli(kind, args=list(arguments), prog=prog, description=text)


def optional(metavar: str) -> Any:
    """Return the annotation of an option without a value by default, for its help text."""
    import tyro

    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


def overview(commands: Mapping[str, Command] = COMMANDS, prog: str = "matbackprop") -> str:
    """Return the help text that lists commands."""
    width = max(map(len, commands)) + 2
    return "\n".join(
        [
            f"usage: {prog} COMMAND [OPTIONS]",
            "",
            "commands:",
            *(f"  {name:<{width}}{command.summary}" for name, command in commands.items()),
            "",
            f"{prog} COMMAND --help        options of a command",
            f"{prog} --version             version",
            "",
            "options of every command:",
            "  --quiet                           print errors only",
            "  --json                            print one JSON document instead of text",
            "  --debug (or MATBACKPROP_DEBUG=1)  print the traceback of an error",
        ]
    )
