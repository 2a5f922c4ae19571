"""``matbackprop demo``: train and show both systems on images made on the fly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matbackprop.training.demo import DemoConfig, run_demo
from matbackprop.training.run_folder import RunFolder


@dataclass
class Config(DemoConfig):
    """Train both systems in their smallest presets on images made on the fly, and write a report.

    It takes about a minute on two processor cores and needs no data, no weights and no network.
    """


def main(config: Config) -> dict[str, Any]:
    """Run the demonstration."""
    report = run_demo(config)
    results = RunFolder(config.run).read_summary()
    return {"summary": f"The report with pictures: {report}", "run": config.run, "report": report, "results": results}
