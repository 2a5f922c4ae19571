"""``python -m benchmarks speed``: compare speed, memory and accuracy with other packages."""

from __future__ import annotations

import datetime
import math
import multiprocessing
import re
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from benchmarks.speed.measure import Results, describe_machine, run_entry, save_results
from benchmarks.speed.page import format_record
from benchmarks.speed.suites import SUITES
from matbackprop.errors import ConfigurationError
from matbackprop.vision.devices import choose_device
from matbackprop.vision.versions import git_revision


@dataclass
class Config:
    """Measure the suites pooling, functions, decompositions, inverse-root, ncuts, segmentation and training-step.

    Packages that are not installed are reported as missing.
    """

    suites: Annotated[tuple[str, ...], tyro.conf.Positional] = ()  #: Suites to measure; all by default.
    device: Literal["auto", "cpu", "cuda"] = "auto"  #: Where to compute.
    cases: str = ""  #: Regular expression of the cases to measure; all by default.
    limit: float = math.inf  #: Seconds after which a suite measures no further entry.
    quick: bool = False  #: Tiny sizes that finish in seconds, to check that all suites run.
    seconds: float = 1.0  #: Time for the repeats of each measurement.
    threads: int = 0  #: CPU threads for torch; 0 uses torch's default.
    output: Path | None = None  #: Folder for the results, one JSON file per machine; by default nothing is written.
    revision: str = ""  #: Revision of the code, if git is not available.


def measure_suite(config: Config, suite: str, device: torch.device) -> Results:
    """Measure one suite and print its records."""
    if config.threads:
        torch.set_num_threads(config.threads)
    stop = time.perf_counter() + config.limit
    results = Results(
        machine=describe_machine(device),
        command=" ".join(["python -m benchmarks speed", *sys.argv[2:]]),
        revision=config.revision or (git_revision()["git"] or "")[:7],
        date=datetime.date.today().isoformat(),
    )
    for entry in SUITES[suite](device, "quick" if config.quick else "full"):
        if not re.search(config.cases, entry.case):
            continue
        if time.perf_counter() > stop:
            break
        results.records.append(run_entry(suite, entry, device, config.seconds))
        print(format_record(results.records[-1]), flush=True)
    return results


def measure_alone(config: Config, suite: str, device: torch.device) -> Results:
    """Measure in a separate process, because failed captures and retained memory affect later suites."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(measure_suite, config, suite, device).result()


def main(config: Config) -> dict[str, Any]:
    """Measure, print the records, and write results if requested."""
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
