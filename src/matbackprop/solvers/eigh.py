"""The batched symmetric eigensolver and the table that chooses its route."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop.checks import is_plain
from matbackprop.cuda import compiler, cusolver, jacobi, tridiagonal
from matbackprop.errors import DtypeError, ShapeError, SolverError
from matbackprop.numerics import real_dtype

_REAL = (torch.float32, torch.float64)
_DTYPES = (*_REAL, torch.complex64, torch.complex128)
_DOUBLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_LARGE_BATCH = 400  # fills an H200 several times over


# LAPACK on the CPU with the batch spread over threads: torch.linalg.eigh solves the matrices of a batch one after the
# other and lets LAPACK use the threads inside each, which for matrices of these sizes costs more than it gives.

_CHUNKS_PER_THREAD = 2  # a little slack when one thread is interrupted
_MIN_WORK = 5e5  # batch·n³ under which handing out the work costs more than it saves, measured on 2 and 16 cores
_MAX_ORDER = 200  # above some 250 LAPACK starts threads of its own in each of ours, and both get slower


def _spreading_pays(n: int, batch: int) -> bool:
    """Whether a batch is large enough to be spread over the threads torch may use."""
    return torch.get_num_threads() > 1 and batch > 1 and n <= _MAX_ORDER and batch * float(n) ** 3 >= _MIN_WORK


@functools.lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    # The process is part of the key because threads do not survive a fork.
    return ThreadPoolExecutor(
        threads, thread_name_prefix="matbackprop-eigh", initializer=torch.set_num_threads, initargs=(1,)
    )


def _solve_in_threads(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigendecomposition of (batch, n, n) CPU matrices."""
    threads = torch.get_num_threads()
    values = torch.empty(a.shape[:-1], dtype=real_dtype(a.dtype))
    vectors = torch.empty_like(a, memory_format=torch.contiguous_format).mT  # LAPACK's own layout

    inference = torch.is_inference_mode_enabled()  # a mode of the calling thread only; the workers have to enter it

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


def _many_on_the_cpu(device: torch.device, dtype: torch.dtype, n: int, batch: int) -> bool:
    return device.type == "cpu" and _spreading_pays(n, batch)


def _few_and_small(device: torch.device, dtype: torch.dtype, n: int, batch: int) -> bool:
    """Whether the Jacobi kernel is faster than cuSOLVER's batched routine, as measured on an H200."""
    if device.type != "cuda" or dtype not in _REAL:
        return False
    most = 48 if batch > _LARGE_BATCH else {torch.float32: 64, torch.float64: 60}[dtype]
    return n <= most and compiler.available()


def _of_some_hundred_rows(device: torch.device, dtype: torch.dtype, n: int, batch: int) -> bool:
    return device.type == "cuda" and dtype in _REAL and tridiagonal.takes(device, n)


def _by_tridiagonal_form(a: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, which takes less time than cuSOLVER's float32."""
    values, vectors = tridiagonal.solve(a.double().contiguous())
    return values.to(a.dtype), vectors.to(a.dtype)


def _real_on_cuda(device: torch.device, dtype: torch.dtype, n: int, batch: int) -> bool:
    return device.type == "cuda" and dtype in _REAL and cusolver.available()


def _small_and_complex(device: torch.device, dtype: torch.dtype, n: int, batch: int) -> bool:
    """Whether torch would call cuSOLVER's Jacobi routine, which leaves 1e-10 of rotations where eigenvalues meet."""
    return device.type == "cuda" and dtype not in _REAL and n <= 32


def _on_the_host(a: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(a.cpu())
    return values.to(a.device), vectors.to(a.device)


class _Route(NamedTuple):
    takes: Callable[[torch.device, torch.dtype, int, int], bool]
    solve: Callable[[Tensor], tuple[Tensor, Tensor]]


def _torch_eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(a)
    return values, vectors


# The first route that takes the matrices solves them; torch takes all.
_ROUTES = {
    "lapack-threads": _Route(_many_on_the_cpu, _solve_in_threads),
    "lapack": _Route(lambda device, *_: device.type == "cpu", _torch_eigh),
    "jacobi": _Route(_few_and_small, lambda a: jacobi.solve(a.contiguous())),
    "tridiagonal": _Route(_of_some_hundred_rows, _by_tridiagonal_form),
    "cusolver": _Route(_real_on_cuda, cusolver.solve),
    "lapack-host": _Route(_small_and_complex, _on_the_host),
    "torch": _Route(lambda *_: True, _torch_eigh),
}


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise DtypeError(f"the eigensolver takes {', '.join(map(str, _DTYPES))}, got {dtype}; convert the matrices.")


def route(device: torch.device | str, dtype: torch.dtype, n: int, batch: int = 1) -> str:
    """Name the route that :func:`batched_eigh` takes.

    ``lapack`` and ``lapack-threads`` are the CPU's, the latter with the batch spread over threads; ``jacobi`` is the
    kernel of this package that keeps small matrices on chip; ``tridiagonal`` are its kernels for orders up to 1024 on
    devices that multiply float64 at full rate, which reduce matrices to tridiagonal form and solve that by divide and
    conquer; ``cusolver`` is cuSOLVER's 64-bit batched routine in the library that torch ships; ``torch`` is
    :func:`torch.linalg.eigh`, everywhere else and for complex matrices on CUDA, up to order 32 ``lapack-host``, which
    copies them to the CPU.

    Args:
        device: where the matrices are.
        dtype: float32, float64, complex64 or complex128.
        n: their order.
        batch: how many there are.

    Returns:
        The name of the route.

    Example:
        >>> route("cpu", torch.float64, n=36)
        'lapack'
    """
    _check_dtype(dtype)
    if n == 0 or batch == 0:
        return "torch"
    device = torch.device(device)
    return next(name for name, one in _ROUTES.items() if one.takes(device, dtype, n, batch))


def _solve_reflected(a: Tensor) -> tuple[Tensor, Tensor]:
    """Solve, in double precision and seen in a mirror, what LAPACK's divide and conquer gave up on.

    Where much of a matrix is zero (Gram matrices of masked features) rounding decays below the range of floating point
    on the way, often in float32 and now and then in float64. H A H with a reflection H = I − 2vvᵀ that has no zeros has
    the same eigenvalues, and rounding of one size everywhere.
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
    try:
        if a.is_cpu and not _spreading_pays(n, batch.numel()):  # the commonest route, without a walk along the table
            return _torch_eigh(a)
        name = route(a.device, a.dtype, n, batch.numel())
        if name in ("lapack", "torch"):  # take any leading dimensions
            return _ROUTES[name].solve(a)
        values, vectors = _ROUTES[name].solve(a.reshape(-1, n, n))
    except torch.linalg.LinAlgError as error:
        if a.is_cpu:
            with contextlib.suppress(torch.linalg.LinAlgError):
                return _solve_reflected(a)
        raise SolverError(
            f"the eigensolver did not converge on {batch.numel()} matrices of order {n} ({error}). Look for NaN and "
            f"Inf in what they are made of, scale them, or add a multiple of the identity."
        ) from error
    return values.reshape(*batch, n), vectors.reshape(*batch, n, n)


@torch.library.custom_op("matbackprop::batched_eigh", mutates_args=(), device_types="cuda")
def _operator(a: Tensor) -> tuple[Tensor, Tensor]:
    """The form that torch.compile and vmap see on CUDA, where the routes cannot be traced."""
    values, vectors = _solve(a)
    return values.contiguous(), vectors.contiguous()


@_operator.register_fake
def _(a: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape[:-1], dtype=real_dtype(a.dtype)), a.new_empty(a.shape)


@_operator.register_vmap
def _(info, in_dims, a):  # type: ignore[no-untyped-def]
    return _operator(a.movedim(in_dims[0], 0)), (0, 0)


def batched_eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    r"""Eigendecomposition of symmetric or Hermitian matrices, A = U diag(λ) Uᴴ, by the fastest route installed.

    Every operator of the package calls this function. It is not differentiable: the operators carry their own adjoints.
    On CUDA real matrices neither wait for the device nor move to the CPU, and can be captured into a CUDA graph after
    one call with the same shapes. The one exception: float64 matrices above order 128 that cuSOLVER solves, unless the
    batch is very large, are replayed from a recording, and making it, in the second call with a shape, waits once.
    Complex ones wait.

    Args:
        a: matrices ``(*batch, n, n)``, float32, float64, complex64 or complex128; only the lower triangle is read.

    Returns:
        Ascending eigenvalues ``(*batch, n)`` and eigenvectors ``(*batch, n, n)`` in columns. On CUDA they are NaN for a
        matrix that could not be solved, which costs no synchronisation. Where LAPACK gives up on float32 matrices on
        the CPU, they are solved in float64 and rounded.

    Raises:
        SolverError: a matrix on the CPU could not be solved.
        ShapeError, DtypeError: ``a`` is not a batch of square matrices of such a dtype.

    Gradient:
        None; results are detached.

    Example:
        >>> values, vectors = batched_eigh(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> values
        tensor([1., 3.])
    """
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ShapeError(f"the eigensolver needs square matrices (*batch, n, n), got shape {tuple(a.shape)}.")
    _check_dtype(a.dtype)
    a = a.detach()
    if a.numel() == 0 or not is_plain(a):
        return _operator(a) if a.device.type == "cuda" and a.numel() else _torch_eigh(a)
    return _solve(a)
