"""cuSOLVER's eigensolvers ``cusolverDnXsyevd`` and ``cusolverDnXsyevBatched``, called in the library that torch ships.

torch.linalg.eigh synchronizes to read the status, and in many releases calls the batched routine only for n ≤ 32. Here
the status stays on the device: matrices that failed become NaN.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from matbackprop.cuda import kernels_enabled
from matbackprop.cuda.compiler import load_library
from matbackprop.errors import SolverError

_VECTORS = 1  # CUSOLVER_EIG_MODE_VECTOR
_LOWER = 0  # CUBLAS_FILL_MODE_LOWER
_TYPES = {torch.float32: 0, torch.float64: 1}  # CUDA_R_32F, CUDA_R_64F
_MAX_ENTRIES = 2**31 - 1  # documented limit of n·lda·batch

_thread = threading.local()


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library("cusolver")
    if library is None or not hasattr(library, "cusolverDnXsyevBatched"):
        return None
    size, pointer, i64, i32 = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    head: list[Any] = [pointer, pointer, i32, i32, i64, i32, pointer, i64, i32, pointer, i32]
    sizes: list[Any] = [ctypes.POINTER(size), ctypes.POINTER(size)]
    for name, batch in (("cusolverDnXsyevd", []), ("cusolverDnXsyevBatched", [i64])):
        getattr(library, f"{name}_bufferSize").argtypes = [*head, *sizes, *batch]
        getattr(library, name).argtypes = [*head, pointer, size, pointer, size, pointer, *batch]
    library.cusolverDnSetStream.argtypes = [pointer, pointer]
    return library


def available() -> bool:
    """Return whether the library is installed and new enough (CUDA ≥ 12.6.2), and kernels are not turned off."""
    return kernels_enabled() and _library() is not None


def _check(status: int, what: str) -> None:
    if status:
        raise SolverError(f"cuSOLVER returned status {status} while {what}. Try MATBACKPROP_KERNELS=0.")


class _Handle:
    """A cuSOLVER handle of one thread and device, with its host workspace."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.handle = ctypes.c_void_p()
        self.params = ctypes.c_void_p()
        _check(library.cusolverDnCreate(ctypes.byref(self.handle)), "creating a handle")
        _check(library.cusolverDnCreateParams(ctypes.byref(self.params)), "creating parameters")
        self.host = ctypes.create_string_buffer(1)

    def solve(self, values: Tensor, vectors: Tensor, batched: bool) -> None:
        """Decompose matrices (batch, n, n), which become the vectors; batch = 1 unless ``batched``."""
        batch, n, _ = vectors.shape
        kind, device = _TYPES[vectors.dtype], vectors.device
        name, count = ("cusolverDnXsyevBatched", (batch,)) if batched else ("cusolverDnXsyevd", ())
        device_bytes, host_bytes = ctypes.c_size_t(), ctypes.c_size_t()
        matrices = (n, kind, vectors.data_ptr(), n, kind, values.data_ptr(), kind)
        problem = (self.handle, self.params, _VECTORS, _LOWER, *matrices)
        status = getattr(self.library, f"{name}_bufferSize")(
            *problem, ctypes.byref(device_bytes), ctypes.byref(host_bytes), *count
        )
        _check(status, f"sizing the workspace of {batch} matrices of order {n}")
        info = torch.empty(batch, dtype=torch.int32, device=device)
        # Zeros, because releases before 11.7.3 read their workspace before writing it.
        workspace = torch.zeros(max(device_bytes.value, 1), dtype=torch.uint8, device=device)
        if len(self.host) < host_bytes.value:
            self.host = ctypes.create_string_buffer(host_bytes.value)
        self.library.cusolverDnSetStream(self.handle, torch.cuda.current_stream(device).cuda_stream)
        status = getattr(self.library, name)(
            *problem, workspace.data_ptr(), device_bytes.value, self.host, host_bytes.value, info.data_ptr(), *count
        )
        _check(status, f"decomposing {batch} matrices of order {n}")
        failed = (info != 0).unsqueeze(-1)
        values.masked_fill_(failed, torch.nan)
        vectors.masked_fill_(failed.unsqueeze(-1), torch.nan)


def _handle(device: int) -> _Handle:
    handles: dict[int, _Handle] = _thread.__dict__.setdefault("handles", {})
    if device not in handles:
        library = _library()
        if library is None:
            raise SolverError("cusolverDnXsyevBatched was not found. Install a CUDA build of torch for CUDA ≥ 12.6.2.")
        handles[device] = _Handle(library)
    return handles[device]


def solve(a: Tensor, *, separately: bool = False) -> tuple[Tensor, Tensor]:
    """Eigendecomposition of (batch, n, n) CUDA matrices; NaN if the routine reports a failure.

    ``separately`` decomposes one matrix after the other. It cannot be captured into a CUDA graph.
    """
    n = a.shape[-1]
    if n * n > _MAX_ENTRIES:
        raise SolverError(f"cuSOLVER's batched routine takes orders up to 46340, got {n}. Use the CPU.")
    vectors = a.mT.clone(memory_format=torch.contiguous_format)  # column-major, of which the lower triangle is read
    values = torch.empty(a.shape[:-1], dtype=a.dtype, device=a.device)
    chunk = 1 if separately else max(1, _MAX_ENTRIES // (n * n))
    with torch.cuda.device(a.device):
        for part in zip(values.split(chunk), vectors.split(chunk), strict=True):
            _handle(a.get_device()).solve(*part, batched=not separately)
    return values, vectors.mT


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
