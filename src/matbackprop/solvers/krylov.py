"""Leading eigenpairs of a symmetric or Hermitian operator, given by its products with vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from matbackprop.errors import SolverError


class Leading(NamedTuple):
    """The largest eigenvalues and their vectors, and the next eigenvalue.

    Attributes:
        values: λ₁ ≥ … ≥ λ_k ``(k,)``.
        vectors: orthonormal columns ``(n, k)``, the largest entry of each positive.
        following: λ_{k+1}, or a lower bound that is clearly below λ_k; −∞ if there is none.
        scale: the largest |λ| found.
    """

    values: Tensor
    vectors: Tensor
    following: Tensor
    scale: Tensor


class _Budget:
    """Products of an operator with single vectors, counted."""

    def __init__(self, products: Callable[[Tensor], Tensor], most: int, generator: torch.Generator, start: Tensor):
        self.products, self.most, self.used, self.generator, self.like = products, most, 0, generator, start

    def product(self, x: Tensor) -> Tensor:
        self.used += 1
        return self.products(x.unsqueeze(-1)).squeeze(-1)

    def random(self) -> Tensor:
        like, generator = self.like, self.generator
        return torch.randn(len(like), generator=generator, dtype=like.dtype, device=generator.device).to(like.device)

    def refuse(self, k: int, residual: Tensor, goal: Tensor) -> None:
        """Raise if no products are left, or a residual is not finite."""
        if self.used >= self.most or not bool(torch.isfinite(residual).all()):
            raise SolverError(
                f"The {k} leading eigenpairs of an operator of order {len(self.like)} did not converge in {self.used} "
                f"products: the largest residual is {float(residual.max()):.3g}, the tolerance {float(goal):.3g}. "
                f"Raise max_products or tolerance, choose another k (eigenvalues close to the k-th slow convergence "
                f"down), and look for NaN."
            )


def _clear(x: Tensor, *bases: Tensor) -> tuple[Tensor, Tensor]:
    """Orthogonalize x against the rows of the bases; also return its coefficients in the last one."""
    total = torch.zeros_like(bases[-1][:, 0])
    for _ in range(2):  # twice, because of cancellation
        for basis in bases:
            coefficients = basis.conj() @ x
            x = x - coefficients @ basis
        total = total + coefficients
    return x, total


def _lanczos(
    budget: _Budget, k: int, tolerance: float, locked: Tensor, floor: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Leading eigenvalues and eigenvectors, in rows, outside of the span of the locked rows, and the largest |λ| seen.

    Lanczos with thick restarts and full orthogonalization. With a ``floor`` it stops as soon as the first eigenvalue is
    known to be clearly below it.
    """
    start = budget.random()
    n = len(start)
    most = min(n - len(locked), max(2 * k + 1, 20))
    q, t = start.new_zeros(most + 1, n), start.new_zeros(most, most)
    first, _ = _clear(start, locked)
    q[0] = first / torch.linalg.vector_norm(first)
    size = 0
    while True:
        for j in range(size, most):
            w, h = _clear(budget.product(q[j]), locked, q[: j + 1])
            t[: j + 1, j], t[j, : j + 1] = h, h.conj()
            beta = torch.linalg.vector_norm(w)
            if not bool(beta > 16 * torch.finfo(w.dtype).eps * torch.linalg.vector_norm(h)):
                w, _ = _clear(budget.random(), locked, q[: j + 1])  # the span is invariant: restart randomly
                beta = 0 * beta
                w = w / torch.linalg.vector_norm(w) if j + 1 < n - len(locked) else 0 * w
                q[j + 1] = w
            else:
                q[j + 1] = w / beta
        theta, s = torch.linalg.eigh(t)
        theta, s = theta.flip(-1), s.flip(-1)
        residual = (beta * s[-1]).abs()
        scale = theta.abs().amax()
        goal = tolerance * scale
        below = floor is not None and bool(theta[0] + residual[0] < floor - 0.5 * (floor - theta[0]))
        if most == n - len(locked) or below or bool((residual[:k] <= goal).all()):
            return theta[:k], s[:, :k].mT @ q[:-1], scale
        budget.refuse(k, residual[:k], goal)
        size = min(most - 1, k + (most - k) // 2)
        q[:size], q[size] = s[:, :size].mT @ q[:-1], q[-1].clone()
        t.zero_()
        t.diagonal()[:size] = theta[:size]


def leading_pairs(
    products: Callable[[Tensor], Tensor], like: Tensor, k: int, tolerance: float, most: int, generator: torch.Generator
) -> Leading:
    """The k largest eigenvalues of a symmetric operator and their vectors, by Lanczos with thick restarts.

    A Krylov space of one vector contains a repeated eigenvalue only once. Therefore the largest eigenvalue outside the
    span of the pairs found is computed until it is below λ_k, which finds all copies and the gap.

    Args:
        products: maps columns ``(n, r)`` to A times them.
        like: ``(n,)`` tensor with the order, dtype and device of A.
        k: number of pairs.
        tolerance: residuals ‖Av − λv‖ to stop at, as a fraction of the largest |λ|.
        most: largest number of products.
        generator: for random vectors.

    Raises:
        SolverError: not converged.
    """
    budget = _Budget(products, most, generator, like)
    n = len(like)
    values, v, scale = _lanczos(budget, k, tolerance, like.new_zeros(0, n), None)
    following = torch.full_like(scale, -torch.inf)
    while k < n:
        value, new, _ = _lanczos(budget, 1, tolerance, v, values[-1])
        if not bool(value[0] > values[-1] + tolerance * scale):
            following = value[0]
            break
        values, order = torch.cat([values, value]).sort(descending=True)
        values, v = values[:k], torch.cat([v, new])[order[:k]]
        budget.refuse(k, values, scale)
    largest = v.gather(-1, v.abs().argmax(-1, keepdim=True))
    return Leading(values, (v * torch.sgn(largest).conj()).mT, following, scale)
