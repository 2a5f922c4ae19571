"""What a result has to say about the machine it was measured on."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe_machine", "machine_name"]

PACKAGES = (
    "matbackprop",
    "torch",
    "numpy",
    "scipy",
    "scikit-learn",
    "scikit-image",
    "spd_learn",
    "geoopt",
    "ncut_pytorch",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "jax",
)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Processor, device, threads and versions, as JSON can hold them."""
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "kind": device.type,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
    }
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    facts["versions"] = {**versions, "torch": torch.__version__}
    return facts


def machine_name(machine: dict[str, Any]) -> str:
    """A file name for the machine: its device, and the threads where that is a CPU.

    Example:
        >>> machine_name({"device": "NVIDIA H200", "kind": "cuda", "threads": 16})
        'nvidia-h200'
        >>> machine_name({"device": "Intel(R) Xeon(R) Processor", "kind": "cpu", "threads": 2})
        'intel-xeon-2-threads'
    """
    text = re.sub(r"\((r|tm)\)|processor|cpu|@.*", " ", machine["device"].lower())
    slug = "-".join(re.findall(r"[a-z0-9]+", text)) or "unknown"
    return slug if machine["kind"] == "cuda" else f"{slug}-{machine['threads']}-threads"
