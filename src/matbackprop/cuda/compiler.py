"""Load the CUDA libraries that torch ships, compile kernels with NVRTC, and launch them with the CUDA driver.

Compiled kernels are cached on disk, so that a later process does not compile them again. Launches go to torch's current
stream, do not synchronize and can be captured into a CUDA graph after the first call of a kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from matbackprop._torch import current_device, current_raw_stream
from matbackprop.cuda import kernels_enabled
from matbackprop.errors import SolverError
from matbackprop.refinement import NOISE, OVERLAP, SAFE_RATIO, SEPARATED

_SHARED_LIMIT = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_STATIC_SHARED = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
_MAX_ARGUMENTS = 24
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

Constant = str | int | float

# Constants that the launchers share with the sources.
TYPES = {torch.float32: "float", torch.float64: "double", torch.float16: "float", torch.bfloat16: "float"}

MAX_WARPS = 24  # per block of the Jacobi solver, so that each thread has 80 registers
TILE, PRODUCT_THREADS = 64, 256  # edge of a tile of a product; threads that compute it
LDT, DEPTH = 68, 16  # leading dimension of operands, which avoids bank conflicts; their rows in one step
TENSOR_CORES = (8, 0)  # the first compute capability that has them for double precision
CHUNK = 64  # columns that a block keeps in shared memory

POOL_FUNCTIONS = {"log": 0, "sqrt": 1, "inv_sqrt": 2, "inverse": 3}
FUNCTIONS = POOL_FUNCTIONS | {"exp": 4}

CONSTANTS: dict[str, Constant] = {
    **{name.upper(): number for name, number in FUNCTIONS.items()},
    "MAX_THREADS": 32 * MAX_WARPS,
    "TILE": TILE,
    "PRODUCT_THREADS": PRODUCT_THREADS,
    "LDT": LDT,
    "DEPTH": DEPTH,
    "CHUNK": CHUNK,
    "SAFE_RATIO": SAFE_RATIO,
    "SEPARATED": SEPARATED,
    "OVERLAP": OVERLAP[False],
    "NOISE": NOISE,
    "REAL_IS_DOUBLE": 1,
}


# Newest first: CUDA 13 and CUDA 12 name their libraries differently.
_SONAMES = {
    "cusolver": ("libcusolver.so.12", "libcusolver.so.11", "cusolver64_12.dll", "cusolver64_11.dll"),
    "nvrtc": ("libnvrtc.so.13", "libnvrtc.so.12", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll"),
    "cuda": ("libcuda.so.1", "nvcuda.dll"),
}


@functools.cache
def load_library(name: str) -> ctypes.CDLL | None:
    """Open ``cusolver``, ``nvrtc`` or ``cuda`` (the driver); None without CUDA or if it is missing.

    Copies in torch's folder and in the nvidia packages next to it come first, then the system's search path. The driver
    must be the copy that torch has loaded, which the search path returns.
    """
    if torch.version.cuda is None:
        return None
    sonames = [s for s in _SONAMES[name] if s.endswith(".dll") == (sys.platform == "win32")]
    package = Path(torch.__file__).parent
    folders = () if name == "cuda" else (package / "lib", package.parent / "nvidia")
    shipped = [str(path) for soname in sonames for folder in folders for path in sorted(folder.glob(f"**/{soname}"))]
    for path in shipped + sonames:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    return None


class _Arguments(threading.local):
    """Memory for the arguments of a launch, which the driver copies: 8 bytes each, and their addresses."""

    def __init__(self) -> None:
        self.values = (ctypes.c_uint64 * _MAX_ARGUMENTS)()
        first = ctypes.addressof(self.values)
        self.addresses = (ctypes.c_void_p * _MAX_ARGUMENTS)(*(first + 8 * i for i in range(_MAX_ARGUMENTS)))


_arguments = _Arguments()
_thread = threading.local()


def _nvrtc() -> ctypes.CDLL:
    nvrtc = load_library("nvrtc")
    if nvrtc is None:
        raise SolverError("The CUDA compiler NVRTC was not found next to torch. Install a CUDA build of torch.")
    return nvrtc


def compiler_version() -> str:
    """Version of NVRTC, as ``12.8``."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_cubin(text: str, architecture: str, defines: Mapping[str, Constant]) -> bytes:
    """Compile CUDA C++ for ``architecture`` (``sm_90``); needs no device."""
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{k}={v}" for k, v in defines.items())]
    array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"matbackprop.cu", 0, None, None)
    if status == 0:
        status = nvrtc.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    try:
        if status:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise SolverError(
                f"NVRTC could not compile the kernels for {architecture}. Set MATBACKPROP_KERNELS=0 to use torch "
                f"operations. The log: {log.value.decode()}"
            )
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _cache_folder() -> Path:
    """``$MATBACKPROP_CACHE/kernels``, or ``matbackprop/kernels`` in the user's cache folder."""
    if chosen := os.environ.get("MATBACKPROP_CACHE"):
        return Path(chosen) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "matbackprop" / "kernels"


def cached_cubin(text: str, architecture: str, defines: Mapping[str, Constant]) -> bytes:
    """:func:`compile_cubin`, or its earlier result from disk.

    A file is named by a hash of source, definitions, architecture and compiler version, and starts with a checksum. A
    corrupt or incomplete file is recompiled and rewritten. A folder that is not writable is not used.
    """
    identity = repr((text, architecture, sorted(defines.items()), compiler_version()))
    name = hashlib.sha256(identity.encode()).hexdigest()
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home folder
        stored = (_cache_folder() / f"{name}.cubin").read_bytes()
        checksum, cubin = stored[:32], stored[32:]
        if hashlib.sha256(cubin).digest() == checksum:
            return cubin
    cubin = compile_cubin(text, architecture, defines)
    with contextlib.suppress(OSError, RuntimeError):
        _cache_folder().mkdir(parents=True, exist_ok=True)
        (_cache_folder() / f"{name}.cubin").write_bytes(hashlib.sha256(cubin).digest() + cubin)
    return cubin


def _check(status: int, what: str) -> None:
    if status:
        raise SolverError(f"The CUDA driver returned error {status} while {what}. Try MATBACKPROP_KERNELS=0.")


@functools.cache
def shared_limit(device: int) -> int:
    """Bytes of shared memory that a block may request."""
    limit = ctypes.c_int()
    status = _driver().cuDeviceGetAttribute(ctypes.byref(limit), _SHARED_LIMIT, device)
    _check(status, "reading the limit of shared memory")
    return limit.value


def _driver() -> ctypes.CDLL:
    driver = load_library("cuda")
    if driver is None:
        raise SolverError("The CUDA driver library was not found. Install the NVIDIA driver.")
    return driver


class Module:
    """Compiled kernels on one device.

    Args:
        text: CUDA C++ source.
        defines: preprocessor definitions.
        device: index of the CUDA device.
    """

    def __init__(self, text: str, defines: Mapping[str, Constant], device: int) -> None:
        driver = _driver()
        u = ctypes.c_uint
        driver.cuLaunchKernel.argtypes = [ctypes.c_void_p, u, u, u, u, u, u, u, *(ctypes.c_void_p,) * 3]
        self._driver = driver
        self._device = device
        properties = torch.cuda.get_device_properties(device)
        self.shared_limit = shared_limit(device)
        self._cubin = cached_cubin(text, f"sm_{properties.major}{properties.minor}", defines)
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._module = ctypes.c_void_p()
        with torch.cuda.device(device):
            self._make_current()
            _check(driver.cuModuleLoadData(ctypes.byref(self._module), self._cubin), "loading the kernels")

    def _make_current(self) -> None:
        """Make torch's context current in this thread, because autograd runs backward passes in other threads."""
        if getattr(_thread, "ready", None) != self._device:
            torch.cuda.current_stream(self._device).query()  # any runtime call binds the primary context
            _thread.ready = self._device

    def _function(self, name: str) -> ctypes.c_void_p:
        function = self._functions.get(name)
        if function is None:
            function = ctypes.c_void_p()
            status = self._driver.cuModuleGetFunction(ctypes.byref(function), self._module, name.encode())
            _check(status, f"looking for the kernel {name}")
            static = ctypes.c_int()
            self._driver.cuFuncGetAttribute(ctypes.byref(static), _STATIC_SHARED, function)
            free = ctypes.c_int(self.shared_limit - static.value)
            _check(self._driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, free), f"preparing the kernel {name}")
            self._functions[name] = function
        return function

    def launch(
        self, name: str, grid: Sequence[int], threads: int, shared: int, arguments: Sequence[int | float]
    ) -> None:
        """Launch a kernel on the current stream of the module's device, which need not be the current device.

        An argument is an address or a number; a float is passed as double.
        """
        if current_device() == self._device:
            self._launch(name, grid, threads, shared, arguments)
        else:
            with torch.cuda.device(self._device):
                self._launch(name, grid, threads, shared, arguments)

    def _launch(
        self, name: str, grid: Sequence[int], threads: int, shared: int, arguments: Sequence[int | float]
    ) -> None:
        self._make_current()
        values = _arguments.values
        for i, x in enumerate(arguments):
            values[i] = x if type(x) is int else int.from_bytes(struct.pack("<d", x), "little")
        x, y, z = (*grid, 1, 1)[:3]
        stream = current_raw_stream(self._device)
        status = self._driver.cuLaunchKernel(
            self._function(name), x, y, z, threads, 1, 1, shared, stream, _arguments.addresses, None
        )
        _check(status, f"launching {name} with grid {tuple(grid)}, {threads} threads and {shared} bytes")


_INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)


class Source:
    """A kernel file of this folder, compiled with CONSTANTS and further definitions."""

    def __init__(self, file: str, **constants: Constant) -> None:
        self.file, self.constants = file, CONSTANTS | constants
        self._modules: dict[tuple[object, ...], Module] = {}

    def text(self) -> str:
        """The source with each header inserted at its first ``#include``."""
        included: set[str] = set()

        def insert(name: str) -> str:
            if name in included:
                return ""
            included.add(name)
            text = (Path(__file__).parent / name).read_text(encoding="utf-8")
            return _INCLUDE.sub(lambda match: insert(match[1]), text)

        return insert(self.file)

    def on(self, device: int, **choices: Constant) -> Module:
        """The kernels compiled for a device, once for each choice of further definitions."""
        key = (device, *choices.items())
        if key not in self._modules:
            self._modules[key] = Module(self.text(), self.constants | choices, device)
        return self._modules[key]


def available() -> bool:
    """Whether kernels can be compiled and launched (a CUDA torch with NVRTC, a driver), and are not turned off."""
    return kernels_enabled() and _found()


@functools.cache
def _found() -> bool:
    return load_library("nvrtc") is not None and load_library("cuda") is not None


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)
