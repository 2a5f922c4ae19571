"""``python -m experiments NAME``: rebuild a published table."""

from matbackprop.cli import Command, main

COMMANDS = {
    name: Command(
        "experiments.config",
        summary,
        config,
        "experiments.table:reproduce",
        stopped="stopped; finished runs are kept. Rerun the command to resume.",
    )
    for name, config, summary in (
        ("table1", "Table1Config", "The paper's first table: region classification."),
        ("table2", "Table2Config", "The paper's second table: full-image segmentation."),
        ("backbones", "BackbonesConfig", "Region classification by first and second order on several backbones."),
    )
}

if __name__ == "__main__":
    main(commands=COMMANDS, prog="python -m experiments")
