"""``python -m benchmarks NAME``: one program per question."""

from matbackprop.cli import Command, main

SUMMARIES = {
    "speed": "Compare speed, memory and accuracy with other packages.",
    "accuracy": "Measure errors of values and gradients against high-precision references.",
    "adversarial_matrices": "Call every operator with ill-conditioned and invalid matrices.",
    "architectures": "Apply replace_pool to classifiers of other packages.",
    "corrupted_files": "Read corrupted files of every kind.",
    "faults": "Inject faults into training runs and resume them.",
    "load": "Load-test the web page with many concurrent visitors.",
    "long_runs": "Measure memory over long runs, in threads and in processes.",
}
COMMANDS = {
    name: Command(f"benchmarks.{'speed.cli' if name == 'speed' else name}", summary, extra="bench")
    for name, summary in SUMMARIES.items()
}

if __name__ == "__main__":
    main(commands=COMMANDS, prog="python -m benchmarks")
