"""The same differentiable functions implemented with torch and other packages.

Each factory imports its package when it is called and raises :class:`MissingPeer` if it is not installed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class MissingPeer(Exception):
    """A peer package is not installed."""


def need(name: str) -> Any:
    """Import a peer's module, or raise MissingPeer."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPeer(f"{name} is not installed ({error})") from error


def need_jax() -> Any:
    """Import JAX with float64 and without preallocation."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # by default it takes three quarters of the memory
    jax = need("jax")
    jax.config.update("jax_enable_x64", True)
    return jax


def torch_linalg(name: str) -> Callable[..., Any]:
    """A function of ``torch.linalg`` that only newer versions have."""
    if not hasattr(torch.linalg, name):
        raise MissingPeer(f"torch {torch.__version__} has no torch.linalg.{name}")
    return getattr(torch.linalg, name)


def eigh_function(name: str) -> Callable[[Tensor], Tensor]:
    """g(A) written with :func:`torch.linalg.eigh` and differentiated by autograd."""
    g = {"log": torch.log, "sqrt": torch.sqrt}[name]

    def apply(a: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(a)
        return (vectors * g(values).unsqueeze(-2)) @ vectors.mT

    return apply


def spd_learn_function(name: str) -> Callable[[Tensor], Tensor]:
    """spd_learn's Function with its Loewner-matrix gradient."""
    functional = need("spd_learn.functional")
    function = {"log": functional.matrix_log, "sqrt": functional.matrix_sqrt}[name]
    return function.apply if hasattr(function, "apply") else function


def geoopt_function(name: str) -> Callable[[Tensor], Tensor]:
    """geoopt's symmetric matrix function, eigh and autograd."""
    linalg = need("geoopt.linalg")
    return {"log": linalg.sym_logm, "sqrt": linalg.sym_sqrtm}[name]


def in_tf32(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function whose products, and those of its gradient, are computed in TF32; on CUDA only."""
    if not torch.cuda.is_available():
        raise MissingPeer("TF32 is CUDA's")

    class InTF32(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch.enable_grad(), _tf32():
                ctx.x = x.detach().requires_grad_()
                ctx.out = function(ctx.x)
            return ctx.out.detach()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            with _tf32():
                return torch.autograd.grad(ctx.out, ctx.x, g)[0]

    return InTF32.apply


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def jax_function(name: str) -> Callable[[Tensor], Tensor]:
    """g(A) by JAX's eigendecomposition and its derivative, compiled, on the device of A without copies."""
    jax = need_jax()
    g = {"log": jax.numpy.log, "sqrt": jax.numpy.sqrt}[name]

    def value(a: Any) -> Any:
        values, vectors = jax.numpy.linalg.eigh(a)
        return (vectors * g(values)[..., None, :]) @ jax.numpy.swapaxes(vectors, -1, -2)

    forward, backward = jax.jit(lambda a: jax.vjp(value, a)), jax.jit(lambda pull, g: pull(g)[0])

    class ByJax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            out, ctx.pull = forward(jax.dlpack.from_dlpack(a.detach().contiguous()))
            return torch.from_dlpack(out)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return torch.from_dlpack(backward(ctx.pull, jax.dlpack.from_dlpack(g.contiguous())))

    return ByJax.apply


#: Method → factory of g(A) for ``log`` and ``sqrt``.
MATRIX_FUNCTIONS: dict[str, Callable[[str], Callable[[Tensor], Tensor]]] = {
    "torch.linalg.eigh + autograd": eigh_function,
    "jax.numpy.linalg.eigh + jax.vjp": jax_function,
    "spd_learn": spd_learn_function,
    "geoopt": geoopt_function,
}


def pool_with(function: Callable[[Tensor], Tensor], eps: float) -> Callable[[Tensor], Tensor]:
    """Second-order pooling g(FᵀF + εI) through a function of d×d matrices."""

    def pool(f: Tensor) -> Tensor:
        return function(f.mT @ f + eps * torch.eye(f.shape[-1], dtype=f.dtype, device=f.device))

    return pool


def svd_pool(name: str, eps: float) -> Callable[[Tensor], Tensor]:
    """Second-order pooling through the thin SVD of F and autograd; the null space is added back in closed form."""
    g = {"log": torch.log, "sqrt": torch.sqrt}[name]

    def pool(f: Tensor) -> Tensor:
        _, s, vh = torch.linalg.svd(f, full_matrices=False)
        base = g(torch.tensor(eps, dtype=f.dtype, device=f.device))
        eye = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
        return base * eye + (vh.mT * (g(s.square() + eps) - base).unsqueeze(-2)) @ vh

    return pool


def isqrt(a: Tensor, steps: int = 5) -> Tensor:
    """Approximate the matrix square root by Newton–Schulz iterations on A/tr A, rescaled by √tr A.

    Y ← Y(3I − ZY)/2, Z ← (3I − ZY)Z/2 from Y = A/tr A, Z = I; Y converges to the square root.

    Reference:
        Li, Xie, Wang, Gao, "Towards Faster Training of Global Covariance Pooling Networks by Iterative Matrix Square
        Root Normalization", CVPR 2018, equations 2 to 5.
    """
    trace = a.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    y, z = a / trace, eye.expand_as(a)
    for _ in range(steps):
        middle = 0.5 * (3 * eye - z @ y)
        y, z = y @ middle, middle @ z
    return y * trace.sqrt()


def coupled_newton(a: Tensor, p: int, eps: float, steps: int = 100, tolerance: float = 1e-6) -> Tensor:
    """Inverse p-th root of A + ελ_max I by the coupled Newton iteration, as Shampoo's implementations write it.

    X ← XT, M ← TᵖM with T = ((p + 1)I − M)/p, from M = zA and X = z^(1/p)I; M tends to I and X to the root. It stops
    when M is within ``tolerance`` of I, after ``steps``, or if an iteration increases the error.

    Reference:
        Anil, Gupta, Koren, Regan, Singer, "Scalable second order optimization for deep learning", 2020, appendix.
    """
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    v = torch.ones_like(a[..., :1])
    for _ in range(100):  # power iteration for λ_max
        v = a @ v
        v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True)
    damped = a + eps * (v.mT @ a @ v) * eye
    z = (1 + p) / (2 * torch.linalg.matrix_norm(damped))[..., None, None]
    m, x = damped * z, eye * z ** (1 / p)
    error = torch.inf
    for _ in range(steps):
        t = ((1 + p) * eye - m) / p
        new_m, new_x = torch.linalg.matrix_power(t, p) @ m, x @ t
        new_error = float((new_m - eye).abs().max())
        if not new_error < 1.2 * error:
            break
        m, x, error = new_m, new_x, new_error
        if error < tolerance:
            break
    return x
