"""cuSOLVER's batched eigensolver ``cusolverDnXsyevBatched``, called in the library that torch ships.

In many releases torch.linalg.eigh calls this routine only for n ≤ 32, and always synchronizes to read the status. Here
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
from matbackprop.cuda.graphs import replayed
from matbackprop.errors import SolverError

_VECTORS = 1  # CUSOLVER_EIG_MODE_VECTOR
_LOWER = 0  # CUBLAS_FILL_MODE_LOWER
_TYPES = {torch.float32: 0, torch.float64: 1}  # CUDA_R_32F, CUDA_R_64F
_MAX_ENTRIES = 2**31 - 1  # documented limit of n·lda·batch
_NEEDS_ZEROED_WORKSPACE = 11703  # releases before 11.7.3 read their workspace before writing it

_CHAIN_MIN_ORDER = 129  # up to 128 one thread block holds a matrix and few kernels are launched
_CHAIN_MAX_BYTES = 2**28
_RECORDABLE = 12000  # first release tested with graph recording (CUDA 13)

_thread = threading.local()


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library("cusolver")
    if library is None or not hasattr(library, "cusolverDnXsyevBatched"):
        return None
    size, pointer, i64, i32 = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    head: list[Any] = [pointer, pointer, i32, i32, i64, i32, pointer, i64, i32, pointer, i32]
    library.cusolverDnXsyevBatched_bufferSize.argtypes = [
        *head,
        ctypes.POINTER(size),
        ctypes.POINTER(size),
        i64,
    ]
    library.cusolverDnXsyevBatched.argtypes = [*head, pointer, size, pointer, size, pointer, i64]
    library.cusolverDnSetStream.argtypes = [pointer, pointer]
    return library


def available() -> bool:
    """Return whether the library is installed and new enough (CUDA ≥ 12.6.2), and kernels are not turned off."""
    return kernels_enabled() and _library() is not None


@functools.cache
def version() -> int:
    """Version of the library, 11703 for 11.7.3; 0 if it is missing."""
    library = _library()
    if library is None:
        return 0
    number = ctypes.c_int()
    library.cusolverGetVersion(ctypes.byref(number))
    return number.value


def recordable() -> bool:
    """Whether the routine may be recorded into a CUDA graph."""
    return version() >= _RECORDABLE


def _check(status: int, what: str) -> None:
    if status:
        raise SolverError(f"cuSOLVER returned status {status} while {what}.")


class _Handle:
    """A cuSOLVER handle of one thread and device, with its host workspace."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.handle = ctypes.c_void_p()
        self.params = ctypes.c_void_p()
        _check(library.cusolverDnCreate(ctypes.byref(self.handle)), "creating a handle")
        _check(library.cusolverDnCreateParams(ctypes.byref(self.params)), "creating parameters")
        self.host = ctypes.create_string_buffer(1)
        self.sizes: dict[tuple[int, int, torch.dtype], tuple[int, int]] = {}

    def buffer_sizes(self, n: int, batch: int, dtype: torch.dtype) -> tuple[int, int]:
        key = (n, batch, dtype)
        if key not in self.sizes:
            device_bytes, host_bytes = ctypes.c_size_t(), ctypes.c_size_t()
            kind = _TYPES[dtype]
            status = self.library.cusolverDnXsyevBatched_bufferSize(
                self.handle, self.params, _VECTORS, _LOWER, n, kind, None, n, kind, None, kind,
                ctypes.byref(device_bytes), ctypes.byref(host_bytes), batch,
            )  # fmt: skip
            _check(status, f"sizing the workspace of {batch} matrices of order {n}")
            self.sizes[key] = (device_bytes.value, host_bytes.value)
        return self.sizes[key]


def _handle(device: int) -> _Handle:
    handles = _thread.__dict__.setdefault("handles", {})
    if device not in handles:
        library = _library()
        if library is None:
            raise SolverError("cusolverDnXsyevBatched was not found; it comes with CUDA builds of torch ≥ 12.6.2.")
        handles[device] = _Handle(library)
    handle: _Handle = handles[device]
    return handle


def solve(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigendecomposition of (batch, n, n) CUDA matrices; NaN if the routine reports a failure.

    From order 129 on the routine launches more than a thousand small kernels. In double precision the launches take
    twice as long as the kernels, so repeated shapes are replayed from a CUDA graph.
    """
    chain = a.dtype == torch.float64 and a.shape[-1] >= _CHAIN_MIN_ORDER and recordable()
    if chain and a.numel() * a.element_size() <= _CHAIN_MAX_BYTES:
        values, vectors = replayed("cusolver", _solve, (a,))
    else:
        values, vectors = _solve(a)
    return values, vectors.mT  # the routine writes eigenvectors in columns of a column-major matrix


def _solve(a: Tensor) -> tuple[Tensor, Tensor]:
    vectors = a.mT.clone(memory_format=torch.contiguous_format)  # column-major, of which the lower triangle is read
    return solve_in_place(vectors), vectors


def solve_in_place(a: Tensor) -> Tensor:
    """Replace contiguous symmetric (batch, n, n) CUDA matrices by their eigenvectors in rows; return the eigenvalues.

    Both are NaN if the routine reports a failure.
    """
    values = torch.empty(a.shape[:-1], dtype=a.dtype, device=a.device)
    _launch(values, a)
    return values


def _launch(values: Tensor, vectors: Tensor) -> None:
    """Replace the symmetric matrices in ``vectors`` (batch, n, n), contiguous, by their eigenvectors in rows."""
    batch, n, _ = vectors.shape
    if n * n > _MAX_ENTRIES:
        raise SolverError(f"cuSOLVER's batched routine takes orders up to 46340, got n = {n}.")
    chunk = max(1, _MAX_ENTRIES // (n * n))
    if batch > chunk:
        for part in zip(values.split(chunk), vectors.split(chunk), strict=True):
            _launch(*part)
        return
    kind = _TYPES[vectors.dtype]
    device = vectors.device
    with torch.cuda.device(device):
        handle = _handle(vectors.get_device())
        info = torch.empty(batch, dtype=torch.int32, device=device)
        device_bytes, host_bytes = handle.buffer_sizes(n, batch, vectors.dtype)
        create = torch.zeros if version() < _NEEDS_ZEROED_WORKSPACE else torch.empty
        workspace = create(max(device_bytes, 1), dtype=torch.uint8, device=device)
        if len(handle.host) < host_bytes:
            handle.host = ctypes.create_string_buffer(host_bytes)
        stream = torch.cuda.current_stream(device).cuda_stream
        handle.library.cusolverDnSetStream(handle.handle, stream)
        status = handle.library.cusolverDnXsyevBatched(
            handle.handle, handle.params, _VECTORS, _LOWER, n, kind, vectors.data_ptr(), n, kind, values.data_ptr(),
            kind, workspace.data_ptr(), device_bytes, handle.host, host_bytes, info.data_ptr(), batch,
        )  # fmt: skip
    _check(status, f"decomposing {batch} matrices of order {n}")
    failed = (info != 0).unsqueeze(-1)
    values.masked_fill_(failed, torch.nan)
    vectors.masked_fill_(failed.unsqueeze(-1), torch.nan)


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
