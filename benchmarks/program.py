"""Options, provenance and summary files of the programs that run cases of ``tests/helpers``."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from matbackprop.vision.versions import git_revision

ROOT = Path(__file__).resolve().parents[1]


def options_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the option ``--output``, by default the results file of the program."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / f"{name}.json")
    return parser


def provenance() -> dict[str, str]:
    """Machine, versions and revision of a summary."""
    return {
        "machine": f"{platform.platform()}, {os.cpu_count()} processors",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "revision": git_revision()["git"] or "",
    }


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    path.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
