"""The batched symmetric eigensolver and the function that chooses its route by device, dtype, order and batch."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from matbackprop._torch import is_plain
from matbackprop.checks import nan_where
from matbackprop.cuda import compiler, cusolver, jacobi, tridiagonal
from matbackprop.errors import DtypeError, ShapeError, SolverError
from matbackprop.numerics import real_dtype

_COMPLEX = (torch.complex64, torch.complex128)
_DTYPES = (torch.float32, torch.float64, *_COMPLEX)
_DOUBLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}

_MIN_WORK = 5e5  # batch·n³ from which distributing a batch over threads pays, measured on 2 and 16 cores
_MAX_THREADED = 200  # above order 250, LAPACK starts threads inside each worker thread
_CHUNKS_PER_THREAD = 2
_LARGE_BATCH = 400  # enough to fill an H200 several times
_MAX_JACOBI = {torch.float32: 64, torch.float64: 60}  # up to which the Jacobi kernel is the fastest on an H200
_MAX_JACOBI_OF_MANY = 48  # the same for large batches
_FEW, _FEW_LARGE = 768, 180  # order / batch above which cuSOLVER's routine for one matrix is faster than other routes
_MAX_HOST = 32  # complex orders for which torch calls cuSOLVER's Jacobi routine, accurate to 1e-10 at ties


Solver = Callable[[Tensor], tuple[Tensor, Tensor]]


def _torch_eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(a)
    return values, vectors


def nan_if_not_finite(solve: Callable[[Tensor], tuple[Tensor, ...]], a: Tensor) -> Any:
    """Decompose matrices ``(*batch, m, n)``; factors are NaN if a matrix is not finite, which LAPACK rejects."""
    a = a.resolve_conj()  # isfinite of a conjugate view has no batching rule
    bad = ~a.isfinite().all(-1).all(-1)
    eye = torch.eye(*a.shape[-2:], dtype=a.dtype, device=a.device)
    return tuple(nan_where(bad, t) for t in solve(torch.where(bad[..., None, None], eye, a)))


@functools.lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    # The process is part of the key because threads do not survive a fork.
    return ThreadPoolExecutor(
        threads, thread_name_prefix="matbackprop-eigh", initializer=torch.set_num_threads, initargs=(1,)
    )


def _in_threads(a: Tensor) -> tuple[Tensor, Tensor]:
    """Distribute (batch, n, n) CPU matrices over threads; torch.linalg.eigh solves one after the other."""
    threads = torch.get_num_threads()
    values = torch.empty(a.shape[:-1], dtype=real_dtype(a.dtype))
    vectors = torch.empty_like(a, memory_format=torch.contiguous_format).mT  # LAPACK's layout
    inference = torch.is_inference_mode_enabled()  # holds for the calling thread only

    def work(start: int, stop: int) -> None:
        with torch.no_grad(), torch.inference_mode(inference):
            torch.linalg.eigh(a[start:stop], out=(values[start:stop], vectors[start:stop]))

    batch = a.shape[0]
    step = -(-batch // (threads * _CHUNKS_PER_THREAD))
    pool = _pool(threads, os.getpid())
    futures = [pool.submit(work, start, min(start + step, batch)) for start in range(0, batch, step)]
    for future in futures:
        future.result()
    return values, vectors


def _by_jacobi(a: Tensor) -> tuple[Tensor, Tensor]:
    return jacobi.solve(a.contiguous())


def _by_tridiagonal_form(a: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, which takes less time than cuSOLVER's float32."""
    values, vectors = tridiagonal.solve(a.double().contiguous())
    return values.to(a.dtype), vectors.to(a.dtype)


def _one_by_one(a: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = nan_if_not_finite(functools.partial(cusolver.solve, separately=True), a)
    return values, vectors


def _on_the_host(a: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(a.cpu())
    return values.to(a.device), vectors.to(a.device)


def _route(
    device: torch.device, dtype: torch.dtype, n: int, batch: int, *, capturing: bool = False
) -> tuple[str, Solver]:
    """The first route that takes the matrices, and its solver.

    cuSOLVER's routine for one matrix cannot be captured into a CUDA graph, nor its batched routine for large orders.
    """
    if capturing and n > tridiagonal.MAX_ORDER:
        raise SolverError(
            f"Matrices of order {n} cannot be decomposed inside a CUDA graph, only those up to order "
            f"{tridiagonal.MAX_ORDER}. Call the operator outside the captured region."
        )
    if n and batch and device.type == "cpu":
        many = batch > 1 and batch * float(n) ** 3 >= _MIN_WORK
        if many and n <= _MAX_THREADED and torch.get_num_threads() > 1:
            return "lapack-threads", _in_threads
        return "lapack", _torch_eigh
    if n and batch and device.type == "cuda":
        if dtype in _COMPLEX:
            return ("lapack-host", _on_the_host) if n <= _MAX_HOST else ("torch", _torch_eigh)
        if n <= (_MAX_JACOBI_OF_MANY if batch > _LARGE_BATCH else _MAX_JACOBI[dtype]) and compiler.available():
            return "jacobi", _by_jacobi
        blocked = tridiagonal.takes(device, n)
        if n > (_FEW if blocked else _FEW_LARGE) * batch and cusolver.available() and not capturing:
            return "cusolver", _one_by_one
        if blocked:
            return "tridiagonal", _by_tridiagonal_form
        if cusolver.available():
            return "cusolver-batched", cusolver.solve
    return "torch", _torch_eigh


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise DtypeError(f"The eigensolver takes {', '.join(map(str, _DTYPES))}, got {dtype}. Convert the matrices.")


def route(device: torch.device | str, dtype: torch.dtype, n: int, batch: int = 1) -> str:
    """Name the route that :func:`batched_eigh` takes.

    On the CPU ``lapack``, or ``lapack-threads`` with the batch distributed over threads. On CUDA ``jacobi`` is a kernel
    that keeps small matrices on chip; ``tridiagonal`` are kernels for orders up to 1024 on devices with full float64
    rate, which reduce matrices to tridiagonal form and solve it by divide and conquer; ``cusolver`` solves a few large
    matrices one after the other, and ``cusolver-batched`` is cuSOLVER's batched routine; ``lapack-host`` copies complex
    matrices up to order 32 to the CPU. ``torch`` is :func:`torch.linalg.eigh`, for everything else.

    Args:
        device: device of the matrices.
        dtype: float32, float64, complex64 or complex128.
        n: their order.
        batch: number of matrices.

    Returns:
        The name of the route.

    Example:
        >>> route("cpu", torch.float64, n=36)
        'lapack'
    """
    _check_dtype(dtype)
    return _route(torch.device(device), dtype, n, batch)[0]


def _solve_reflected(a: Tensor) -> tuple[Tensor, Tensor]:
    """Retry in float64 after a Householder similarity HAH, H = I − 2vvᵀ, which has no zero blocks.

    LAPACK's divide and conquer can fail if much of a matrix is zero, because rounding errors underflow.
    """
    double = a.to(_DOUBLE.get(a.dtype, a.dtype))
    v = torch.arange(1, a.shape[-1] + 1, dtype=torch.float64).cos()
    v = (v / v.norm()).to(double.dtype).unsqueeze(-1)
    av = double @ v
    reflected = double - 2 * (v @ av.mH + av @ v.mT) + 4 * (v.mT @ av) * (v @ v.mT)
    values, vectors = torch.linalg.eigh(0.5 * (reflected + reflected.mH))
    return values.to(real_dtype(a.dtype)), (vectors - 2 * v @ (v.mT @ vectors)).to(a.dtype)


def _solve(a: Tensor) -> tuple[Tensor, Tensor]:
    batch, n = a.shape[:-2], a.shape[-1]
    capturing = a.is_cuda and torch.cuda.is_current_stream_capturing()
    _, solve = _route(a.device, a.dtype, n, batch.numel(), capturing=capturing)
    try:
        if solve is _torch_eigh:  # accepts any leading dimensions
            return _torch_eigh(a)
        values, vectors = solve(a.reshape(-1, n, n))
    except torch.linalg.LinAlgError as error:
        if a.is_cpu:
            if not bool(a.isfinite().all()):
                return nan_if_not_finite(_solve, a)
            with contextlib.suppress(torch.linalg.LinAlgError):
                return _solve_reflected(a)
        raise SolverError(
            f"The eigensolver did not converge on {batch.numel()} matrices of order {n} ({error}). Look for NaN and "
            f"Inf in their inputs, scale them, or add a multiple of the identity."
        ) from error
    return values.reshape(*batch, n), vectors.reshape(*batch, n, n)


@torch.library.custom_op("matbackprop::batched_eigh", mutates_args=(), device_types="cuda")
def _operator(a: Tensor) -> tuple[Tensor, Tensor]:
    """Custom operator for torch.compile and vmap on CUDA, which cannot trace the routes."""
    values, vectors = _solve(a)
    return values.contiguous(), vectors.contiguous()


@_operator.register_fake
def _(a: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape[:-1], dtype=real_dtype(a.dtype)), a.new_empty(a.shape)


@_operator.register_vmap
def _(info, in_dims, a):  # type: ignore[no-untyped-def]
    return _operator(a.movedim(in_dims[0], 0)), (0, 0)


def batched_eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    r"""Eigendecomposition of symmetric or Hermitian matrices, A = U diag(λ) Uᴴ, by the route of :func:`route`.

    Every operator of the package calls this function. It is not differentiable: the operators implement adjoints.
    On CUDA devices with full float64 rate, real matrices up to order 768 are solved without synchronizing, and those up
    to order 1024 can be captured into a CUDA graph after one call with the same shapes. Complex matrices synchronize.

    Args:
        a: matrices ``(*batch, n, n)``, float32, float64, complex64 or complex128; only the lower triangle is read.

    Returns:
        Ascending eigenvalues ``(*batch, n)`` and eigenvectors ``(*batch, n, n)`` in columns. They are NaN for a
        matrix that is not finite, and on CUDA for one that could not be solved. Float32 matrices for which LAPACK fails
        to converge are solved in float64 and rounded.

    Raises:
        SolverError: a matrix on the CPU could not be solved, or one above order 1024 is captured into a CUDA graph.
        ShapeError, DtypeError: ``a`` is not a batch of square matrices of one of these dtypes.

    Gradient:
        None; results are detached.

    Example:
        >>> values, vectors = batched_eigh(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> values
        tensor([1., 3.])
    """
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ShapeError(f"The eigensolver needs square matrices (*batch, n, n), got shape {tuple(a.shape)}.")
    _check_dtype(a.dtype)
    a = a.detach()
    if a.numel() == 0 or not is_plain(a):
        if a.device.type == "cuda" and a.numel():
            return _operator(a)
        return nan_if_not_finite(_torch_eigh, a)
    return _solve(a)
