"""Inverse roots of positive semidefinite matrices with damping, for preconditioners."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from matbackprop.checks import Prepared, prepare
from matbackprop.divided_differences import bind_params, power_function
from matbackprop.errors import DomainError
from matbackprop.functional._eigh import eigh
from matbackprop.functional._matrix_function import without_rounding
from matbackprop.functional._spectrum import Spectrum, spectral
from matbackprop.numerics import autocast_off, real_dtype
from matbackprop.solvers import batched_eigh


def check_root(p: float) -> None:
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not (math.isfinite(p) and p > 0):
        raise DomainError(f"p must be a positive number, such as 4 for the inverse fourth root, got {p!r}.")


def check_damping(eps: float) -> None:
    if not (math.isfinite(eps) and eps >= 0):
        raise DomainError(f"eps must be a finite number ≥ 0, got {eps}.")


def inverse_root(
    a: Tensor,
    p: float,
    *,
    eps: float = 0.0,
    relative: bool = False,
    check: bool | None = None,
    precision: torch.dtype | None = None,
) -> Tensor:
    r"""Inverse root of damped positive semidefinite matrices, :math:`(A + \varepsilon I)^{-1/p}`.

    .. math:: U \operatorname{diag}\bigl((\lambda + \varepsilon)^{-1/p}\bigr) U^\top, \qquad
        A = U \operatorname{diag}(\lambda) U^\top

    The Shampoo optimizer uses p = 4 for matrix-shaped parameters.

    Args:
        a: symmetric or Hermitian positive semidefinite matrices ``(*batch, n, n)``; the symmetric part is used.
        p: order of the root, p > 0.
        eps: damping ε ≥ 0, added to the eigenvalues.
        relative: multiply ε by the largest eigenvalue of each matrix. This bounds the condition number by 1 + 1/ε.
        check, precision: as in `matrix_function`.

    Returns:
        Symmetric matrices ``(*batch, n, n)`` in the dtype of ``a``.

    Raises:
        ShapeError, DtypeError, NonFiniteError, SymmetryError: as in `matrix_function`.
        DomainError: λ + ε is not positive, p is not positive, ε is negative, or the entries of ``a`` are too large or
            too small for the compute dtype.

    Gradient:
        Same as `matrix_power` with exponent −1/p: first and second order, exact at repeated eigenvalues. With
        ``relative`` it includes the derivative of the largest eigenvalue; if that is repeated, the computed eigenvector
        is used. Negative eigenvalues within rounding error of zero, in the dtype of ``a``, count as zero.

    Example:
        >>> import torch, matbackprop
        >>> matbackprop.inverse_root(torch.diag(torch.tensor([0.0, 15.0])), 4, eps=1.0).diagonal()
        tensor([1.0000, 0.5000])

    Reference:
        Gupta, Koren, Singer, Shampoo: preconditioned stochastic tensor optimization, ICML 2018.
    """
    check_root(p)
    check_damping(eps)
    ready = prepare(a, "a", check, precision, sizes="sums", symmetric=True)
    with autocast_off(a.device.type):
        return prepared_inverse_root(ready, a.dtype, p, eps, relative).to(a.dtype)


def prepared_inverse_root(
    ready: Prepared, data: torch.dtype, p: float, eps: float, relative: bool = False, name: str = "a"
) -> Tensor:
    """`inverse_root` in the dtype of the computation; ``data`` is the dtype of A, for the rounding tolerance."""
    x, n = ready.x, ready.x.shape[-1]
    shift = torch.full(x.shape[:-2], eps, dtype=real_dtype(x.dtype), device=x.device)
    if relative and eps and n:  # λ_max is differentiated
        values, vectors = eigh(x, ties="drop", precision=real_dtype(x.dtype), check=False)
    else:
        values, vectors = batched_eigh(x.detach())
    if relative and n:
        shift = shift * values[..., -1]
    values = without_rounding(values.detach(), data, "nonnegative" if eps else "positive")
    values = values + shift.detach().unsqueeze(-1)
    function, exponent = power_function(-1.0 / p)
    if ready.check_values:
        check_positive(values, eps, name)
        function = function.checked
    else:
        values = values.masked_fill(values <= 0, torch.nan)
    damped = x + torch.diag_embed(shift.unsqueeze(-1).expand(x.shape[:-1])).to(x.dtype)
    g = bind_params(function, exponent, x.shape[:-2], x)
    return ready.marked(spectral(damped, Spectrum(values, vectors.detach()), g.function, g.p))


def check_positive(values: Tensor, eps: float, name: str) -> None:
    bad = (values <= 0).any(-1)
    if bool(bad.any()):
        raise DomainError(
            f"{name} needs positive eigenvalues; {int(bad.sum())} of {bad.numel()} matrices have one down to "
            f"{float(values.min()):.3g} after damping by eps={eps}. Pass a larger eps, or check that the input is "
            f"positive semidefinite."
        )
