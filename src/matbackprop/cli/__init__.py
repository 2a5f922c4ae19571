"""The command line: a table of commands, each in a module of its own that is imported only when it is called.

A command's module has a dataclass ``Config``, from which tyro makes the options, and ``main(config)``, which prints
what people read and returns a document of what was done: its ``summary`` is the last line that is printed,
``exit_code`` what the command exits with. Every command takes ``--quiet``, which leaves out everything but errors, and
``--json``, which prints the document instead of the text; the page of the command line says what the documents hold.
Errors of the library's own kinds end a command with one message and exit code 2, SIGINT, SIGTERM and SIGHUP with 130,
143 and 129; ``--debug`` or ``MATBACKPROP_DEBUG=1`` shows where they came from.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import inspect
import json
import os
import re
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from types import FrameType
from typing import Any

from matbackprop.vision.files import plain_numbers
from matbackprop.vision.signals import SignalHandlers

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True)
class Command:
    """Where a command lives.

    Attributes:
        module: imported when the command is called.
        summary: one line for the overview.
        config: name of the options' dataclass in the module.
        main: name of the function, or ``module:function`` of one that is elsewhere.
        parse: name of a function ``parse(arguments, prog) → config`` for commands that need more than tyro's parser.
        arguments: further positional arguments of ``parse``.
        stopped: what is left after a signal, where the command knows better than what it was doing.
        extra: the extra that installs everything that the command needs.
    """

    module: str
    summary: str
    config: str = "Config"
    main: str = "main"
    parse: str | None = None
    arguments: tuple[str, ...] = ()
    stopped: str | None = None
    extra: str = "train"

    def function(self) -> Callable[[Any], dict[str, Any] | None]:
        """Import what carries the command out."""
        place, _, name = self.main.rpartition(":")
        return getattr(importlib.import_module(place or self.module), name)


COMMANDS: dict[str, Command] = {
    "demo": Command(
        "matbackprop.vision.training.demo",
        "Train and show both systems in a few minutes, on data made on the fly.",
        "DemoConfig",
    ),
    "train o2p": Command(
        "matbackprop.cli.train", "Train a region classifier (DeepO2P).", parse="parse", arguments=("o2p",)
    ),
    "train contours": Command(
        "matbackprop.cli.train", "Train contours for segmentation (ContourNet).", parse="parse", arguments=("contours",)
    ),
    "train ncuts": Command(
        "matbackprop.cli.train", "Train image segmentation (DeepNCuts).", parse="parse", arguments=("ncuts",)
    ),
    "evaluate segmentations": Command(
        "matbackprop.cli.evaluate",
        "Score segmentations against human ones: covering, PRI, VI, boundaries.",
        extra="metrics",
    ),
    "evaluate contours": Command(
        "matbackprop.cli.evaluate",
        "Score soft contour maps against human maps: boundary precision and recall.",
        "ContoursConfig",
        "contours",
        extra="metrics",
    ),
    "evaluate run": Command("matbackprop.cli.evaluate_run", "Validate a trained run again."),
    "segment": Command(
        "matbackprop.cli.segment",
        "Segment photographs.",
        stopped="stopped. The results so far are kept; rerun the command for the rest.",
    ),
    "classify": Command("matbackprop.cli.classify", "Name the objects in regions of images."),
    "export": Command("matbackprop.cli.export", "Write a trained network as an ONNX file.", extra="onnx"),
    "report": Command("matbackprop.cli.report", "Write the HTML page of a run, or of a comparison of runs."),
    "serve": Command(
        "matbackprop.cli.serve", "Open a page in the browser: segment photographs, explore gradients.", extra="serve"
    ),
    "doctor": Command(
        "matbackprop.cli.doctor", "Say what is installed, what works, and check the gradients.", parse="parse"
    ),
    "data check": Command("matbackprop.cli.data", "Verify a data set and name each bad file.", "Check", "check"),
    "data download": Command("matbackprop.cli.data", "Fetch a data set or weights.", "Download", "download"),
    "data cache": Command("matbackprop.cli.data", "List, verify or remove cached data.", "CacheConfig", "cache"),
    "completion": Command("matbackprop.cli.completion", "Print the completion of a shell.", extra="metrics"),
}
"""All commands: one or two words → where they live."""

_MEMORY = re.compile("can't allocate memory|not enough memory|out of memory")  # torch's own errors, of all devices

GROUPS = {
    "train": "Train one of the two systems.",
    "evaluate": "Score segmentations, or validate a run.",
    "data": "Check, fetch and cache data.",
}

EXTRAS: dict[str, tuple[str, ...]] = {
    "metrics": ("numpy", "scipy", "PIL", "torchmetrics", "tyro", "shtab", "rich"),
    "train": (
        "filelock",
        "pydantic",
        "lightning_fabric",
        "safetensors",
        "skimage",
        "tensorboard",
        "matplotlib",
        "pycocotools",
        "pooch",
        "tqdm",
    ),
    "sift": ("kornia",),
    "serve": ("gradio", "uvicorn", "mpmath"),
    "onnx": ("onnx", "onnxscript"),
    "video": ("av",),
    "bench": ("psutil", "sklearn", "spd_learn", "geoopt", "ncut_pytorch"),
}
"""Extra → the modules that it brings."""

INCLUDED = {"train": ("metrics",), **dict.fromkeys(("serve", "onnx", "video", "bench"), ("train", "metrics"))}
"""Extra → the extras that it contains."""


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
            stream.reconfigure(errors="backslashreplace")  # names of files may hold what no encoding has
    debug = os.environ.get("MATBACKPROP_DEBUG", "") not in ("", "0")
    flags = {flag: f"--{flag}" in words for flag in ("debug", "quiet", "json")}
    words = [word for word in words if word not in ("--debug", "--quiet", "--json")]
    name = _name(words, commands)
    call = lambda: _dispatch(words, commands, prog, quiet=flags["quiet"], as_json=flags["json"])  # noqa: E731
    sys.exit(_guarded(call, debug or flags["debug"], f"{prog} {name}", commands.get(name or "")))


class _Signals(SignalHandlers):
    """A signal unwinds a command like Ctrl-C, so that it ends what it has started; a later one ends it."""

    def first(self) -> None:
        raise KeyboardInterrupt

    def again(self, signum: int, frame: FrameType | None) -> None:
        os._exit(128 + signum)


def _guarded(call: Callable[[], int], debug: bool, name: str = "matbackprop", command: Command | None = None) -> int:
    """Call and turn signals and the library's own errors into a message and an exit code."""
    from matbackprop import errors

    own = tuple(getattr(errors, name) for name in errors.__all__ if not name.endswith("Warning"))
    with _Signals() as signals, warnings.catch_warnings():
        # What is worth saying about a damaged picture, its reader says.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.filterwarnings("ignore", "Detected pickle protocol")  # of torch, about a file that is then refused
        try:
            return call()
        except BaseException as error:
            # RunInterrupted is known here by its attribute, without importing the engine.
            signum = getattr(error, "signum", signals.signum)
            if isinstance(error, KeyboardInterrupt) and signum is None:
                signum = signal.SIGINT
            if signum is not None:  # whatever else went wrong while the command was ending
                if debug:
                    traceback.print_exc()
                said = str(error) if hasattr(error, "signum") else "stopped."
                stopped = command.stopped if command else None
                print(f"matbackprop: {stopped or said}", file=sys.stderr)
                return 128 + int(signum)
            if isinstance(error, BrokenPipeError):
                # The reader of our output has gone; keep Python from complaining once more when it flushes at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 141
            message = _missing_extra(error, name, command) or (
                str(error) if isinstance(error, own) else _system_error(error)
            )
            if message is None:
                raise
            if debug:
                traceback.print_exc()
            print(f"matbackprop: error: {message}", file=sys.stderr)
            return 2


def _missing_extra(error: BaseException, name: str, command: Command | None) -> str | None:
    """Return what to install where an import of an optional dependency failed: one extra that is enough."""
    from matbackprop.errors import MissingExtraError

    failed = error.__context__ if isinstance(error, MissingExtraError) else error
    module = (getattr(failed, "name", None) or "").split(".")[0] if isinstance(failed, ModuleNotFoundError) else ""
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    if extra is None:
        return None
    wanted = command.extra if command else extra
    if extra != wanted and extra not in INCLUDED.get(wanted, ()):
        wanted = extra
    needs = f"'{name}' needs" if command else "this needs"
    return f"{needs} {module}, which is not installed: pip install 'matbackprop[{wanted}]'"


def _system_error(error: BaseException) -> str | None:
    """Return a message where the system refused memory, depth, or a file or folder that an option names."""
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _MEMORY.search(str(error))):
        return "there is not enough memory for this. Give smaller files, or a machine with more memory."
    if isinstance(error, RecursionError):
        return "a path or a file that was given is nested too deeply."
    if isinstance(error, OSError) and error.strerror:
        place = "" if error.filename is None else f"{error.filename}: "
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "Make room on the disk" if full else "Check the path and its permissions"
        return f"{place}{error.strerror}. {advice}, or name another one."
    return None


def _dispatch(words: list[str], commands: Mapping[str, Command], prog: str, *, quiet: bool, as_json: bool) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview(commands=commands, prog=prog))
        return 0
    if words[0] in ("-V", "--version"):
        from matbackprop import __version__

        print(f"matbackprop {__version__}")
        return 0
    name = _name(words, commands)
    if name is not None:
        return run(name, words[len(name.split()) :], commands, prog, quiet=quiet, as_json=as_json)
    if commands is COMMANDS and words[0] in GROUPS:
        if len(words) == 1 or words[1] in ("-h", "--help"):
            print(overview(words[0]))
            return 0
        return _unknown(" ".join(words[:2]), commands, prog, words[0])
    return _unknown(words[0], commands, prog)


def _name(words: Sequence[str], commands: Mapping[str, Command]) -> str | None:
    """Return the command that the first words name."""
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
    """Parse the options of one command, run it, print its summary or its document, and return its exit code."""
    from matbackprop.vision.progress import silence

    command = commands[name]
    module = importlib.import_module(command.module)
    prog = f"{prog} {name}"
    if command.parse is not None:
        config = getattr(module, command.parse)(*command.arguments, arguments, prog)
    else:
        config = parse(getattr(module, command.config), arguments, prog)
    with ExitStack() as stack:
        if quiet or as_json:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        if quiet:
            stack.enter_context(silence())
        done = command.function()(config) or {}
    then = done.pop("then", None)
    if as_json:
        from matbackprop import __version__

        print(
            json.dumps(plain_numbers({"command": name, "version": __version__, "exit_code": 0, **done}), indent=2),
            flush=True,
        )
    elif not quiet and "summary" in done:
        print(done["summary"], flush=True)
    if then is not None:
        then()
    return int(done.get("exit_code", 0))


def parse(kind: Any, arguments: Sequence[str], prog: str, description: str | None = None) -> Any:
    """Make a command line of a dataclass and read it."""
    import tyro

    text = inspect.cleandoc(description or kind.__doc__ or "")
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    paragraphs.append(
        "Every command also takes --quiet (only errors), --json (a document instead of text) and --debug."
    )
    return tyro.cli(kind, args=list(arguments), prog=prog, description="\n\n".join(paragraphs))


def overview(group: str | None = None, commands: Mapping[str, Command] = COMMANDS, prog: str = "matbackprop") -> str:
    """Return the list of commands, or of those of a group."""
    names = [n for n in commands if group is None or n.split()[0] == group]
    width = max(map(len, names)) + 2
    head = GROUPS[group] if group else "Structured matrix layers with exact gradients, and two systems built on them."
    place = f" {group}" if group else ""
    lines = [f"usage: {prog}{place} COMMAND [OPTIONS]", "", head, "", "commands:"]
    for n in names:
        hang = " " * (width + 2)
        lines += textwrap.wrap(commands[n].summary, 76, initial_indent=f"  {n:<{width}}", subsequent_indent=hang)
    lines += [
        "",
        f"{prog} COMMAND --help        the options of a command",
        f"{prog} --version             the version",
        "every command takes",
        "--quiet                           print errors only",
        "--json                            print one JSON document instead of text",
        "--debug (or MATBACKPROP_DEBUG=1)  show where an error came from",
    ]
    return "\n".join(lines)


def _unknown(name: str, commands: Mapping[str, Command], prog: str, group: str | None = None) -> int:
    known = [n for n in commands if group is None or n.split()[0] == group]
    near = difflib.get_close_matches(name, [*known, *GROUPS], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(known)}."
    print(f"{prog}: error: there is no command {name!r}; {hint}", file=sys.stderr)
    return 2
