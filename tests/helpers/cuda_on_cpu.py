"""Compile the package's CUDA kernels with the system's C++ compiler, to run them on the CPU."""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from matbackprop.cuda.compiler import Constant, Source

_KERNEL = re.compile(r"__global__ void[^(]*?(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(([^)]*)\)\s*{")
_launched: list[str] = []


@functools.cache
def compiled(source: Source, **choices: Constant) -> "Kernels":
    """Compile a source once for each choice of definitions, for all processes of the tests.

    Skip the test if there is no compiler.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ to compile the kernels for the CPU")
    text = (
        source.text().replace("extern __shared__ double shared_memory[];", "").replace("__shared__ REAL", "static REAL")
    )
    launchers = ""
    for name, parameters in _KERNEL.findall(text):
        names = ", ".join(re.findall(r"(\w+)\s*(?:,|$)", parameters))
        launchers += f'extern "C" void launch_{name}(int threads, {parameters}) {{\n'
        launchers += f"    launch(threads, [=] {{ {name}({names}); }});\n}}\n"
    text = f'#include "cuda_on_cpu.h"\n{text}\n{launchers}'
    options = [f"-D{name}={value}" for name, value in (source.constants | choices).items()]
    folder = Path(os.environ["MATBACKPROP_CACHE"])  # removed after the tests
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / hashlib.sha256(" ".join([text, *options]).encode()).hexdigest()
    if not library.exists():
        command = [compiler, "-O1", "-std=c++17", "-w", "-fpermissive", "-shared", "-fPIC", *options]
        command += [f"-I{Path(__file__).parent}", "-x", "c++", "-", "-o", f"{library}-{os.getpid()}", "-lpthread"]
        subprocess.run(command, input=text, text=True, check=True)
        os.replace(command[-2], library)
    return Kernels(library)


def emulate(patch: pytest.MonkeyPatch, *sources: Source, **fixed: Constant) -> list[str]:
    """Run the kernels of sources on tensors of the CPU, with some definitions fixed.

    Return a list that receives the name of each kernel when it is launched.
    """
    for source in sources:
        patch.setattr(source, "on", lambda device, *, s=source, **choices: compiled(s, **(choices | fixed)))
    _launched.clear()
    return _launched


class Kernels:
    """Launches compiled kernels as a ``Module`` does on a GPU. Writing beyond the requested shared memory fails."""

    shared_limit = 2**17

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.was_overrun.restype = ctypes.c_bool

    def launch(self, name, grid, threads, shared, arguments):
        """Run one kernel; integers are passed as 64 bits, which also fit addresses."""
        _launched.append(name)
        self.library.begin_launch(*(*grid, 1, 1)[:3], ctypes.c_longlong(shared))
        kinds = {int: ctypes.c_uint64, float: ctypes.c_double}
        getattr(self.library, f"launch_{name}")(threads, *(kinds[type(a)](a) for a in arguments))
        assert not self.library.was_overrun(), f"{name} wrote beyond its {shared} bytes of shared memory"
