"""``python -m benchmarks speed``: measure speed, memory and accuracy next to other packages."""

from __future__ import annotations

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from benchmarks.speed import Results


@dataclass
class Config:
    """Measure the suites pooling, functions, decompositions, inverse-root, ncuts, segmentation, gradient-error and
    training-step.

    Packages that are not installed are reported as missing.
    """

    suites: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Suites to measure; all by default."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    quick: bool = False
    """Tiny sizes that finish in seconds, to see that everything runs."""
    seconds: float = 1.0
    """Time for the repeats of each measurement."""
    threads: int = 0
    """CPU threads for torch; 0 leaves its choice."""
    output: Path | None = None
    """Folder for the results, one JSON file per machine; nothing is written without it."""
    page: Path | None = None
    """Write the page of all results in the output folder to this Markdown file, its plots beside it."""
    revision: str = ""
    """Revision of the code, where git cannot tell."""
    measure: bool = True
    """Measure; --no-measure only writes the page."""


def measure_suite(config: Config, suite: str, device: str) -> Results:
    """Measure one suite and print its records."""
    import torch
    from rich.console import Console

    from benchmarks.speed import run_suites
    from benchmarks.speed.page import format_record

    if config.threads:
        torch.set_num_threads(config.threads)
    console = Console(highlight=False)
    return run_suites(
        [suite],
        device,
        scale="quick" if config.quick else "full",
        seconds=config.seconds,
        revision=config.revision,
        report=lambda record: console.print(format_record(record), markup=False, soft_wrap=True),
    )


def measure_alone(config: Config, suite: str, device: str) -> Results:
    """Measure in a separate process, because a failed capture or a library that keeps memory affects later suites."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(measure_suite, config, suite, device).result()


def main(config: Config) -> dict[str, Any]:
    """Measure, print a table, and write results and page if requested."""
    from rich.console import Console

    from benchmarks.speed import SUITES, save_results
    from benchmarks.speed.page import write_page
    from matbackprop.errors import ConfigurationError
    from matbackprop.vision.inference import choose_device

    if config.page is not None and config.output is None:
        raise ConfigurationError("--page draws the results in a folder; name it with --output.")
    if not (0 <= config.threads <= 1024 and 0 < config.seconds < math.inf):
        raise ConfigurationError(
            f"--threads {config.threads} --seconds {config.seconds}: give from 0 to 1024 threads and a positive time."
        )
    device = choose_device(config.device).type
    console = Console(highlight=False)
    files: list[Path] = []
    if config.measure:
        for suite in config.suites or tuple(SUITES):  # save each as soon as it is measured
            results = (measure_alone if device == "cuda" else measure_suite)(config, suite, device)
            if config.output is not None:
                files.append(save_results(results, config.output))
                console.print(f"results: {files[-1]}", markup=False, soft_wrap=True)
    if config.page is not None and config.output is not None:
        files.append(write_page(config.output, config.page))
    where = ", ".join(str(file) for file in dict.fromkeys(files)) or "not kept; --output names a folder for them"
    return {"summary": f"measured on {device}; results: {where}", "device": device, "files": list(dict.fromkeys(files))}
