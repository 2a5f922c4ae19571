"""The leading eigenspace of a symmetric matrix or operator, for losses that do not see its basis.

With AV = VH, VᵀV = I, H symmetric, the variation of V outside of its span is the solution Z of ZH − AZ = (I − VVᵀ)dA V,
whatever the basis: no eigenvalue inside appears, so that ties there do no harm to derivatives of any order. Inside of
its span V is taken to stand still, which a loss of VVᵀ cannot tell.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matbackprop.checks import values_checkable
from matbackprop.errors import GaugeWarning
from matbackprop.functional._eigh import largest_entry
from matbackprop.functional._function import Operation, apply
from matbackprop.functional._leading import find_leading, symmetric_operator
from matbackprop.functional._linear_solve import conjugate_gradient_solve, products_of
from matbackprop.numerics import autocast_off, half_of_the_digits, real_dtype, symmetrize

__all__ = ["topk_subspace"]


class _Settings(NamedTuple):
    tolerance: float
    max_products: int
    wanted: bool


def _outside(matvec: Any, x: Tensor, v: Tensor, h: Tensor, *params: Tensor) -> Tensor:
    """XH − AX for X as one vector, made a multiple of the identity on the span of V, where it would be indefinite."""
    whole = x.reshape(v.shape)
    inside = v.mH @ whole
    size = h.detach().abs().amax()
    lift = torch.where(size == 0, 1, size) * inside - inside @ h + h @ inside
    return (whole @ h - matvec(whole, *params) + v @ lift).flatten()


class _Subspace(Operation):
    """V, given it as a constant."""

    forward_twice = "topk_subspace"
    widen = False  # the products may hold tensors of their own

    @staticmethod
    def forward(matvec: Any, settings: _Settings, vectors: Tensor, *params: Tensor) -> Tensor:
        return vectors.clone()

    @staticmethod
    def save(inputs: tuple[Any, ...], outputs: Tensor) -> Sequence[Any]:
        matvec, settings, _, *params = inputs
        return matvec, settings, outputs, *params

    @staticmethod
    def adjoint(saved: Sequence[Any], needed: Sequence[bool], *gradients: Any) -> Any:
        (matvec, settings, v, *params), (g,) = saved, gradients
        if settings.wanted and values_checkable(g):
            _warn_of_gauge(v, g)
        out: list[Tensor | None] = [None] * len(params)
        if wanted := [i for i, wants in enumerate(needed[3:]) if wants]:
            _, pull = products_of(matvec, v, params, wanted)
            for i, value in zip(wanted, pull(_solve(matvec, settings, v, params, g)), strict=True):
                out[i] = value
        return None, None, None, *out

    @staticmethod
    def tangent(saved: Sequence[Any], *directions: Tensor | None) -> Tensor:
        (matvec, settings, v, *params), d_params = saved, directions[3:]
        moving = [i for i, d in enumerate(d_params) if d is not None]
        value, pull = products_of(matvec, v, params, moving)
        push: Any = torch.func.vjp(pull, torch.zeros_like(value))[1]
        return _solve(matvec, settings, v, params, push(tuple(d_params[i] for i in moving))[0])


def _solve(matvec: Any, settings: _Settings, v: Tensor, params: Sequence[Tensor], b: Tensor) -> Tensor:
    """Z outside of the span of V with ZH − AZ = (I − VVᵀ)B."""
    if v.shape[0] == v.shape[1]:
        return torch.zeros_like(v)
    z = conjugate_gradient_solve(
        lambda x, *more: _outside(matvec, x, *more),
        (b - v @ (v.mH @ b)).flatten(),
        (v, symmetrize(v.mH @ matvec(v, *params)), *params),
        tolerance=settings.tolerance,
        max_iterations=settings.max_products,
        precision=real_dtype(v.dtype),
        check=False,
    ).reshape(v.shape)
    return z - v @ (v.mH @ z)


def _warn_of_gauge(v: Tensor, g: Tensor) -> None:
    seen = v.detach().mH @ g.detach()
    if bool(((seen - seen.mH).abs() > half_of_the_digits(torch.float32) * largest_entry(g.detach())).any()):
        warnings.warn(
            "the loss of topk_subspace depends on the choice of the basis, which is not determined; the gradient is "
            "that of the subspace alone. Write the loss in terms of V @ V.mH, or use topk_eigh for single vectors.",
            GaugeWarning,
            stacklevel=3,
        )


def topk_subspace(
    a: Tensor | Callable[..., Tensor],
    k: int,
    params: Sequence[Tensor] = (),
    *,
    n: int | None = None,
    largest: bool = True,
    tolerance: float = 1e-11,
    max_products: int = 100_000,
    generator: torch.Generator | None = None,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""An orthonormal basis of the leading eigenspace, for losses of its projector, exact at ties inside.

    .. math:: \Pi = VV^\top,\qquad AV = VH,\quad V^\top V = I

    It is what `topk_eigh` finds, with a gradient that does not ask which vector is which: any loss of
    :math:`VV^\top`, or of ``v @ (v.mH @ x)`` where n² entries are too many, is differentiated exactly where eigenvalues
    inside the k coincide. For complex matrices ᵀ is the conjugate transpose here.

    Args:
        a, k, params, n, largest: the operator and which end of its spectrum, as in `topk_eigh`; one matrix at a time.
        tolerance, max_products, generator, check, precision: as in `topk_eigh`.

    Returns:
        V ``(n, k)`` in the dtype of `topk_eigh`.

    Raises:
        TieError: λ_k = λ_{k+1}, so that the eigenspace is not determined; the other errors are those of `topk_eigh`.

    Gradient:
        ZVᵀ, symmetrised, with Z outside of the span of V and ZH − AZ = (I − VVᵀ)G, by conjugate gradients. All orders
        and forward mode, exact at ties inside the k. A loss that sees the basis gets a GaugeWarning.

    Example:
        >>> import torch, matbackprop
        >>> v = matbackprop.topk_subspace(torch.diag(torch.tensor([2.0, 1.0, 2.0])), 2)
        >>> (v @ v.mT).diagonal().round(decimals=4)
        tensor([1., 0., 1.])

    Reference:
        As for `topk_eigh`.
    """
    operator = symmetric_operator(a, k, params, n, largest, check, precision)
    with autocast_off(operator.like.device.type):
        pairs = find_leading(operator, k, tolerance, max_products, generator)
        settings = _Settings(tolerance, max_products, operator.wanted)
        return apply(_Subspace, operator.matvec, settings, pairs.vectors, *operator.params).to(operator.like.dtype)
