"""``matbackprop doctor``: report the installation and check the gradients on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matbackprop.vision.versions import package_versions

SOLVES = ((100, 36), (100, 169), (100, 256), (1, 20))
"""Batch and order of the eigenproblems whose route is shown: pool5, ReLU-5, all channels, one image's cuts."""

EXTRAS: dict[str, tuple[str, ...]] = {
    "metrics": ("numpy", "scipy", "PIL", "torchmetrics", "tyro", "shtab", "rich"),
    "train": (
        "filelock",
        "pydantic",
        "lightning_fabric",
        "safetensors",
        "skimage",
        "tensorboard",
        "matplotlib",
        "pycocotools",
        "pooch",
        "tqdm",
    ),
    "sift": ("kornia",),
    "serve": ("gradio", "uvicorn"),
    "onnx": ("onnx", "onnxscript"),
    "video": ("av",),
    "bench": ("psutil", "sklearn", "spd_learn", "geoopt", "ncut_pytorch"),
}
"""Extra → its modules."""

TOLERANCE = 1e-6


@dataclass
class Config:
    """Report the installation and check the gradients. Exits with 1 if a check fails."""


def parse(arguments: Sequence[str], prog: str) -> Config:
    """Parse the options without tyro, which may not be installed."""
    parser = argparse.ArgumentParser(prog, description=Config.__doc__)
    parser.parse_args(arguments)
    return Config()


def options() -> type[Config]:
    """The options, for shell completion."""
    return Config


def examine() -> dict[str, Any]:
    """Return the whole report as JSON values."""
    return {
        "versions": _versions(),
        "devices": _devices(),
        "eigensolver": _routes(),
        "extras": _extras(),
        "data": _data(),
        "gradients": _gradients(),
        "kernels": _kernels(),
    }


def _versions() -> dict[str, str]:
    names = ("matbackprop", "torch", "lightning-fabric", "numpy", "scipy")
    system = {"python": platform.python_version(), "platform": platform.platform()}
    return system | dict.fromkeys(names, "not installed") | package_versions(names)


def _devices() -> dict[str, str]:
    import torch

    report = {"cpu": f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"}
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        report[f"cuda:{i}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return report


def _routes() -> dict[str, str]:
    import torch

    from matbackprop.solvers import route

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return {
        f"{device} {str(dtype).removeprefix('torch.')} {batch}×{n}×{n}": route(device, dtype, n=n, batch=batch)
        for device in devices
        for dtype in (torch.float32, torch.float64)
        for batch, n in SOLVES
    }


def _extras() -> dict[str, dict[str, Any]]:
    report = {}
    for extra, modules in EXTRAS.items():
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        report[extra] = {"complete": not missing, "missing": missing}
    return report


def _data() -> dict[str, str]:
    report: dict[str, str] = {}
    root = os.environ.get("MATBACKPROP_DATA")
    if not root:
        report["MATBACKPROP_DATA"] = "not set; recipes need --data.root or generated data (--data.made)"
    elif not Path(root).is_dir():
        report["MATBACKPROP_DATA"] = f"{root} is not a folder"
    else:
        report["MATBACKPROP_DATA"] = root
        for name, sign in (("BSDS500", "data/groundTruth"), ("coco", "annotations"), ("weights", ".")):
            report[name] = "there" if (Path(root) / name / sign).exists() else "not there"
    try:
        from matbackprop.vision.data.cache import default_cache_folder
    except ImportError:
        report["cache"] = "unknown without NumPy"
        return report
    cache = default_cache_folder()
    size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    report["cache"] = f"{cache}, {size / 1e6:.0f} MB"
    return report


def _gradients() -> dict[str, Any]:
    """Compare gradients with central differences, on every kind of device, in about a second."""
    import torch

    import matbackprop as mb

    started = time.perf_counter()
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    cases: dict[str, Any] = {
        # Two equal rows and a zero one: a repeated spectrum, where autograd through eigh gives NaN.
        "second_order_pool": lambda f: mb.second_order_pool(torch.cat([f, f[:1], 0 * f[:1]]), eps=1e-2).square().sum(),
        "matrix_log": lambda f: mb.matrix_log(f @ f.mT + torch.eye(len(f)).to(f)).square().sum(),
        "normalized_cut_j2": lambda f: mb.normalized_cut_j2(f.square() + 0.1, labels.to(f.device)),
    }
    errors: dict[str, float] = {}
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        f = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
        direction = torch.randn(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
        for name, function in cases.items():
            x = f.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(function(x), x)
            exact = (gradient * direction).sum()
            with torch.no_grad():
                step = 1e-5
                numeric = (function(f + step * direction) - function(f - step * direction)) / (2 * step)
            error = float((exact - numeric).abs() / numeric.abs().clamp_min(1.0))
            errors[f"{device} {name}"] = error
    right = all(e < TOLERANCE for e in errors.values())  # false for NaN
    return {"right": right, "relative errors": errors, "seconds": time.perf_counter() - started}


def _kernels() -> dict[str, Any]:
    """Compare each CUDA kernel with its fallback, if there is a CUDA device."""
    import torch

    from matbackprop.kernel_check import compare_kernels

    comparisons = compare_kernels("cuda") if torch.cuda.is_available() else []
    return {"right": all(one.right for one in comparisons), "comparisons": [one._asdict() for one in comparisons]}


def main(config: Config) -> dict[str, Any]:
    """Print the report."""
    report = examine()
    gradients, kernels = bool(report["gradients"]["right"]), bool(report["kernels"]["right"])
    good = gradients and kernels
    for title in ("versions", "devices", "eigensolver", "data"):
        print(title)
        for name, value in report[title].items():
            print(f"  {name:<28}{value}")
    print("extras")
    for extra, state in report["extras"].items():
        how = f"missing {', '.join(state['missing'])}: pip install 'matbackprop[{extra}]'"
        print(f"  {extra:<28}{'complete' if state['complete'] else how}")
    seconds = report["gradients"]["seconds"]
    print(f"gradients, against central differences ({seconds:.2f} s)")
    for name, error in report["gradients"]["relative errors"].items():
        print(f"  {name:<28}{error:.1e} {'right' if error < TOLERANCE else 'WRONG'}")
    if report["kernels"]["comparisons"]:
        print("kernels, against their fallbacks")
    for one in report["kernels"]["comparisons"]:
        print(f"  {one['name']:<44}{one['error']:.1e} {'right' if one['right'] else 'WRONG'} {one['message']}".rstrip())
    if good:
        summary = "everything that is installed works"
    elif gradients:
        summary = "a CUDA kernel is wrong on this machine; set MATBACKPROP_KERNELS=0"
    else:
        summary = "a gradient is wrong on this machine"
    return {"summary": summary, "exit_code": 0 if good else 1, **report}
