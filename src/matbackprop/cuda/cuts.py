"""The normalized-cut objectives J₂ and soft on CUDA: two kernels forward and one backward.

The kernels are in ``cuts.cu``. They process all images of a batch at once and distribute a large image over the
device. Sums are float64 in a fixed order, so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from matbackprop.cuda import jacobi
from matbackprop.cuda.compiler import CONSTANTS, PRODUCT_THREADS, TENSOR_CORES, TILE, TYPES, Module, Source
from matbackprop.cuda.fallback import Pair, call_pair, device_takes, kernels_may_take

SOURCE = Source("cuts.cu", CONSTANTS)
_REAL_BYTES = 8
_MAX_FEATURES = TILE - 1  # one column of a tile holds the counts
_MIN_PIECE, _MAX_PIECES = 128, 256  # rows a block sums up; blocks an image is spread over
_GRID_LIMIT = 65535


def takes(d: int, device: torch.device) -> bool:
    """Return whether the kernels support d features on a device."""
    return 0 < d <= _MAX_FEATURES and device_takes(device, TENSOR_CORES)


def applies(f: Tensor, labels: Tensor, weight: Tensor | None, ridge: float) -> bool:
    """Return whether the kernels support a batch: d ≤ 63, and weights that require no gradient.

    They are inaccurate for a small ridge and fewer rows than features, and for float64 features in directions that are
    inaccurate in the Gram matrix.
    """
    return (
        f.shape[-2] <= TILE * _GRID_LIMIT
        and (ridge == 0 or f.shape[-2] >= f.shape[-1])
        and f.dtype in TYPES
        and f.dtype != torch.float64
        and (weight is None or not weight.requires_grad)
        and kernels_may_take(f, labels, *(() if weight is None else (weight,)))
        and takes(f.shape[-1], f.device)
    )


def _kernels(f: Tensor) -> Module:
    return SOURCE.on(f.get_device(), REAL_IS_DOUBLE=1, IN=TYPES[f.dtype])


def _address(weight: Tensor | None) -> int:
    return 0 if weight is None else weight.data_ptr()


def forward(
    f: Tensor, labels: Tensor, weight: Tensor | None, k: int, ridge: float, tol: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Objective ``(n,)`` in F's dtype, A ``(n, k, d)`` and Q ``(n, d, d)`` for labels ``(n, m)``.

    F is ``(n, m, d)``, or ``(n/a, m, d)`` if each image has ``a`` consecutive labelings; weights are float64, m numbers
    per image.
    """
    images, m, d = f.shape
    n = labels.shape[0]
    kernels = _kernels(f)
    piece = max(_MIN_PIECE, -(-m // _MAX_PIECES))
    pieces = -(-m // piece)
    entries = (d + k) * (d + 1)

    value = torch.empty(n, dtype=f.dtype, device=f.device)
    a = torch.empty((n, k, d), dtype=torch.float64, device=f.device)
    q = torch.empty((n, d, d), dtype=torch.float64, device=f.device)
    scratch = torch.empty(n * (pieces * entries + entries + 2 * k), dtype=torch.float64, device=f.device)
    partial = scratch.data_ptr()
    sums = partial + n * pieces * entries * _REAL_BYTES
    terms = sums + n * entries * _REAL_BYTES
    grid = (n, pieces, -(-(d + k) // TILE))
    arguments = (f.data_ptr(), labels.data_ptr(), _address(weight), partial, m, d, k, piece, n // images)
    kernels.launch("cut_sums", grid, PRODUCT_THREADS, 0, arguments)
    sizes = jacobi.Sizes(d)
    shared = sizes.shared_bytes(_REAL_BYTES, extra=sizes.players + 5)
    outputs = (sums, a.data_ptr(), terms, q.data_ptr(), value.data_ptr())
    kernels.launch("cut_solve", (n,), sizes.threads, shared, (partial, *outputs, ridge, tol, pieces, d, k))
    return value, a, q


def gradient(g: Tensor, f: Tensor, labels: Tensor, weight: Tensor | None, a: Tensor, q: Tensor) -> Tensor:
    """dL/dF in the shape of F for the gradient g ``(n,)`` of the objective."""
    images, m, d = f.shape
    n = labels.shape[0]
    out = torch.empty((n, m, d), dtype=f.dtype, device=f.device)
    shared = (d * d + TILE * d) * _REAL_BYTES
    addresses = (f.data_ptr(), labels.data_ptr(), _address(weight), *(x.data_ptr() for x in (a, q, g, out)))
    arguments = (*addresses, m, d, a.shape[-2], n // images)
    _kernels(f).launch("cut_gradient", (n, -(-m // TILE)), PRODUCT_THREADS, shared, arguments)
    return out if n == images else out.unflatten(0, (images, -1)).sum(1)


def objective(
    f: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    k: int,
    ridge: float,
    tol: float,
    general: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """J₂ (ridge 0) or the soft objective in the dtype of F ``(*b, m, d)``, in the shape of labels without m.

    Args:
        f: features.
        labels: regions ``(*b, m)`` or ``(*b, a, m)``; rows with a label outside of 0 … k − 1 do not count.
        weight: ``(*b, m)``, how often each row counts, or None.
        k: bound of the number of regions.
        ridge: λ of the soft objective, 0 for J₂.
        tol: relative size of an eigenvalue of FᵀF that counts as zero in J₂.
        general: the same operator without the kernels, of features ``(n/a, m, d)``, labels ``(n, m)`` and weights
            ``(n/a, m)``.
    """
    m, d = f.shape[-2:]
    x = f.float().reshape(-1, m, d).contiguous()
    regions = labels.reshape(-1, m).to(torch.int64).contiguous()
    mass = None if weight is None else weight.reshape(x.shape[:2]).to(torch.float64).contiguous()

    def kernels(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        value, *factors = forward(x, regions, mass, k, ridge, tol)
        return value, tuple(factors)

    def adjoint(g: Tensor, x: Tensor, a: Tensor, q: Tensor) -> Tensor:
        return gradient(g, x, regions, mass, a, q)

    value = call_pair(x, Pair(kernels, adjoint, lambda x: general(x, regions, mass)))
    return value.reshape(labels.shape[:-1]).to(f.dtype)
