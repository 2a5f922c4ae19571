"""Clamp the eigenvalues of symmetric matrices from below."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from matbackprop.checks import prepare
from matbackprop.divided_differences import CLAMP
from matbackprop.errors import DomainError
from matbackprop.functional._spectrum import Spectrum, spectral
from matbackprop.numerics import autocast_off
from matbackprop.solvers import batched_eigh


def check_least(least: float) -> None:
    if not math.isfinite(least):
        raise DomainError(f"least must be finite, got {least}.")


def matrix_clamp(
    a: Tensor, least: float = 0.0, *, check: bool | None = None, precision: torch.dtype | None = None
) -> Tensor:
    r"""Clamp the eigenvalues of symmetric matrices from below.

    .. math:: U \operatorname{diag}(\max(\lambda, t)) U^\top, \qquad A = U \operatorname{diag}(\lambda) U^\top

    t = 0 gives the nearest positive semidefinite matrix. t > 0 gives the rectification (ReEig) of SPD networks.

    Args:
        a: symmetric (Hermitian) matrices ``(*batch, n, n)``; the symmetric part is used.
        least: t, the lower bound of the eigenvalues.
        check, precision: as in `matrix_function`.

    Returns:
        Symmetric matrices ``(*batch, n, n)`` in the dtype of ``a``.

    Raises:
        DomainError: ``least`` is not finite, or the entries of ``a`` are too large or too small.

    Gradient:
        U(Γ∘(UᵀGU))Uᵀ with Γᵢⱼ = 1 if both eigenvalues are above t, 0 if neither is, and (λᵢ − t)/(λᵢ − λⱼ) if only λᵢ
        is. First and second order, exact at repeated eigenvalues. At λ = t it is the derivative from below.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.matrix_clamp(torch.diag(torch.tensor([-1.0, 2.0]))).diagonal()
        tensor([0., 2.])

    Reference:
        Higham, Computing a nearest symmetric positive semidefinite matrix (1988); Huang and Van Gool, A Riemannian
        network for SPD matrix learning, AAAI 2017.
    """
    check_least(least)
    ready = prepare(a, "a", check, precision, sizes="sums", symmetric=True)
    with autocast_off(a.device.type):
        values, vectors = batched_eigh(ready.x.detach())
        threshold = values.new_full(values.shape[:-1], least)
        return ready.marked(spectral(ready.x, Spectrum(values, vectors), CLAMP, threshold)).to(a.dtype)
