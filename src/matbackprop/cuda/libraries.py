"""The CUDA libraries that the installed torch ships."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

# Newest first: CUDA 13 and CUDA 12 name their libraries differently.
_SONAMES = {
    "cusolver": ("libcusolver.so.12", "libcusolver.so.11", "cusolver64_12.dll", "cusolver64_11.dll"),
    "nvrtc": ("libnvrtc.so.13", "libnvrtc.so.12", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll"),
    "cuda": ("libcuda.so.1", "nvcuda.dll"),
}


def _loaded(soname: str) -> Iterator[str]:
    """Paths of a library that this process has mapped already (Linux)."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        for line in maps.read_text().splitlines():
            if soname in line:
                yield line.split(maxsplit=5)[-1]


def _installed(soname: str) -> Iterator[str]:
    """Paths of a library in torch's folder and in the nvidia packages next to it."""
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "nvidia"):
        yield from (str(path) for path in sorted(folder.glob(f"**/{soname}")))


@functools.cache
def load_library(name: str) -> ctypes.CDLL | None:
    """Open ``cusolver``, ``nvrtc`` or ``cuda`` (the driver); None without CUDA or if it is missing.

    The copy that torch has loaded comes first, then the copies of torch's packages, then the system's search path.
    """
    if torch.version.cuda is None:
        return None
    sonames = [s for s in _SONAMES[name] if s.endswith(".dll") == (sys.platform == "win32")]
    for find in (_loaded, _installed, lambda soname: [soname]):
        for soname in sonames:
            for path in find(soname):
                try:
                    return ctypes.CDLL(path)
                except OSError:
                    continue
    return None


@contextlib.contextmanager
def without_magma(a: Tensor) -> Iterator[None]:
    """Let torch.linalg factor and solve matrices on CUDA by cuSOLVER and cuBLAS.

    MAGMA, which torch prefers for some batches, aborts the process during CUDA graph capture. The same
    routine is used with and without capture, so that the first call creates the handles. Compiled code keeps
    torch's choice.
    """
    if torch.compiler.is_compiling() or not a.is_cuda:
        yield
        return
    before = torch.backends.cuda.preferred_linalg_library()
    torch.backends.cuda.preferred_linalg_library("cusolver")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_linalg_library(before)
