"""``python -m benchmarks speed``: measure speed, memory and accuracy next to other packages."""

from matbackprop.cli import Command, main

COMMANDS = {
    "speed": Command(
        "benchmarks.speed.cli", "Measure speed, memory and accuracy next to other packages.", extra="bench"
    )
}

if __name__ == "__main__":
    main(commands=COMMANDS, prog="python -m benchmarks")
