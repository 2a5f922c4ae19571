"""Leading eigenpairs of a symmetric or Hermitian operator, given by its products with vectors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop.errors import SolverError

_BLOCK = 8  # vectors per product; blocks read a dense matrix a third as often
_THREADS = 4  # from which products with a block pay, because products with one vector are limited by memory
_COARSE = 1e-5  # relative residual of the first iteration, in single precision


class Leading(NamedTuple):
    values: Tensor  # λ₁ ≥ … ≥ λ_k (k,)
    vectors: Tensor  # orthonormal columns (n, k), the largest entry of each positive
    following: Tensor  # λ_{k+1}, or a lower bound that is clearly below λ_k; −∞ if there is none
    scale: Tensor  # the largest |λ| found


@dataclass
class _Budget:
    """Products of an operator with the rows of a matrix, counted."""

    products: Callable[[Tensor], Tensor]
    most: int
    generator: torch.Generator
    like: Tensor
    used: int = 0

    def product(self, x: Tensor) -> Tensor:
        self.used += len(x)
        out = self.products(x.mT).mT
        if not bool(torch.isfinite(out).all()):
            raise SolverError("A product of the operator is not finite. Look for NaN, or scale the operator.")
        return out

    def random(self, rows: int) -> Tensor:
        like, generator = self.like, self.generator
        shape = rows, len(like)
        return torch.randn(shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)

    def check(self, k: int, residuals: Tensor, goal: Tensor) -> None:
        """Raise if no products are left."""
        if self.used >= self.most:
            raise SolverError(
                f"The {k} leading eigenpairs of an operator of order {len(self.like)} did not converge in {self.used} "
                f"products: the largest residual is {float(residuals.max()):.3g}, the tolerance {float(goal):.3g}. "
                f"Raise max_products or tolerance, or choose another k (eigenvalues close to the k-th slow convergence "
                f"down)."
            )


def _clear(x: Tensor, *bases: Tensor) -> tuple[Tensor, Tensor]:
    """Orthogonalize rows against those of the bases; also return their coefficients in the last basis."""
    total = torch.zeros_like(x @ bases[-1].mH)
    for _ in range(2):  # twice, because of cancellation
        for basis in bases:
            coefficients = x @ basis.mH
            x = x - coefficients @ basis
        total = total + coefficients
    return x, total


def _orthonormal(budget: _Budget, x: Tensor, size: Tensor | float, *bases: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal rows that span those of X, orthogonal to the bases, and R with X = RᵀQ.

    Random rows replace those of rounding errors, compared with ``size``: the basis is then an invariant subspace.
    """
    q, r = torch.linalg.qr(x.mT)
    q, least = q.mT, r.diagonal().abs()
    if bool((least > 1e-4 * size).all()):
        return q, r
    lost = ~(least > 16 * torch.finfo(x.dtype).eps * size)
    if bool(lost.any()):
        q = torch.where(lost.unsqueeze(-1), budget.random(len(x)), q)
    return torch.linalg.qr(_clear(q, *bases)[0].mT).Q.mT, r  # again, because rounding errors were amplified


def _lanczos(
    budget: _Budget,
    k: int,
    tolerance: float,
    start: Tensor,
    locked: Tensor,
    floor: Tensor | None = None,
    *,
    restart: bool = True,
) -> tuple[Tensor, Tensor]:
    """Descending eigenvalues and the first k + 1 eigenvectors, in rows, outside of the span of the locked rows.

    Block Lanczos with thick restarts and full orthogonalization, which starts with the rows of ``start``. It stops if
    k pairs have converged and the next eigenvalue is known to be smaller, or to be equal. With a ``floor`` it also
    stops after 12 passes or more if the first eigenvalue is clearly below the floor.
    """
    n = start.shape[-1] - len(locked)
    b = min(len(start), n)
    width = min(n, max(20, 2 * k + 1, 4 * b, (12 if restart else 24) * min(b, _BLOCK)))
    q, t = start.new_zeros(width + b, start.shape[-1]), start.new_zeros(width + b, width + b)
    q[:b], _ = _orthonormal(budget, _clear(start[:b], locked)[0], 0.0, locked)
    done, filled, passes = 0, b, 0  # rows of the basis, and those that have been multiplied
    while True:
        passes += 1
        w, h = _clear(budget.product(q[done:filled]), locked, q[:filled])
        t[:filled, done:filled], t[done:filled, :filled] = h.mT, h.conj()
        theta, s = torch.linalg.eigh(t[:filled, :filled])
        theta, s = theta.flip(-1), s.flip(-1)
        if filled == n:
            return theta, s.mT @ q[:filled]
        new, r = _orthonormal(budget, w, torch.linalg.matrix_norm(h), locked, q[:filled])
        residuals = torch.linalg.vector_norm(r @ s[done:filled], dim=0)
        goal = tolerance * theta.abs().amax()
        ready = filled > k and bool((residuals[:k] <= goal).all())
        ready = ready and bool(residuals[k] <= (0.5 * (theta[k - 1] - theta[k])).maximum(goal))
        full = filled + b > width < n
        if floor is not None and passes >= 12:
            ready = ready or bool(residuals[0] < 0.5 * (floor - theta[0]))
        if ready or (full and not restart):
            return theta, s[:, : k + 1].mT @ q[:filled]
        budget.check(k, residuals[:k], goal)
        if full:
            filled = min(k + (width - k) // 2, width - b)
            q[:filled] = s[:, :filled].mT @ q[: len(s)]
            t = torch.diag_embed(torch.nn.functional.pad(theta[:filled], (0, len(t) - filled))).to(t.dtype)
        done, filled = filled, min(filled + b, n)
        q[done:filled] = new[: filled - done]


def leading_pairs(
    products: Callable[[Tensor], Tensor],
    like: Tensor,
    k: int,
    tolerance: float,
    most: int,
    generator: torch.Generator,
    coarse: Callable[[], Callable[[Tensor], Tensor]] | None = None,
) -> Leading:
    """The k largest eigenvalues of a symmetric operator and their vectors, by block Lanczos with thick restarts.

    A Krylov space of b vectors contains at most b copies of a repeated eigenvalue. If b eigenvalues found are close,
    the largest eigenvalue outside the span of the pairs found is therefore computed until it is below λ_k.

    ``products`` maps columns ``(n, r)`` to A times them, and ``coarse`` returns the same products in single precision,
    for the first iterations. The iteration stops at residuals ‖Av − λv‖ below ``tolerance`` times the largest |λ|.
    """
    budget = _Budget(products, most, generator, like)
    n = len(like)
    block = _BLOCK if like.is_cuda or torch.get_num_threads() >= _THREADS else 1
    start = budget.random(block)
    if coarse is not None and block > 1:
        single = torch.complex64 if like.is_complex() else torch.float32
        rough, first = _Budget(coarse(), most, generator, like.to(single)), start.to(single)
        with contextlib.suppress(SolverError):  # entries out of the range of single precision
            start = _lanczos(rough, k + 2, _COARSE, first, first[:0], restart=False)[1].to(like.dtype)
    values, v = _lanczos(budget, k, tolerance, start, start[:0])
    scale = values.abs().amax()
    following = values[k] if k < n else torch.full_like(scale, -torch.inf)
    values, v = values[:k], v[:k]
    while block <= k < n and bool((values[: k + 1 - block] - values[block - 1 :] <= 1e-3 * scale).any()):
        value, new = _lanczos(budget, 1, tolerance, budget.random(block), v, values[-1])
        following = value[0].maximum(following)
        if not bool(value[0] > values[-1] + tolerance * scale):
            break
        values, order = torch.cat([values, value[:1]]).sort(descending=True)
        values, v, following = values[:k], torch.cat([v, new[:1]])[order[:k]], values[k]
        budget.check(k, values, scale)
    largest = v.gather(-1, v.abs().argmax(-1, keepdim=True))
    return Leading(values, (v * torch.sgn(largest).conj()).mT, following, scale)
