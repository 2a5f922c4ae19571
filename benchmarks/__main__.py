"""``python -m benchmarks NAME``: one program per question."""

from __future__ import annotations

import importlib
import sys

from matbackprop.cli import Command, main

COMMANDS = {
    "speed": Command("benchmarks.speed.cli", "Compare speed, memory and accuracy with other packages.", extra="bench"),
    "architectures": Command("benchmarks.architectures", "Apply replace_pool to classifiers of other packages."),
}
#: Programs that parse their options themselves.
PROGRAMS = {
    "accuracy": "Measure errors of values and gradients against high-precision references.",
    "adversarial_matrices": "Call every operator with ill-conditioned and invalid matrices.",
    "corrupted_files": "Read corrupted files of every kind.",
    "faults": "Inject faults into training runs and resume them.",
    "load": "Load-test the web page with many concurrent visitors.",
    "long_runs": "Measure memory over long runs, in threads and in processes.",
}

if __name__ == "__main__":
    name = next(iter(sys.argv[1:]), "--help")
    if name in PROGRAMS:
        sys.argv = [f"python -m benchmarks {name}", *sys.argv[2:]]
        sys.exit(importlib.import_module(f"benchmarks.{name}").main())
    if name in ("-h", "--help"):
        print("\n".join(["Programs:", *(f"  {key:<22} {text}" for key, text in PROGRAMS.items()), ""]))
    main(commands=COMMANDS, prog="python -m benchmarks")
