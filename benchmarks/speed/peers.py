"""The same differentiable functions implemented with torch and other packages.

Each factory imports its package when it is called and raises :class:`MissingPeer` if it is not installed.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from matbackprop.vision.serve.gradients import isqrt


class MissingPeer(Exception):
    """A peer package is not installed."""


def need(name: str) -> Any:
    """Import a peer's module.

    Raises:
        MissingPeer: it is not installed.
    """
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


MATRIX_FUNCTIONS: dict[str, Callable[[str], Callable[[Tensor], Tensor]]] = {
    "torch.linalg.eigh + autograd": eigh_function,
    "jax.numpy.linalg.eigh + jax.vjp": jax_function,
    "spd_learn": spd_learn_function,
    "geoopt": geoopt_function,
}
"""Method → factory of g(A) for ``log`` and ``sqrt``."""


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


class _NewtonSchulz(torch.autograd.Function):
    """`isqrt` with an explicit gradient of its steps, which saves two matrices per step, as MPN-COV's layers do."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, steps: int) -> Tensor:
        trace = a.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        y, z = a / trace, eye.expand_as(a)
        pairs = []
        for _ in range(steps):
            pairs += [y, z]
            middle = 0.5 * (3 * eye - z @ y)
            y, z = y @ middle, middle @ z
        ctx.save_for_backward(a, y, *pairs)
        return y * trace.sqrt()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # of Y and Z, step by step, then through A/tr A and √tr A
        (g,), (a, last, *pairs) = gradients, ctx.saved_tensors
        trace = a.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        g_y, g_z = g * trace.sqrt(), torch.zeros_like(g)
        for y, z in zip(pairs[-2::-2], pairs[-1::-2], strict=True):
            middle = 0.5 * (3 * eye - z @ y)
            g_middle = -0.5 * (y.mT @ g_y + g_z @ z.mT)
            g_y, g_z = g_y @ middle.mT + z.mT @ g_middle, middle.mT @ g_z + g_middle @ y.mT
        of_trace = (g * last).sum((-2, -1)) / (2 * trace[..., 0, 0].sqrt())
        of_trace = of_trace - (g_y * a).sum((-2, -1)) / trace[..., 0, 0].square()
        return g_y / trace + of_trace[..., None, None] * eye, None


def mpn_cov_root(a: Tensor, steps: int = 5) -> Tensor:
    """The square root as the layers of MPN-COV compute it: `isqrt` with an explicit gradient; approximate.

    Reference:
        As for `isqrt`, equations 6 to 11. The authors' layers (github.com/jiangtaoxie/fast-MPN-COV, MIT license) are
        not copied.
    """
    return _NewtonSchulz.apply(a, steps)


@functools.cache
def _binomials(count: int) -> list[float]:
    """|C(½, k)| for k = 1 … count: (1 − z)^½ = 1 − Σ |C(½, k)| zᵏ."""
    out = [1.0]
    for k in range(1, count + 1):
        out.append(out[-1] * abs(k - 1.5) / k)
    return out[1:]


@functools.cache
def _pade(degree: int) -> tuple[list[float], list[float]]:
    """Coefficients p, q of (1 − z)^½ ≈ (1 − Σ pₖzᵏ)/(1 − Σ qₖzᵏ), which agrees with the series up to 2·degree."""
    series = torch.tensor([1.0, *(-x for x in _binomials(2 * degree))], dtype=torch.float64)
    rows = torch.stack([series[degree + i + 1 - torch.arange(1, degree + 1)] for i in range(degree)])
    q = torch.linalg.solve(rows, -series[degree + 1 :])
    bottom = torch.cat([torch.ones(1, dtype=torch.float64), q])
    top = torch.stack([(series[: k + 1] * bottom[: k + 1].flip(0)).sum() for k in range(degree + 1)])
    return (-top[1:]).tolist(), (-q).tolist()


def _less_powers(z: Tensor, coefficients: list[float]) -> Tensor:
    """I − Σ cₖZᵏ."""
    out, power = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device).expand_as(z), z
    for k, c in enumerate(coefficients):
        power = power @ z if k else z
        out = out - c * power
    return out


class _RootAndLyapunov(torch.autograd.Function):
    """A series of (I − Z)^½ forward; backward BX + XB = G with the root B, by eight Newton–Schulz steps."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, rational: bool) -> Tensor:
        size = torch.linalg.matrix_norm(a)[..., None, None]
        z = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device) - a / size
        if rational:
            top, bottom = _pade(5)
            root = torch.linalg.solve(_less_powers(z, bottom), _less_powers(z, top))
        else:
            root = _less_powers(z, _binomials(11))
        root = root * size.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (b,), (g,) = ctx.saved_tensors, gradients
        size = torch.linalg.matrix_norm(b)[..., None, None]
        b, c = b / size, g / size
        eye = torch.eye(b.shape[-1], dtype=b.dtype, device=b.device)
        for _ in range(8):
            square = b @ b
            rest = 3 * eye - square
            c = 0.5 * (c @ rest - square @ c + b @ c @ b)
            b = 0.5 * b @ rest
        return 0.5 * c, None


def pade_root(a: Tensor) -> Tensor:
    """Square root by the Padé approximant [5, 5] of (1 − z)^½, its gradient by a Lyapunov equation; approximate.

    Reference:
        Song, Sebe, Wang, "Fast Differentiable Matrix Square Root", ICLR 2022: MPA_Lya. The authors' code
        (github.com/KingJamesSong/FastDifferentiableMatSqrt, MIT license) is not copied.
    """
    return _RootAndLyapunov.apply(a, True)


def taylor_root(a: Tensor) -> Tensor:
    """Square root by eleven terms of the Taylor series: MTP_Lya; approximate."""
    return _RootAndLyapunov.apply(a, False)


APPROXIMATE_ROOTS: dict[str, Callable[[Tensor], Tensor]] = {
    "iSQRT, 5 steps (approximate)": isqrt,
    "MPN-COV's iSQRT layer, 5 steps (approximate)": mpn_cov_root,
    "Padé + Lyapunov steps, MPA_Lya (approximate)": pade_root,
    "Taylor + Lyapunov steps, MTP_Lya (approximate)": taylor_root,
}


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
