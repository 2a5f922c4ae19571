"""``python -m benchmarks speed``: compare speed, memory and accuracy with other packages."""

from __future__ import annotations

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    import torch

    from benchmarks.speed.measure import Results


@dataclass
class Config:
    """Measure the suites pooling, functions, decompositions, inverse-root, ncuts, segmentation and training-step.

    Packages that are not installed are reported as missing.
    """

    suites: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Suites to measure; all by default."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    cases: str = ""
    """Regular expression of the cases to measure; all by default."""
    limit: float = math.inf
    """Seconds after which a suite measures no further entry."""
    quick: bool = False
    """Tiny sizes that finish in seconds, to check that all suites run."""
    seconds: float = 1.0
    """Time for the repeats of each measurement."""
    threads: int = 0
    """CPU threads for torch; 0 uses torch's default."""
    output: Path | None = None
    """Folder for the results, one JSON file per machine; by default nothing is written."""
    revision: str = ""
    """Revision of the code, if git is not available."""


def measure_suite(config: Config, suite: str, device: torch.device) -> Results:
    """Measure one suite and print its records."""
    import torch

    from benchmarks.speed.measure import run_suite
    from benchmarks.speed.page import format_record

    if config.threads:
        torch.set_num_threads(config.threads)
    return run_suite(
        suite,
        device,
        scale="quick" if config.quick else "full",
        seconds=config.seconds,
        cases=config.cases,
        limit=config.limit,
        revision=config.revision,
        report=lambda record: print(format_record(record), flush=True),
    )


def measure_alone(config: Config, suite: str, device: torch.device) -> Results:
    """Measure in a separate process, because failed captures and retained memory affect later suites."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(measure_suite, config, suite, device).result()


def main(config: Config) -> dict[str, Any]:
    """Measure, print the records, and write results if requested."""
    from benchmarks.speed.measure import save_results
    from benchmarks.speed.suites import SUITES
    from matbackprop.errors import ConfigurationError
    from matbackprop.vision.inference import choose_device

    if unknown := [suite for suite in config.suites if suite not in SUITES]:
        raise ConfigurationError(f"Unknown suite {unknown[0]!r}. Suites: {', '.join(SUITES)}.")
    device = choose_device(config.device)
    written = None
    for suite in config.suites or tuple(SUITES):  # save each as soon as it is measured
        results = (measure_alone if device.type == "cuda" else measure_suite)(config, suite, device)
        if config.output is not None:
            written = save_results(results, config.output)
    where = written or "not written; --output names a folder for them"
    return {"summary": f"measured on {device.type}; results: {where}", "device": device.type, "file": written}
