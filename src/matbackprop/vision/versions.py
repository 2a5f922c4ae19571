"""Versions of packages and of the checkout."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("matbackprop", "torch", "triton", "numpy", "scipy", "torchmetrics", "lightning-fabric", "safetensors",
            "pycocotools", "kornia", "gradio", "timm", "torchvision", "transformers", "onnx")  # fmt: skip


def versions() -> dict[str, Any]:
    """Return package versions, git revision, platform and command line of this process."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "packages": package_versions(),
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "platform": platform.platform(),
        "command": sys.argv,
        **git_revision(),
    }


def package_versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    known = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            known[name] = metadata.version(name)
    return known


def git_revision() -> dict[str, Any]:
    """Return the git revision of this package, and whether files other than published results have changed."""

    def git(*words: str) -> str | None:
        try:
            here = Path(__file__).parent
            done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    revision = git("rev-parse", "HEAD")
    if revision is None:
        return {"git": None}
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)results")
    return {"git": revision, "git_dirty": bool(changed)}
