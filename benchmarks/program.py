"""Provenance and summary files of the programs that run cases of ``tests/helpers``."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from matbackprop.vision.versions import git_revision

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def provenance() -> dict[str, str]:
    """Machine, versions and revision of a summary."""
    return {
        "machine": f"{platform.platform()}, {os.cpu_count()} processors",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "revision": git_revision()["git"] or "",
    }


def finish(path: Path, summary: dict[str, Any], text: str, *, good: bool) -> dict[str, Any]:
    """Write a summary file and return the document of the command; the exit code is 1 unless ``good``."""
    path.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return {"summary": f"{text}: {path}", "exit_code": int(not good)}
