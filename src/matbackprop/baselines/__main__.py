"""``python -m matbackprop.baselines --data DIR --out DIR``: score the baselines and write one summary a method."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from matbackprop.baselines.run import BASELINES, HUMANS, run_baselines


@dataclass
class Config:
    """Segment BSDS images with every baseline and score them."""

    data: Path
    """Folder of the data set (BSDS500, BSDS300 or your own in the same layout)."""
    out: Path
    """Folder for one JSON file a method."""
    methods: tuple[str, ...] = (*BASELINES, HUMANS)
    """Which methods."""
    split: str = "bsds300-test"
    """Which images."""
    limit: int | None = None
    """Only the first so many images."""
    boundary: bool = True
    """Match boundaries too."""
    workers: int = 1
    """Number of processes."""


def main(config: Config) -> None:
    """Run and print one line a method."""
    words = ["--data", "BSDS500", "--out", str(config.out), "--methods", *config.methods, "--split", config.split]
    words += ["--limit", str(config.limit)] if config.limit else []
    words += [] if config.boundary else ["--no-boundary"]
    command = shlex.join(["python", "-m", "matbackprop.baselines", *words])

    def progress(method: str, done: int, total: int) -> None:
        if done % 10 == 0 or done == total:
            print(f"{method}: {done} of {total}", file=sys.stderr, flush=True)

    for method in config.methods:
        summaries = run_baselines(
            config.data,
            config.out,
            [method],
            config.limit,
            split=config.split,
            boundary=config.boundary,
            workers=config.workers,
            command=command,
            progress=progress,
        )
        scores = summaries[method]["scores"]
        print(
            f"{method}: best (average) covering {scores['paper_best']:.3f} ({scores['paper_average']:.3f})", flush=True
        )


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Config, prog="python -m matbackprop.baselines"))
