"""Compiles the package's CUDA kernels with the system's C++ compiler, to run them on the CPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from matbackprop.cuda.compiler import Constant, Source


def build(folder: Path, kernels: Source, main: str, *, shared: bool = False, **choices: Constant) -> Path:
    """Compile kernels with a ``main`` that launches them; skips the test where there is no compiler.

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

    ``main`` has for each kernel a C function ``launch_<kernel>`` of batch, threads and the kernel's arguments.
    """

    shared_limit = 2**17

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.launched: list[str] = []

    def launch(self, name, grid, threads, shared, arguments):
        """Run one kernel; an integer goes as 64 bits, enough for an address, of which an int reads the lower half."""
        self.launched.append(name)
        kinds = {int: ctypes.c_uint64, float: ctypes.c_double}
        getattr(self.library, f"launch_{name}")(grid[0], threads, *(kinds[type(x)](x) for x in arguments))
