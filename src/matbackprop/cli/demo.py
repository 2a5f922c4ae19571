"""``matbackprop demo``: train and show both systems on images made on the fly."""

from __future__ import annotations

from dataclasses import dataclass

from matbackprop.training.demo import DemoConfig, run_demo


@dataclass
class Config(DemoConfig):
    """Train two small networks through the structured layers on images made on the fly, and write a report.

    It takes about a minute on two processor cores and needs no data, no weights and no network.
    """


def main(config: Config) -> None:
    """Run the demonstration."""
    run_demo(config)
