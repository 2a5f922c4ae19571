"""Leading eigenpairs of a symmetric or Hermitian operator, given by its products with vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop._torch import outside_transforms
from matbackprop.errors import SolverError


class Leading(NamedTuple):
    values: Tensor  # λ₁ ≥ … ≥ λ_k (k,)
    vectors: Tensor  # orthonormal columns (n, k), the largest entry of each positive
    following: Tensor  # λ_{k+1}, or a lower bound that is clearly below λ_k; −∞ if there is none
    scale: Tensor  # the largest |λ| found


@dataclass
class _Budget:
    """Products of an operator with vectors, counted."""

    products: Callable[[Tensor], Tensor]
    most: int
    generator: torch.Generator
    like: Tensor
    used: int = 0

    def product(self, x: Tensor) -> Tensor:
        self.used += 1
        out = self.products(x.unsqueeze(-1)).squeeze(-1)
        if not bool(torch.isfinite(out).all()):
            raise SolverError("A product of the operator is not finite. Look for NaN, or scale the operator.")
        return out

    def random(self) -> Tensor:
        like, generator = self.like, self.generator
        with outside_transforms():  # vmap, which jacfwd uses, does not allow random numbers
            x = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=generator.device)
        return x.to(like.device)

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
    """Orthogonalize a vector against the rows of the bases; also return its coefficients in the last basis."""
    total = torch.zeros_like(bases[-1][:, 0])
    for _ in range(2):  # twice, because of cancellation
        for basis in bases:
            coefficients = basis.conj() @ x
            x = x - coefficients @ basis
        total = total + coefficients
    return x, total


def _unit(x: Tensor, *bases: Tensor) -> Tensor:
    x, _ = _clear(x, *bases)
    return x / torch.linalg.vector_norm(x)


def _descending(t: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(t)
    return values.flip(-1), vectors.flip(-1)


def _lanczos(
    budget: _Budget, k: int, tolerance: float, locked: Tensor, floor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Descending eigenvalues and the first k + 1 eigenvectors, in rows, outside of the span of the locked rows.

    Lanczos with thick restarts and full orthogonalization. It stops if k pairs have converged and the next eigenvalue
    is known to be smaller, or to be equal. With a ``floor`` it also stops if the first eigenvalue is clearly below it.
    """
    n = len(budget.like) - len(locked)
    width = min(n, max(40, 2 * k + 20))
    q, t = budget.like.new_zeros(width + 1, len(budget.like)), budget.like.new_zeros(width, width)
    q[0] = _unit(budget.random(), locked)
    size = 0
    while True:
        w, h = _clear(budget.product(q[size]), locked, q[: size + 1])
        t[: size + 1, size], t[size, : size + 1] = h, h.conj()
        size += 1
        if size == n:
            theta, s = _descending(t)
            return theta, s.mT @ q[:n]
        beta, norm = torch.linalg.vector_norm(w), torch.linalg.vector_norm(h)
        if bool(beta > 1e-4 * norm):
            q[size] = w / beta
        elif bool(beta > 16 * torch.finfo(w.dtype).eps * norm):
            q[size] = _unit(w / beta, locked, q[:size])
        else:  # the span is invariant: continue with a random vector
            q[size] = _unit(budget.random(), locked, q[:size])
        if size < width and (size <= k or size % 2):  # testing for convergence takes longer than a small product
            continue
        theta, s = _descending(t[:size, :size])
        residuals = beta * s[-1].abs()
        goal = tolerance * theta.abs().amax()
        ready = bool((residuals[:k] <= goal).all())
        ready = ready and bool(residuals[k] <= (0.5 * (theta[k - 1] - theta[k])).maximum(goal))
        if floor is not None and size >= 12:
            ready = ready or bool(residuals[0] < 0.5 * (floor - theta[0]))
        if ready:
            return theta, s[:, : k + 1].mT @ q[:size]
        budget.check(k, residuals[:k], goal)
        if size == width:
            size = k + (width - k) // 2
            q[:size], q[size] = s[:, :size].mT @ q[:-1], q[-1].clone()
            t.zero_()
            t.diagonal()[:size] = theta[:size]


def leading_pairs(
    products: Callable[[Tensor], Tensor], like: Tensor, k: int, tolerance: float, most: int, generator: torch.Generator
) -> Leading:
    """The k largest eigenvalues of a symmetric operator and their vectors, by Lanczos with thick restarts.

    A Krylov space contains a repeated eigenvalue only once. Therefore the largest eigenvalue outside the span of the
    pairs found is computed until it is below λ_k, which finds all copies and the gap.

    ``products`` maps columns ``(n, r)`` to A times them. The iteration stops at residuals ‖Av − λv‖ below ``tolerance``
    times the largest |λ|.
    """
    budget = _Budget(products, most, generator, like)
    n = len(like)
    values, v = _lanczos(budget, k, tolerance, like.new_zeros(0, n))
    scale = values.abs().amax()
    following = values[k] if k < n else torch.full_like(scale, -torch.inf)
    values, v = values[:k], v[:k]
    while k < n:
        value, new = _lanczos(budget, 1, tolerance, v, values[-1])
        following = value[0].maximum(following)
        if not bool(value[0] > values[-1] + tolerance * scale):
            break
        values, order = torch.cat([values, value[:1]]).sort(descending=True)
        values, v, following = values[:k], torch.cat([v, new[:1]])[order[:k]], values[k]
        budget.check(k, values, scale)
    largest = v.gather(-1, v.abs().argmax(-1, keepdim=True))
    return Leading(values, (v * torch.sgn(largest).conj()).mT, following, scale)
