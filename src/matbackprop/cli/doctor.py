"""``matbackprop doctor``: report the installation and check the gradients on this machine."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matbackprop.vision.versions import PACKAGES, package_versions

TOLERANCE = 1e-6


@dataclass
class Config:
    """Report the installation and check the gradients. Exits with 1 if a check fails."""


def parse(word: str, arguments: Sequence[str], prog: str) -> Config:
    """Parse the options without tyro, which may not be installed."""
    argparse.ArgumentParser(prog, description=Config.__doc__).parse_args(arguments)
    return Config()


def main(config: Config) -> dict[str, Any]:
    """Print the report."""
    report = {"versions": _versions(), "devices": _devices()}
    report["data"] = {name: os.environ.get(name, "not set") for name in ("MATBACKPROP_DATA", "MATBACKPROP_CACHE")}
    for title, values in report.items():
        print(title)
        for name, value in values.items():
            print(f"  {name:<28}{value}")
    gradients = _gradient_errors()
    print("gradients (relative error against central differences)")
    for name, error in gradients.items():
        print(f"  {name:<28}{error:.1e} {'ok' if error < TOLERANCE else 'WRONG'}")
    kernels = _kernels()
    if kernels:
        print("kernels (error against their fallbacks)")
    for one in kernels:
        print(f"  {one['name']:<44}{one['error']:.1e} {'ok' if one['right'] else 'WRONG'} {one['message']}".rstrip())
    summary = "All checks passed."
    if wrong_kernel := not all(one["right"] for one in kernels):
        summary = "A CUDA kernel is wrong on this machine. Set MATBACKPROP_KERNELS=0."
    if wrong_gradient := not all(error < TOLERANCE for error in gradients.values()):  # also for NaN
        summary = "A gradient is wrong on this machine."
    return {
        "summary": summary,
        "exit_code": int(wrong_gradient or wrong_kernel),
        **report,
        "gradients": {"right": not wrong_gradient, "relative errors": gradients},
        "kernels": {"right": not wrong_kernel, "comparisons": kernels},
    }


def _versions() -> dict[str, str]:
    system = {"python": platform.python_version(), "platform": platform.platform()}
    return system | dict.fromkeys(PACKAGES, "not installed") | package_versions()


def _devices() -> dict[str, str]:
    import torch

    report = {"cpu": f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"}
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        report[f"cuda:{i}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return report


def _gradient_errors() -> dict[str, float]:
    import torch

    import matbackprop as mb

    labels = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    cases: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        # Two equal rows and a zero row repeat eigenvalues, for which autograd through eigh returns NaN.
        "second_order_pool": lambda f: mb.second_order_pool(torch.cat([f, f[:1], 0 * f[:1]]), eps=1e-2).square().sum(),
        "matrix_log": lambda f: mb.matrix_log(f @ f.mT + torch.eye(len(f)).to(f)).square().sum(),
        "normalized_cut_j2": lambda f: mb.normalized_cut_j2(f.square() + 0.1, labels.to(f.device)),
    }
    errors = {}
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        generator = torch.Generator().manual_seed(0)
        f, direction = torch.randn(2, 7, 3, generator=generator, dtype=torch.float64).to(device)
        for name, function in cases.items():
            _, slope = torch.autograd.functional.vjp(function, f)
            step = 1e-5 * direction
            numeric = (function(f + step) - function(f - step)) / 2e-5
            errors[f"{device} {name}"] = float(((slope * direction).sum() - numeric).abs() / numeric.abs().clamp_min(1))
    return errors


def _kernels() -> list[dict[str, Any]]:
    import torch

    from matbackprop.kernel_check import compare_kernels

    return [one._asdict() for one in compare_kernels("cuda")] if torch.cuda.is_available() else []
