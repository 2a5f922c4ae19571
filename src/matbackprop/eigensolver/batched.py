"""The batched symmetric eigensolver and the choice of its route."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import torch
from torch import Tensor

from matbackprop.eigensolver import _cusolver, _jacobi, _kernels, _refined, _threads
from matbackprop.errors import DtypeError, NonFiniteError, NumericalWarning, ShapeError, SolverError
from matbackprop.numerics import values_checkable

Route = Literal["lapack", "lapack-threads", "jacobi", "refined", "cusolver", "torch"]
OnFailure = Literal["mark", "raise", "retry"]
_ON_FAILURE = get_args(OnFailure)

# Largest order for which the Jacobi kernel is faster than cuSOLVER's batched routine, measured on an H200: for batches
# of some hundred matrices, and for those that fill the device several times over.
_JACOBI_MAX_ORDER = {torch.float32: 64, torch.float64: 60}
_JACOBI_MAX_ORDER_LARGE_BATCH = 48
_LARGE_BATCH = 400


def _cuda_route(device: torch.device, dtype: torch.dtype, n: int, batch: int) -> Route:
    most = _JACOBI_MAX_ORDER[dtype] if batch <= _LARGE_BATCH else _JACOBI_MAX_ORDER_LARGE_BATCH
    if n <= most and _kernels.available():
        return "jacobi"
    if dtype == torch.float64 and _refined.MIN_ORDER <= n <= _refined.MAX_ORDER and _refined.available(device):
        return "refined"
    if _cusolver.available():
        return "cusolver"
    return "torch"


def route(
    a: Tensor | torch.device | str, dtype: torch.dtype | None = None, n: int | None = None, batch: int | None = None
) -> Route:
    """Name the route that :func:`batched_eigh` takes.

    ``lapack`` and ``lapack-threads`` are the CPU's, the latter with the batch spread over threads; ``jacobi`` is the
    kernel of this package that keeps small matrices on chip; ``cusolver`` is cuSOLVER's 64-bit batched routine in the
    library that torch ships; ``refined`` is the same routine in float32 whose results are refined to float64 by matrix
    products and, where eigenvalues nearly meet, by rotations; ``torch`` is :func:`torch.linalg.eigh`, everywhere else.

    Args:
        a: the matrices ``(*batch, n, n)``, or the device they would be on.
        dtype: float32 or float64; taken from ``a`` if that is a tensor.
        n: order of the matrices; likewise.
        batch: number of matrices; likewise.

    Returns:
        The name of the route.

    Example:
        >>> route("cpu", torch.float64, n=36, batch=1)
        'lapack'
    """
    if isinstance(a, Tensor):
        device = a.device
        dtype = dtype or a.dtype
        n = a.shape[-1] if n is None else n
        batch = a.shape[:-2].numel() if batch is None else batch
    else:
        device = torch.device(a)
    if dtype not in _JACOBI_MAX_ORDER:
        raise DtypeError(f"the eigensolver takes float32 and float64 matrices, got {dtype}; convert them first.")
    n = 0 if n is None else n
    batch = 1 if batch is None else batch
    if device.type == "cpu":
        return "lapack-threads" if _threads.worth_it(n, batch) else "lapack"
    if device.type == "cuda" and n > 0 and batch > 0:
        return _cuda_route(device, dtype, n, batch)
    return "torch"


def _torch_eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(a)
    return values, vectors


def _solve(a: Tensor, name: Route) -> tuple[Tensor, Tensor]:
    """Solve (batch, n, n) by a named route; lapack and torch take any leading dimensions."""
    if name == "jacobi":
        return _jacobi.solve(a.contiguous())
    if name == "refined":
        return _refined.solve(a.contiguous())
    if name == "cusolver":
        return _cusolver.solve(a)
    try:
        return _threads.solve(a) if name == "lapack-threads" else _torch_eigh(a)
    except torch.linalg.LinAlgError as error:
        count, n = a.shape[:-2].numel(), a.shape[-1]
        raise SolverError(
            f"the eigensolver did not converge on {count} matrices of order {n} ({error}). Check them for NaN and Inf, "
            f"or ask for on_failure='retry'."
        ) from error


def _solve_flat(a: Tensor) -> tuple[Tensor, Tensor]:
    name = route(a)
    if name == "lapack":  # takes any leading dimensions
        return _solve(a, name)
    batch, n = a.shape[:-2], a.shape[-1]
    values, vectors = _solve(a.reshape(-1, n, n), name)
    return values.reshape(*batch, n), vectors.reshape(*batch, n, n)


@torch.library.custom_op("matbackprop::batched_eigh", mutates_args=(), device_types="cuda")
def _operator(a: Tensor) -> tuple[Tensor, Tensor]:
    """The form that torch.compile and vmap see on CUDA, where the routes cannot be traced."""
    values, vectors = _solve_flat(a)
    return values.contiguous(), vectors.contiguous()


@_operator.register_fake
def _(a: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape[:-1]), a.new_empty(a.shape)


@_operator.register_vmap
def _(info, in_dims, a):  # type: ignore[no-untyped-def]
    return _operator(a.movedim(in_dims[0], 0)), (0, 0)


def _retry(a: Tensor, name: Route) -> tuple[Tensor, Tensor]:
    """Solve (k, n, n) matrices on which the route ``name`` failed in another way."""
    if name in ("jacobi", "refined") and _cusolver.available():
        return _solve(a, "cusolver")
    if a.device.type == "cuda" and name != "torch":
        return _solve(a, "torch")
    # Divide and conquer on the matrix with its indices reversed takes another path, and double precision a safer one.
    values, vectors = _solve(a.double().flip(-1, -2), "torch")
    return values.to(a.dtype), vectors.flip(-2).to(a.dtype)


def _guarded(a: Tensor, on_failure: OnFailure) -> tuple[Tensor, Tensor]:
    """Solve and look at the result, which waits for the device."""
    n = a.shape[-1]
    flat = a.reshape(-1, n, n)
    name = route(a)
    try:
        values, vectors = _solve(flat, name)
        failed = ~torch.isfinite(values).all(-1)
    except SolverError:
        if on_failure == "raise":
            raise
        values, vectors = flat.new_empty(flat.shape[:-1]), torch.empty_like(flat)
        failed = torch.ones(flat.shape[0], dtype=torch.bool, device=flat.device)
    count = int(failed.sum())
    if count:
        finite = torch.isfinite(flat[failed]).flatten(1).all(-1)
        if not bool(finite.all()):
            raise NonFiniteError(
                f"{count - int(finite.sum())} of {flat.shape[0]} matrices hold NaN or Inf and have no eigenvalues; "
                f"look for an exploding activation or a division by zero upstream."
            )
        message = f"the route {name!r} failed on {count} of {flat.shape[0]} matrices of order {n}"
        if on_failure == "raise":
            raise SolverError(f"{message}; ask for on_failure='retry', or scale the matrices.")
        warnings.warn(f"{message}; they are solved again by another route.", NumericalWarning, stacklevel=3)
        again = _retry(flat[failed], name)
        if not bool(torch.isfinite(again[0]).all()):
            raise SolverError(f"{message}, and so did another route; scale the matrices or add a multiple of I.")
        values, vectors = values.clone(), vectors.clone()
        values[failed], vectors[failed] = again
    return values.reshape(a.shape[:-1]), vectors.reshape(a.shape)


def batched_eigh(a: Tensor, *, on_failure: OnFailure = "mark") -> tuple[Tensor, Tensor]:
    r"""Eigendecomposition of symmetric matrices, A = U diag(λ) Uᵀ, by the fastest route installed.

    Every operator of the package calls this function. It is not differentiable: the operators carry their own adjoints.
    On CUDA it neither waits for the device nor moves anything to the CPU, and can be captured into a CUDA graph after
    one call with the same shapes. The one exception: float64 matrices above order 128, unless the batch is very large,
    are replayed from a recording, and making it, in the second call with a shape, waits once.

    Args:
        a: symmetric matrices ``(*batch, n, n)``, float32 or float64; only the lower triangle is read.
        on_failure: what happens to matrices that a route cannot solve. ``"mark"``: on CUDA their eigenvalues and
            eigenvectors are NaN, which costs no synchronisation; the CPU raises. ``"raise"``: wait and raise.
            ``"retry"``: wait, warn, and solve those matrices again by another route.

    Returns:
        Ascending eigenvalues ``(*batch, n)`` and eigenvectors ``(*batch, n, n)`` in columns.

    Raises:
        SolverError: a matrix could not be solved (see ``on_failure``).
        NonFiniteError: a matrix holds NaN or Inf and ``on_failure`` is not ``"mark"``.
        NumericalWarning: a failed matrix was solved again by another route.

    Gradient:
        None; results are detached.

    Example:
        >>> values, vectors = batched_eigh(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> values
        tensor([1., 3.])
    """
    if on_failure not in _ON_FAILURE:
        raise ValueError(f"on_failure must be one of {', '.join(_ON_FAILURE)}, got {on_failure!r}.")
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ShapeError(f"the eigensolver needs square matrices (*batch, n, n), got shape {tuple(a.shape)}.")
    if a.dtype not in _JACOBI_MAX_ORDER:
        raise DtypeError(f"the eigensolver takes float32 and float64 matrices, got {a.dtype}; convert them first.")
    a = a.detach()
    plain = values_checkable(a) and type(a) in (Tensor, torch.nn.Parameter)
    if not plain or a.numel() == 0:
        return _operator(a) if a.device.type == "cuda" and a.numel() else _torch_eigh(a)
    if on_failure != "mark":
        return _guarded(a, on_failure)
    return _solve_flat(a)
