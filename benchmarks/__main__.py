"""``python -m benchmarks speed``, ``… architectures``: measurements next to other packages and on their models."""

from matbackprop.cli import Command, main

COMMANDS = {
    "speed": Command(
        "benchmarks.speed.cli", "Measure speed, memory and accuracy next to other packages.", extra="bench"
    ),
    "architectures": Command("benchmarks.architectures", "Apply replace_pool to classifiers of other packages."),
}

if __name__ == "__main__":
    main(commands=COMMANDS, prog="python -m benchmarks")
