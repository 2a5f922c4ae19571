"""Compile the package's CUDA kernels with the system's C++ compiler, to run them on the CPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from matbackprop.cuda.compiler import Constant, Source


def build(folder: Path, kernels: Source, main: str, *, shared: bool = False, **choices: Constant) -> Path:
    """Compile kernels with a ``main`` that launches them. Skip the test if there is no compiler.

    With ``shared`` the result is a library and ``main`` holds functions to call in it.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to compile the kernels for the CPU")
    text = (
        kernels.text()
        .replace("extern __shared__ double shared_memory[];", "")
        .replace("__shared__ REAL", "static REAL")
    )
    source, program = folder / "kernels.cpp", folder / "kernels"
    source.write_text(f'#include "cuda_on_cpu.h"\n{text}\n{main}')
    options = [
        *(f"-D{name}={value}" for name, value in (kernels.constants | choices).items()),
        *(["-shared", "-fPIC"] if shared else []),
    ]
    command = [compiler, "-O1", "-std=c++17", "-w", "-fpermissive", *options, f"-I{Path(__file__).parent}"]
    subprocess.run([*command, str(source), "-o", str(program), "-lpthread"], check=True)
    return program


def run(program: Path, arguments: tuple[float, ...], *inputs: np.ndarray, dtype: type) -> np.ndarray:
    """Run a program on arrays and return the numbers it wrote."""
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, input=b"".join(x.tobytes() for x in inputs), capture_output=True, check=True)
    return np.frombuffer(done.stdout, dtype=dtype)


class Kernels:
    """Launches kernels of a library built with ``shared`` on tensors of the CPU, as a ``Module`` does on a GPU.

    ``main`` has a C function ``launch_<kernel>`` for each kernel, with the arguments batch, threads and those of the
    kernel. The grid is that of the call. Writing beyond the requested shared memory fails.
    """

    shared_limit = 2**17

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.was_overrun.restype = ctypes.c_bool
        self.launched: list[str] = []

    def launch(self, name, grid, threads, shared, arguments):
        """Run one kernel; integers are passed as 64 bits, which also fit addresses."""
        self.launched.append(name)
        x, y, z = (*grid, 1, 1)[:3]
        self.library.begin_launch(x, y, z, ctypes.c_longlong(shared))
        kinds = {int: ctypes.c_uint64, float: ctypes.c_double}
        getattr(self.library, f"launch_{name}")(x, threads, *(kinds[type(a)](a) for a in arguments))
        assert not self.library.was_overrun(), f"{name} wrote beyond its {shared} bytes of shared memory"
